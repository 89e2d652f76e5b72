"""The log of an engine's steps since the current draft came: the last ones, and totals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import zip_longest
from operator import sub
from typing import NamedTuple

from titan.core.metrics import DraftMetrics, EngineCounters, Percentiles, RecentMetrics, Shortages, StepSplit, ratio
from titan.core.step import Shortage
from titan.core.step_times import StepTimes

MAX_STEPS = 1024
"""Number of the last steps that are remembered."""

RATE_S = 10.0
"""Seconds over which tokens per second are counted, or fewer if the remembered steps do not go back that far."""


class StepRecord(NamedTuple):
    """A remembered step."""

    end: float  # seconds, on the engine's clock
    times: StepTimes
    num_sequences: int  # requests that emitted tokens
    num_emitted_tokens: int
    num_rows: int  # tokens that the target's pass computed, drafts included
    num_context_tokens: int  # tokens before these
    shortage: Shortage | None

    @property
    def begin(self) -> float:
        """Seconds, on the same clock."""
        return self.end - self.times.whole


class StepLog:
    """Remembers steps, and sums them up only when asked, so that steps stay cheap.

    Args:
        counters: the engine's, which go up in each step.
    """

    def __init__(self, counters: EngineCounters) -> None:
        self.counters = counters
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._totals = 0, 0, 0, 0
        self.start_draft()

    def start_draft(self) -> None:
        """Count for a new draft from here on, and forget the steps of others: how long they took says nothing of it."""
        self._records.clear()
        self._before_draft = deepcopy(self.counters)

    def note(self, end: float, times: StepTimes, shortage: Shortage | None) -> None:
        """Add the step that the counters have just counted.

        Args:
            end: seconds, on the engine's clock.
            times: seconds of the step's parts.
            shortage: of its plan.
        """
        before, now = self._totals, self.counters
        self._totals = now.num_sequence_steps, now.num_emitted_tokens, now.num_rows, now.num_context_tokens
        num_sequences, num_emitted, num_rows, num_context = map(sub, self._totals, before)
        self._records.append(StepRecord(end, times, num_sequences, num_emitted, num_rows, num_context, shortage))

    def draft_metrics(self) -> DraftMetrics:
        """Sum up the steps since the current draft came."""
        now, before = self.counters, self._before_draft
        num_steps = now.num_sequence_steps - before.num_sequence_steps
        num_drafted = now.num_drafted_steps - before.num_drafted_steps
        proposed = _more(now.proposed_per_depth, before.proposed_per_depth)
        accepted = _more(now.accepted_per_depth, before.accepted_per_depth)
        num_emitted = now.num_emitted_tokens - before.num_emitted_tokens
        return DraftMetrics(
            num_sequence_steps=num_steps,
            num_drafted_steps=num_drafted,
            proposed_per_depth=proposed,
            accepted_per_depth=accepted,
            num_proposed_tokens=sum(proposed),
            num_accepted_tokens=sum(accepted),
            mean_acceptance_length=ratio(num_emitted, num_steps),
            mean_drafted_length=ratio(num_emitted - (num_steps - num_drafted), num_drafted),  # the other steps emit one token each
        )

    def recent_metrics(self, now: float, pass_s: Callable[[float, float], float] | None) -> RecentMetrics:
        """Sum up the remembered steps.

        Args:
            now: seconds, on the engine's clock.
            pass_s: returns the seconds of a target's pass, by its rows and the tokens of context; ``None``: not measured.
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


def _more(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return by how much counts per depth have grown, up to the last depth that has."""
    grown = [count - past for count, past in zip_longest(now, before, fillvalue=0)]
    while grown and not grown[-1]:
        grown.pop()
    return grown


def _rate(records: Sequence[StepRecord], now: float) -> float:
    return ratio(sum([each.num_emitted_tokens for each in records]), now - records[0].begin) if records else 0.0


def _split(times: Sequence[StepTimes], whole_s: float) -> StepSplit:
    return StepSplit(
        schedule=ratio(sum([each.schedule for each in times]), whole_s),
        draft=ratio(sum([each.draft for each in times]), whole_s),
        target=ratio(sum([each.backlog + each.target for each in times]), whole_s),
        verify=ratio(sum([each.verify for each in times]), whole_s),
        rest=ratio(sum([each.adapt + each.clear + each.inputs + each.commit for each in times]), whole_s),
    )


def _shortages(found: Sequence[Shortage | None]) -> Shortages:
    requests, tokens, blocks = (ratio(found.count(kind), len(found)) for kind in ("requests", "tokens", "blocks"))
    return Shortages(requests, tokens, blocks)
