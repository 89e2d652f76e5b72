"""Measures Titan on a CUDA device, in minutes and with nothing to download: whether it is right, how fast it is, against what.

    python -m titan.bench.gpu_check                              all sections, within 16 minutes
    python -m titan.bench.gpu_check --only attention             some of them
    TRITON_INTERPRET=1 python -m titan.bench.gpu_check --tiny    tiny shapes in Triton's interpreter: a rehearsal

Sections run one after the other, each in processes of its own: what crashes, hangs or leaves the device unusable costs its own row.
Where time runs out, the least important rows are skipped, and say so. Rows are written to the JSON file as they come. The status is
1 if anything of Titan's failed, or disagrees with others; missed goals are only shown. `bench/gpu/first_hour.sh` runs it all.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from titan.bench.gpu import attention, ceilings, device_tests, end_to_end, sampling, splits
from titan.bench.gpu.sections import Figures, Row, Section, Setting, run_isolated
from titan.bench.options import bench_parser, parse, positive
from titan.bench.report import Report, Table, count, figure_table, format_label, measure_and_publish
from titan.bench.samples import Label
from titan.bench.turns import log
from titan.kernels.triton.tools import INTERPRETED

SECTIONS = {
    each.name: each
    for each in (
        ceilings.SECTION,
        device_tests.SECTION,
        attention.SECTION,
        end_to_end.SECTION,
        ceilings.PRODUCTS,
        sampling.SECTION,
        splits.SECTION,
    )
}
RESULTS = Path(__file__).resolve().parent / "results"

OVER_BASE = "x base"
"""The first figure of a row over that in another run."""

RunSection = Callable[[Section, Setting, float], Iterator[Row]]


def run_sections(sections: Sequence[Section], setting: Setting, seconds: float, run_section: RunSection) -> Iterator[Row]:
    """Run sections one after the other, and yield their rows.

    Each section has its share of the seconds, and what those before it have left. The bandwidth is known when it is measured.
    """
    start, may_end = time.monotonic(), 0.0
    for section in sections:
        may_end += seconds * section.seconds / sum(each.seconds for each in sections)
        log(f"{section.name} begins, and may take until {may_end:.0f} s")
        for found in run_section(section, setting, start + may_end - time.monotonic()):
            row = replace(found, labels={"section": section.name, **found.labels})
            known: dict[str, Any] = {name: row.figures[rate] for name, rate in ceilings.RATES.items() if rate in row.figures}
            setting = replace(setting, **known)
            text = row.problem or ", ".join(f"{name} {figure:.4g}" for name, figure in row.figures.items())
            name, took = _name(row.labels), time.monotonic() - start
            log(f"{took:.0f} of {seconds:.0f} s: {name}: {row.status}; {text} ({row.seconds:.1f} s)")
            yield row


def make_report(rows: Sequence[Row], base: Mapping[str, Figures]) -> Report:
    """All that is known so far; ``base`` are figures of another run by row, as `read_base` returns them."""
    names = dict.fromkeys(str(row.labels["section"]) for row in rows)
    compared = {name: SECTIONS[name].compare([row for row in rows if row.labels["section"] == name]) for name in names}
    for name, mine in compared.items():
        mine[:] = [with_base(row, base.get(_name(row.labels), {}), SECTIONS[name].columns) for row in mine]
    met = [each for row in chain(*compared.values()) for each in row.is_met.values()]
    num_ok = sum(row.status == "ok" for row in rows)
    return Report(
        "GPU check",
        f"{num_ok} of {count(len(rows), 'row')} are right, and {sum(met)} of {count(len(met), 'goal')} are met.",
        {"rows": list(chain(*compared.values()))},
        [section_table(SECTIONS[name], mine) for name, mine in compared.items()],
        notes=list(dict.fromkeys(SECTIONS[name].notes for name in names)),
        warnings=[f"{_name(row.labels)}: {row.problem}" for row in rows if row.status in ("failed", "wrong")],
        versions={"triton": version("triton")},
    )


def read_base(path: Path) -> dict[str, Figures]:
    """Figures of a run that ``--json`` wrote, by the name of the row.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError) as error:
        raise ValueError(f"--base {path} cannot be read: {error}") from error
    return {_name(row["labels"]): row["figures"] for row in rows}


def with_base(row: Row, base: Figures, names: Iterable[str]) -> Row:
    """Add the ratio of the first figure that both runs have."""
    name = next((name for name in names if name in row.figures and base.get(name)), None)
    return row if name is None else replace(row, figures={**row.figures, OVER_BASE: row.figures[name] / base[name]})


def section_table(section: Section, rows: Sequence[Row]) -> Table:
    """The rows of a section, with what became of them and of their goals."""
    shown = []
    for row in rows:
        goals = [f"{name} at least {row.goals[name]:g}: {'met' if is_met else 'missed'}" for name, is_met in row.is_met.items()]
        status = row.status if row.problem is None else f"{row.status}: {row.problem}"
        shown.append(replace(row, labels={**row.labels, "status": status, **({"goal": "; ".join(goals)} if goals else {})}))
    labels = [name for name in dict.fromkeys(chain(*(row.labels for row in shown))) if name != "section"]
    return figure_table(section.title, shown, labels, {**section.columns, OVER_BASE: ".3f"})


def main(argv: Sequence[str] | None = None, run_section: RunSection = run_isolated) -> int:
    """Run the command line; the status is 1 if anything failed or gave wrong numbers.

    Raises:
        ValueError: the machine has no CUDA device and this process no interpreter for Triton.
    """
    args = parse(make_parser(), argv)
    device = choose_check_device(args.tiny)
    if args.json is None and not args.tiny:
        args.json = RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', torch.cuda.get_device_name(device).lower())}.json"
    sections = [each for name, each in SECTIONS.items() if name in (ceilings.SECTION.name, *(args.only or SECTIONS))]
    seconds = args.seconds or sum(section.seconds for section in sections)
    setting = Setting(device, args.tiny, args.seed, args.threads, args.batches)
    rows: list[Row] = []
    base = {} if args.base is None else read_base(args.base)

    def measure() -> Iterator[None]:
        for row in run_sections(sections, setting, seconds, run_section):
            rows.append(row)
            yield

    measure_and_publish(args, measure, lambda: make_report(rows, base))
    return int(any(row.status in ("failed", "wrong") for row in rows))


def choose_check_device(is_tiny: bool) -> torch.device:
    """Where the kernels run: a CUDA device, or for tiny shapes the interpreter's.

    Raises:
        ValueError: there is no such place.
    """
    if torch.cuda.is_available() and not INTERPRETED:
        return torch.device("cuda", torch.cuda.current_device())
    if is_tiny and INTERPRETED:
        return torch.device("cpu")
    raise ValueError("a CUDA device is needed: there is none; --tiny with TRITON_INTERPRET=1 rehearses the work on a CPU")


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("gpu_check", __doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections (default: all); ceilings are always measured")
    parser.add_argument("--batches", nargs="+", type=positive, default=(), help="of whole engines (default: as planned)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; times mean nothing then")
    parser.add_argument("--base", type=Path, metavar="FILE", help="another run that --json wrote, to compare with row by row")
    parser.add_argument("--seconds", type=positive, help="for everything (default: as the sections are planned)")
    return parser


def _name(labels: Mapping[str, Label]) -> str:
    """A label that says nothing is left out, as older runs may not have it."""
    return ", ".join(format_label(each) for each in labels.values() if each != end_to_end.NO_DRAFT)


if __name__ == "__main__":
    sys.exit(main())
