"""The scripts in examples/ run, and do what they are there to show; so does the code of docs/serving.md."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from http.client import HTTPConnection
from math import exp, log
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from stepping import greedy

from titan import LLM, SamplingParams, engine
from titan.core.step import Acceptance, StepPlan
from titan.kernels.torch.trees import RuledTrees

ROOT = Path(__file__).parents[1]
PROMPT = "def quicksort("
ENDLESS = {"max_tokens": None, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has room for all that could be of use takes longer to clear than most scripts to run."""
    monkeypatch.setattr(engine, "num_kv_blocks", lambda *_: 256)


def code_of(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


SHOWN = {
    "block_verification": r"token by token +([2-4]\.\d\d) tokens .*\nby blocks +[2-4]\.",
    "custom_drafter": r"accepted per depth: \[[1-9]\d*, [1-9]\d*\] of ",
    "draft_budgets": r"1 at once: [56]\.\d draft tokens .*\n3 at once: [01]\.\d ",
    "generate": r"(?s)(tokens per target step.*){3}in a tenth of a second\nwhile",
    "observer": r"was wrong in [1-9]\d* of \d+ steps with drafts\n\d+ times '.*' in place of '",
    "scheduling_policy": "32 tokens after 'def f\\('\n64 tokens after 'class A:'\n96 tokens after 'import os'",
    "swap_draft": r"None .* 1\.00 tokens per .*\nngram .*\ndemo +[\d.]+ tokens/s, [2-5]\.",
    "trees": r"(?s)chain .*dynamic .*auto .*\[-1, 0, 1, -1, 0, -1\] .* accepted per depth: \[[1-9]",
}
"""What each script prints."""


def generate_less(llm: LLM, prompts: Any, params: SamplingParams, **options: Any) -> Any:
    """Of the first three prompts, 28 tokens each: enough for all that a script shows."""
    few = prompts if isinstance(prompts, str) else prompts[:3]
    return GENERATE(llm, few, replace(params, max_tokens=min(params.max_tokens or 28, 28)), **options)


GENERATE = LLM.generate
WHOLE = ("generate", "scheduling_policy")
"""Scripts whose numbers of tokens are looked at."""


@pytest.mark.parametrize("name", SHOWN)
def test_the_script_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in WHOLE:
        monkeypatch.setattr(LLM, "generate", generate_less)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(SHOWN[name], capsys.readouterr().out)


def test_no_script_is_left_out() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SHOWN.keys() | {"acceptance_rule", "server", "tree_policy"}


def test_two_chains_change_how_many_tokens_come_and_not_which(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", generate_less)
        two_chains = runpy.run_path(str(ROOT / "examples" / "tree_policy.py"))["TwoChains"]
    assert re.search(r"[2-4]\.\d\d tokens per request and step, proposed per depth: \[\d+, \d+, \d+\]", capsys.readouterr().out)
    llm, prompts = LLM("demo", draft_model="demo", dtype="float32", speculation="fixed"), [PROMPT, "import os\n"]
    llm.engine.drafter.policy = two_chains("chain", "auto", 6)  # type: ignore[attr-defined]
    plain = llm.generate(prompts, greedy(32, use_speculative=False), use_tqdm=False)
    for max_draft_tokens in (1, 5, 6):
        drafted = llm.generate(prompts, greedy(32, max_draft_tokens=max_draft_tokens), use_tqdm=False)
        assert [each.outputs for each in drafted] == [each.outputs for each in plain]
        first, *others = drafted[0].metrics.proposed_per_depth
        assert len(others) == (max_draft_tokens - 1) // 2 and first > sum(drafted[0].metrics.accepted_per_depth[:1]) > 0
    sampled = SamplingParams(temperature=0.8, max_tokens=32)
    assert all(each.metrics.num_accepted_tokens for each in llm.generate(prompts, sampled, use_tqdm=False))


def test_typical_acceptance_accepts_what_is_likely_enough_and_more_than_a_lossless_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model's own log-probabilities, which are those of p at temperature 1; at temperature 0 it changes no token."""
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", generate_less)
        typical = runpy.run_path(str(ROOT / "examples" / "acceptance_rule.py"))["typical"]
    lengths = re.findall(r"(lossless|typical) +([\d.]+) tokens per request and step", capsys.readouterr().out)
    assert [name for name, _ in lengths] == ["lossless", "typical"] and 1 < float(lengths[0][1]) < float(lengths[1][1])

    llm, prompts, seen = LLM("demo", draft_model="demo", dtype="float32", speculation="fixed"), [PROMPT, "import os\n"], [0, 0]
    llm.engine.backend.trees = RuledTrees(llm.engine.backend, typical)
    plain = llm.generate(prompts, greedy(32, use_speculative=False), use_tqdm=False)
    drafted = llm.generate(prompts, greedy(32), use_tqdm=False)
    assert [each.outputs for each in drafted] == [each.outputs for each in plain]
    assert sum(each.metrics.num_accepted_tokens for each in drafted) > 20

    def look(plan: StepPlan, acceptance: Acceptance) -> None:
        for i, entries in acceptance.logprobs.items():
            tree, path = acceptance.trees[i], acceptance.paths[i]
            for node, accepted, entry in zip([-1, *path], [*path, None], entries, strict=True):
                p = {token_id: exp(each.logprob) for token_id, each in entry.items()}
                least = min(0.09, 0.3 * exp(sum(each * log(each) for each in p.values() if each)))
                likely = {child: p[tree.token_ids[child]] for child in np.flatnonzero(tree.parents == node).tolist()}
                if accepted is not None:
                    assert likely[accepted] == max(likely.values()) > least - 1e-6
                else:
                    assert all(each < least + 1e-6 for each in likely.values())
                seen[accepted is None] += bool(likely)

    llm.engine.observers.append(look)
    llm.generate(prompts, SamplingParams(max_tokens=32, logprobs=-1, ignore_eos=True), use_tqdm=False)
    assert min(seen) > 10


def test_the_least_rule_of_the_page_accepts_nothing() -> None:
    [code] = [each for each in code_of("docs/speculation.md") if "RuledTrees" in each]
    llm = LLM("demo", draft_model="demo", speculation="fixed")
    exec(code, {"llm": llm})
    [output] = llm.generate(PROMPT, greedy(24), use_tqdm=False)
    assert output.metrics.num_draft_tokens > 24 and output.metrics.num_accepted_tokens == 0


@pytest.mark.parametrize(
    ("page", "begin", "draft", "num_depths"),
    [
        ("README.md", "from titan import LLM, SamplingParams\n", "ngram", 0),  # whether it pays, the clock says
        ("docs/speculation.md", "from titan import LLM\n", "repeater", 2),
    ],
)
def test_the_code_of_the_page_runs(page: str, begin: str, draft: str, num_depths: int) -> None:
    [code] = [each for each in code_of(page) if each.startswith(begin)]
    names: dict[str, Any] = {}
    exec(code, names)
    [output] = names["llm"].generate("import os", greedy(24), use_tqdm=False)
    metrics = names["llm"].metrics()
    assert output.outputs[0].text and (metrics.draft, metrics.num_draft_failures) == (draft, 0)
    assert len(metrics.proposed_per_depth) >= num_depths


def test_examples_import_names_that_are_kept() -> None:
    kept = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Names that are kept")[2]
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("titan."):
                assert all(f"`{module}.{each.name}`" in kept or f"`{module}`" in kept for each in node.names), path.name


@pytest.fixture
def llm() -> LLM:
    return LLM("demo", draft_model="demo", dtype="float32", speculation="fixed")


@pytest.fixture
def hold(llm: LLM) -> Iterator[Callable[[], None]]:
    """Let the engine make no step after the first one until this is called: whoever leaves does so while its request runs."""
    may_go_on, num_steps = Event(), iter(range(10**6))
    llm.engine.observers.append(lambda *_: next(num_steps) and may_go_on.wait())
    yield may_go_on.set
    may_go_on.set()


def ended_early(llm: LLM) -> bool:
    metrics = llm.metrics()
    return metrics.num_finished_requests == 1 and metrics.num_emitted_tokens < 1000 < llm.engine.max_model_len


class Served:
    """A server in a thread of its own, and its clients."""

    def __init__(self, llm: LLM) -> None:
        self.server = runpy.run_path(str(ROOT / "examples" / "server.py"))["Server"](llm, 0)
        self.server.daemon_threads = False  # so that closing it waits for them
        self.server.RequestHandlerClass.log_message = lambda *_: None
        self.thread = Thread(target=self.server.serve_forever)
        self.thread.start()

    def ask(self, body: dict[str, Any] | None) -> Any:
        connection = HTTPConnection(*self.server.server_address)
        connection.request("GET" if body is None else "POST", "/", None if body is None else json.dumps(body))
        return connection.getresponse()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def served(llm: LLM) -> Iterator[Served]:
    served = Served(llm)
    yield served
    served.close()


def test_the_server_streams_and_refuses(served: Served, llm: LLM) -> None:
    lines = [json.loads(line) for line in served.ask({"prompt": PROMPT, "temperature": 0, "max_tokens": 40})]
    [expected] = llm.generate(PROMPT, greedy(40), use_tqdm=False)
    assert len(lines) > 2 and "".join(line["text"] for line in lines) == expected.outputs[0].text
    assert [line["finish_reason"] for line in lines[-2:]] == [None, expected.outputs[0].finish_reason]
    assert json.loads(served.ask(None).read())["num_finished_requests"] == 2
    lines = [json.loads(line) for line in served.ask({"prompt": PROMPT, "seed": 7, "max_tokens": 20, "n": 3})]
    [several] = llm.generate(PROMPT, SamplingParams(seed=7, max_tokens=20, n=3), use_tqdm=False)
    for each in several.outputs:
        own = [line for line in lines if line["index"] == each.index]
        assert "".join(line["text"] for line in own) == each.text
        assert [line["finish_reason"] for line in own if line["finish_reason"]] == [each.finish_reason]
    for options, reason in (
        ({"prompt": ""}, "no tokens"),
        ({"prompt": None}, "prompt=None"),
        ({"top_p": 2}, "top_p=2"),
        ({"best_of": 2}, "best_of"),
    ):
        refusal = served.ask({"prompt": PROMPT} | options)
        assert refusal.status == 400 and reason in refusal.read().decode()


def test_a_client_that_leaves_the_server_ends_its_request(served: Served, llm: LLM, hold: Callable[[], None]) -> None:
    with served.ask({"prompt": PROMPT, **ENDLESS}) as response:
        assert json.loads(response.readline())["text"]
    hold()
    served.close()
    assert ended_early(llm)


def test_the_asyncio_code_of_the_page(llm: LLM, hold: Callable[[], None]) -> None:
    [code] = [each for each in code_of("docs/serving.md") if "async def" in each]
    names: dict[str, Any] = {"llm": llm}
    exec(code, names)

    async def leave() -> None:
        async with aclosing(names["stream"](PROMPT, SamplingParams(**ENDLESS))) as outputs:  # type: ignore[arg-type]
            async for output in outputs:
                assert output.outputs[0].text
                hold()
                break

    async def stay() -> str:
        texts = [output.outputs[0].text async for output in names["stream"](PROMPT, greedy(40))]
        assert len(texts) > 2
        return str(texts[-1])

    async def refuse() -> None:
        async for _ in names["stream"]("", greedy(40)):
            pytest.fail("an empty prompt is refused")

    asyncio.run(leave())
    names["pool"].shutdown()  # waits for its threads
    assert ended_early(llm)
    exec(code, names)  # another pool
    [expected] = llm.generate(PROMPT, greedy(40), use_tqdm=False)
    assert asyncio.run(stay()) == expected.outputs[0].text
    with pytest.raises(ValueError, match="no tokens"):
        asyncio.run(refuse())
    names["pool"].shutdown()
