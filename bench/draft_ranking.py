"""Which draft is best, and why: speed-ups are told apart by the tokens of a step and by what the step costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, host included, and its parts."""

    draft: float
    target: float
    host: float

    @property
    def total(self) -> float:
        return self.draft + self.target + self.host


@dataclass(frozen=True, slots=True)
class Contender:
    """A draft over all workloads at one temperature.

    ``cost`` is in steps without a draft; ``None`` where parts of steps cannot be timed.
    """

    name: str
    speed_ups: Mapping[str, float]  # by workload, at least one
    tokens_per_step: float
    cost: StepCost | None

    @property
    def speed_up(self) -> float:
        """Geometric mean over the workloads."""
        return geometric_mean(self.speed_ups.values())


@dataclass(frozen=True, slots=True)
class Place:
    """A draft's place; ``reason`` is a sentence."""

    rank: int
    name: str
    speed_up: float
    reason: str


def rank(contenders: Sequence[Contender]) -> list[Place]:
    """Order drafts by their speed-up over no draft, the best first, and say why each is not the best.

    Args:
        contenders: drafts, none of them "no draft".
    """
    ordered = sorted(contenders, key=lambda each: each.speed_up, reverse=True)
    return [
        Place(i + 1, each.name, each.speed_up, _why_best(each) if i == 0 else _why_behind(each, ordered[0]))
        for i, each in enumerate(ordered)
    ]


def _why_best(best: Contender) -> str:
    if best.cost is None:
        return f"emits {best.tokens_per_step:.2f} tokens per step"
    pays = "pay for" if best.speed_up > 1 else "do not pay for"
    return f"{best.tokens_per_step:.2f} tokens per step {pays} steps that take {best.cost.total:.2f} x as long as without a draft"


def _why_behind(each: Contender, best: Contender) -> str:
    """The larger of two factors: fewer tokens per step, or longer steps."""
    fewer = f"emits {each.tokens_per_step:.2f} tokens per step, {best.name} {best.tokens_per_step:.2f}"
    if each.cost is None or best.cost is None:
        return fewer
    fewer_by = math.log(best.tokens_per_step / each.tokens_per_step)
    longer_by = math.log(each.cost.total / best.cost.total)
    if max(fewer_by, longer_by) <= 0:
        return "no worse per step in these figures: behind within the noise"
    if fewer_by >= longer_by:
        reason = fewer
    else:
        more = {
            "drafting": each.cost.draft - best.cost.draft,
            "verification": each.cost.target - best.cost.target,
            "the host": each.cost.host - best.cost.host,
        }
        cause = max(more, key=lambda part: more[part])
        lengths = f"{each.cost.total:.2f} x a step without a draft, {best.name}'s {best.cost.total:.2f}"
        reason = f"its steps take {lengths}, mostly for {cause}"
    return f"{reason}; slower than no draft" if each.speed_up < 1 else reason
