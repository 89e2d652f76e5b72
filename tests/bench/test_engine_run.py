"""Titan under a workload: the same tokens in every mode, times against queues that can be computed, and the parts of steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from step_clock import StepClock
from stepping import make_engine, submit
from zoo import Zoo, random_prompts

from titan import LLM, SamplingParams
from titan.bench import engine_run, step_times
from titan.bench.engine_run import first_steps, make_idle, make_requests, run_static, run_workload, serve
from titan.bench.runs import Run
from titan.bench.side_by_side import run_alone
from titan.bench.step_times import TimedSteps, product_and_kv_seconds
from titan.bench.workloads import Workload
from titan.core.step_times import StepTimes
from titan.core.trees import GrowthReport
from titan.engine import Engine
from titan.kernels.torch.backend import TorchBackend

OUTPUT_LENS = [3, 12, 5, 6, 20, 4]
WORKLOAD = Workload(random_prompts(6, seed=1), OUTPUT_LENS)


@pytest.fixture(scope="module")
def engine(zoo: Zoo) -> Engine:
    options: dict[str, Any] = {"max_draft_tokens": 3, "max_batch_size": 4, "max_model_len": 80, "enable_prefix_caching": False}
    return LLM(zoo.path("llama"), zoo.path("llama~"), dtype="float32", device="cpu", speculation="fixed", **options).engine


def test_each_request_has_its_own_tokens_and_steps_and_batches_add_up(zoo: Zoo, engine: Engine) -> None:
    """Without a draft each step gives a running request one token, and a new request's prompt takes none of its own."""
    modes: dict[str, Callable[[], Run]] = {
        "single": lambda: run_workload(engine, WORKLOAD, 1, use_speculative=False),
        "static": lambda: run_static(engine, WORKLOAD, 3),
        "continuous": lambda: run_workload(engine, WORKLOAD, 3, use_speculative=False),
        "draft": lambda: run_workload(engine, WORKLOAD, 3),
    }
    num_steps, figures = {}, {}
    for mode, work in modes.items():
        before, counts = engine.counters.num_steps, deepcopy(engine.counters)
        run = work()
        num_steps[mode], figures[mode] = engine.counters.num_steps - before, run.figures
        for prompt, wanted, request in zip(WORKLOAD.prompts, OUTPUT_LENS, run.requests, strict=True):
            assert request.token_ids == zoo.greedy("llama", prompt, wanted, ignore_eos=True), mode
            assert request.first_token is not None and 0 < request.first_token <= request.finished <= run.seconds
        assert run.figures["CPU"] > 0 and not engine.scheduler.has_unfinished and not engine.observers
    slots = [0, 0, 0]  # when each is free
    for length in OUTPUT_LENS:
        slots[slots.index(min(slots))] += length
    assert num_steps["single"] == sum(OUTPUT_LENS) and figures["single"]["batch"] == 1
    assert num_steps["static"] == max(OUTPUT_LENS[:3]) + max(OUTPUT_LENS[3:]) and figures["static"]["batch"] == 3
    assert num_steps["draft"] < num_steps["continuous"] == max(slots) < num_steps["static"]
    accepted = [now - then for now, then in zip_longest(engine.counters.accepted_per_depth, counts.accepted_per_depth, fillvalue=0)]
    num_sequence_steps = engine.counters.num_sequence_steps - counts.num_sequence_steps
    found = [figures["draft"][f"depth {depth}"] for depth in range(1, 7)]
    assert found == pytest.approx([each / num_sequence_steps for each in [*accepted, 0, 0, 0]]) and len(accepted) == 3
    for mode in ("draft", "continuous"):
        tokens_per_step = sum(OUTPUT_LENS) / (num_steps[mode] * figures[mode]["batch"])
        assert figures[mode]["tokens/step"] == pytest.approx(tokens_per_step) and (tokens_per_step > 1) == (mode == "draft")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_requests_wait_as_in_the_queue_of_so_many_servers(
    engine: Engine, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First come first served, a token per second and request (for one server, the recursion of Lindley)."""
    random = np.random.default_rng(0)
    lengths, gaps = random.integers(1, 5, 100).tolist(), random.poisson(2.7 / concurrency, 100)
    workload = Workload([[5]] * 100, lengths, [float(time) for time in np.cumsum(gaps)])
    StepClock(engine, monkeypatch)
    run = run_workload(engine, workload, concurrency, use_speculative=False)
    free, waits = [0.0] * concurrency, []
    for arrival, length, request in zip(workload.arrivals, lengths, run.requests, strict=True):
        waits.append(max(0.0, min(free) - arrival))
        free[free.index(min(free))] = arrival + waits[-1] + length
        assert (request.arrival, request.to_first_token, request.latency) == (arrival, waits[-1] + 1, waits[-1] + length)
    assert run.seconds == max(free) - workload.arrivals[0] and min(waits) == 0 and max(waits) > 3


def test_a_request_that_comes_during_a_step_waits_for_its_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    StepClock(engine, monkeypatch)
    run = run_workload(engine, Workload([[5], [6], [7]], [2, 1, 1], [0.0, 0.25, 5.5]), use_speculative=False)
    assert [request.latency for request in run.requests] == [2.0, 1.75, 1.0]


def test_a_run_includes_making_its_requests_as_those_of_other_engines_do(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(engine, monkeypatch)
    monkeypatch.setattr(engine_run, "make_requests", lambda *rest, **options: clock.sleep(0.5) or make_requests(*rest, **options))
    run = run_workload(engine, Workload([[5], [6]], [2, 1]), use_speculative=False)
    assert run.seconds == 2.5 and [request.latency for request in run.requests] == [2.5, 1.5]
    assert run.figures["ms/step"] == 1250 and run.figures["CPU"] * torch.get_num_threads() == 1


def test_a_static_batch_starts_when_the_one_before_it_is_over(zoo: Zoo) -> None:
    """Also where its requests are out of step, as a long prompt takes several steps and a short one does not."""
    engine = LLM(zoo.path("llama"), dtype="float32", device="cpu", prefill_chunk_size=4, max_model_len=80).engine
    requests = run_static(engine, Workload([[5], [6] * 40, [7], [8]], [3, 2, 1, 1]), 2).requests
    assert requests[0].finished == requests[1].finished
    assert all((request.first_token or 0.0) > requests[0].finished for request in requests[2:])


def test_kv_use_is_the_share_of_blocks_that_requests_hold(engine: Engine) -> None:
    figures = run_workload(engine, Workload([[5] * 16, [6] * 16], [2, 17]), 2, use_speculative=False).figures
    # the prompts fill a block each, the second step needs one more of each, and then only the long request is left
    num_blocks = np.array([2, 4, *[2] * 15])
    found = np.array([figures["KV peak"], figures["KV mean"]]) * engine.kv.pool.num_blocks
    assert found == pytest.approx([num_blocks.max(), num_blocks.mean()])


def test_a_device_is_asked_how_busy_it_is_once_and_outside_of_all_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(engine, monkeypatch)
    monkeypatch.setattr(engine.backend, "utilization", lambda: clock.sleep(100) or 0.25, raising=True)
    run = run_workload(engine, Workload([[5]] * 3, [20] * 3), 2, use_speculative=False)
    assert run.figures["GPU"] == 0.25 and run.seconds == 40 and run.figures["CPU"] * torch.get_num_threads() == 1
    assert clock.time == 100 + 40 + 100


def test_requests_that_would_end_for_want_of_room_are_refused(engine: Engine) -> None:
    assert len(make_requests(engine, Workload([[5] * 60], [20]))) == 1
    with pytest.raises(ValueError, match="no room for requests of 81 tokens: max_model_len=80"):
        make_requests(engine, Workload([[5] * 60, [5]], [21, 4]))


def test_an_aborted_request_is_an_error_and_the_engine_can_be_made_idle(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = engine.scheduler
    monkeypatch.setattr(engine, "step", lambda: [each for each in [*scheduler.waiting] if not scheduler.abort(each, "no room")])
    with pytest.raises(RuntimeError, match="ended early: no room"):
        run_workload(engine, WORKLOAD, 3)
    scheduler.add(make_requests(engine, WORKLOAD)[0])
    make_idle(engine)
    assert not scheduler.has_unfinished and not engine.observers


@pytest.mark.filterwarnings("ignore:the drafter 'ngram' failed:RuntimeWarning")  # as Python shows it: a line, and the run goes on
@pytest.mark.parametrize(
    "measure",
    [
        lambda engine: run_workload(engine, WORKLOAD),
        lambda engine: run_alone(lambda own_time: first_steps(engine, WORKLOAD, 3, own_time)),
        lambda engine: list(serve(engine, WORKLOAD, make_requests(engine, WORKLOAD), 3)),
    ],
    ids=["workload", "first steps", "steps"],
)
def test_a_drafter_that_fails_is_an_error_however_it_is_measured(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, measure: Callable[[Engine], object]
) -> None:
    engine = make_engine(zoo.path("llama"), "ngram", speculation="fixed", max_model_len=80)
    monkeypatch.setattr(engine.drafter, "propose", lambda _: 1 / 0)
    with pytest.raises(RuntimeWarning, match=r"the drafter 'ngram' failed, .*: ZeroDivisionError"):
        measure(engine)
    make_idle(engine)
    assert not engine.scheduler.has_unfinished


def test_filters_of_warnings_are_as_they_were_between_steps(engine: Engine) -> None:
    filters = list(warnings.filters)
    assert all(warnings.filters == filters for _ in serve(engine, WORKLOAD, make_requests(engine, WORKLOAD), 3))


@pytest.fixture(params=["as it is", "operation by operation"])
def chain_engine(zoo: Zoo, request: pytest.FixtureRequest) -> Engine:
    """An engine whose small passes are compiled, where there are compiled ones, and one that has none."""
    backend = None if request.param == "as it is" else TorchBackend(torch.device("cpu"))
    return make_engine(zoo.path("llama"), zoo.path("llama~"), backend=backend, max_draft_tokens=3, max_model_len=80)


def test_decode_steps_are_those_without_prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at once, four tokens each, of which the first comes with the prompt: 3 + 3 decode steps of the two waves."""
    seen: list[TimedSteps] = []

    @contextmanager
    def watched(engine: Engine) -> Iterator[TimedSteps]:
        with step_times.step_times(engine) as times:
            seen.append(times)
            yield times

    monkeypatch.setattr(engine_run, "step_times", watched)
    run = run_workload(engine, Workload([[5] * 8] * 4, [4] * 4), 2, use_speculative=False)
    [times] = seen
    assert (len(times.steps), len(times.decodes)) == (8, 6) and times.figures.items() <= run.figures.items()
    assert run.figures["ms/decode step"] == pytest.approx(1e3 * np.mean([each.whole for each in times.decodes]))
    assert "host" not in run_workload(engine, Workload([[5] * 8] * 3, [1] * 3), 2).figures  # no step but those of prompts


def test_parts_of_a_step_add_up_and_each_pass_of_a_chain_counts_also_if_all_are_one_call(chain_engine: Engine) -> None:
    """Three draft tokens take three passes: two follow the one that reads what the step before emitted."""
    submit(chain_engine, [[5] * 8], [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)])
    chain_engine.step()  # the prefill
    with step_times.step_times(chain_engine) as times:
        for _ in range(4):
            chain_engine.step()
    parts = times.figures
    assert len(times.steps) == 4 and parts["draft passes"] == 3
    assert parts["host"] + parts["draft"] + parts["target"] == pytest.approx(1)
    assert parts["draft"] > 0 and parts["target"] > 0 and parts["draft"] + parts["target"] < 1
    assert "propose" not in vars(chain_engine.drafting) and "note" not in vars(chain_engine._log)  # nothing is left of the timing


