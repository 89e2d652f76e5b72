"""Bad input gets a ValueError that names the argument, the value and what is allowed, before any work is done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepping import greedy
from text_tools import make_byte_tokenizer, make_tokenizer
from tiny_models import make_model
from zoo import Zoo, random_prompts

from titan import LLM, SamplingParams
from titan.core.kv_tensor import KVGroup, KVLayout
from titan.core.options import EngineConfig
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import DraftContext, NoDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.registry import register
from titan.draft.replay import ReplayDrafter

CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


def raises(*parts: object) -> Any:
    """A ValueError whose message has all of these, in this order."""
    return pytest.raises(ValueError, match=".*".join(re.escape(str(part)) for part in parts))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"temperature": -0.1}, ["temperature=-0.1", "[0, inf)"]),
        ({"temperature": float("nan")}, ["temperature=nan", "[0, inf)"]),
        ({"temperature": float("inf")}, ["temperature=inf", "[0, inf)"]),
        ({"temperature": "hot"}, ["temperature='hot'", "[0, inf)"]),
        ({"temperature": True}, ["temperature=True", "[0, inf)"]),
        ({"top_p": 0.0}, ["top_p=0.0", "(0, 1]"]),
        ({"top_p": 1.5}, ["top_p=1.5", "(0, 1]"]),
        ({"top_p": 1e-46}, ["top_p=1e-46", "(0, 1]"]),
        ({"temperature": 1e39}, ["temperature=1e+39", "[0, inf)"]),
        ({"repetition_penalty": 1e-46}, ["repetition_penalty=1e-46", "(0, inf)"]),
        ({"min_p": -1}, ["min_p=-1", "[0, 1]"]),
        ({"min_p": 1.01}, ["min_p=1.01", "[0, 1]"]),
        ({"top_k": -2}, ["top_k=-2", "an integer >= -1"]),
        ({"top_k": 1.5}, ["top_k=1.5", "an integer >= -1"]),
        ({"min_tokens": -1}, ["min_tokens=-1", "an integer >= 0"]),
        ({"max_tokens": 0}, ["max_tokens=0", "an integer >= 1"]),
        ({"max_tokens": 2.0}, ["max_tokens=2.0", "an integer >= 1"]),
        ({"max_tokens": 3, "min_tokens": 4}, ["min_tokens=4", "max_tokens=3", "at most max_tokens"]),
        ({"seed": -1}, ["seed=-1", "an integer from 0 to 9223372036854775807"]),
        ({"seed": 2**63}, ["seed=9223372036854775808", "an integer from 0 to"]),
        ({"max_draft_tokens": 64}, ["max_draft_tokens=64", "an integer from 0 to 63"]),
        ({"max_draft_tokens": 2, "use_speculative": False}, ["max_draft_tokens=2", "use_speculative=False", "None and 0"]),
        ({"stop": ""}, ["stop=''", "non-empty str"]),
        ({"stop": ["a", ""]}, ["stop=['a', '']", "non-empty str"]),
        ({"stop": [1]}, ["stop=[1]", "non-empty str"]),
        ({"stop": 5}, ["stop=5", "non-empty str", "None"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids=-1", "an integer >= 0"]),
        ({"stop_token_ids": [1.0]}, ["stop_token_ids=1.0", "an integer >= 0"]),
        ({"stop_token_ids": 7}, ["stop_token_ids=7", "a list of token ids or None"]),
        ({"stop_token_ids": "7"}, ["stop_token_ids='7'", "a list of token ids or None"]),
        ({"ignore_eos": 1}, ["ignore_eos=1", "True or False"]),
        ({"use_speculative": "no"}, ["use_speculative='no'", "True or False"]),
        ({"skip_special_tokens": None}, ["skip_special_tokens=None", "True or False"]),
        ({"include_stop_str_in_output": 0}, ["include_stop_str_in_output=0", "True or False"]),
        ({"n": 0}, ["n=0", "an integer >= 1"]),
        ({"n": 2.0}, ["n=2.0", "an integer >= 1"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0", "(0, inf)"]),
        ({"repetition_penalty": float("inf")}, ["repetition_penalty=inf", "(0, inf)"]),
        ({"presence_penalty": 2.1}, ["presence_penalty=2.1", "[-2, 2]"]),
        ({"presence_penalty": None}, ["presence_penalty=None", "[-2, 2]"]),
        ({"frequency_penalty": -2.5}, ["frequency_penalty=-2.5", "[-2, 2]"]),
        ({"logit_bias": [1, 2.0]}, ["logit_bias=[1, 2.0]", "a dict of token ids to numbers, or None"]),
        ({"logit_bias": {"1": 2.0}}, ["logit_bias='1'", "an integer >= 0"]),
        ({"logit_bias": {-1: 2.0}}, ["logit_bias=-1", "an integer >= 0"]),
        ({"logit_bias": {1: 100.5}}, ["logit_bias[1]=100.5", "[-100, 100]"]),
        ({"logit_bias": {1: float("nan")}}, ["logit_bias[1]=nan", "[-100, 100]"]),
        ({"logit_bias": {1: "a"}}, ["logit_bias[1]='a'", "[-100, 100]"]),
        ({"logits_processors": print}, ["logits_processors=<built-in function print>", "a sequence of callables, or None"]),
        ({"logits_processors": [print, 5]}, ["logits_processors=[<built-in function print>, 5]", "a sequence of callables"]),
        ({"logits_processors": "ab"}, ["logits_processors='ab'", "a sequence of callables, or None"]),
        ({"logprobs": -1}, ["logprobs=-1", "an integer from 0 to 20"]),
        ({"logprobs": 21}, ["logprobs=21", "an integer from 0 to 20"]),
        ({"logprobs": True}, ["logprobs=True", "an integer from 0 to 20"]),
    ],
)
def test_sampling_options(options: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dtype": "int8"}, ["dtype='int8'", "'auto', 'float32', 'bfloat16', 'float16'"]),
        ({"draft_tree": "bush"}, ["draft_tree='bush'", "'auto', 'dynamic', 'chain'"]),
        ({"draft_tree": 3}, ["draft_tree=3", "'auto', 'dynamic', 'chain' or a list of parents"]),
        ({"draft_tree": []}, ["draft_tree=[]", "a list of parents"]),
        ({"draft_tree": [-1, 0.5]}, ["draft_tree=[-1, 0.5]", "a list of parents"]),
        ({"draft_tree": [-1, 1]}, ["draft_tree=[-1, 1] is not topological", "node 1 is 1", "-1 (the root) to 0"]),
        ({"draft_tree": [-2]}, ["draft_tree=[-2] is not topological", "node 0 is -2"]),
        ({"draft_tree": [-1] * 7}, ["has 7 nodes", "at most max_draft_tokens=6"]),
        ({"draft_tree": [-1] * 64, "max_draft_tokens": 64}, ["max_draft_tokens=64", "from 0 to 63"]),
        ({"draft_sampling": "random"}, ["draft_sampling='random'", "'auto', 'greedy', 'sampled'"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy='lifo'", "'fcfs'"]),
        ({"preemption_mode": "swap"}, ["preemption_mode='swap'", "'recompute'"]),
        ({"swap_space": 4}, ["swap_space=4", "0"]),
        ({"use_speculative": "no"}, ["use_speculative='no'", "True or False"]),
        ({"enable_prefix_caching": 1}, ["enable_prefix_caching=1", "True or False"]),
        ({"seed": -1}, ["seed=-1", "an integer from 0 to"]),
        ({"seed": None}, ["seed=None", "an integer from 0 to"]),
        ({"max_draft_tokens": 64}, ["max_draft_tokens=64", "an integer from 0 to 63"]),
        ({"max_draft_tokens": True}, ["max_draft_tokens=True", "an integer from 0 to 63"]),
        ({"max_batch_size": 0}, ["max_batch_size=0", "an integer >= 1"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens=0", "an integer >= 1"]),
        ({"max_num_batched_tokens": 31}, ["max_num_batched_tokens=31", "max_batch_size=32", "at least one token"]),
        ({"prefill_chunk_size": 0}, ["prefill_chunk_size=0", "an integer >= 1"]),
        ({"max_waiting_requests": 0}, ["max_waiting_requests=0", "an integer >= 1"]),
        ({"max_model_len": 0}, ["max_model_len=0", "an integer >= 1"]),
        ({"block_size": 24}, ["block_size=24", "8, 16, 32, 64, 128"]),
        ({"num_kv_blocks": 0}, ["num_kv_blocks=0", "an integer >= 1"]),
        ({"kv_cache_memory": 1.5}, ["kv_cache_memory=1.5", "an integer >= 1"]),
        ({"num_kv_blocks": 3, "kv_cache_memory": 5}, ["num_kv_blocks=3", "kv_cache_memory=5", "at most one"]),
    ],
)
def test_engine_options(options: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        EngineConfig.of(**options)


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(TypeError, match=r"there is no option 'max_batch'; allowed: dtype, device, .*max_batch_size"):
        LLM("demo", max_batch=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"device": "tpu"}, ["device='tpu'", "'auto', 'cpu', 'cuda', 'cuda:N'"]),
        ({"device": "meta"}, ["device='meta'", "'auto', 'cpu', 'cuda', 'cuda:N'"]),
        ({"device": "cuda:99"}, ["device='cuda:99'", "CUDA devices were found"]),
        ({"max_model_len": 257}, ["max_model_len=257", "at most 256"]),
        ({"kv_cache_memory": 100}, ["kv_cache_memory=100", "one block takes 12288 bytes"]),
        ({"tokenizer": "/no/such/folder"}, ["tokenizer='/no/such/folder'", "does not exist"]),
        ({"draft_model": "/no/such/folder"}, ["draft_model='/no/such/folder'", "'ngram'", "does not exist"]),
        ({"draft_model": 5}, ["draft_model=5", "None, a name, a folder, a hub id, or a Drafter"]),
        ({"use_speculative": 0}, ["use_speculative=0", "True or False"]),
        ({"draft_model": "ngram", "draft_sampling": "sampled"}, ["draft_sampling='sampled'", "'ngram'", "'auto' and 'greedy'"]),
        ({"draft_model": "ngram", "draft_tree": [-1, -1]}, ["draft_tree=", "'ngram'", "'auto' and 'chain'"]),
        ({"draft_model": NgramDrafter(3), "draft_tree": "dynamic"}, ["draft_tree='dynamic'", "'ngram'", "'auto' and 'chain'"]),
    ],
)
def test_options_that_the_model_and_the_machine_decide_on(zoo: Zoo, options: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        LLM(zoo.path("llama"), **(CPU | options))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nor/this", "a/b/c", 5, None])
def test_a_model_that_is_not_there(model: Any) -> None:
    with raises("model", repr(model), "'demo'", "folder"):
        LLM(model, **CPU)


def test_a_model_of_another_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    with raises(str(tmp_path), "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"):
        LLM(str(tmp_path), **CPU)


@pytest.fixture(scope="module")
def llm(zoo: Zoo) -> LLM:
    return LLM(zoo.path("llama+text"), zoo.path("llama~"), num_kv_blocks=8, max_model_len=200, **CPU)


BAD_PROMPTS: dict[str, tuple[Any, list[object]]] = {
    "empty text": ("", ["prompt=''", "at least one token"]),
    "empty list": ([], ["prompt=[]", "at least one token"]),
    "too long": ([5] * 200, ["200 tokens", "at most 199", "max_model_len=200"]),
    "token too large": ([5, 131], ["token id 131", "0 to 130"]),
    "token negative": ([5, -1], ["token id -1", "0 to 130"]),
    "token not whole": ([5, 1.5], ["1.5", "not a token id", "list of int"]),
    "token a truth": ([5, True], ["True", "not a token id", "list of int"]),
    "words in a list": (["the", "dog"], ["'the'", "not a token id", "list of int"]),
    "half a character": ("a\ud800", ["'a\\ud800'", "surrogate", "UTF-8"]),
    "bytes": (b"the", ["b'the'", "a str or a list of int"]),
    "never fits": ([5] * 120, ["120 tokens", "max_tokens=16", "128 tokens", "num_kv_blocks=8"]),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_one_bad_prompt_is_refused_and_the_others_keep_their_outputs(llm: LLM, name: str) -> None:
    prompt, parts = BAD_PROMPTS[name]
    good = ["the dog", [7, 8, 9]]
    params = greedy(16, ignore_eos=True)
    expected = llm.generate(good, params, use_tqdm=False)
    num_steps = llm.metrics().num_steps
    with raises(*parts):
        llm.generate([prompt], params, use_tqdm=False)
    with raises(*parts):
        llm.stream(prompt, params)
    assert llm.metrics().num_steps == num_steps
    with pytest.warns(UserWarning, match="prompt 1 was not run: .*" + re.escape(str(parts[0]))):
        outputs = llm.generate([good[0], prompt, good[1]], params, use_tqdm=False)
    assert [outputs[0].outputs, outputs[2].outputs] == [output.outputs for output in expected]
    refused = outputs[1]
    assert refused.finished and refused.outputs[0].finish_reason == "abort"
    assert (refused.prompt, refused.prompt_token_ids) == ((prompt, []) if isinstance(prompt, str) else (None, list(prompt)))
    assert (refused.outputs[0].text, refused.outputs[0].token_ids) == ("", [])
    assert refused.error is not None
    assert re.search(".*".join(re.escape(str(part)) for part in parts), refused.error)
    assert refused.metrics.num_emitted_tokens == 0 and refused.metrics.finished_time is not None


def test_bad_options_of_one_prompt_do_not_cost_the_others(llm: LLM) -> None:
    for name, bad in (("stop_token_ids", greedy(4, stop_token_ids=[5, 131])), ("logit_bias", greedy(4, n=3, logit_bias={131: 1}))):
        params = [greedy(4), bad, greedy(4, ignore_eos=True)]
        with pytest.warns(UserWarning, match=f"prompt 1 was not run: {name} has token id 131.* 0 to 130"):
            outputs = llm.generate(["the"] * 3, params, use_tqdm=False)
        assert [output.error is None for output in outputs] == [True, False, True]
        assert [completion.finish_reason for completion in outputs[1].outputs] == ["abort"] * bad.n
        assert len(outputs[2].outputs[0].token_ids) == 4


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "a"}, {"a"}, b"abc", iter(["a"])])
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with raises("prompts=", "a str, a list of str, a list of int or a list of such lists"):
        llm.generate(prompts)


def test_lists_of_prompts_that_are_empty_or_hold_something_else(llm: LLM) -> None:
    with raises("prompts=[]", "at least one prompt"):
        llm.generate([])
    with raises("5", "not a prompt", "str and list of int"):
        llm.generate(["a", 5])  # type: ignore[arg-type]


def test_options_that_do_not_go_with_the_prompts(llm: LLM) -> None:
    with raises("sampling_params", "3 entries", "2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    for wrong in (5, {"temperature": 0}, [5], "greedy"):
        with raises("sampling_params=", "a SamplingParams, a list of them, or None"):
            llm.generate("a", wrong)  # type: ignore[arg-type]
        with raises("sampling_params=", "a SamplingParams, a list of them, or None"):
            llm.stream("a", wrong)  # type: ignore[arg-type]


def test_text_needs_a_tokenizer(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), num_kv_blocks=8, **CPU)
    with raises("prompt='the'", "no tokenizer", "token ids"):
        llm.generate("the")
    with raises("stop='a'", "needs a tokenizer", "None"):
        llm.generate([[5]], SamplingParams(stop="a"))
    with raises("chat()", "chat template", "generate()"):
        llm.chat([{"role": "user", "content": "a"}])
    [output] = llm.generate([[5, 6]], greedy(3, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("messages", [[], "the dog", 5, [[]], [{"role": "user"}], [{"content": "a"}], [[{"role": "user"}]], [5]])
def test_messages_that_are_no_conversation(llm: LLM, messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.frontend.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with raises("messages"):
        llm.chat(messages)


def test_chat_without_a_template(llm: LLM) -> None:
    with raises("chat()", "chat template", "generate()"):
        llm.chat([{"role": "user", "content": "a"}])


def test_a_full_queue(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), num_kv_blocks=8, max_batch_size=1, max_waiting_requests=2, **CPU)
    for _ in range(2):
        llm.engine.scheduler.add(llm.frontend.make_request([5], greedy(4)))
    with raises("max_waiting_requests=2", "request 2 is refused"):
        llm.engine.scheduler.add(llm.frontend.make_request([5], greedy(4)))
    with raises("max_waiting_requests=2", "refused"):
        next(llm.stream([5]))


def test_a_draft_of_another_vocabulary(zoo: Zoo, tmp_path: Path) -> None:
    with raises("draft_model=", "small_vocab", "another vocabulary", "120 tokens", "131"):
        LLM(zoo.path("llama"), zoo.path("small_vocab"), **CPU)
    make_model(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    with raises("draft_model=", "another vocabulary", "336", "131"):
        LLM(zoo.path("llama+text"), str(tmp_path), **CPU)
    llm = LLM(zoo.path("llama+text"), **CPU)
    with raises("draft_model=", "another vocabulary"):
        llm.swap_draft(str(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    renamed = json.loads(file.read_text(encoding="utf-8"))
    token_ids = renamed["model"]["vocab"]
    token_ids["a"], token_ids["b"] = token_ids["b"], token_ids["a"]
    file.write_text(json.dumps(renamed), encoding="utf-8")
    with raises("draft_model=", "another vocabulary", "131 tokens, the target's 131", "they differ"):
        llm.swap_draft(str(tmp_path))


def test_swapping_the_draft_of_an_engine_that_must_not_speculate(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), use_speculative=False, num_kv_blocks=8, **CPU)
    with raises("swap_draft()", "use_speculative=False", "use_speculative=True"):
        llm.swap_draft("ngram")


def test_options_of_drafters() -> None:
    with raises("min_ngram=0", "1 <= min_ngram <= max_ngram"):
        NgramDrafter(4, min_ngram=0)
    with raises("min_ngram=5", "max_ngram=4"):
        NgramDrafter(4, min_ngram=5)
    with raises("acceptance=1.1", "[0, 1]"):
        ReplayDrafter({}, acceptance=1.1, vocab_size=10, max_draft_tokens=4)
    with raises("vocab_size=1", "at least 2"):
        ReplayDrafter({}, acceptance=0.5, vocab_size=1, max_draft_tokens=4)
    factory: Callable[[DraftContext], NoDrafter] = lambda context: NoDrafter()  # noqa: E731
    with raises("name='ngram'", "taken", "ngram"):
        register("ngram", factory)


def test_a_model_whose_logits_are_not_finite_aborts_the_request_that_met_them(zoo: Zoo, tmp_path: Path) -> None:
    """The row of one token's embedding is NaN: who has that token in the prompt ends, and nobody else notices."""
    make_model(tmp_path)
    prompts = random_prompts(6, seed=9, max_len=30)
    expected = [zoo.greedy("llama", prompt, 10, ignore_eos=True) for prompt in prompts]
    unused = min(set(range(3, 131)) - {token for tokens in (*prompts, *expected) for token in tokens})
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][unused] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    bad = [*prompts[1][:9], unused, *prompts[1][9:]]
    params = greedy(10, ignore_eos=True)
    for draft in (None, str(tmp_path)):
        llm = LLM(str(tmp_path), draft, num_kv_blocks=40, block_size=8, prefill_chunk_size=8, **CPU)
        outputs = llm.generate([*prompts[:3], bad, *prompts[3:], bad], params, use_tqdm=False)
        assert [output.error is not None for output in outputs] == [False] * 3 + [True] + [False] * 3 + [True]
        for broken in (outputs.pop(7), outputs.pop(3)):
            assert broken.outputs[0].finish_reason == "abort" and broken.finished
            assert broken.error == "the target's logits are not finite"
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.diagnose() == []


