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
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.bench.progress import Progress, log

from titan.bench.provenance import collect_provenance, machine_name
from titan.bench.report import Report, Table, add_report_options, count, format_figure, publish, use_threads

MICRO = Path(__file__).resolve().parent / "micro"
REFERENCE = "reference_"
LAST = "[last]"
"""How the names of references end that run after all others."""
INTERRUPTED = 2
"""Exit status of pytest after Ctrl-C."""
NOTHING_SELECTED = 5
"""Exit status of pytest without a test to run."""


@dataclass(frozen=True, slots=True)
class Row:
    """One benchmark; seconds per call."""

    name: str
    group: str  # "kernel" or "host"
    minimum: float
    median: float
    iqr: float  # between the quartiles
    num_rounds: int
    relative: float | None  # minimum over the least of the group's references; None: none ran
    stored_ratio: float | None  # relative over that of the stored run; of a reference, minimum over minimum


def read_stored(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a run that ``--save`` or ``--json`` wrote.

    Raises:
        ValueError: there is no such file, or it is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = document["rows"]
        machine = document["provenance"]["machine"]
        if not all({"name", "minimum", "relative"} <= row.keys() for row in rows):
            raise ValueError("its rows have no name, minimum and relative")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--compare {path} is not a run of titan bench kernels: {error}") from error
    if machine != machine_name():
        log(f"the stored run is of another machine: {machine}")
    return rows


def make_rows(benchmarks: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Read what pytest-benchmark found, and compare.

    Args:
        benchmarks: as in its JSON files, each with "name", "group" and "stats".
        stored: rows of an earlier run, as in the JSON of a report; may be empty.

    Returns:
        Rows by group, references first.
    """
    references: dict[str, float] = {}
    for each in benchmarks:
        if is_reference(_name(each)):
            references[each["group"]] = min(each["stats"]["min"], references.get(each["group"], math.inf))
    before = {row["name"]: row for row in stored}
    rows = []
    for each in benchmarks:
        name, group, stats = _name(each), each["group"], each["stats"]
        reference = references.get(group)
        relative = stats["min"] / reference if reference else None
        key = "minimum" if is_reference(name) else "relative"
        now, then = {"minimum": stats["min"], "relative": relative}[key], before.get(name, {}).get(key)
        rows.append(
            Row(
                name,
                group,
                stats["min"],
                stats["median"],
                stats["iqr"],
                stats["rounds"],
                relative,
                now / then if now and then else None,
            )
        )
    return sorted(rows, key=lambda row: (row.group, not is_reference(row.name), row.name))


def is_reference(name: str) -> bool:
    """Whether a benchmark is what others are divided by; it says what the machine does, not the code."""
    return name.startswith(REFERENCE)


def slower_rows(rows: Sequence[Row], threshold: float) -> list[Row]:
    """The rows whose ratio to the stored run is above the threshold, references apart."""
    return [row for row in rows if row.stored_ratio is not None and row.stored_ratio > threshold and not is_reference(row.name)]


def kernel_table(rows: Sequence[Row]) -> Table:
    """Lay the rows out; microseconds."""
    is_compared = any(row.stored_ratio is not None for row in rows)
    header = ["benchmark", "part", "fastest", "median", "quartiles apart", "rounds", "x reference"]
    cells = [
        [
            row.name,
            row.group,
            *(f"{seconds * 1e6:.1f}" for seconds in (row.minimum, row.median, row.iqr)),
            str(row.num_rounds),
            format_figure(row.relative, 2),
            *([format_figure(row.stored_ratio, 2)] if is_compared else []),
        ]
        for row in rows
    ]
    return Table("Microseconds per call", [*header, *(["x stored"] if is_compared else [])], cells, num_text_columns=2)


def run_benchmarks(select: str, seconds: float, seed: int) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Run the micro-benchmarks in this process.

    Args:
        select: an expression over their names, as pytest's ``-k``; empty for all. References always run.
        seconds: for each, about.
        seed: of tokens and weights.

    Returns:
        Benchmarks as in pytest-benchmark's JSON files; a line for each that failed; and whether it came to its end.

    Raises:
        ValueError: pytest or pytest-benchmark is not installed, pytest cannot run, or nothing has such a name.
    """
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"titan bench kernels needs {error.name}: pip install pytest pytest-benchmark") from error

    class Watcher:
        """Provides the seed, shows progress, keeps failures."""

        def __init__(self) -> None:
            self.failures: list[str] = []
            self.progress: Progress | None = None

        @pytest.fixture(scope="session")
        def seed(self) -> int:
            return seed

        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items.sort(key=lambda item: (item.name.endswith(LAST), not is_reference(_short(item.nodeid))))

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            if all(is_reference(_short(item.nodeid)) for item in session.items):
                session.items.clear()  # nothing to compare with them
            self.progress = Progress(len(session.items))
            self.progress.__enter__()

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                self.failures.append(f"{_short(report.nodeid)} failed: {crash.message if crash else report.longrepr}")
            if report.when == "teardown" and self.progress is not None:
                self.progress.advance(_short(report.nodeid))

        def pytest_sessionfinish(self) -> None:
            if self.progress is not None:
                self.progress.__exit__()

    watcher = Watcher()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmarks.json"
        options = ["-c", os.devnull, f"--rootdir={MICRO}", "--import-mode=importlib", "--override-ini=python_files=micro_*.py"]
        options += ["-p", "no:cacheprovider", "-p", "no:terminal", "--capture=no", "-W", "ignore:Not saving anything"]
        options += [f"--benchmark-json={path}", f"--benchmark-max-time={seconds}", "--benchmark-quiet", "--benchmark-disable-gc"]
        options += ["-k", f"reference or ({select})"] if select else []
        status = pytest.main([*options, str(MICRO)], plugins=[watcher])
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["benchmarks"] if path.exists() else []
    if status == NOTHING_SELECTED:
        raise ValueError(f"--select {select!r} names no benchmark")
    if not (found or watcher.failures or status == INTERRUPTED):
        raise ValueError(f"pytest could not run (status {int(status)})")
    return found, watcher.failures, status != INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the status is 1 if a benchmark failed.

    With ``--fail`` it is 1 also if one is slower than the stored run, if nothing could be compared, or if one of the stored run is
    missing although all were selected.

    Raises:
        KeyboardInterrupt: Ctrl-C came before anything was measured.
        ValueError: an option is not allowed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.threshold <= 0 or args.seconds <= 0:
        raise ValueError(f"--threshold {args.threshold:g} and --seconds {args.seconds:g} must both be above 0")
    if args.fail and args.compare is None:
        raise ValueError("--fail is not allowed without --compare: it needs a stored run")
    stored = [] if args.compare is None else read_stored(args.compare)
    use_threads(args)
    provenance = collect_provenance("kernels", argv, models={"target": "demo", "draft": "demo"}, seed=args.seed)
    benchmarks, failures, is_complete = run_benchmarks(args.select, args.seconds, args.seed)
    if not (benchmarks or is_complete):
        raise KeyboardInterrupt
    rows = make_rows(benchmarks, stored)
    slower = slower_rows(rows, args.threshold)
    own = [row for row in rows if not is_reference(row.name)]
    num_compared = sum(row.stored_ratio is not None for row in own)
    names = {row.name for row in rows}
    missing = [] if args.select else [row["name"] for row in stored if row["name"] not in names and not is_reference(row["name"])]
    warnings = [f"{row.name}: {row.stored_ratio:.2f} x the stored run, more than {args.threshold:g}" for row in slower]
    if args.compare is not None and num_compared < len(own):
        warnings.append(f"{len(own) - num_compared} rows could not be compared: the stored run or a reference lacks them")
    if missing:
        warnings.append(f"missing, although the stored run has them: {', '.join(missing)}")
    compared = f"; {len(slower)} of {num_compared} are slower than stored by more than {args.threshold:g} x" if stored else ""
    report = Report(
        "Kernels and host",
        f"{count(len(own), 'benchmark')} ran{compared}.",
        provenance,
        vars(args),
        {"rows": rows},
        [kernel_table(rows)] if rows else [],
        notes=[
            "x reference: the fastest time over that of the reference of its part; x stored: that over the same of the stored run."
        ],
        warnings=[*failures, *warnings],
        is_complete=is_complete,
    )
    publish(report, args)
    return int(bool(failures) or (args.fail and (bool(slower or missing) or not num_compared)))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="titan bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--select", default="", metavar="EXPRESSION", help='names, such as "attention and not prefill" (default: all)'
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for each benchmark, about (default: %(default)s)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a run that --save wrote")
    parser.add_argument("--threshold", type=float, default=1.25, help="ratio to it from which to warn (default: %(default)s)")
    parser.add_argument("--fail", action="store_true", help="exit with status 1 if one is above it, or missing, or none compares")
    add_report_options(parser)
    parser.add_argument("--save", dest="json", type=Path, metavar="FILE", help="the same as --json: what --compare reads")
    return parser.parse_args(argv)


def _short(node_id: str) -> str:
    """The name of a benchmark from pytest's, which begins with its file."""
    return node_id.partition("::test_")[2]


def _name(benchmark: Mapping[str, Any]) -> str:
    name: str = benchmark["name"]
    return name.removeprefix("test_")


if __name__ == "__main__":
    sys.exit(main())
