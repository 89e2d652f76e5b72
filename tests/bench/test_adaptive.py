"""The adaptive bench: every setting gives a row, useless drafts are useless, and what it adds up means what it says."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import CODED, make_back_end
from zoo import Zoo

from titan.bench import adaptive
from titan.bench.adaptive import (
    AdaptiveBench,
    adaptive_answer,
    bootstrap_median,
    compare,
    interval_rows,
    main,
    mean_samples,
    parse_arguments,
)
from titan.bench.engine_run import first_steps, make_requests
from titan.bench.hopeless_drafts import load_shuffled
from titan.bench.samples import Sample
from titan.bench.side_by_side import OwnTime, Steps
from titan.bench.workloads import Workload
from titan.draft.base import Review, ReviewReport
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model

SIZES = ["--output-len", "12", "--fixed", "1", "3"]


def options(zoo: Zoo, *more: str) -> list[str]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--threads", str(torch.get_num_threads())]
    return [*models, "--dtype", "float32", "--prompt-len", "4-20", "--rounds", "2", "--concurrency", "1", "3", *more]


def run(zoo: Zoo, folder: Path, *more: str) -> dict[str, Any]:
    main(options(zoo, f"--json={folder / 'run.json'}", *more))
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_every_setting_gives_a_row(zoo: Zoo, tmp_path: Path) -> None:
    result = run(zoo, tmp_path, *SIZES)
    rows = {tuple(row["labels"].values()): row["figures"] for row in result["rows"]}
    settings = ["off", "fixed 1", "fixed 3", "adaptive"]
    assert list(rows) == [(at_once, setting) for at_once in (1, 3, "all") for setting in settings]
    for (at_once, setting), figures in rows.items():
        assert figures["tokens/s"]["num_rounds"] == 2 and ("x off" in figures) == (setting != "off")
        if at_once != "all":
            nodes, tokens = (figures[name]["median"] for name in ("nodes/step", "tokens/step"))
            assert (nodes > 0) == (setting != "off") or setting == "adaptive"
            assert nodes <= {"off": 0, "fixed 1": 1, "fixed 3": 3, "adaptive": 6}[setting] and 1 <= tokens <= 1 + nodes
    turns = [(sample["labels"]["setting"], sample["round_id"]) for sample in result["samples"] if sample["labels"]["at once"] == 1]
    assert turns == [(each, round_id) for round_id in range(2) for each in settings]
    for at_once in (1, 3, "all"):
        assert sum("x best fixed" in rows[at_once, setting] for setting in settings) == 3


def test_a_fixed_setting_may_have_a_shape(zoo: Zoo) -> None:
    engines = AdaptiveBench(parse_arguments(options(zoo, "--fixed", "3", "3,tree=-1,-1,0")))._engines
    for setting, shape in {"fixed 3": "auto", "fixed 3,tree=-1,-1,0": (-1, -1, 0), "adaptive": "auto"}.items():
        drafter = engines[setting].drafter
        assert isinstance(drafter, DraftModelDrafter) and drafter.context.draft_tree == shape


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "0 is not allowed: it must be an integer of at least 1"),
        ("64", "max_draft_tokens=64 is not allowed: it must be an integer from 1 to 63"),
        ("2,tree=-1,0,0", "draft_tree=(-1, 0, 0) has 3 nodes"),
    ],
)
def test_a_fixed_setting_that_no_engine_would_take_is_refused(value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--fixed", value])
    assert f"argument --fixed: {message}" in capsys.readouterr().err


def test_each_run_has_its_kv_cache_in_another_place(zoo: Zoo) -> None:
    bench = AdaptiveBench(parse_arguments(options(zoo, *SIZES)))
    before, after = ([each.kv.tensors["target"].groups[0] for each in bench._engines.values()] for _ in bench.run())
    assert all(cache is not other for cache, other in zip(before, after, strict=True))


@pytest.mark.parametrize(("draft", "helps"), [([], [True, True]), (["--hopeless"], [False, False]), (["--mixed"], [True, False])])
def test_a_useless_draft_is_useless_and_drafts_as_much(zoo: Zoo, draft: list[str], helps: list[bool]) -> None:
    """For none of the requests, or for every second one; outputs are the target's in any case."""
    engine = AdaptiveBench(parse_arguments(options(zoo, *SIZES, *draft)))._engines["fixed 3"]
    prompts = [[5, 9, 77, 14], [7] * 9, [21, 8]]
    requests = make_requests(engine, Workload(prompts, [20] * 3))
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_unfinished:
        engine.step()
    for i, request in enumerate(requests):
        metrics, num_accepted = request.metrics, request.metrics.num_accepted_tokens
        assert request.output_token_ids == zoo.greedy("llama", prompts[i], 20, ignore_eos=True)
        assert num_accepted > 6 if helps[i % 2] else num_accepted <= 2
        assert metrics.num_draft_tokens >= 2.5 * (metrics.num_sequence_steps - 1)


