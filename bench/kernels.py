"""Micro-benchmarks of every kernel that runs on this device and of the host's part of a step, by pytest-benchmark.

    titan bench kernels --json before.json
    titan bench kernels --compare before.json --fail
    titan bench kernels --select "attention and verify"

Shapes are those of the demo pair with 1 and with 32 requests of 128 tokens, unless a benchmark says others. A time is the fastest
of many: what else runs on the machine can only add to it. It is shown in microseconds and over a reference of the same run, a
matrix product for kernels and a loop of Python for the host's part, each run first and last; a comparison with a stored run is of
these ratios, so that a slower machine alone changes little. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import timeit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from titan.bench.options import bench_parser, parse
from titan.bench.provenance import machine_name
from titan.bench.report import Report, count, figure_table, measure_and_publish
from titan.bench.samples import Row, Spread
from titan.bench.turns import log
from titan.models.loader import DEMO

MICRO = Path(__file__).resolve().parent / "micro"
FASTEST, MEDIAN, RELATIVE, OVER_STORED = "fastest, us", "median, us", "x reference", "x stored"
COLUMNS = {FASTEST: ".1f", MEDIAN: "±.1f", RELATIVE: ".2f", OVER_STORED: ".2f"}


def read_stored(path: Path) -> dict[str, float]:
    """Times over the reference, by benchmark, of a run that ``--json`` wrote.

    Raises:
        ValueError: there is no such file, or it is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = document["provenance"]["machine"]
        stored = {row["labels"]["benchmark"]: row["figures"][RELATIVE]["median"] for row in document["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--compare {path} is not a run of titan bench kernels: {type(error).__name__}: {error}") from error
    if machine != machine_name():
        log(f"the stored run is of another machine: {machine}")
    return stored


def reference_seconds() -> dict[str, float]:
    """What the machine itself does, by part: the fastest of many float32 matrix products, and of many loops of Python."""
    matrix = torch.ones(256, 256, device="cuda" if torch.cuda.is_available() else "cpu")
    references = {"kernel": lambda: (matrix @ matrix)[0, 0].item(), "host": lambda: sum(i & 7 for i in range(5000))}
    return {part: min(timeit.repeat(reference, number=1, repeat=1000)) for part, reference in references.items()}


def run_benchmarks(
    select: str, seconds: float, seed: int, swap_pair: tuple[str, str] = (DEMO, DEMO)
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Run the micro-benchmarks in this process; pytest shows its progress on stderr.

    Returns:
        Benchmarks as in pytest-benchmark's JSON files; a line for each that failed; and whether Ctrl-C ended them.

    Raises:
        ValueError: pytest or pytest-benchmark is not installed, or the selection names nothing.
    """
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"titan bench kernels needs {error.name}: pip install 'titan-spec[bench]'") from error
    failures: list[str] = []

    class Plugin:
        """Provides the seed and the models of swaps, keeps failures."""

        @pytest.fixture
        def seed(self) -> int:
            return seed

        @pytest.fixture
        def swap_pair(self) -> tuple[str, str]:
            return swap_pair

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                failures.append(f"{report.nodeid} failed: {crash.message if crash else report.longrepr}")

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        path = Path(folder) / "benchmarks.json"
        options = ["-c", os.devnull, f"--rootdir={MICRO}", "--import-mode=importlib", "--override-ini=python_files=micro_*.py"]
        options += ["-q", "-p", "no:cacheprovider", "--capture=no", "-W", "ignore:Not saving anything", "-k", select]
        options += [f"--benchmark-json={path}", f"--benchmark-max-time={seconds}", "--benchmark-quiet", "--benchmark-disable-gc"]
        status = pytest.main([*options, str(MICRO)], plugins=[Plugin()])
        found = json.loads(path.read_text(encoding="utf-8"))["benchmarks"] if path.exists() else []
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ValueError(f"--select {select!r} names no benchmark")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise ValueError(f"pytest ended with status {int(status)}: see above")
    return found, failures, status == pytest.ExitCode.INTERRUPTED


def make_rows(benchmarks: Sequence[Mapping[str, Any]], references: Mapping[str, float], stored: Mapping[str, float]) -> list[Row]:
    """Rows of what pytest-benchmark found, by part; medians come with their quartiles, as their range."""
    rows = []
    for each in sorted(benchmarks, key=lambda each: (each["group"], each["name"])):
        name, part, stats = each["name"].removeprefix("test_"), each["group"], each["stats"]
        figures = {
            FASTEST: Spread.of([1e6 * stats["min"]]),
            MEDIAN: Spread(1e6 * stats["median"], 1e6 * stats["q1"], 1e6 * stats["q3"], stats["rounds"]),
            RELATIVE: Spread.of([stats["min"] / references[part]]),
        }
        if name in stored:
            figures[OVER_STORED] = Spread.of([figures[RELATIVE].median / stored[name]])
        rows.append(Row({"benchmark": name, "part": part}, figures))
    return rows


def complaints(rows: Sequence[Row], stored: Mapping[str, float], threshold: float, *, is_selection: bool) -> list[str]:
    """What ``--fail`` fails for: rows that are slower than stored ones or gone, or none that could be compared."""
    found = [
        f"{row.labels['benchmark']}: {ratio:.2f} x the stored run, more than {threshold:g}"
        for row in rows
        if (ratio := row.median(OVER_STORED)) is not None and ratio > threshold
    ]
    missing = stored.keys() - {row.labels["benchmark"] for row in rows}
    if missing and not is_selection:
        found.append(f"missing, although the stored run has them: {', '.join(sorted(missing))}")
    if len(missing) == len(stored):
        found.append("nothing could be compared")
    return found


def make_report(rows: Sequence[Row], warnings: Sequence[str], threshold: float) -> Report:
    """All rows, and how many of those that were compared with a stored run are slower."""
    ratios = [ratio for row in rows if (ratio := row.median(OVER_STORED)) is not None]
    num_slower = sum(ratio > threshold for ratio in ratios)
    compared = f"; {num_slower} of {len(ratios)} are slower than stored by more than {threshold:g} x" if ratios else ""
    return Report(
        "Kernels and host",
        f"{count(len(rows), 'benchmark')} ran{compared}.",
        {"rows": rows},
        [figure_table("Times of a call", rows, ["benchmark", "part"], COLUMNS)],
        notes=[
            "median: ± half of what is between the quartiles. x reference: the fastest time over that of the reference of its "
            "part; x stored: that over the same of the stored run."
        ],
        warnings=warnings,
    )


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

    def measure() -> Iterator[None]:
        first = reference_seconds()
        benchmarks, problems, is_interrupted = run_benchmarks(args.select, args.seconds, args.seed, args.swap_pair)
        references = {part: min(seconds, first[part]) for part, seconds in reference_seconds().items()}
        rows.extend(make_rows(benchmarks, references, stored or {}))
        failures.extend(problems)
        yield
        if is_interrupted:
            raise KeyboardInterrupt

    def found() -> list[str]:
        return [] if stored is None else complaints(rows, stored, args.threshold, is_selection=bool(args.select))

    def report() -> Report:
        return make_report(rows, [*failures, *found()], args.threshold)

    measure_and_publish(args, measure, report, dict(zip(("target", "draft"), args.swap_pair, strict=True)))
    return int(bool(failures or (args.fail and found())))


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("kernels", __doc__)
    parser.add_argument(
        "--select", default="", metavar="EXPRESSION", help='names, such as "attention and not prefill" (default: all)'
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for each benchmark, about (default: %(default)s)")
    parser.add_argument("--swap-pair", nargs=2, default=(DEMO, DEMO), metavar="MODEL", help="of swaps (default: the demo pair)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a run that --json wrote")
    parser.add_argument("--threshold", type=float, default=1.25, help="ratio to it from which to warn (default: %(default)s)")
    parser.add_argument("--fail", action="store_true", help="exit with status 1 if one is above it, or missing, or none compares")
    return parser
