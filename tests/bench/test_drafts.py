"""Drafts: recipes, the drafts made of them, what is measured, and what that adds up to."""

from __future__ import annotations

import copy
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import cpu_backend
from stepping import make_engine
from tiny_models import reference_logits
from zoo import Zoo

from titan.bench import drafts as drafts_bench
from titan.bench.draft_recipes import DraftRecipe, Models
from titan.bench.drafts import compare, find_fastest, main
from titan.bench.engine_run import run_workload
from titan.bench.runs import Run
from titan.bench.samples import NO_DRAFT, Sample, Spread, make_rows
from titan.bench.step_times import model_of
from titan.bench.workloads import Workload
from titan.core.batch import QueryRow, build_batch
from titan.core.kv_tensor import KVTensor
from titan.core.trees import EMPTY_TREE
from titan.draft.base import DraftContext
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.registry import _FACTORIES, open_draft_model, register
from titan.engine import Engine
from titan.kernels.interfaces import PassCounts, PassLimits
from titan.models.decoder import Decoder


def logits_of(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position: float32 [len(token_ids), vocab]."""
    kv = KVTensor(model.kv_layout, 4, 16, cpu_backend().device)
    runner = cpu_backend().prepare(model, kv, PassLimits(num_requests=1, query_len=1, num_blocks=4, num_tokens=64), PassCounts())
    batches = (build_batch([QueryRow([0, 1, 2, 3], i, [token_id])], block_size=16) for i, token_id in enumerate(token_ids))
    return torch.cat([runner.forward(batch) for batch in batches]).float()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_truncated_target_is_its_first_layers_in_transformers(zoo: Zoo, name: str) -> None:
    token_ids = [5, 9, 77, 14, 5, 130, 21, 8, 3, 66, 12, 90, 41, 7, 18]
    engine = make_engine(zoo.path(name))
    drafter = DraftRecipe("", "truncated", 1).make_drafter(engine, {})
    shorter: Any = copy.deepcopy(zoo.model(name))
    shorter.model.layers = shorter.model.layers[:1]
    assert isinstance(drafter, DraftModelDrafter)
    for model, expected in ((drafter.model, shorter), (model_of(engine.runner), zoo.model(name))):
        assert torch.allclose(logits_of(model, token_ids), reference_logits(expected, token_ids), atol=2e-4, rtol=1e-4)


def test_recipes_make_the_drafters_that_they_name_and_share_their_weights(zoo: Zoo) -> None:
    engine, models, good = make_engine(zoo.path("llama"), max_draft_tokens=8), Models(), zoo.path("llama~")
    texts = ["ngram,tokens=3", good, f"{good},tree=dynamic,tokens=8", f"{good},tree=-1,-1,0,sampling=sampled"]
    ngram, *others = (DraftRecipe.parse(text, 4).make_drafter(engine, models) for text in texts)
    assert isinstance(ngram, NgramDrafter) and ngram.max_draft_tokens == 3
    plain, dynamic, fixed = (each for each in others if isinstance(each, DraftModelDrafter))
    assert (dynamic.max_draft_tokens, dynamic.policy.draft_tree, plain.policy.draft_tree) == (8, "dynamic", "auto")
    assert (fixed.max_draft_tokens, fixed.policy.draft_tree, fixed.policy.draft_sampling) == (3, (-1, -1, 0), "sampled")
    assert dynamic.model is plain.model is fixed.model


def test_a_registered_drafter_is_what_is_measured_whatever_its_factory_has_changed(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_wrong(context: DraftContext) -> DraftModelDrafter:
        drafter = open_draft_model(zoo.path("llama~"), context)()
        monkeypatch.setattr(drafter, "propose", lambda plan: [EMPTY_TREE for _ in plan.requests])
        return drafter

    monkeypatch.setattr("titan.draft.registry._FACTORIES", dict(_FACTORIES))
    register("wrong", make_wrong)
    drafts = ["--draft=wrong", f"--draft={zoo.path('llama~')}"]
    result = run(zoo, tmp_path, *drafts, "--prompts", "synthetic", "--rounds", "1")
    assert result["answer"].startswith("Fastest draft by tokens/s in one round: at temperature 0 ")
    steps = [row["figures"]["tokens/step"]["median"] for row in result["rows"]]
    assert steps[0] == steps[1] == 1 < steps[2]


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    sizes = ["--prompt-len", "12", "--output-len", "18", "--rounds", "2", "--concurrency", "2", "--threads", "1"]
    main(["--model", zoo.path("llama+text"), "--dtype", "float32", *sizes, "--json", str(folder / "run.json"), *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_drafts_take_turns_on_the_same_prompts_and_what_cannot_run_is_named(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(engine: Engine, workload: Workload, **options: Any) -> Run:
        lengths.append(workload.output_lens)
        assert (options["top_k"], options["top_p"]) == (0, 0.9)
        return run_workload(engine, workload, **options)

    lengths: list[list[int]] = []
    monkeypatch.setattr(drafts_bench, "run_workload", watched)
    good = zoo.path("llama~+text")
    drafts = [good, f"{good},tree=dynamic,tokens=6", "truncated:1", "ngram", zoo.path("small_vocab")]
    options = ["--prompts", "code", "chat", "synthetic", "--temperature", "0", "0.8", "--top-p", "0.9"]
    result = run(zoo, tmp_path, *options, *(f"--draft={draft}" for draft in drafts))
    orders = [NO_DRAFT, *drafts[:4]], [*drafts[:4], NO_DRAFT]
    places = [(each, t) for each in ("code", "synthetic") for t in (0.0, 0.8)]
    found = [(each["round_id"], *each["labels"].values()) for each in result["samples"]]
    assert found == [(round_id, *place, name) for round_id in (0, 1) for place in places for name in orders[round_id]]
    assert "kernels" in result["provenance"]["versions"]
    assert lengths == [[16, 16], [18, 18]] * len(result["samples"]), "each run has a warm-up"
    assert "left out: prompts chat" in (warnings := "; ".join(result["warnings"])) and "has another vocabulary" in warnings
    rows = {tuple(row["labels"].values()): row["figures"] for row in result["rows"]}
    for (_, temperature, name), figures in rows.items():
        assert ("x no draft" in figures) == ("verify/decode" in figures) == (name != NO_DRAFT)
        if temperature == 0 and name != NO_DRAFT:  # in float32 speculation changes nothing
            assert figures["equal outputs"]["minimum"] == 1
    figures = rows["synthetic", 0.0, drafts[1]]
    depths = [each["median"] for name, each in figures.items() if name.startswith("depth")]
    assert depths == sorted(depths, reverse=True) and len(depths) == 6 and 0 < depths[0] <= 1
    assert re.match(r"Fastest draft by tokens/s: at temperature 0 .+ x no draft\); at temperature 0\.8 ", result["answer"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "demo,foo=1"], "'demo,foo=1' is not allowed: .* tokens=4, of tree, tokens, sampling, each at most once"),
        (["--draft", ""], "draft '' is not allowed: it must be a name"),
        (["--draft", "demo,tokens=0"], "'demo,tokens=0' is not allowed: tokens=0"),
        (
            ["--draft", "demo,tokens=many"],
            "'demo,tokens=many' is not allowed: tokens='many' is not allowed: it must be an integer >= 1",
        ),
        (
            ["--draft", "truncated:many"],
            "'truncated:many' is not allowed: truncated='many' is not allowed: it must be an integer >= 1",
        ),
        (["--draft", "demo,4"], "'demo,4' is not allowed: it must be a name, then options such as tokens=4"),
        (["--draft", "demo,tree=-1,0,1,2,3,tokens=4"], "at most max_draft_tokens=4"),
        (["--draft", "demo,tree=star"], r"or a list of parents, such as \[-1, 0, -1\]"),
        (["--draft", "demo,tokens=2,tree=[-1, 0, -1]"], "at most max_draft_tokens=2"),
        (["--draft", "truncated:2"], "left out: truncated:2: .* the target has 2 layers, so 1 to one less"),
        (["--draft", "demo", "--output-len", "1"], "--output-len 1 is not allowed: it must be at least 2"),
        (["--prompts", "poetry"], "left out: prompts poetry: prompts 'poetry' are unknown"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
    ],
)
def test_nothing_to_measure_is_an_error_before_work_is_done(zoo: Zoo, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(zoo, tmp_path, *options)


def test_speed_ups_are_within_rounds_and_the_fastest_is_so_over_prompts() -> None:
    rates = {"code": {"good": (200, 300), "even": (180, 270)}, "prose": {"good": (90, 90), "even": (120, 180)}}
    samples = []
    for (source, drafts), round_id in product(rates.items(), range(2)):
        plain = {"tokens/s": 100.0 * (1 + round_id), "ms/target pass": 2.0}
        samples.append(Sample({"prompts": source, "temperature": 0.0, "draft": NO_DRAFT}, round_id, plain))
        for draft, speeds in drafts.items():
            figures = {"tokens/s": float(speeds[round_id]), "ms/target pass": 3.0}
            samples.append(Sample({"prompts": source, "temperature": 0.0, "draft": draft}, round_id, figures))
    rows = {tuple(row.labels.values()): row for row in make_rows(compare(samples))}
    good = rows["code", 0.0, "good"].figures
    assert good["x no draft"] == Spread.of([2.0, 1.5]) and good["verify/decode"].median == 1.5
    assert rows["prose", 0.0, "even"].median("x no draft") == pytest.approx(1.05)
    assert find_fastest(list(rows.values())) == {0.0: ("even", pytest.approx((1.575 * 1.05) ** 0.5))}
