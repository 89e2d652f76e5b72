"""Latency under load: what streams whose times can be computed say about an engine, and the whole bench on a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zoo import Zoo

from titan.bench import latency
from titan.bench.latency import RATE, SERVED, find_limits, latency_answer, load_figures
from titan.bench.runs import RequestRun
from titan.bench.samples import Sample, make_rows
from titan.bench.workloads import draw_arrivals


def test_gaps_between_arrivals_are_exponential_with_a_mean_of_a_second() -> None:
    arrivals = draw_arrivals(20_000, seed=3)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and len(arrivals) == 20_000
    assert gaps.mean() == pytest.approx(1, abs=0.03) and gaps.std() == pytest.approx(1, abs=0.03)
    assert np.median(gaps) == pytest.approx(np.log(2), abs=0.03)
    assert arrivals[:50] == draw_arrivals(50, seed=3) != draw_arrivals(50, seed=2)


def request(arrival: float, first: float, finished: float, num_tokens: int = 5) -> RequestRun:
    return RequestRun([0] * num_tokens, finished, first, arrival)


def test_goodput_counts_the_requests_within_both_limits() -> None:
    found = [request(0, 1, 5), request(1, 2.5, 2.9), request(2, 3, 8), request(3, 4, 4, num_tokens=1)]  # the first and last are
    assert load_figures(found, 1.0, 1.0) == {"goodput/s": 0.25, "within target": 0.5, "followed": 0.5}
    assert not {"followed", "excess"} & load_figures(found[:1], 1.0, 1.0).keys()


@pytest.mark.parametrize(
    ("rate", "num_servers", "least", "most"),
    [(0.3, None, 0.0, 0.02), (3.0, None, 0.0, 0.02), (2.0, 1, 0.9, 1.0), (10.0, 4, 0.95, 1.0)],
)
def test_overloaded_servers_are_called_saturated_and_those_of_constant_latency_hardly_ever(
    rate: float, num_servers: int | None, least: float, most: float
) -> None:
    """Servers take 1 s per request, first come first served (``None``: as many as requests)."""
    found = []
    for seed in range(200):
        ends: list[float] = []
        arrivals = [time / rate for time in draw_arrivals(128, seed)]
        for i, arrival in enumerate(arrivals):
            is_queueing = num_servers is not None and i >= num_servers
            ends.append(1.0 + (max(arrival, ends[i - (num_servers or 0)]) if is_queueing else arrival))
        figures = load_figures([request(arrival, end, end) for arrival, end in zip(arrivals, ends, strict=True)], 1.0, 1.0)
        found.append(figures.get("excess", -1.0) > 0)
    assert least <= np.mean(found) <= most


def test_limits_are_the_last_rate_followed_and_the_first_that_saturates() -> None:
    """A stream that is too short to say has no excess; it ends what was followed, and saturates nothing."""
    loads: dict[float, dict[str, float]] = {1: {"excess": -1}, 2: {"excess": -2}, 3: {}, 4: {"excess": 1}, 5: {"excess": -1}}
    loads = {rate: {"within target": 1.0 if rate < 2 else 0.8, "requests/s": 9 - rate, **load} for rate, load in loads.items()}
    [limits] = find_limits(make_rows(Sample({"engine": "one", RATE: rate}, 0, load) for rate, load in loads.items()))
    found = {name: spread.median for name, spread in limits.figures.items()}
    assert found == {"follows up to": 2, "saturated from": 4, SERVED: 1, "most finished": 8}
    assert latency_answer([limits]) == "At least 90% of the requests are within the target up to 1 requests/s with one."


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--dtype", "float32", "--threads", "1"]
    sizes = ["--prompt-len", "4-20", "--output-len", "2-8", "--num-requests", "6", "--rounds", "2"]
    latency.main([*models, *sizes, "--json", str(folder / "run.json"), *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_both_engines_serve_the_same_requests_in_turns(zoo: Zoo, tmp_path: Path) -> None:
    result = run(zoo, tmp_path, "--rate", "400", "200", "--slo-ttft", "1e-9")
    draft, samples = f"draft {zoo.path('llama~')}", result["samples"]
    orders = ["no draft", draft], [draft, "no draft"]
    assert [(each["round_id"], each["labels"][RATE], each["labels"]["engine"]) for each in samples] == [
        (round_id, rate, engine) for round_id in (0, 1) for rate in (200, 400) for engine in orders[round_id]
    ]
    for slow, fast in ((samples[i], samples[j]) for i in (0, 4) for j in (i + 1, i + 2, i + 3)):
        assert slow["details"]["tokens"] == fast["details"]["tokens"]
        stretched = np.array(fast["details"]["arrival, s"]) * fast["labels"][RATE] / slow["labels"][RATE]
        assert stretched == pytest.approx(slow["details"]["arrival, s"])
    plain, drafted = (row["figures"] for row in result["rows"][:2])
    assert plain["tokens/step"]["median"] == 1 < drafted["tokens/step"]["median"]
    assert "P50 / no draft" in drafted and "P50 / no draft" not in plain
    assert not result["warnings"]


def test_a_draft_of_another_vocabulary_is_left_out_and_the_rest_sweeps_around_what_it_bears(zoo: Zoo, tmp_path: Path) -> None:
    result = run(zoo, tmp_path, "--draft-model", zoo.path("small_vocab"), "--quick")
    assert [row["labels"]["engine"] for row in result["rows"]] == ["no draft", "no draft"]
    slow, fast = (row["labels"][RATE] for row in result["rows"])
    assert fast / slow == pytest.approx(1.3 / 0.6, rel=0.2)
    [warning] = result["warnings"]
    assert warning.startswith("draft ") and "has another vocabulary" in warning


def test_without_the_reference_which_fails_amid_a_stream_rates_come_from_the_other(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With requests in the engine that the other must not meet."""
    serve = latency.run_workload

    def serve_or_fail(engine: Any, workload: Any, *, use_speculative: bool) -> Any:
        assert not engine.scheduler.has_unfinished
        with monkeypatch.context() as patch:
            if not use_speculative:
                patch.setattr(engine.kv, "commit", lambda *_: 1 / 0)
            return serve(engine, workload, use_speculative=use_speculative)

    monkeypatch.setattr(latency, "run_workload", serve_or_fail)
    result = run(zoo, tmp_path, "--rounds", "1")
    assert len(result["rows"]) == 6 and not any(row["labels"]["engine"] == "no draft" for row in result["rows"])
    [problem] = result["warnings"]
    assert problem.startswith("no draft") and problem.endswith("ended while it warmed up: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "argument --rate: 0 is not allowed: it must be a number above 0"),
        (["--slo-ttft", "nan"], "argument --slo-ttft: nan is not allowed"),
        (["--prompts", "nowhere"], "prompts 'nowhere' are unknown"),
        (["--output-len", "600"], "is more than the model's positions"),
    ],
)
def test_bad_options_are_refused(
    zoo: Zoo, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ValueError, SystemExit)) as refusal:
        run(zoo, tmp_path, *options)
    assert message in f"{refusal.value} {capsys.readouterr().err}"
