"""The draft-swap experiment: recipes, the drafts made of them, what a run says, and the ranking."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stepping import make_engine
from tiny_models import reference_logits
from zoo import Zoo

from titan.bench.acceptance import AcceptanceCounts
from titan.bench.charts import StackedBars
from titan.bench.draft_recipes import DraftRecipe, rounded, truncate
from titan.bench.draft_report import draft_charts, draft_table
from titan.bench.draft_rows import NO_DRAFT, Contender, PassTimes, Sample, Setting, StepCost, make_rows, rank
from titan.bench.drafts import DraftBench, main, parse_arguments
from titan.bench.profiling import model_of
from titan.core.batch import QueryRow, build_batch
from titan.core.kv_tensor import KVTensor
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.kernels.backend import choose_backend
from titan.kernels.interfaces import PassCounts, PassLimits
from titan.models.decoder import Decoder
from titan.models.loader import load_model

BACKEND = choose_backend(torch.device("cpu"))


def logits_of(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position: float32 [len(token_ids), vocab]."""
    kv = KVTensor(model.kv_layout, 4, 16, BACKEND.device)
    runner = BACKEND.prepare(model, kv, PassLimits(num_requests=1, query_len=1, num_blocks=4), PassCounts())
    batches = (build_batch([QueryRow([0, 1, 2, 3], i, [token_id])], block_size=16) for i, token_id in enumerate(token_ids))
    return torch.cat([runner.forward(batch) for batch in batches]).float()


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("demo", DraftRecipe("demo", "demo")),
        ("ngram,tokens=2", DraftRecipe("ngram,tokens=2", "ngram", num_tokens=2)),
        ("truncated:2,bits=8", DraftRecipe("truncated:2,bits=8", "truncated:2", num_layers=2, bits=8)),
        ("a/b,tree=dynamic,tokens=8", DraftRecipe("a/b,tree=dynamic,tokens=8", "a/b", tree="dynamic", num_tokens=8)),
        ("demo,tree=-1/-1/0", DraftRecipe("demo,tree=-1/-1/0", "demo", tree=(-1, -1, 0))),
        ("demo,sampling=sampled", DraftRecipe("demo,sampling=sampled", "demo", sampling="sampled")),
    ],
)
def test_recipes_are_read(text: str, recipe: DraftRecipe) -> None:
    assert DraftRecipe.parse(text, 4) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("demo,foo=1", "'foo=1' is not an option"),
        ("demo,tokens", "'tokens' is not an option"),
        ("demo,tokens=1,tokens=2", "'tokens=2' is not an option"),
        ("demo,tokens=many", "invalid literal"),
        ("demo,tokens=0", "tokens=0 is not allowed"),
        ("demo,tokens=64", "max_draft_tokens=64 is not allowed"),
        ("demo,tree=star", "draft_tree='star' is not supported"),
        ("demo,tree=-1/1", "is not topological"),
        ("demo,tree=-1/0/1/2/3", "at most max_draft_tokens=4"),
        ("demo,sampling=often", "draft_sampling='often' is not supported"),
        ("demo,bits=9", "bits=9 is not allowed: it must be 2 to 8"),
        ("truncated", "it begins with demo"),
        ("truncated:x", "invalid literal"),
        ("", "it begins with demo"),
    ],
)
def test_a_recipe_that_is_none_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DraftRecipe.parse(text, 4)
    assert f"draft {text!r}" in str(error.value)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_truncated_target_is_its_first_layers_in_transformers(zoo: Zoo, name: str, num_layers: int) -> None:
    token_ids = [5, 9, 77, 14, 5, 130, 21, 8, 3, 66, 12, 90, 41, 7, 18]
    shorter: Any = copy.deepcopy(zoo.model(name))
    shorter.model.layers = shorter.model.layers[:num_layers]
    target = load_model(zoo.path(name), dtype="float32", backend=BACKEND)
    draft = truncate(target, num_layers, BACKEND)
    assert torch.allclose(logits_of(draft, token_ids), reference_logits(shorter, token_ids), atol=2e-4, rtol=1e-4)
    assert draft.embedding is target.embedding
    assert torch.allclose(logits_of(target, token_ids), reference_logits(zoo.model(name), token_ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounded_weights_are_integers_of_their_row_and_no_further_than_half_a_step(bits: int) -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    result = rounded(weight, bits)
    largest = 2 ** (bits - 1) - 1
    for row, expected in zip(result.numpy(), weight.numpy(), strict=True):
        step = np.abs(expected).max() / largest
        if step == 0:
            assert (row == 0).all()
            continue
        integers = row / step
        assert np.allclose(integers, np.rint(integers), atol=1e-4) and np.abs(integers).max() <= largest + 1e-4
        assert np.abs(row - expected).max() <= step * 0.5001
    assert not torch.equal(result, weight)


def test_rounding_changes_linear_weights_and_nothing_else(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"))
    drafter = DraftRecipe.parse("truncated:2,bits=4", 4).make_drafter(engine, zoo.path("llama"))
    assert isinstance(drafter, DraftModelDrafter)
    plain: Any = copy.deepcopy(zoo.model("llama"))
    plain.model.layers = plain.model.layers[:2]
    for name, parameter in plain.named_parameters():
        if "proj" in name or "lm_head" in name:
            parameter.data = rounded(parameter.data, 4)
    token_ids = [5, 9, 77, 14, 5, 130, 21]
    assert torch.allclose(logits_of(drafter.model, token_ids), reference_logits(plain, token_ids), atol=2e-4, rtol=1e-4)
    # the engine's own weights stay as they are
    assert torch.allclose(
        logits_of(model_of(engine.runner), token_ids), reference_logits(zoo.model("llama"), token_ids), atol=2e-4, rtol=1e-4
    )


def test_a_recipe_makes_the_drafter_that_it_names(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), max_draft_tokens=8)
    ngram = DraftRecipe.parse("ngram,tokens=3", 4).make_drafter(engine, zoo.path("llama"))
    assert isinstance(ngram, NgramDrafter) and ngram.max_draft_tokens == 3
    model = DraftRecipe.parse(f"{zoo.path('llama~')},tree=dynamic,tokens=8", 4).make_drafter(engine, zoo.path("llama"))
    assert isinstance(model, DraftModelDrafter) and model.max_draft_tokens == 8
    assert model.policy.draft_tree == "dynamic" and model.policy.draft_sampling == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("truncated:3", "the target has 3 layers, so 1 to one less"),
        ("truncated:0", "the target has 3 layers, so 1 to one less"),
        ("ngram,bits=8", "bits=8 needs a draft model"),
        ("ngram,tree=dynamic", "needs a draft model"),
        ("./nowhere", "'./nowhere' does not exist"),
    ],
)
def test_a_draft_that_cannot_be_made_is_refused(zoo: Zoo, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftRecipe.parse(text, 4).make_drafter(make_engine(zoo.path("llama")), zoo.path("llama"))


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    sizes = ["--prompt-len", "12", "--output-len", "16", "--repeats", "2", "--concurrency", "2", "--threads", "1"]
    files = ["--json", str(folder / "run.json"), "--html", str(folder / "run.html")]
    main(["--model", zoo.path("llama+text"), "--dtype", "float32", *sizes, *files, *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_drafts_take_turns_on_the_same_prompts_and_what_cannot_run_is_named(zoo: Zoo, tmp_path: Path) -> None:
    good = zoo.path("llama~+text")
    drafts = [
        good,
        f"{good},tree=dynamic,tokens=6",
        "truncated:1",
        "ngram",
        zoo.path("small_vocab"),
        "truncated:7",
        f"{good},tokens=-1",
    ]
    options = [word for draft in drafts for word in ("--draft", draft)]
    workloads = ["--workload", "code", "synthetic", "poetry", "--temperature", "0", "0.8"]
    result = run(zoo, tmp_path, *options, *workloads)
    names = [NO_DRAFT, *drafts[:4]]
    settings = [(workload, temperature) for workload in ("code", "synthetic") for temperature in (0.0, 0.8)]
    assert [(each["round_id"], each["workload"], each["temperature"], each["draft"]) for each in result["samples"]] == [
        (round_id, *setting, name) for round_id in (0, 1) for setting in settings for name in names
    ]
    warnings = "\n".join(result["warnings"])
    for part in ("poetry", "has another vocabulary", "truncated:7 was left out", "tokens=-1"):
        assert part in warnings
    rows = {(row["workload"], row["temperature"], row["draft"]): row for row in result["rows"]}
    assert len(rows) == len(settings) * len(names)
    for (_, temperature, name), row in rows.items():
        assert row["num_rounds"] == 2 and row["num_outputs"] == 4
        assert row["num_equal"] == (4 if temperature == 0 else None)  # in float32 speculation changes nothing
        assert row["mean_acceptance_length"] >= 1.0
        assert (row["mean_acceptance_length"] == 1.0) == (
            name == NO_DRAFT or not any(each["num_accepted"] for each in row["depths"])
        )
        if row["depths"]:
            low, high = row["depths"][0]["interval"]
            assert 0 <= low <= row["depths"][0]["rate"] <= high <= 1
            assert row["predicted_speed_up"] > 0 and row["costs"]["draft_pass"] > 0
    assert rows["code", 0.0, NO_DRAFT]["speed_up"]["median"] == 1.0
    chain, dynamic = rows["synthetic", 0.0, good], rows["synthetic", 0.0, drafts[1]]
    assert 1.5 < chain["mean_acceptance_length"] <= 5.0 and chain["costs"]["num_draft_passes"] > 1
    assert len(chain["depths"]) == 4 and len(dynamic["depths"]) > 4
    assert {place["name"] for place in result["ranking"]} == set(drafts[:4])
    assert sorted(result["provenance"]["models"]) == sorted(["target", *drafts[:4]])
    assert "Speed-up over acceptance" in (tmp_path / "run.html").read_text()


def test_every_draft_is_warmed_up_at_every_temperature(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftBench._run
    warmed_up: list[tuple[float, str]] = []

    def record(self: DraftBench, setting: Setting, draft: str, block: int, output_len: int) -> Any:
        if block == 0:
            warmed_up.append((setting.temperature, draft))
        return original(self, setting, draft, block, output_len)

    monkeypatch.setattr(DraftBench, "_run", record)
    run(zoo, tmp_path, "--draft", "ngram", "--workload", "synthetic", "--temperature", "0", "0.8", "--repeats", "1")
    assert sorted(warmed_up) == [(0.0, "ngram"), (0.0, NO_DRAFT), (0.8, "ngram"), (0.8, NO_DRAFT)]


def test_interrupt_keeps_the_runs_before_it(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftBench._run

    def interrupt_second_block(self: DraftBench, setting: Setting, draft: str, block: int, output_len: int) -> Any:
        if block == 2 and draft == "ngram":
            raise KeyboardInterrupt
        return original(self, setting, draft, block, output_len)

    monkeypatch.setattr(DraftBench, "_run", interrupt_second_block)
    result = run(zoo, tmp_path, "--draft", "ngram", "--workload", "synthetic")
    assert not result["is_complete"]
    assert {row["draft"]: row["num_rounds"] for row in result["rows"]} == {NO_DRAFT: 2, "ngram": 1}


def test_a_draft_that_fails_is_left_out_and_the_others_go_on(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, failing = DraftBench._run, zoo.path("llama~+text")

    def fail_in_second_round(self: DraftBench, setting: Setting, draft: str, block: int, output_len: int) -> Any:
        assert not self.llm.engine.scheduler.has_unfinished
        if block == 2 and draft == failing:
            with monkeypatch.context() as patch:
                patch.setattr(self.llm.engine.kv, "commit", lambda *_: 1 / 0)
                return original(self, setting, draft, block, output_len)
        return original(self, setting, draft, block, output_len)

    monkeypatch.setattr(DraftBench, "_run", fail_in_second_round)
    options = ["--draft", failing, "--draft", "ngram", "--workload", "synthetic", "--repeats", "3"]
    result = run(zoo, tmp_path, *options)
    assert {row["draft"]: row["num_rounds"] for row in result["rows"]} == {NO_DRAFT: 3, failing: 1, "ngram": 3}
    assert all(row["num_equal"] == row["num_outputs"] for row in result["rows"])
    assert f"{failing} ended on synthetic: ZeroDivisionError: division by zero" in result["warnings"] and result["is_complete"]


def test_without_the_figures_of_no_draft_there_are_no_ratios(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftBench._run

    def fail_without_draft(self: DraftBench, setting: Setting, draft: str, block: int, output_len: int) -> Any:
        if draft == NO_DRAFT and block:
            raise RuntimeError("out of memory")
        return original(self, setting, draft, block, output_len)

    monkeypatch.setattr(DraftBench, "_run", fail_without_draft)
    result = run(zoo, tmp_path, "--draft", "ngram", "--workload", "synthetic")
    [row] = result["rows"]
    assert (row["draft"], row["speed_up"], row["num_equal"], row["predicted_speed_up"]) == ("ngram", None, None, None)
    assert result["ranking"] == [] and "no draft ended on synthetic: RuntimeError: out of memory" in result["warnings"]


def test_a_request_that_the_engine_gives_up_is_a_failure_and_no_endless_loop(zoo: Zoo, tmp_path: Path) -> None:
    """Both requests are given up in their prefill, before they have a token."""
    options = ["--model", zoo.path("llama+text"), "--dtype", "float32", "--draft", "ngram", "--workload", "synthetic"]
    bench = DraftBench(parse_arguments([*options, "--prompt-len", "12", "--output-len", "4", "--concurrency", "2"]))
    engine = bench.llm.engine

    def give_up() -> list[Any]:
        given_up = [*engine.scheduler.running, *engine.scheduler.waiting]
        for request in given_up:
            engine.scheduler.abort(request, "no room")
        return given_up

    engine.step = give_up  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="ended early: no room"):
        bench._run(Setting("synthetic", 0.0), NO_DRAFT, 0, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "demo,x"], "'x' is not an option"),
        (["--draft", "truncated:9"], "draft truncated:9 was left out"),
        (["--workload", "poetry"], "workload poetry was left out"),
        (["--temperature", "-1"], "temperature"),
        (["--prompt-len", "x"], "'x' is not a length"),
        (["--output-len", "400"], "is more than the model's positions"),
    ],
)
def test_nothing_to_measure_is_an_error_before_work_is_done(zoo: Zoo, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(zoo, tmp_path, *options)


def test_quick_is_a_preset_that_other_options_refine() -> None:
    quick = parse_arguments(["--quick", "--repeats", "7"])
    assert (quick.repeats, quick.output_len) == (7, 48)
    assert parse_arguments([]).output_len == 128


def sample(draft: str, round_id: int, tokens_per_second: float, times: PassTimes | None) -> Sample:
    return Sample("code", 0.0, draft, round_id, tokens_per_second, 2, 2, times)


def test_speed_ups_are_within_rounds_and_predictions_from_costs() -> None:
    counts = AcceptanceCounts()
    counts.tree_depths[2] = counts.path_depths[2] = 4
    counts.path_depths[0] = counts.tree_depths[2] = 4
    counts.num_tries, counts.num_descents = 12, 6
    plain, drafted = PassTimes(10.0, 8.0, 0.0, 0.0), PassTimes(13.0, 9.0, 1.0, 2.0)
    samples = []
    for round_id, slowness in enumerate((1.0, 0.5, 0.1)):
        samples += [sample(NO_DRAFT, round_id, 100 * slowness, plain), sample("x", round_id, 150 * slowness, drafted)]
    setting = Setting("code", 0.0)
    row, base = make_rows(samples, {(setting, NO_DRAFT): AcceptanceCounts(), (setting, "x"): counts})
    assert (row.draft, base.draft) == ("x", NO_DRAFT)  # the fastest first
    assert row.speed_up is not None and (row.speed_up.minimum, row.speed_up.maximum) == (1.5, 1.5)
    assert row.alpha == 0.5 and row.expected_tokens == pytest.approx(1.75)
    assert row.predicted_speed_up == pytest.approx(1.75 * 8 / (2 * 1 + 9))
    assert row.step == StepCost(draft=2.0, target=9.0, host=2.0)
    [cells, base_cells] = draft_table([row, base]).rows
    assert "1.50 ±0 %" in cells and base_cells.count("-") >= 3


def test_bars_of_all_temperatures_are_drawn() -> None:
    counts = AcceptanceCounts()
    samples = [Sample("code", temperature, NO_DRAFT, 0, 100.0, 2, 2, PassTimes(10.0, 8.0, 0.0, 0.0)) for temperature in (0.0, 0.8)]
    rows = make_rows(samples, {(each.setting, NO_DRAFT): counts for each in samples})
    bars = draft_charts(rows)[-1]
    assert isinstance(bars, StackedBars) and bars.bars == ["no draft, code", "no draft, code at temperature 0.8"]


def contender(name: str, speed_up: float, tokens: float, draft: float, target: float = 1.0, host: float = 0.1) -> Contender:
    return Contender(name, {"code": speed_up, "prose": speed_up}, tokens, StepCost(draft, target, host))


def test_the_ranking_says_what_a_draft_lacks() -> None:
    best = contender("best", 1.9, 3.0, 0.4)
    dear = contender("dear", 1.1, 3.1, 1.6)
    blind = contender("blind", 0.8, 1.2, 0.4)
    verbose = contender("verbose", 1.5, 3.0, 0.4, target=1.5)
    places = rank([blind, dear, best, verbose])
    assert [(place.rank, place.name) for place in places] == [(1, "best"), (2, "verbose"), (3, "dear"), (4, "blind")]
    assert places[0].reason == "3.00 tokens per step pay for steps that take 1.50 x as long as without a draft"
    assert places[1].reason.endswith("mostly for verification")
    assert places[2].reason == "its steps take 2.70 x a step without a draft, best's 1.50, mostly for drafting"
    assert places[3].reason == "emits 1.20 tokens per step, best 3.00; slower than no draft"


def test_speed_ups_over_workloads_are_averaged_geometrically() -> None:
    one, two = Contender("a", {"x": 0.5, "y": 2.0}, 2.0, None), Contender("b", {"x": 1.1, "y": 1.1}, 1.5, None)
    places = rank([one, two])
    assert [place.name for place in places] == ["b", "a"] and places[1].speed_up == pytest.approx(1.0)
    assert places[0].reason == "emits 1.50 tokens per step"


def test_a_best_draft_that_does_not_pay_is_called_so() -> None:
    assert "do not pay for" in rank([contender("only", 0.9, 1.2, 0.5)])[0].reason
