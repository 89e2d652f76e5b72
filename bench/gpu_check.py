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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from titan.bench.progress import log

from titan.bench.gpu import attention, ceilings, end_to_end
from titan.bench.gpu.sections import Figure, Row, Section, Setting, run_isolated
from titan.bench.provenance import Provenance, collect_provenance
from titan.bench.report import Report, Table, add_report_options, count, measure_and_publish, positive, use_threads, write_json
from titan.kernels.triton.tools import INTERPRETED, is_launchable

SECTIONS = (ceilings.SECTION, attention.SECTION, end_to_end.SECTION_8B, end_to_end.SECTION_1B)
RESULTS = Path(__file__).resolve().parent / "results"

RunSection = Callable[[Section, Setting, float, Callable[[Row], None]], list[Row]]


def run_sections(sections: Sequence[Section], setting: Setting, seconds: float, run_section: RunSection) -> Iterator[list[Row]]:
    """Run sections one after the other, and yield the rows of each.

    Args:
        sections: in this order.
        setting: for all of them; the bandwidth is filled in when it is measured.
        seconds: for everything; each section has its share of them, and what those before it have left.
        run_section: runs one section, in so many seconds, and tells every row.
    """
    start, planned = time.monotonic(), 0.0

    def note(row: Row) -> None:
        figures = ", ".join(f"{name} {_written(value, '.4g')}" for name, value in row.figures.items())
        elapsed = f"{time.monotonic() - start:.0f} of {seconds:.0f} s"
        log(f"{elapsed}: {row.section}: {row.name}: {row.status}; {row.problem or figures} ({row.seconds:.1f} s)")

    for section in sections:
        planned += section.seconds
        may_end = seconds * planned / sum(each.seconds for each in sections)
        log(f"{section.name} begins, and may take until {may_end:.0f} s")
        rows = run_section(section, setting, start + may_end - time.monotonic(), note)
        for row in rows:
            if row.name == ceilings.COPY and isinstance(rate := row.figures.get(ceilings.RATE), float):
                setting = replace(setting, copy_bandwidth=rate)
        yield rows


def make_report(rows: Sequence[Row], provenance: Provenance, args: argparse.Namespace, is_complete: bool) -> Report:
    """All that is known so far."""
    goals = [goal_table(rows)] if any(row.goals for row in rows) else []
    ran = [section for section in SECTIONS if any(row.section == section.name for row in rows)]
    met, num_ok = [goal.is_met for row in rows for goal in row.goals], sum(row.status == "ok" for row in rows)
    return Report(
        "GPU check",
        f"{num_ok} of {count(len(rows), 'row')} are right, and {sum(met)} of {count(len(met), 'goal')} are met.",
        provenance,
        vars(args),
        {"rows": rows},
        [*(section_table(section, rows) for section in ran), *goals],
        notes=[section.notes for section in ran],
        warnings=[f"{row.section}, {row.name}: {row.problem}" for row in rows if row.status in ("failed", "wrong")],
        is_complete=is_complete,
    )


def section_table(section: Section, rows: Sequence[Row]) -> Table:
    """The rows of a section; those without figures say why."""
    mine = [row for row in rows if row.section == section.name]
    columns = {name: spec for name, spec in section.columns.items() if any(name in row.figures for row in mine)}
    cells = [
        [
            row.name,
            row.status if row.problem is None else f"{row.status}: {row.problem}",
            *(_written(row.figures.get(name, "-"), spec) for name, spec in columns.items()),
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
    rows: list[Row] = []

    def measure() -> None:
        for found in run_sections(wanted, Setting(device, args.tiny, args.seed, args.threads), seconds, run_section):
            rows.extend(found)
            if args.json is not None:
                write_json(args.json, make_report(rows, provenance, args, is_complete=False))

    measure_and_publish(measure, partial(make_report, rows, provenance, args), args)
    return int(any(row.status in ("failed", "wrong") for row in rows))


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


def _written(figure: Figure, spec: str) -> str:
    return figure if isinstance(figure, str) else format(figure, spec)


if __name__ == "__main__":
    sys.exit(main())
