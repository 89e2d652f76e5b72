"""Micro-benchmarks of parts of a step, by pytest-benchmark: swaps, scheduling, layers of transformers, the host's part on CUDA.

    titan bench parts --json parts.json
    titan bench parts --select "swap or recompute"

A time is the fastest of many, in microseconds: what else runs on the machine can only add to it. Ctrl-C ends the measurement and
reports what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from titan.bench.options import above_zero, bench_parser, parse
from titan.bench.report import Report, count, figure_table, measure_and_publish
from titan.bench.samples import Row, Spread
from titan.models.files import DEMO

MICRO = Path(__file__).resolve().parent / "micro"
FASTEST, MEDIAN = "fastest, us", "median, us"


def run_benchmarks(
    select: str, seconds: float, seed: int, swap_pair: tuple[str, str]
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
        raise ValueError(f"titan bench parts needs {error.name}: pip install '.[bench]' in Titan's folder") from error
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


def make_rows(benchmarks: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of what pytest-benchmark found, by part; medians come with their quartiles, as their range."""
    rows = []
    for each in sorted(benchmarks, key=lambda each: (each["group"], each["name"])):
        name, part, stats = each["name"].removeprefix("test_"), each["group"], each["stats"]
        figures = {
            FASTEST: Spread.of([1e6 * stats["min"]]),
            MEDIAN: Spread(1e6 * stats["median"], 1e6 * stats["q1"], 1e6 * stats["q3"], stats["rounds"]),
        }
        rows.append(Row({"benchmark": name, "part": part}, figures))
    return rows


def make_report(rows: Sequence[Row], failures: Sequence[str]) -> Report:
    """All rows; what failed is a warning."""
    return Report(
        "Parts of a step",
        f"{count(len(rows), 'benchmark')} ran.",
        {"rows": rows},
        [figure_table("Times of a call", rows, ["benchmark", "part"], {FASTEST: ".1f", MEDIAN: "±.1f"})],
        notes=["median: ± half of what is between the quartiles."],
        warnings=failures,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the status is 1 if a benchmark failed.

    Raises:
        KeyboardInterrupt: Ctrl-C came before anything was measured.
        ValueError: an option is not allowed.
    """
    args = parse(make_parser(), argv)
    rows: list[Row] = []
    failures: list[str] = []

    def measure() -> Iterator[None]:
        benchmarks, problems, is_interrupted = run_benchmarks(args.select, args.seconds, args.seed, (args.model, args.draft_model))
        rows.extend(make_rows(benchmarks))
        failures.extend(problems)
        yield
        if is_interrupted:
            raise KeyboardInterrupt

    measure_and_publish(args, measure, lambda: make_report(rows, failures))
    return int(bool(failures))


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("parts", __doc__)
    parser.add_argument("--select", default="", metavar="EXPRESSION", help='names, such as "swap or recompute" (default: all)')
    parser.add_argument("--seconds", type=above_zero, default=0.5, help="for each benchmark, about (default: %(default)s)")
    parser.add_argument("--model", default=DEMO, help="folder or hub id of the target of swaps (default: the demo pair)")
    parser.add_argument("--draft-model", default=DEMO, help="folder or hub id of the draft of swaps (default: the demo's)")
    return parser
