"""What metrics say of the last steps, and what limits them, in runs whose times are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log2
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from stepping import DEFAULTS, drain, greedy, make_engine, submit
from zoo import Zoo, random_prompts

from titan import LLM
from titan import engine as engine_module
from titan.adaptive.pass_cost import PassCost
from titan.bench.step_times import step_times
from titan.core.metrics import EngineCounters, Percentiles, SpeculationMetrics, StepSplit
from titan.core.step_log import MAX_STEPS, StepLog
from titan.core.step_times import StepTimes
from titan.diagnosis import bottlenecks
from titan.engine import Engine
from titan.kernels.triton.backend import TritonBackend
from titan.verify import accept as accept_module

Milliseconds = Callable[[int], float]
"""Of a pass of the target, by its rows."""

FLAT: Milliseconds = lambda _: 10.0  # noqa: E731 - whatever the rows: the time goes into reading weights
STEEP: Milliseconds = lambda rows: 2.0 * rows  # noqa: E731


class Clock:
    """Stands still but for what parts of a step are said to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Milliseconds) -> None:
        self.now, self._monkeypatch = 0.0, monkeypatch
        for module in ("titan.engine", "titan.kernels.torch.backend"):
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: self.now))
        sizes = (1, 2, 4, 8, 16, 32, 64)
        monkeypatch.setattr("titan.adaptive.profiler.measure", lambda *_: [PassCost(sizes, [target(size) / 1e3 for size in sizes])])

    def spend(self, owner: Any, name: str, milliseconds: Callable[..., float]) -> None:
        """Let calls take this long, by their arguments."""
        original = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self.now += milliseconds(*args) / 1e3
            return original(*args, **options)

        self._monkeypatch.setattr(owner, name, timed)

    def time(self, engine: Engine, target: Milliseconds, parts: Mapping[str, float]) -> None:
        """Set what the parts of an engine's steps take; "between" is before each step."""
        self.spend(engine.runner, "forward", lambda batch: target(len(batch.token_ids)))
        owners = {"between": (engine, "step"), "schedule": (engine.scheduler, "schedule"), "draft": (engine.drafting, "propose")}
        for part, owner in (owners | {"verify": (engine_module, "accept"), "commit": (engine.kv, "commit")}).items():
            self.spend(*owner, lambda *_, part=part: parts.get(part, 0.0))


RUNS: list[tuple[str, str, Milliseconds, dict[str, float], dict[str, Any]]] = [
    ("compute", "more or faster cores", STEEP, {}, {}),
    ("bandwidth", "more requests", FLAT, {}, {}),
    ("target", "not measured", FLAT, {}, {"max_inter_token_s": None}),
    ("KV memory, bandwidth", "give the KV cache more memory", FLAT, {}, {"num_kv_blocks": 7, "max_model_len": 48}),
    ("queue, bandwidth", "raise max_batch_size", FLAT, {}, {"max_batch_size": 1}),
    ("queue, bandwidth", "raise max_num_batched_tokens", FLAT, {}, {"max_prefill_tokens": 1}),
    ("draft", "use a smaller draft", FLAT, {"draft": 4.0}, {"draft_model": "useless"}),
    ("bandwidth", "better drafts", FLAT, {"draft": 4.0}, {"draft_model": "llama"}),
    ("bandwidth", "better drafts", FLAT, {"draft": 1.0}, {"draft_model": "useless"}),
    ("host", "scheduling 38%, verifying 25%", FLAT, {"schedule": 10.0, "verify": 6.5}, {}),
    ("host", "fewer options", FLAT, {"commit": 7.0}, {}),
    ("host", "send more requests at once, which shares", FLAT, {"commit": 7.0}, {}),
    ("queue, host", "raise max_batch_size, which shares", FLAT, {"commit": 7.0}, {"max_batch_size": 1}),
    ("idle, bandwidth", "send more requests", FLAT, {"between": 12.0}, {}),
]


