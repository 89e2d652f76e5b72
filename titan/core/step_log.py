"""The last steps of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import sub
from typing import NamedTuple

from titan.core.metrics import EngineCounters, Percentiles, RecentMetrics, Shortages, StepSplit, ratio
from titan.core.step import Shortage
from titan.core.step_times import StepTimes

MAX_STEPS = 1024
"""Steps that are remembered."""

RATE_S = 10.0
"""Seconds over which tokens per second are counted, as far as their steps are remembered."""


class StepRecord(NamedTuple):
    """What a step did."""

    end: float  # seconds, on the engine's clock
    times: StepTimes
    num_sequences: int  # requests that emitted tokens
    num_emitted_tokens: int
    num_rows: int  # of the target's pass, drafts included
    num_context_tokens: int  # before them
    shortage: Shortage | None

    @property
    def begin(self) -> float:
        """Seconds, on the same clock."""
        return self.end - self.times.whole


class StepLog:
    """Remembers steps, and sums them up when asked: noting one is all that a step pays for."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._totals = 0, 0, 0, 0

    def note(self, end: float, times: StepTimes, counters: EngineCounters, shortage: Shortage | None) -> None:
        """Add a step.

        Args:
            end: of the step, seconds.
            times: of its parts.
            counters: after it.
            shortage: of its plan.
        """
        before = self._totals
        self._totals = counters.num_sequence_steps, counters.num_emitted_tokens, counters.num_rows, counters.num_context_tokens
        num_sequences, num_emitted, num_rows, num_context = map(sub, self._totals, before)
        self._records.append(StepRecord(end, times, num_sequences, num_emitted, num_rows, num_context, shortage))

    def metrics(self, now: float, pass_s: Callable[[float, float], float] | None) -> RecentMetrics:
        """Sum up the remembered steps.

        Args:
            now: seconds, on the clock of the steps.
            pass_s: seconds of a pass of the target by rows and tokens of context; ``None`` = not measured.
        """
        records, num_steps = self._records, len(self._records)
        whole_s = sum([each.times.whole for each in records])
        mean_rows = ratio(sum([each.num_rows for each in records]), num_steps)
        mean_context_tokens = ratio(sum([each.num_context_tokens for each in records]), num_steps)
        row_cost = None
        if pass_s is not None and mean_rows >= 1:
            row_cost = max(pass_s(2 * mean_rows, mean_context_tokens) / pass_s(mean_rows, mean_context_tokens) - 1, 0.0)
        return RecentMetrics(
            num_steps=num_steps,
            tokens_per_s=_rate([each for each in records if each.end > now - RATE_S], now),
            busy_share=ratio(whole_s, records[-1].end - records[0].begin) if records else 0.0,
            mean_acceptance_length=ratio(
                sum([each.num_emitted_tokens for each in records]), sum([each.num_sequences for each in records])
            ),
            mean_rows=mean_rows,
            mean_context_tokens=mean_context_tokens,
            row_cost=row_cost,
            step_s=Percentiles.of([each.times.whole for each in records]),
            split=_split([each.times for each in records], whole_s),
            shortages=_shortages([each.shortage for each in records]),
        )


def _rate(records: Sequence[StepRecord], now: float) -> float:
    return ratio(sum([each.num_emitted_tokens for each in records]), now - records[0].begin) if records else 0.0


def _split(times: Sequence[StepTimes], whole_s: float) -> StepSplit:
    return StepSplit(
        schedule=ratio(sum([each.schedule for each in times]), whole_s),
        draft=ratio(sum([each.draft for each in times]), whole_s),
        target=ratio(sum([each.backlog + each.target for each in times]), whole_s),
        verify=ratio(sum([each.verify for each in times]), whole_s),
        rest=ratio(sum([each.prepare + each.inputs + each.commit for each in times]), whole_s),
    )


def _shortages(found: Sequence[Shortage | None]) -> Shortages:
    requests, tokens, blocks = (ratio(found.count(kind), len(found)) for kind in ("requests", "tokens", "blocks"))
    return Shortages(requests, tokens, blocks)
