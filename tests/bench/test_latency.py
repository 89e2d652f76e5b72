"""Serving under load on a clock that only steps advance: against queues that can be computed, and on a real engine."""

from __future__ import annotations

import json
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from zoo import Zoo

from titan.bench.arrivals import ArrivalProcess
from titan.bench.latency import LatencyBench, main, parse_arguments
from titan.bench.latency_report import latency_answer, make_limits, make_rows
from titan.bench.open_loop import RequestTimes, Target, TimedRequest, find_limits, measure_load, round_rate, serve

GOOD = Target(1.0, 1.0)


class ManualClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.time += seconds


class FakeRequest:
    """A request of the fake engine: one token per step."""

    error = None

    def __init__(self, output_len: int) -> None:
        self.output_len = output_len
        self.num_output_tokens = 0

    @property
    def is_finished(self) -> bool:
        return self.num_output_tokens == self.output_len


class FakeEngine:
    """Serves at most ``width`` requests at once, first come first served; each step takes a second."""

    def __init__(self, clock: ManualClock, width: int = 1) -> None:
        self.clock = clock
        self.width = width
        self.queue: deque[FakeRequest] = deque()
        self.engine = self.scheduler = self
        self.num_speculative = 0

    def make_request(self, prompt: list[int], params: Any) -> FakeRequest:
        self.num_speculative += params.use_speculative
        return FakeRequest(params.max_tokens)

    def add(self, request: FakeRequest) -> None:
        self.queue.append(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[FakeRequest]:
        self.clock.time += 1.0
        running = list(self.queue)[: self.width]
        for request in running:
            request.num_output_tokens += 1
        self.queue = deque(request for request in self.queue if not request.is_finished)
        return running


def serve_fake(times: list[float], output_lens: list[int], width: int = 1) -> list[RequestTimes]:
    clock = ManualClock()
    arrivals = [TimedRequest(time, [1], length) for time, length in zip(times, output_lens, strict=True)]
    engine: Any = FakeEngine(clock, width)
    return serve(engine, arrivals, use_speculative=False, clock=clock)


def test_waiting_in_a_single_server_follows_the_recursion_of_lindley() -> None:
    lengths = np.random.default_rng(0).integers(1, 5, 200).tolist()
    times = [float(round(time)) for time in islice(ArrivalProcess(2.0).times(0.3, seed=7), 200)]  # at the ends of steps
    found = serve_fake(times, lengths)
    wait = 0.0
    for i, each in enumerate(found):
        assert each.arrival == times[i] and each.num_tokens == lengths[i]
        assert each.latency == pytest.approx(wait + lengths[i])
        assert each.to_first_token == pytest.approx(wait + 1)
        if i + 1 < len(times):
            wait = max(0.0, wait + lengths[i] - (times[i + 1] - times[i]))
    assert max(each.latency for each in found) > 10  # there was a queue


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    first, second = serve_fake([0.0, 0.25], [2, 1], width=2)
    assert (first.first_token, first.finished, first.between_tokens) == (1.0, 2.0, 1.0)
    assert (second.to_first_token, second.latency, second.between_tokens) == (1.75, 1.75, None)


def test_an_idle_engine_sleeps_until_the_next_arrival() -> None:
    clock = ManualClock()
    engine: Any = FakeEngine(clock)
    serve(engine, [TimedRequest(0.0, [1], 1), TimedRequest(5.0, [1], 1)], use_speculative=True, clock=clock)
    assert clock.slept == [4.0] and engine.num_speculative == 2


def test_a_sweep_finds_the_saturation_of_a_server_of_one_request_per_second() -> None:
    loads = []
    for rate in (0.4, 0.8, 1.6, 3.2):
        times = list(islice(ArrivalProcess().times(rate, seed=1), 400))
        load = measure_load(serve_fake(times, [1] * 400), Target(3.0, 1.0))
        loads.append((rate, load.excess, load.attainment))
        served = min(rate, 1.0)
        assert load.requests_per_second == pytest.approx(served, rel=0.1)
        assert load.following == pytest.approx(served / rate, rel=0.1)
        assert (load.num_left > 50) == (rate > 1)
    limits = find_limits(loads)
    assert (limits.followed_up_to, limits.saturated_from, limits.well_served_up_to) == (0.8, 1.6, 0.4)


def times(arrival: float, first: float, finished: float, num_tokens: int = 5) -> RequestTimes:
    return RequestTimes(arrival, first, finished, num_tokens)


def test_goodput_counts_the_requests_within_both_limits() -> None:
    found = [times(0, 1, 5), times(1, 2.5, 4), times(2, 3, 8), times(3, 4, 4, num_tokens=1)]
    load = measure_load(found, GOOD)
    assert [GOOD.is_met(each) for each in found] == [True, False, False, True]
    assert (load.seconds, load.attainment, load.goodput) == (8.0, 0.5, 0.25)
    assert load.requests_per_second == 0.5 and load.tokens_per_second == 2.0
    assert (load.following, load.num_left) == (0.0, 4)
    assert measure_load(found[:1], GOOD).following is None


def test_limits_end_at_the_first_rate_that_is_not_borne() -> None:
    limits = find_limits([(3.0, -1.0, 1.0), (1.0, 0.0, 0.9), (2.0, 0.5, 0.1)])
    assert (limits.followed_up_to, limits.saturated_from, limits.well_served_up_to) == (1.0, 2.0, 1.0)
    nothing = find_limits([(1.0, 2.0, 0.0)])
    assert (nothing.followed_up_to, nothing.saturated_from, nothing.well_served_up_to) == (None, 1.0, None)
    unknown = find_limits([(1.0, None, 1.0), (2.0, -1.0, 1.0), (3.0, 1.0, 1.0)])
    assert (unknown.followed_up_to, unknown.saturated_from) == (None, 3.0)


def share_saturated(variation: float, rate: float, width: int | None, num_trials: int) -> float:
    """Share of streams at which a server of 1 s per request, ``width`` at once (``None``: no limit), is called saturated."""
    num_saturated = 0
    for seed in range(num_trials):
        arrivals = list(islice(ArrivalProcess(variation).times(rate, seed), 128))
        finished: list[float] = []
        for i, arrival in enumerate(arrivals):
            finished.append(1.0 + (max(arrival, finished[i - width]) if width is not None and i >= width else arrival))
        excess = measure_load([times(at, end, end) for at, end in zip(arrivals, finished, strict=True)], GOOD).excess
        num_saturated += excess is not None and excess > 0
    return num_saturated / num_trials


@pytest.mark.parametrize("num_in_flight", [0.3, 1.0, 3.0, 10.0])
def test_a_server_of_constant_latency_is_hardly_ever_called_saturated(num_in_flight: float) -> None:
    assert share_saturated(1.0, num_in_flight, None, 200) <= 0.02
    assert share_saturated(3.0, num_in_flight, None, 200) <= 0.06


def test_an_overloaded_server_is_called_saturated_also_if_requests_come_in_bursts() -> None:
    assert share_saturated(1.0, 2.0, 1, 200) > 0.9
    assert share_saturated(1.0, 10.0, 4, 200) > 0.95
    assert share_saturated(3.0, 8.0, 1, 200) > 0.9


def test_a_stream_that_ends_before_its_first_requests_do_says_nothing_about_saturation() -> None:
    assert measure_load([times(i, 50 + i, 100 + i) for i in range(20)], GOOD).excess is None
    assert measure_load([times(0, 1, 2)], GOOD).excess is None


@pytest.mark.parametrize(("rate", "rounded"), [(0.1234, 0.12), (1.0, 1.0), (47.9, 48.0), (1234.0, 1200.0)])
def test_rates_of_a_sweep_are_round(rate: float, rounded: float) -> None:
    assert round_rate(rate) == rounded


@pytest.mark.parametrize("limits", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_a_target_that_is_none_is_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="both must be above 0"):
        Target(*limits)


def arguments(zoo: Zoo, *options: str) -> list[str]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--dtype", "float32"]
    sizes = ["--prompt-len", "4-20", "--output-len", "2-8", "--num-requests", "6", "--repeats", "2"]
    return [*models, *sizes, "--threads", str(torch.get_num_threads()), *options]


def test_both_engines_serve_the_same_requests_in_turns_and_limits_are_found(zoo: Zoo) -> None:
    clock = ManualClock()
    bench = LatencyBench(parse_arguments(arguments(zoo, "--rate", "50", "0.1")), clock)
    step = bench.llm.engine.step

    def timed_step() -> Any:
        clock.time += 0.25
        return step()

    bench.llm.engine.step = timed_step  # type: ignore[method-assign]
    bench.run()
    draft = f"draft {zoo.path('llama~')}"
    assert [(each.round_id, each.rate, each.engine) for each in bench.samples] == [
        (round_id, rate, engine) for round_id in (0, 1) for rate in (0.1, 50.0) for engine in ("no draft", draft)
    ]
    for plain, drafted in zip(bench.samples[::2], bench.samples[1::2], strict=True):
        assert [(each.arrival, each.num_tokens) for each in plain.times] == [
            (each.arrival, each.num_tokens) for each in drafted.times
        ]
    rows = {(row.rate, row.engine): row for row in make_rows(bench.samples)}
    assert rows[0.1, "no draft"].mean_acceptance_length == 1.0 < rows[0.1, draft].mean_acceptance_length
    # a step is a token without a draft: the first needs one step, or a part of it more if it came during one
    assert rows[0.1, "no draft"].between_tokens is not None
    assert rows[0.1, "no draft"].between_tokens.p99 == pytest.approx(0.25)
    assert 0.25 <= rows[0.1, "no draft"].to_first_token.p50 < 0.5
    ratio = rows[0.1, draft].p50_ratio
    assert ratio is not None and ratio.median < 1.0
    limits = {each.engine: each.limits for each in make_limits(list(rows.values()))}
    assert limits["no draft"].well_served_up_to is None  # a token takes 0.25 s
    assert latency_answer(make_limits(list(rows.values()))).startswith(
        "At least 90% of the requests are within the target at no rate tried with no draft"
    )
    assert limits["no draft"].followed_up_to == 0.1  # at 50 the stream is too short to say


def test_the_lengths_of_a_prompt_and_its_output_are_independent(zoo: Zoo) -> None:
    sizes = ["--prompt-len", "4-40", "--output-len", "4-40", "--num-requests", "200", "--repeats", "2", "--rate", "1"]
    bench = LatencyBench(parse_arguments(arguments(zoo, *sizes)), ManualClock())
    lengths = [(len(body.prompt), body.output_len) for bodies in bench.bodies for body in bodies]
    assert abs(np.corrcoef(np.array(lengths).T)[0, 1]) < 0.15


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    main([*arguments(zoo), "--json", str(folder / "run.json"), "--html", str(folder / "run.html"), *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_a_trace_is_replayed_with_its_own_lengths(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("0 4 3\n0.01 9 2\n0.02 5 6\n")
    result = run(zoo, tmp_path, "--arrivals", str(tmp_path / "trace.txt"))
    assert {row["rate"] for row in result["rows"]} == {100.0}
    assert [[each["num_tokens"] for each in sample["times"]] for sample in result["samples"]] == [[3, 2, 6]] * 4
    assert [each["arrival"] for each in result["samples"][0]["times"]] == [0.0, 0.01, 0.02]
    assert result["is_complete"] and "Goodput over load" in (tmp_path / "run.html").read_text()


def test_a_trace_is_cut_only_if_asked_to_and_prompts_that_are_too_short_are_named(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("".join(f"{i} 6 2\n" for i in range(80)))
    (tmp_path / "prompts.txt").write_text("abc\nabcdefghi abcdefghi abcdefghi abcdefghi\n")
    model = ["--model", zoo.path("llama+text"), "--draft-model", "ngram", "--dtype", "float32", "--repeats", "1"]
    options = [*model, "--arrivals", str(tmp_path / "trace.txt"), "--prompts", str(tmp_path / "prompts.txt")]
    bench = LatencyBench(parse_arguments(options), ManualClock())
    assert len(bench.bodies[0]) == len(bench._times(1.0, 0)) == 80
    assert any(line.startswith("40 of 80 prompts are shorter than the trace asks") for line in bench.problems)
    assert len(LatencyBench(parse_arguments([*options, "--num-requests", "5"]), ManualClock()).bodies[0]) == 5


def test_without_rates_it_sweeps_around_what_the_engine_bears(zoo: Zoo, tmp_path: Path) -> None:
    result = run(zoo, tmp_path, "--repeats", "1", "--arrivals", "bursty:2")
    rates = sorted({row["rate"] for row in result["rows"]})
    assert len(rates) == 6 and rates[-1] / rates[0] == pytest.approx(2.0 / 0.3, rel=0.2)


def test_a_draft_of_another_vocabulary_is_left_out_and_the_rest_runs(zoo: Zoo, tmp_path: Path) -> None:
    result = run(zoo, tmp_path, "--draft-model", zoo.path("small_vocab"), "--rate", "100", "--repeats", "1")
    assert [row["engine"] for row in result["rows"]] == ["no draft"]
    assert any("has another vocabulary" in line for line in result["warnings"])


def test_an_engine_that_fails_is_left_out_and_the_other_goes_on(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft fails in the second round, in the middle of a stream, with requests in the engine that no draft shares."""
    serve_stream, draft_rounds = LatencyBench._serve, []

    def serve_or_fail(self: LatencyBench, bodies: Any, at: Any, engine: str) -> Any:
        assert not self.llm.engine.scheduler.has_unfinished
        draft_rounds.extend([engine] * (engine != "no draft"))
        if len(draft_rounds) == 3 and engine != "no draft":  # a warm-up and a round before
            with monkeypatch.context() as patch:
                patch.setattr(self.llm.engine.kv, "commit", lambda *_: 1 / 0)
                return serve_stream(self, bodies, at, engine)
        return serve_stream(self, bodies, at, engine)

    monkeypatch.setattr(LatencyBench, "_serve", serve_or_fail)
    result = run(zoo, tmp_path, "--rate", "100", "--repeats", "3")
    draft = f"draft {zoo.path('llama~')}"
    assert {row["engine"]: row["num_rounds"] for row in result["rows"]} == {"no draft": 3, draft: 1}
    assert len(draft_rounds) == 3 and result["is_complete"]
    [problem] = [line for line in result["warnings"] if "ended" in line]
    assert problem == f"{draft} ended at 100 requests/s: ZeroDivisionError: division by zero"


def test_a_draft_is_measured_even_if_no_draft_fails(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_stream = LatencyBench._serve

    def serve_or_fail(self: LatencyBench, bodies: Any, at: Any, engine: str) -> Any:
        if engine == "no draft":
            raise RuntimeError("out\nof memory")
        return serve_stream(self, bodies, at, engine)

    monkeypatch.setattr(LatencyBench, "_serve", serve_or_fail)
    result = run(zoo, tmp_path, "--repeats", "1")
    assert {row["engine"] for row in result["rows"]} == {f"draft {zoo.path('llama~')}"} and len(result["rows"]) == 6
    assert all(row["p50_ratio"] is None for row in result["rows"])
    assert "no draft ended while it warmed up: RuntimeError: out of memory" in result["warnings"]


def test_interrupt_keeps_the_streams_before_it(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times_of = LatencyBench._times

    def interrupt_second_round(self: LatencyBench, rate: float, round_id: int) -> list[float]:
        if round_id == 1:
            raise KeyboardInterrupt
        return times_of(self, rate, round_id)

    monkeypatch.setattr(LatencyBench, "_times", interrupt_second_round)
    result = run(zoo, tmp_path, "--rate", "100")
    assert not result["is_complete"] and [row["num_rounds"] for row in result["rows"]] == [1, 1]


def test_quick_is_a_preset_that_other_options_refine() -> None:
    quick = parse_arguments(["--quick", "--num-requests", "7"])
    assert (quick.repeats, quick.num_requests) == (1, 7) and parse_arguments([]).repeats == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "rate=0.0 is not allowed"),
        (["--arrivals", "./nowhere.csv"], "arrivals './nowhere.csv' are unknown"),
        (["--prompts", "nowhere"], "prompts 'nowhere' are unknown"),
        (["--slo-ttft", "0"], "a target of 0.0 s"),
        (["--output-len", "600"], "is more than the model's positions"),
        (["--prompt-len", "8-4"], "'8-4' is not a length"),
    ],
)
def test_bad_options_are_refused(zoo: Zoo, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main([*arguments(zoo), *options])