@pytest.mark.parametrize(("names", "words", "target", "parts", "options"), RUNS)
def test_the_limits_of_a_run_are_named(
    zoo: Zoo,
    names: str,
    words: str,
    target: Milliseconds,
    parts: dict[str, float],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, target)
    options = DEFAULTS | {"num_kv_blocks": 64, "block_size": 8, "max_inter_token_s": 1e9} | options
    draft = options.pop("draft_model", None)
    llm = LLM(zoo.path("llama"), draft and zoo.path(draft), **options)
    assert llm.diagnose() == []
    clock.time(llm.engine, target, parts)
    llm.generate(random_prompts(6, max_len=20), greedy(20, ignore_eos=True), use_tqdm=False)
    found = bottlenecks(llm.metrics())
    assert llm.diagnose()[: len(found)] == found
    assert ", ".join(finding.partition(":")[0] for finding in found) == names and words in " ".join(found)


def test_a_draft_that_was_replaced_is_not_blamed(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, prompts = Clock(monkeypatch, FLAT), random_prompts(6, max_len=20)
    llm = LLM(zoo.path("llama"), zoo.path("useless"), **DEFAULTS | {"num_kv_blocks": 64, "block_size": 8, "max_inter_token_s": 1e9})
    clock.time(llm.engine, FLAT, {"draft": 90.0})
    llm.generate(prompts, greedy(20, ignore_eos=True), use_tqdm=False)
    (finding,) = bottlenecks(metrics := llm.metrics())
    assert finding.startswith("draft:") and finding.endswith(", or speculation='adaptive' or 'off'")
    (finding,) = bottlenecks(replace(metrics, speculation=Mock(SpeculationMetrics)))
    assert finding.startswith("draft:") and finding.endswith(", or speculation='off'")
    llm.swap_draft(None)
    assert bottlenecks(llm.metrics()) == [] and llm.metrics().recent.num_steps == 0
    llm.generate(prompts[:2], greedy(4, ignore_eos=True), use_tqdm=False)
    assert [each.partition(":")[0] for each in bottlenecks(llm.metrics())] == ["bandwidth"]


def test_the_time_of_steps_is_split(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a step whose pass takes more memory than there is: both halves count, and the attempt is part of the rest."""
    clock = Clock(monkeypatch, FLAT)
    engine = make_engine(zoo.path("llama"), "ngram", num_kv_blocks=64, max_prefill_tokens=None)
    clock.time(engine, FLAT, {"schedule": 1, "draft": 2, "verify": 3, "commit": 4, "between": 20})
    submit(engine, [[5, 6, 7], [7, 8]], [greedy(4, ignore_eos=True, use_speculative=False)] * 2)
    engine.step()
    recent = engine.metrics().recent
    assert recent.split == StepSplit(*(pytest.approx(part / 20) for part in (1, 2, 10, 3, 4)))
    assert recent.step_s is not None and recent.step_s.p50 == recent.step_s.p99 == pytest.approx(0.02)
    assert (recent.mean_rows, recent.mean_context_tokens, recent.mean_acceptance_length) == (5, 0, 1)
    assert recent.busy_share == pytest.approx(1) and recent.tokens_per_s == pytest.approx(2 / 0.02)
    forward, failures = engine.runner.forward, iter([torch.OutOfMemoryError("made up")])

    def fail_once(batch: Any) -> Any:
        for error in failures:
            clock.now += 0.005
            raise error
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", fail_once)
    engine.step()
    recent = engine.metrics().recent
    assert recent.split == StepSplit(*(pytest.approx(part / 66) for part in (2, 6, 30, 9, 19)))  # 20 ms, and then 46
    metrics = engine.metrics()
    assert (metrics.num_steps, metrics.mean_batch_size, recent.num_steps) == (2, 2, 2), "halves are no steps"
    assert recent.mean_rows == (5 + 2) / 2 and recent.mean_context_tokens == (0 + 5) / 2
    assert recent.busy_share == pytest.approx(66 / 86) and recent.tokens_per_s == pytest.approx(4 / 0.086)
    clock.now += 9.95
    assert engine.metrics().recent.tokens_per_s == pytest.approx(2 / 9.996)
    clock.now += 0.1
    assert engine.metrics().recent.tokens_per_s == 0


def test_logprobs_of_prompts_are_a_part_of_verification(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, FLAT)
    engine = make_engine(zoo.path("llama"), num_kv_blocks=64)
    clock.time(engine, FLAT, {"verify": 2})
    clock.spend(accept_module, "prompt_logprobs", lambda *_: 8.0)
    submit(engine, [[5, 6, 7]], [greedy(1, prompt_logprobs=0)])
    engine.step()
    split = engine.metrics().recent.split
    assert (split.target, split.verify) == (pytest.approx(0.5), pytest.approx(0.5))


def test_passes_of_prompts_are_the_targets_time_whenever_they_are_waited_for(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, of which the second step waits for the first, and the third for the second; none of it is time to decide."""
    clock, backend = Clock(monkeypatch, FLAT), make_back_end("triton")
    clock.spend(backend, "seconds_between", lambda marks: 10.0 * (len(marks) == 1))
    engine = make_engine(zoo.path("llama"), backend=backend, num_kv_blocks=64, prefill_chunk_size=16)
    submit(engine, [list(range(5, 45))], [greedy(2, ignore_eos=True)])
    with step_times(engine) as timed:
        drain(engine)
    assert [each.target for each in timed.steps[:2]] == [0, 0] and [each.backlog for each in timed.steps] == [0, 0.01, 0.01, 0]
    assert not any(each.adapt or each.clear for each in timed.steps) and timed.steps[2].recurring < timed.steps[2].whole
    assert engine.metrics().recent.busy_share >= 1


@pytest.mark.parametrize("num_steps", [1, 2, 99, 100, 3000])
def test_the_last_steps_are_remembered(num_steps: int) -> None:
    counters = EngineCounters()
    log = StepLog(counters)
    seconds = np.random.default_rng(num_steps).exponential(1e-3, num_steps).tolist()
    for i, step_s in enumerate(seconds):
        counters.num_emitted_tokens += i
        log.note(sum(seconds[: i + 1]), StepTimes(target=step_s), "blocks" if i % 2 else None)
    recent, last = log.recent_metrics(sum(seconds), None), seconds[-MAX_STEPS:]
    p50, p90, p99 = np.percentile(last, (50, 90, 99), method="inverted_cdf")
    assert recent.step_s == Percentiles(p50, p90, p99) and recent.num_steps == len(last)
    assert recent.tokens_per_s == pytest.approx(sum(range(num_steps)[-MAX_STEPS:]) / sum(last))
    assert recent.shortages.blocks == sum(i % 2 for i in range(num_steps)[-MAX_STEPS:]) / len(last)


def test_a_pass_of_more_rows_never_costs_less() -> None:
    """Whatever noise there was when passes were measured."""
    log = StepLog(EngineCounters(num_rows=4))
    log.note(1.0, StepTimes(target=1.0), None)
    assert [log.recent_metrics(1.0, lambda rows, _, power=power: rows**power).row_cost for power in (-1.0, 1.0)] == [0.0, 1.0]


def test_steps_that_computed_nothing_have_no_row_cost() -> None:
    """Those of a request that ended for lack of memory."""
    log = StepLog(EngineCounters())
    log.note(1.0, StepTimes(target=1.0), None)
    assert log.recent_metrics(1.0, lambda rows, _: log2(rows)).row_cost is None


def test_utilisation_is_told_where_the_device_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_back_end("triton")
    assert isinstance(backend, TritonBackend) and backend.utilization() is None
    backend.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 37)
    assert TritonBackend.utilization(backend) == 0.37
    monkeypatch.delattr(torch.cuda, "utilization")
    assert TritonBackend.utilization(backend) is None