def test_a_logits_processor_that_fails_aborts_the_request_that_has_it(zoo: Zoo) -> None:
    """With and without drafts after the same token, though the draft's run would have gone on."""
    prompts = random_prompts(4, seed=9, max_len=30)
    expected = [zoo.greedy("llama", prompt, 12, ignore_eos=True) for prompt in prompts]

    def failing(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits if len(token_ids) < len(prompts[2]) + 5 else logits[:5]

    params = [greedy(12, ignore_eos=True)] * 4
    params[2] = greedy(12, ignore_eos=True, logits_processors=[failing], logprobs=0)
    for draft in (None, zoo.path("llama")):
        llm = LLM(zoo.path("llama"), draft, num_kv_blocks=40, **CPU)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.error for output in outputs] == [
            None, None, "logits_processors: ValueError: a processor returned shape [5]: it must be a tensor of shape [131]", None
        ]  # fmt: skip
        assert outputs[2].outputs[0].finish_reason == "abort" and len(outputs[2].outputs[0].logprobs or ()) == 5
        expected[2] = expected[2][:5]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.diagnose() == []


def test_a_logits_processor_that_fails_on_drafts_after_the_end_is_no_error(zoo: Zoo) -> None:
    """A grammar knows no token after the end; the draft does not know the end."""
    prompt = next(p for p in random_prompts(30, seed=11) if 2 <= len(zoo.greedy("llama", p, 30)) < 30)
    expected = zoo.greedy("llama", prompt, 30)
    seen_end = []

    def grammar(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if token_ids[len(prompt) :][: len(expected)] == expected:
            seen_end.append(token_ids)
            raise LookupError("the text has ended")
        return logits

    llm = LLM(zoo.path("llama"), zoo.path("llama"), draft_tree="chain", num_kv_blocks=40, **CPU)
    for max_draft_tokens in range(1, 7):
        params = greedy(30, logits_processors=[grammar], max_draft_tokens=max_draft_tokens)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert (output.error, output.outputs[0].finish_reason, output.outputs[0].token_ids) == (None, "stop", expected)
    assert seen_end


class Greedy(NoDrafter):
    """A drafter that proposes more than it may."""

    name = "greedy"
    max_draft_tokens = 4

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [DraftTree.chain([5] * (budget + 1)) for budget in plan.draft_budgets]


class Homeless(NoDrafter):
    """A drafter that says it keeps KV, and takes no cache."""

    name = "homeless"
    kv: Any = KVLayout((KVGroup(1, 1, 4),), torch.float32)


def test_a_drafter_that_keeps_kv_but_takes_no_cache(zoo: Zoo) -> None:
    with raises("draft_model=", "Homeless", "CachingDrafter", "attach() and lookahead()"):
        LLM(zoo.path("llama"), Homeless(), num_kv_blocks=16, **CPU)


def test_a_drafter_that_proposes_more_than_it_may_is_named(zoo: Zoo) -> None:
    """What it would write lies in blocks of other requests: better no step than a wrong one."""
    llm = LLM(zoo.path("llama"), Greedy(), num_kv_blocks=16, **CPU)
    with raises("drafter 'greedy'", "5 nodes", "at most 4"):
        llm.generate([[5, 6], [7, 8]], greedy(8), use_tqdm=False)
    assert not llm.engine.scheduler.has_unfinished
