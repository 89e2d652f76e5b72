"""Latency under load: what streams whose times can be computed say about an engine, and the whole bench on a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from zoo import Zoo

from titan.bench.arrivals import draw_arrivals
from titan.bench.latency import LatencyBench, main, parse_arguments
from titan.bench.latency_report import latency_answer
from titan.bench.open_loop import RATE, SERVED, find_limits, load_figures
from titan.bench.runs import RequestRun
from titan.bench.samples import Sample, make_rows


def request(arrival: float, first: float, finished: float, num_tokens: int = 5) -> RequestRun:
    return RequestRun([0] * num_tokens, finished, first, arrival)


def test_goodput_counts_the_requests_within_both_limits() -> None:
    found = [request(0, 1, 5), request(1, 2.5, 4), request(2, 3, 8), request(3, 4, 4, num_tokens=1)]  # the first and last are
    figures = load_figures(found, 1.0, 1.0)
    assert figures == {"goodput/s": 0.25, "within target": 0.5, "left at the end": 4, "followed": 0.0}
    assert not {"followed", "excess"} & load_figures(found[:1], 1.0, 1.0).keys()


def serve(variation: float, rate: float, num_servers: int | None, seed: int, num_requests: int = 128) -> list[RequestRun]:
    """A stream at servers that take 1 s per request, first come first served (``None``: as many as requests)."""
    finished: list[float] = []
    arrivals = [time / rate for time in draw_arrivals(variation, num_requests, seed)]
    for i, arrival in enumerate(arrivals):
        is_queueing = num_servers is not None and i >= num_servers
        finished.append(1.0 + (max(arrival, finished[i - (num_servers or 0)]) if is_queueing else arrival))
    return [request(arrival, end, end) for arrival, end in zip(arrivals, finished, strict=True)]


@pytest.mark.parametrize(
    ("variation", "rate", "num_servers", "least", "most"),
    [(1.0, rate, None, 0.0, 0.02) for rate in (0.3, 1.0, 3.0, 10.0)]
    + [(3.0, rate, None, 0.0, 0.06) for rate in (0.3, 1.0, 3.0, 10.0)]
    + [(1.0, 2.0, 1, 0.9, 1.0), (1.0, 10.0, 4, 0.95, 1.0), (3.0, 8.0, 1, 0.9, 1.0)],
)
def test_overloaded_servers_are_called_saturated_and_those_of_constant_latency_hardly_ever(
    variation: float, rate: float, num_servers: int | None, least: float, most: float
) -> None:
    streams = [load_figures(serve(variation, rate, num_servers, seed), 1.0, 1.0) for seed in range(200)]
    assert least <= np.mean([figures.get("excess", -1.0) > 0 for figures in streams]) <= most


def test_a_sweep_finds_the_saturation_of_a_server_of_one_request_per_second() -> None:
    samples = []
    for rate in (0.4, 0.8, 1.6, 3.2):
        stream = serve(1.0, rate, 1, seed=1, num_requests=400)
        figures = {**load_figures(stream, 3.0, 1.0), "requests/s": len(stream) / stream[-1].finished}
        assert figures["followed"] == pytest.approx(min(rate, 1.0) / rate, rel=0.1)
        assert (figures["left at the end"] > 50) == (rate > 1)
        samples.append(Sample({"engine": "one", RATE: rate}, 0, figures))
    [limits] = find_limits(make_rows(samples))
    found = {name: spread.median for name, spread in limits.figures.items()}
    assert found == {"follows up to": 0.8, "saturated from": 1.6, SERVED: 0.4, "most finished": pytest.approx(1.0, rel=0.05)}
    assert latency_answer([limits]) == "At least 90% of the requests are within the target up to 0.4 requests/s with one."


def test_a_stream_that_is_too_short_to_say_is_neither_followed_nor_saturated() -> None:
    loads: list[tuple[float, dict[str, float]]] = [(1.0, {}), (2.0, {"excess": -1.0}), (3.0, {"excess": 1.0})]
    figures = {"within target": 1.0, "requests/s": 1.0}
    [limits] = find_limits(make_rows(Sample({"engine": "one", RATE: rate}, 0, figures | load) for rate, load in loads))
    assert (limits.median("follows up to"), limits.median("saturated from"), limits.median(SERVED)) == (None, 3.0, 3.0)


def arguments(zoo: Zoo, *options: str) -> list[str]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--dtype", "float32"]
    sizes = ["--prompt-len", "4-20", "--output-len", "2-8", "--num-requests", "6", "--repeats", "2"]
    return [*models, *sizes, "--threads", str(torch.get_num_threads()), *options]


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    main([*arguments(zoo), "--json", str(folder / "run.json"), *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_both_engines_serve_the_same_requests_in_turns(zoo: Zoo, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    result = run(zoo, tmp_path, "--rate", "400", "200", "--slo-ttft", "1e-9", "--html", str(page))
    draft, samples = f"draft {zoo.path('llama~')}", result["samples"]
    assert [(each["round_id"], each["labels"][RATE], each["labels"]["engine"]) for each in samples] == [
        (round_id, rate, engine) for round_id in (0, 1) for rate in (200, 400) for engine in ("no draft", draft)
    ]
    for slow, fast in ((samples[i], samples[j]) for i in (0, 4) for j in (i + 1, i + 2, i + 3)):
        assert slow["details"]["tokens"] == fast["details"]["tokens"]
        stretched = np.array(fast["details"]["arrival, s"]) * fast["labels"][RATE] / slow["labels"][RATE]
        assert stretched == pytest.approx(slow["details"]["arrival, s"])
    plain, drafted = result["rows"][:2]
    assert plain["figures"]["tokens/step"]["median"] == 1 < drafted["figures"]["tokens/step"]["median"]
    assert "P50 / no draft" in drafted["figures"] and "P50 / no draft" not in plain["figures"]
    assert result["answer"].startswith("At least 90% of the requests are within the target at no rate tried with no draft")
    text = page.read_text()
    assert text.index("Requests within the target") < text.index("<svg") < text.index("<table") and not result["warnings"]


def test_the_lengths_of_a_prompt_and_its_output_are_independent(zoo: Zoo) -> None:
    sizes = ["--prompt-len", "4-40", "--output-len", "4-40", "--num-requests", "200", "--rate", "1"]
    bench = LatencyBench(parse_arguments(arguments(zoo, *sizes)))
    lengths = [(len(prompt), n) for each in bench.workloads for prompt, n in zip(each.prompts, each.output_lens, strict=True)]
    assert abs(np.corrcoef(np.array(lengths).T)[0, 1]) < 0.15


def test_a_trace_is_replayed_with_its_own_lengths_and_rate_unless_others_are_asked_for(zoo: Zoo, tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("0 4 3\n0.01 9 2\n0.02 5 6\n")
    result = run(zoo, tmp_path, "--arrivals", str(trace))
    assert {row["labels"][RATE] for row in result["rows"]} == {100.0}
    for sample in result["samples"]:
        assert sample["details"]["tokens"] == [3, 2, 6]
        assert sample["details"]["arrival, s"] == pytest.approx([0.0, 0.01, 0.02])
    faster = run(zoo, tmp_path, "--arrivals", str(trace), "--rate", "200", "--num-requests", "2")
    assert faster["samples"][0]["details"]["arrival, s"] == pytest.approx([0.0, 0.005])
    with pytest.raises(ValueError, match="has no rate, as all requests come at once"):
        main(arguments(zoo, "--arrivals", str(trace), "--num-requests", "1"))


def test_prompts_that_are_shorter_than_a_trace_asks_are_reported(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("".join(f"{i} 6 2\n" for i in range(80)))
    (tmp_path / "prompts.txt").write_text("abc\nabcdefghi abcdefghi abcdefghi abcdefghi\n")
    options = ["--model", zoo.path("llama+text"), "--draft-model", "ngram", "--repeats", "1", "--prompts"]
    bench = LatencyBench(parse_arguments([*options, str(tmp_path / "prompts.txt"), "--arrivals", str(tmp_path / "trace.txt")]))
    assert bench.problems == ["40 of 80 prompts are shorter than the trace asks, for lack of longer ones"]


@pytest.mark.parametrize(("options", "num_rates", "width"), [((), 6, 2.0 / 0.3), (("--quick",), 2, 1.3 / 0.6)])
def test_without_rates_it_sweeps_around_what_the_engine_bears(
    zoo: Zoo, tmp_path: Path, options: tuple[str, ...], num_rates: int, width: float
) -> None:
    result = run(zoo, tmp_path, "--repeats", "1", "--arrivals", "bursty:2", *options)
    rates = sorted({row["labels"][RATE] for row in result["rows"]})
    assert len(rates) == num_rates and rates[-1] / rates[0] == pytest.approx(width, rel=0.2)


def test_a_draft_of_another_vocabulary_is_left_out_and_the_rest_runs(zoo: Zoo, tmp_path: Path) -> None:
    result = run(zoo, tmp_path, "--draft-model", zoo.path("small_vocab"), "--rate", "100", "--repeats", "1")
    assert [row["labels"]["engine"] for row in result["rows"]] == ["no draft"]
    assert any("has another vocabulary" in line for line in result["warnings"])


@pytest.mark.parametrize("failing", ["no draft", "draft"])
def test_an_engine_that_fails_is_left_out_and_the_other_goes_on(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """In the middle of a stream, with requests in the engine that the other must not meet; rates come from whoever is left."""
    serve_stream = LatencyBench._serve

    def serve_or_fail(self: LatencyBench, engine: str, workload: Any) -> Any:
        assert not self.llm.engine.scheduler.has_unfinished
        with monkeypatch.context() as patch:
            if engine.startswith(failing):
                patch.setattr(self.llm.engine.kv, "commit", lambda *_: 1 / 0)
            return serve_stream(self, engine, workload)

    monkeypatch.setattr(LatencyBench, "_serve", serve_or_fail)
    result = run(zoo, tmp_path, "--repeats", "1")
    assert len(result["rows"]) == 6 and not any(row["labels"]["engine"].startswith(failing) for row in result["rows"])
    assert not any("P50 / no draft" in row["figures"] for row in result["rows"])
    [problem] = result["warnings"]
    assert problem.startswith(failing) and problem.endswith("ended while it warmed up: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "argument --rate: 0 is not allowed: it must be a number above 0"),
        (["--slo-ttft", "nan"], "argument --slo-ttft: nan is not allowed"),
        (["--prompt-len", "8-4"], "'8-4' is not a length"),
        (["--arrivals", "./nowhere.csv"], "arrivals './nowhere.csv' are not allowed"),
        (["--prompts", "nowhere"], "prompts 'nowhere' are unknown"),
        (["--output-len", "600"], "is more than the model's positions"),
    ],
)
def test_bad_options_are_refused(zoo: Zoo, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, SystemExit)) as refusal:
        main([*arguments(zoo), *options])
    assert message in f"{refusal.value} {capsys.readouterr().err}"