def test_a_draft_that_is_wrong_for_every_second_request_is_so_when_reviewed(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ReviewReport([Review([True, False, True], [-0.5, -0.25, -1.0])] * 2, 7, 0.5)
    monkeypatch.setattr(DraftModelDrafter, "review", lambda *_: plain)
    engine = AdaptiveBench(parse_arguments(options(zoo, *SIZES, "--mixed")))._engines["fixed 3"]
    requests = make_requests(engine, Workload([[5], [6]], [9, 9]))
    assert [int(request.request_id) % 2 for request in requests] == [0, 1]
    assert engine.drafter.review(requests) == plain._replace(
        reviews=[plain.reviews[0], Review([False] * 3, plain.reviews[1].logprobs)]
    )


def test_a_shuffled_draft_has_the_same_numbers_elsewhere(zoo: Zoo) -> None:
    backend = make_back_end("torch")
    shuffled, again = (load_shuffled(zoo.path("llama~"), "float32", "auto", backend, seed=3) for _ in range(2))
    plain = load_model(open_model(ModelFiles(zoo.path("llama~"))), dtype="float32", backend=backend)
    for one, same, other in zip(shuffled.parameters(), again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, same) and torch.equal(one.flatten().sort().values, other.flatten().sort().values)
        assert (one != other).any() == (one.dim() == 2)


@pytest.mark.parametrize("name", [*CODED, "triton"])
def test_a_shuffled_draft_is_read_as_fast_as_one_that_is_not(zoo: Zoo, name: str) -> None:
    for bits, is_coded in (("auto", True), (8, True), (None, False)):
        shuffled = load_shuffled(zoo.path("llama~"), "bfloat16", bits, make_back_end(name), seed=3)
        assert (shuffled.head.dtype == torch.int8) == is_coded and shuffled.weight_bits == (8 if is_coded else None)


def test_first_steps_are_those_of_a_new_engine_each_time(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Engine] = []

    def watched(engine: Engine, workload: Workload, num_steps: int, own_time: OwnTime) -> Steps:
        assert engine not in seen and engine.counters.num_steps == 0
        found = yield from first_steps(engine, workload, num_steps, own_time)
        seen.append(engine)
        assert engine.counters.num_steps == num_steps == 5 and not engine.scheduler.has_unfinished
        is_off = engine.config.speculation.speculation == "off"
        assert [len(request.token_ids) == 5 for request in found.requests] == [True] * len(workload) or not is_off
        return found

    monkeypatch.setattr(adaptive, "first_steps", watched)
    monkeypatch.setenv("TITAN_CPU_KERNELS", "torch")
    result = run(zoo, tmp_path, "--first-steps", "5", "--concurrency", "2", "--device", "cpu")
    assert result["provenance"]["versions"]["kernels"] == "PyTorch"
    assert [tuple(row["labels"].values()) for row in result["rows"]] == [(2, "off"), (2, "adaptive")]
    assert len(seen) == 4 and result["warnings"] == []


def test_what_rates_add_up_to() -> None:
    """At 1 the second number is best, at 8 and over both the first; one round lacks a setting."""
    rates = {(1, "off"): 10, (1, "fixed 2"): 12, (1, "fixed 6"): 20, (1, "adaptive"): 19}
    rates |= {(8, "off"): 90, (8, "fixed 2"): 75, (8, "fixed 6"): 20, (8, "adaptive"): 88}
    samples = [
        Sample({"at once": at_once, "setting": setting}, round_id, {"tokens/s": rate * (1.0 + round_id)})
        for round_id in range(3)
        for (at_once, setting), rate in rates.items()
        if (round_id, at_once, setting) != (2, 8, "fixed 2")
    ]
    found_rows = interval_rows(compare([*samples, *mean_samples(samples)]))
    rows = {tuple(row.labels.values()): row.figures for row in found_rows}
    for place, figure, ratio in (
        ((1, "adaptive"), "x off", 1.9),
        ((1, "adaptive"), "x best fixed", 0.95),
        ((8, "adaptive"), "x best fixed", 88 / 75),
        (("all", "adaptive"), "x off", (1.9 * 88 / 90) ** 0.5),
        (("all", "adaptive"), "x best fixed", (19 * 88 / (12 * 75)) ** 0.5),
    ):
        found = rows[place][figure]
        assert (found.median, found.minimum, found.maximum) == pytest.approx((ratio, ratio, ratio))
    assert rows["all", "fixed 2"]["tokens/s"].num_rounds == 2 and mean_samples(samples[:4]) == []
    assert "1.90x at 1, 0.98x at 8, 1.36x at all over no speculation; 0.95x at 1," in adaptive_answer(found_rows)


def test_one_round_has_no_interval_less_than_six_have_a_range_and_the_headline_says_one_round() -> None:
    rates = {"off": (10.0,) * 6, "adaptive": (12.0, 14.0, 20.0, 14.0, 14.0, 14.0)}
    for num_rounds, shown in ((1, "1.20"), (2, "1.30 [1.20, 1.40]"), (5, "1.40 [1.20, 2.00]"), (6, "1.40 [1.30, 1.70]")):
        samples = [
            Sample({"at once": 1, "setting": setting}, round_id, {"tokens/s": each[round_id]})
            for setting, each in rates.items()
            for round_id in range(num_rounds)
        ]
        rows = interval_rows(compare(samples))
        assert f"{rows[1].figures['x off']:[.2f}" == shown
        assert ("speculation in one round: 1.20x at 1 over" in adaptive_answer(rows)) == (num_rounds == 1)


@pytest.mark.parametrize("num_rounds", [5, 9, 15])
def test_the_interval_is_that_of_all_resamples(num_rounds: int) -> None:
    """The median of a resample is at most the k-th of n values if at least (n + 1) / 2 draws are, each with probability k / n."""

    def below(k: int) -> float:
        share, least = k / num_rounds, (num_rounds + 1) // 2
        return sum(comb(num_rounds, i) * share**i * (1 - share) ** (num_rounds - i) for i in range(least, num_rounds + 1))

    low, high = (next(k for k in range(1, num_rounds + 1) if below(k) >= level) for level in (0.025, 0.975))
    found = bootstrap_median([float(k) for k in range(num_rounds, 0, -1)])
    assert (found.median, found.minimum, found.maximum) == ((num_rounds + 1) / 2, low, high)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["--draft-model", ""], "needs a draft: give --draft-model"),
        (["--hopeless", "--mixed"], "argument --mixed: not allowed with argument --hopeless"),
        (["--fixed", "64"], "max_draft_tokens=64 is not allowed: it must be an integer from 1 to 63"),
        (["--first-steps", "0"], "argument --first-steps: 0 is not allowed: it must be an integer of at least 1"),
        (["--first-steps", "5", "--fixed", "1"], "--fixed is not allowed with --first-steps: it would have no effect"),
        (["--quick", "--first-steps", "5", "--waves", "2"], "--waves is not allowed with --first-steps"),
        (["--first-steps", "5", "--output-len", "8"], "--output-len is not allowed with --first-steps"),
        (["--first-steps", "5", "--output-len", "128"], "--output-len is not allowed with --first-steps"),  # the default
    ],
)
def test_bad_options_are_refused(zoo: Zoo, bad: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, SystemExit)) as refusal:
        main(options(zoo, *bad))
    assert message in f"{refusal.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("option", ["--mixed", "--hopeless"])
def test_a_draft_without_weights_is_refused_before_work_is_done(zoo: Zoo, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} needs a draft model: --draft-model ngram is none"):
        parse_arguments(options(zoo, "--draft-model", "ngram", option))