@pytest.mark.parametrize("growing", [6.0, None])
def test_parts_of_a_step_are_what_its_times_say(growing: float | None) -> None:
    """Two steps of 45 seconds, of which the draft takes 8, and growing trees ``growing``, or an unknown part."""
    step = StepTimes(schedule=1, adapt=1.5, clear=0.5, backlog=3, draft=8, inputs=4, target=16, verify=5, commit=6)
    growth = GrowthReport(num_passes=4, num_rows=8, seconds=growing, first_scores=np.zeros(2, np.float32))
    found = TimedSteps([step] * 3, [step] * 2, [growth] * 2).figures
    in_draft = growing or 8
    assert found == pytest.approx(
        {
            "ms/decode step": 45e3,
            "host": (45 - 3 - 16 - in_draft) / 45,
            "draft": in_draft / 45,
            "target": (3 + 16) / 45,
            "adapt": 1.5 / 45,
            "trees, batch, acceptance": (8 + 4 + 5 - in_draft) / 45,
            "ms/target pass": 19e3,
            "draft passes": 4,
            "ms/draft pass": 2e3,
        }
    )


def test_products_and_kv_are_the_fastest_products_and_the_bytes_of_the_contexts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of the memory that is read for comparison, half a GiB, takes a second."""
    times = iter([[2.0**30, 2.0**29, 2.0**31], [70.0, 50.0, 90.0]])
    monkeypatch.setattr(step_times, "repeat", lambda work, **_: next(times))
    [group] = engine.kv.tensors["target"].groups
    bytes_per_token = group.nbytes / (engine.kv.num_blocks * engine.kv.block_size)
    assert product_and_kv_seconds(engine, 4, 16.5) == pytest.approx(50 + 4 * 16.5 * bytes_per_token)
