"""What runs of drafts add up to: a row per workload, temperature and draft; and which draft is best, and why.

Speed-ups are told apart by the tokens of a step and by what the step costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, mean, median

from titan.bench.noise import Spread, ratio_spread

from titan.bench.acceptance import AcceptanceCounts, DepthAcceptance
from titan.bench.predict import PassCosts, mean_expected_tokens, predicted_speed_up

NO_DRAFT = "no draft"


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


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is about, its draft apart."""

    workload: str
    temperature: float

    def __str__(self) -> str:
        return self.workload if self.temperature == 0 else f"{self.workload} at temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Mean seconds of the steps after the prefill and of their passes, and draft passes per step."""

    step: float
    target_pass: float
    draft_pass: float
    num_draft_passes: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one draft in one round; ``times`` are ``None`` where passes cannot be timed."""

    workload: str
    temperature: float
    draft: str
    round_id: int
    tokens_per_second: float
    num_outputs: int
    num_equal: int | None  # outputs equal to those without a draft, at temperature 0; None: that failed, or another temperature
    times: PassTimes | None

    @property
    def setting(self) -> Setting:
        return Setting(self.workload, self.temperature)


@dataclass(frozen=True, slots=True)
class Row:
    """One draft on one workload at one temperature."""

    workload: str
    temperature: float
    draft: str
    num_rounds: int
    tokens_per_second: Spread
    speed_up: Spread | None  # over no draft, within the rounds; None: that failed
    mean_acceptance_length: float
    alpha: float  # acceptance of one more depth, pooled
    depths: list[DepthAcceptance]
    expected_tokens: float  # per step, from alpha and the depths of the trees
    predicted_speed_up: float | None
    costs: PassCosts | None
    step: StepCost | None
    num_equal: int | None
    num_outputs: int  # over all rounds


def make_rows(samples: Sequence[Sample], counts: Mapping[tuple[Setting, str], AcceptanceCounts]) -> list[Row]:
    """Sum the rounds up: a row per setting and draft, settings in the order of measurement, the fastest draft first."""
    groups: dict[Setting, dict[str, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault(sample.setting, {}).setdefault(sample.draft, []).append(sample)
    rows = []
    for setting, drafts in groups.items():
        base = drafts.get(NO_DRAFT, [])  # none if that failed
        mine = [_make_row(setting, draft, each, base, counts[setting, draft]) for draft, each in drafts.items()]
        rows += sorted(mine, key=lambda row: row.speed_up.median if row.speed_up else 0.0, reverse=True)
    return rows


def _make_row(setting: Setting, draft: str, samples: Sequence[Sample], base: Sequence[Sample], counts: AcceptanceCounts) -> Row:
    rates, base_rates = ({each.round_id: each.tokens_per_second for each in group} for group in (samples, base))
    equal = [sample.num_equal for sample in samples if sample.num_equal is not None]
    times, base_times = _median_times(samples), _median_times(base)
    expected = mean_expected_tokens(counts.alpha, counts.tree_depths)
    costs = step = None
    if times is not None and base_times is not None:
        costs = PassCosts(base_times.target_pass, times.target_pass, times.draft_pass, times.num_draft_passes)
        step = StepCost(costs.draft, times.target_pass, times.step - times.target_pass - costs.draft)
    return Row(
        setting.workload,
        setting.temperature,
        draft,
        len(samples),
        tokens_per_second=Spread.of(list(rates.values())),
        speed_up=ratio_spread(rates, base_rates),
        mean_acceptance_length=counts.mean_acceptance_length,
        alpha=counts.alpha,
        depths=counts.per_depth(),
        expected_tokens=expected,
        predicted_speed_up=None if costs is None else predicted_speed_up(expected, costs),
        costs=costs,
        step=step,
        num_equal=sum(equal) if equal else None,
        num_outputs=sum(sample.num_outputs for sample in samples),
    )


def _median_times(samples: Sequence[Sample]) -> PassTimes | None:
    times = [sample.times for sample in samples if sample.times is not None]
    if not times:
        return None
    return PassTimes(*(median(getattr(each, name) for each in times) for name in PassTimes.__slots__))


def make_ranking(rows: Sequence[Row]) -> dict[float, list[Place]]:
    """Rank the drafts over all workloads, by temperature."""
    base_steps = {Setting(row.workload, row.temperature): row.step for row in rows if row.draft == NO_DRAFT}
    rankings = {}
    for temperature in dict.fromkeys(row.temperature for row in rows):
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row.temperature == temperature and row.draft != NO_DRAFT and row.speed_up is not None:
                groups.setdefault(row.draft, []).append(row)
        rankings[temperature] = rank([_contender(draft, mine, base_steps) for draft, mine in groups.items()])
    return rankings


def _contender(draft: str, rows: Sequence[Row], base_steps: Mapping[Setting, StepCost | None]) -> Contender:
    costs = []
    for row in rows:
        base = base_steps.get(Setting(row.workload, row.temperature))
        if row.step is not None and base is not None:
            costs.append(StepCost(*(part / base.total for part in (row.step.draft, row.step.target, row.step.host))))
    return Contender(
        draft,
        {row.workload: row.speed_up.median for row in rows if row.speed_up is not None},
        mean(row.mean_acceptance_length for row in rows),
        StepCost(*(mean(getattr(cost, part) for cost in costs) for part in StepCost.__slots__)) if costs else None,
    )
