"""Measures Titan on a CUDA device, in minutes and with nothing to download: how fast it is, and against what.

    python -m titan.bench.gpu_check                              all sections, within 6 minutes
    python -m titan.bench.gpu_check --only attention             some of them
    TRITON_INTERPRET=1 python -m titan.bench.gpu_check --tiny    tiny shapes in Triton's interpreter: a rehearsal

Sections run one after the other, each in a process of its own. One that fails or hangs costs its own rows; where time runs out, the
least important rows are skipped, and say so. Results are written after every section. The status is 1 if anything of Titan's
failed, or disagrees with others; missed goals are only shown. Whether the kernels are right is for the tests to say:
``pytest -m cuda``.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from titan.bench.gpu import attention, ceilings, end_to_end
from titan.bench.gpu.isolation import run_isolated
from titan.bench.gpu.sections import Figure, Row, Section, Setting
from titan.bench.provenance import Provenance, collect_provenance
from titan.bench.report import Report, Table, add_report_options, positive, publish, use_threads, write_json
from titan.kernels.triton.tools import INTERPRETED, is_launchable

SECTIONS = (ceilings.SECTION, attention.SECTION, end_to_end.SECTION_8B, end_to_end.SECTION_1B)
RESULTS = Path(__file__).resolve().parent / "results"

RunSection = Callable[[Section, Setting, float, Callable[[Row], None]], list[Row]]


@dataclass(frozen=True, slots=True)
class SectionTime:
    """How long a section took; seconds, of which ``may_end`` and ``ended`` since the start of the run."""

    section: str
    may_end: float
    ended: float
    took: float
    num_rows: int
    num_skipped: int


class GpuCheck:
    """Runs sections and keeps what they give.

    Args:
        sections: in the order in which they run.
        setting: for all of them; the ceilings are filled in when they are measured.
        seconds: for everything; each section has its share of them, and what those before it have left.
        run_section: runs one section, in so many seconds, and tells every row.
    """

    def __init__(
        self, sections: Sequence[Section], setting: Setting, seconds: float, run_section: RunSection = run_isolated
    ) -> None:
        self.sections = sections
        self.setting = setting
        self.seconds = seconds
        self.rows: list[Row] = []
        self.times: list[SectionTime] = []
        self._run_section = run_section
        self._start = time.monotonic()

    def run(self, section: Section) -> None:
        """Run one section."""
        done = self.sections[: self.sections.index(section) + 1]
        may_end = self.seconds * sum(each.seconds for each in done) / sum(each.seconds for each in self.sections)
        started = self._elapsed
        self._log(f"{section.name} begins, and may take until {may_end:.0f} s")
        rows = self._run_section(section, self.setting, may_end - started, self._log_row)
        self.rows += rows
        num_skipped = sum(row.status == "skipped" for row in rows)
        ended = self._elapsed
        self.times.append(SectionTime(section.name, may_end, ended, ended - started, len(rows), num_skipped))
        if section.name == ceilings.SECTION.name:
            rates = {row.name: row.figures.get(ceilings.RATE) for row in rows}
            self.setting = replace(
                self.setting,
                copy_bandwidth=_number(rates.get(ceilings.COPY)),
                matmul_rate=_number(rates.get(ceilings.MATMUL)),
            )

    @property
    def status(self) -> int:
        """Exit status: 1 if a row failed or is wrong."""
        return int(any(row.status in ("failed", "wrong") for row in self.rows))

    def report(self, provenance: Provenance, options: argparse.Namespace, *, is_complete: bool) -> Report:
        """All that is known so far."""
        goals = [goal_table(self.rows)] if any(row.goals for row in self.rows) else []
        ran = [section for section in self.sections if any(row.section == section.name for row in self.rows)]
        return Report(
            "GPU check",
            provenance,
            vars(options),
            {"rows": self.rows, "times": self.times},
            [*(section_table(section, self.rows) for section in ran), *goals, time_table(self.times)],
            notes=[section.notes for section in ran],
            warnings=[f"{row.section}, {row.name}: {row.problem}" for row in self.rows if row.status in ("failed", "wrong")],
            is_complete=is_complete,
        )

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _log_row(self, row: Row) -> None:
        figures = ", ".join(f"{name} {_written(value, '.4g')}" for name, value in row.figures.items())
        self._log(f"{row.section}: {row.name}: {row.status}; {row.problem or figures} ({row.seconds:.1f} s)")

    def _log(self, message: str) -> None:
        print(f"[{self._elapsed:4.0f} of {self.seconds:.0f} s] {message}", file=sys.stderr, flush=True)


def section_table(section: Section, rows: Sequence[Row]) -> Table:
    """The rows of a section; those without figures say why."""
    mine = [row for row in rows if row.section == section.name]
    columns = {name: spec for name, spec in section.columns.items() if any(name in row.figures for row in mine)}
    cells = [
        [
            row.name,
            row.status if row.problem is None else f"{row.status}: {row.problem}",
            *(_written(row.figures.get(name), spec) for name, spec in columns.items()),
        ]
        for row in mine
    ]
    return Table(section.title, [section.name, "", *columns], cells, num_text_columns=2)


def goal_table(rows: Sequence[Row]) -> Table:
    """What was to be reached, and what was."""
    cells = [
        [
            f"{row.section}: {row.name}",
            goal.what,
            f"{'at most' if goal.is_at_most else 'at least'} {goal.required:.4g}",
            f"{goal.measured:.4g}",
            "met" if goal.is_met else "missed",
        ]
        for row in rows
        for goal in row.goals
    ]
    return Table("Goals", ["row", "what", "required", "measured", ""], cells, num_text_columns=2)


def time_table(times: Sequence[SectionTime]) -> Table:
    """How the time was used."""
    cells = [
        [each.section, f"{each.took:.0f}", f"{each.ended:.0f}", f"{each.may_end:.0f}", str(each.num_rows), str(each.num_skipped)]
        for each in times
    ]
    return Table("Time", ["section", "took s", "ended at s", "latest s", "rows", "skipped"], cells)


def main(argv: Sequence[str] | None = None, run_section: RunSection = run_isolated) -> int:
    """Run the command line; the status is 1 if anything failed or gave wrong numbers.

    Raises:
        ValueError: the machine has no CUDA device and this process no interpreter for Triton.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    device = choose_check_device(args.tiny)
    use_threads(args)
    if args.json is None and not args.tiny:
        args.json = RESULTS / f"gpu-{_slug(torch.cuda.get_device_name(device))}.json"
    provenance = collect_provenance("gpu_check", argv, seed=args.seed)
    provenance = replace(provenance, versions=provenance.versions | {"triton": version("triton")})
    wanted = [section for section in SECTIONS if section is ceilings.SECTION or section.name in (args.only or _names())]
    seconds = args.seconds or sum(section.seconds for section in wanted)
    check = GpuCheck(wanted, Setting(device, args.tiny, args.seed, args.threads), seconds, run_section)
    is_complete = True
    try:
        for section in wanted:
            check.run(section)
            if args.json is not None:
                write_json(args.json, check.report(provenance, args, is_complete=section is wanted[-1]))
    except KeyboardInterrupt:
        is_complete = False
    publish(check.report(provenance, args, is_complete=is_complete), args)
    return check.status


