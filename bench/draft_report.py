"""How the draft-swap experiment is shown: tables, charts, and what the columns mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from titan.bench.charts import LineChart, Series, StackedBars
from titan.bench.draft_rows import NO_DRAFT, Place, Row, Setting
from titan.bench.predict import FORMULA
from titan.bench.report import Table, format_figure

NUM_SHOWN_DEPTHS = 6

NOTES = (
    "x no draft: median over the rounds of the ratio within a round; ± is half the range.",
    f"predicted: {FORMULA}, after Leviathan et al. 2023 (equation 1, theorem 3.8), whose algorithm Chen et al. 2023 "
    "share; alpha is the measured acceptance of one more depth, the costs are measured; the host's work outside the passes, "
    "and prefill, are not in it.",
    "tokens/step: mean acceptance length, final token included; expected: what alpha alone gives. ms/draft pass: the time of "
    "drafting over its passes. verify/decode: a target pass with draft tokens over one without.",
    "depth d: of the trees that reach depth d, the share of which a node of that depth was accepted; intervals of Wilson 1927, "
    "as if trees were independent.",
    "bits=N measures the acceptance of rounded weights, not the speed of integer arithmetic.",
)


def draft_table(rows: Sequence[Row]) -> Table:
    """Lay the speeds and costs out."""
    header = ["workload", "draft", "tokens/s", "x no draft", "predicted", "tokens/step", "expected", "alpha"]
    header += ["draft passes", "ms/draft pass", "verify/decode", "ms/step", "equal outputs"]
    cells = []
    for row in rows:
        costs, step = row.costs, row.step
        cells.append(
            [
                str(Setting(row.workload, row.temperature)),
                row.draft,
                row.tokens_per_second.format(0),
                "-" if row.speed_up is None else row.speed_up.format(2),
                format_figure(row.predicted_speed_up, 2),
                f"{row.mean_acceptance_length:.2f}",
                f"{row.expected_tokens:.2f}",
                f"{row.alpha:.2f}" if row.depths else "-",
                format_figure(None if costs is None or row.draft == NO_DRAFT else costs.num_draft_passes, 1),
                format_figure(None if costs is None or row.draft == NO_DRAFT else costs.draft_pass, 2, scale=1e3),
                format_figure(None if costs is None else costs.verify / costs.decode, 2),
                format_figure(None if step is None else step.total, 2, scale=1e3),
                "-" if row.num_equal is None else f"{row.num_equal}/{row.num_outputs}",
            ]
        )
    return Table("Speed and costs", header, cells, num_text_columns=2)


def depth_table(rows: Sequence[Row]) -> Table:
    """Lay the acceptance of the first depths out, with its intervals."""
    num_depths = min(NUM_SHOWN_DEPTHS, max((len(row.depths) for row in rows), default=0))
    header = ["workload", "draft", "trees", *(f"depth {depth}" for depth in range(1, num_depths + 1))]
    cells = []
    for row in rows:
        if row.depths:
            shares = [f"{each.rate:.2f} [{each.interval.low:.2f}, {each.interval.high:.2f}]" for each in row.depths[:num_depths]]
            padding = ["-"] * (num_depths - len(shares))
            setting = str(Setting(row.workload, row.temperature))
            cells.append([setting, row.draft, str(row.depths[0].num_trees), *shares, *padding])
    return Table("Acceptance per depth, with 95 % intervals", header, cells, num_text_columns=2)


def ranking_tables(rankings: Mapping[float, Sequence[Place]]) -> list[Table]:
    """Lay the rankings out, a table per temperature."""
    return [
        Table(
            f"Ranking at temperature {temperature:g}, over all workloads",
            ["draft", "why", "place", "x no draft"],
            [[place.name, place.reason, str(place.rank), f"{place.speed_up:.2f}"] for place in places],
            num_text_columns=2,
        )
        for temperature, places in rankings.items()
        if places
    ]


def draft_charts(rows: Sequence[Row]) -> list[LineChart | StackedBars]:
    """Speed-up over acceptance, measured over predicted, acceptance per depth of each setting, and the parts of a step."""
    drafted = [row for row in rows if row.depths]

    def points(x: Callable[[Row], float | None]) -> list[Series]:
        names = dict.fromkeys(row.draft for row in drafted)
        of = {name: [row for row in drafted if row.draft == name and row.speed_up is not None] for name in names}
        return [
            Series(name, [(place, row.speed_up.median) for row in mine if row.speed_up and (place := x(row)) is not None])
            for name, mine in of.items()
        ]

    speed_up = "speed-up over no draft"
    over_length = points(lambda row: row.mean_acceptance_length)
    over_predicted = points(lambda row: row.predicted_speed_up)
    charts: list[LineChart | StackedBars] = [
        LineChart("Speed-up over acceptance", "mean acceptance length", speed_up, over_length, style="points"),
        LineChart("Speed-up, measured over predicted", "predicted", speed_up, over_predicted, style="points"),
    ]
    for setting in dict.fromkeys(Setting(row.workload, row.temperature) for row in drafted):
        series = [
            Series(row.draft, [(each.depth, each.rate) for each in row.depths], [each.interval for each in row.depths])
            for row in drafted
            if Setting(row.workload, row.temperature) == setting
        ]
        charts.append(LineChart(f"Acceptance per depth: {setting}", "depth", "share of trees accepted so deep", series))
    steps = {f"{row.draft}, {Setting(row.workload, row.temperature)}": row.step for row in rows if row.step is not None}
    if steps:
        parts = {part: [getattr(step, part) * 1e3 for step in steps.values()] for part in ("target", "draft", "host")}
        charts.append(StackedBars("Parts of a step", "ms", list(steps), parts))
    return charts
