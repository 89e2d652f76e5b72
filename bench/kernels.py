"""Micro-benchmarks of every kernel that runs on this device and of the host's part of a step, by pytest-benchmark.

    titan bench kernels --save before.json
    titan bench kernels --compare before.json --fail
    titan bench kernels --select "attention and verify"

Shapes are those of the demo pair with 1 and with 32 requests of 128 tokens. A time is the fastest of many: what else runs on the
machine can only add to it. It is shown in microseconds and over a reference of the same run, a matrix product for kernels and a
loop of Python for the host's part, each run first and last; a comparison with a stored run is of these ratios, so that a slower
machine alone changes little. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from titan.bench.provenance import machine_name
from titan.bench.report import Report, bench_parser, count, figure_table, measure_and_publish, parse
from titan.bench.samples import Row, Spread
from titan.bench.turns import log

MICRO = Path(__file__).resolve().parent / "micro"
REFERENCES = "micro_reference"
"""The file of what others are divided by."""
INTERRUPTED, NOTHING_SELECTED = 2, 5
"""Exit statuses of pytest."""
FASTEST, MEDIAN, RELATIVE, OVER_STORED = "fastest, us", "median, us", "x reference", "x stored"
COLUMNS = {FASTEST: ".1f", MEDIAN: "±.1f", RELATIVE: ".2f", OVER_STORED: ".2f"}

Stored = Mapping[str, Mapping[str, float]]
"""Figures of an earlier run by the name of the benchmark."""


def read_stored(path: Path) -> Stored:
    """Read a run that ``--save`` or ``--json`` wrote.

    Raises:
        ValueError: there is no such file, or it is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = document["provenance"]["machine"]
        rows = {row["labels"]["benchmark"]: row["figures"] for row in document["rows"]}
        stored = {name: {figure: spread["median"] for figure, spread in figures.items()} for name, figures in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--compare {path} is not a run of titan bench kernels: {type(error).__name__}: {error}") from error
    if machine != machine_name():
        log(f"the stored run is of another machine: {machine}")
    return stored


def make_rows(benchmarks: Sequence[Mapping[str, Any]], stored: Stored) -> list[Row]:
    """Rows of what pytest-benchmark found, by part, references first; medians come with their quartiles, as their range."""
    references: dict[str, float] = {}
    for each in benchmarks:
        if is_reference(each["name"]):
            references[each["group"]] = min(each["stats"]["min"], references.get(each["group"], float("inf")))
    rows = []
    for each in sorted(benchmarks, key=lambda each: (each["group"], not is_reference(each["name"]), each["name"])):
        name, part, stats = each["name"], each["group"], each["stats"]
        figures = {FASTEST: 1e6 * stats["min"]}
        if part in references:
            figures[RELATIVE] = stats["min"] / references[part]
        compared = FASTEST if is_reference(name) else RELATIVE
        if compared in figures and compared in stored.get(name, {}):
            figures[OVER_STORED] = figures[compared] / stored[name][compared]
        spreads = {figure: Spread.of([value]) for figure, value in figures.items()}
        spreads[MEDIAN] = Spread(1e6 * stats["median"], 1e6 * stats["q1"], 1e6 * stats["q3"], stats["rounds"])
        rows.append(Row({"benchmark": name, "part": part}, spreads))
    return rows


def is_reference(name: str) -> bool:
    """Whether a benchmark is what others are divided by; it says what the machine does, not the code."""
    return name.startswith("reference_")


def slower_rows(rows: Sequence[Row], threshold: float) -> list[Row]:
    """The rows whose ratio to the stored run is above the threshold, references apart."""
    return [row for row in _own(rows) if (row.median(OVER_STORED) or 0.0) > threshold]


def complaints(rows: Sequence[Row], stored: Stored, threshold: float, *, is_selection: bool) -> list[str]:
    """What ``--fail`` fails for: rows that are slower than stored ones or gone, or none that could be compared."""
    slower = slower_rows(rows, threshold)
    found = [
        f"{row.labels['benchmark']}: {row.median(OVER_STORED):.2f} x the stored run, more than {threshold:g}" for row in slower
    ]
    names = {row.labels["benchmark"] for row in rows}
    missing = [name for name in stored if not (is_selection or name in names or is_reference(name))]
    if missing:
        found.append(f"missing, although the stored run has them: {', '.join(missing)}")
    if not any(OVER_STORED in row.figures for row in _own(rows)):
        found.append("nothing could be compared")
    return found


def run_benchmarks(select: str, seconds: float, seed: int) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Run the micro-benchmarks in this process, references in any case; pytest shows its progress on stderr.

    Returns:
        Benchmarks as in pytest-benchmark's JSON files; a line for each that failed; and whether Ctrl-C ended them.

    Raises:
        ValueError: pytest or pytest-benchmark is not installed, pytest cannot run, or nothing has such a name.
    """
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"titan bench kernels needs {error.name}: pip install pytest pytest-benchmark") from error
    failures: list[str] = []

    class Plugin:
        """Provides the seed, puts references first and last, keeps failures."""

        @pytest.fixture
        def seed(self) -> int:
            return seed

        @pytest.hookimpl(trylast=True)  # when the others are deselected
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items.sort(key=lambda item: (item.name.endswith("[last]"), item.path.stem != REFERENCES))
            if all(item.path.stem == REFERENCES for item in items):
                items.clear()  # nothing to compare with them

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                failures.append(f"{report.nodeid} failed: {crash.message if crash else report.longrepr}")

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        path = Path(folder) / "benchmarks.json"
        options = ["-c", os.devnull, f"--rootdir={MICRO}", "--import-mode=importlib", "--override-ini=python_files=micro_*.py"]
        options += ["-q", "-p", "no:cacheprovider", "--capture=no", "-W", "ignore:Not saving anything"]
        options += [f"--benchmark-json={path}", f"--benchmark-max-time={seconds}", "--benchmark-quiet", "--benchmark-disable-gc"]
        options += ["-k", f"reference or ({select})"] if select else []
        status = pytest.main([*options, str(MICRO)], plugins=[Plugin()])
        found = json.loads(path.read_text(encoding="utf-8"))["benchmarks"] if path.exists() else []
    if status == NOTHING_SELECTED:
        raise ValueError(f"--select {select!r} names no benchmark")
    if not (found or failures or status == INTERRUPTED):
        raise ValueError(f"pytest could not run (status {int(status)})")
    return [each | {"name": each["name"].removeprefix("test_")} for each in found], failures, status == INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the status is 1 if a benchmark failed, and with ``--fail`` if there are `complaints`.

    Raises:
        KeyboardInterrupt: Ctrl-C came before anything was measured.
        ValueError: an option is not allowed.
    """
    args = parse(make_parser(), argv)
    if args.threshold <= 0 or args.seconds <= 0:
        raise ValueError(f"--threshold {args.threshold:g} and --seconds {args.seconds:g} must both be above 0")
    if args.fail and args.compare is None:
        raise ValueError("--fail is not allowed without --compare: it needs a stored run")
    stored = None if args.compare is None else read_stored(args.compare)
    rows: list[Row] = []
    failures: list[str] = []

    def measure() -> None:
        benchmarks, problems, is_interrupted = run_benchmarks(args.select, args.seconds, args.seed)
        rows.extend(make_rows(benchmarks, stored or {}))
        failures.extend(problems)
        if is_interrupted:
            raise KeyboardInterrupt

    def found() -> list[str]:
        return [] if stored is None else complaints(rows, stored, args.threshold, is_selection=bool(args.select))

    def report() -> Report:
        return make_report(rows, [*failures, *found()], None if stored is None else args.threshold)

    measure_and_publish(args, measure, report, {"target": "demo", "draft": "demo"})
    return int(bool(failures or (args.fail and found())))


def make_report(rows: Sequence[Row], warnings: Sequence[str], threshold: float | None) -> Report:
    """All rows; ``None``: they are compared with nothing."""
    num_own, num_compared = len(_own(rows)), sum(OVER_STORED in row.figures for row in _own(rows))
    answer, uncompared = f"{count(num_own, 'benchmark')} ran", []
    if threshold is not None:
        num_slower = len(slower_rows(rows, threshold))
        answer += f"; {num_slower} of {num_compared} are slower than stored by more than {threshold:g} x"
        if num_compared < num_own:
            uncompared = [f"{num_own - num_compared} rows could not be compared: the stored run or a reference lacks them"]
    return Report(
        "Kernels and host",
        f"{answer}.",
        {"rows": rows},
        [figure_table("Times of a call", rows, ["benchmark", "part"], COLUMNS)],
        notes=[
            "median: ± half of what is between the quartiles. x reference: the fastest time over that of the reference of its "
            "part; x stored: that over the same of the stored run."
        ],
        warnings=[*warnings, *uncompared],
    )


def _own(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not is_reference(str(row.labels["benchmark"]))]


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("kernels", __doc__)
    parser.add_argument(
        "--select", default="", metavar="EXPRESSION", help='names, such as "attention and not prefill" (default: all)'
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for each benchmark, about (default: %(default)s)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a run that --save wrote")
    parser.add_argument("--threshold", type=float, default=1.25, help="ratio to it from which to warn (default: %(default)s)")
    parser.add_argument("--fail", action="store_true", help="exit with status 1 if one is above it, or missing, or none compares")
    parser.add_argument("--save", dest="json", type=Path, metavar="FILE", help="the same as --json: what --compare reads")
    return parser


if __name__ == "__main__":
    sys.exit(main())