def choose_check_device(is_tiny: bool) -> torch.device:
    """Where the kernels run: a CUDA device, or for tiny shapes the interpreter's.

    Raises:
        ValueError: there is no such place.
    """
    if torch.cuda.is_available() and not INTERPRETED:
        return torch.device("cuda", torch.cuda.current_device())
    if not is_tiny:
        raise ValueError("gpu_check needs a CUDA device: there is none; --tiny with TRITON_INTERPRET=1 rehearses it on a CPU")
    device = torch.device("cpu")
    if not is_launchable(device):
        raise ValueError("--tiny on a CPU needs Triton's interpreter: set TRITON_INTERPRET=1")
    return device


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="titan bench gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=_names(), help="sections (default: all); ceilings are always measured")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; times mean nothing then")
    parser.add_argument(
        "--seconds", type=positive, help="for everything (default: what the sections are planned to take, 330 for all)"
    )
    add_report_options(parser)
    return parser.parse_args(argv)


def _names() -> list[str]:
    return [section.name for section in SECTIONS]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _number(figure: Figure) -> float | None:
    return figure if isinstance(figure, float) else None


def _written(figure: Figure, spec: str) -> str:
    if figure is None:
        return "-"
    return figure if isinstance(figure, str) else format(figure, spec)


if __name__ == "__main__":
    sys.exit(main())
