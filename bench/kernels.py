"""Micro-benchmarks of every kernel that runs on this device and of the host's part of a step.

    titan bench kernels --json before.json
    titan bench kernels --compare before.json --fail
    titan bench kernels --select attention verify

Shapes are those of the demo pair with 1 and with 32 requests of 128 tokens. A time is the fastest of many: what else runs on the
machine can only add to it. It is shown in microseconds and over a reference of the same run, a matrix product for kernels and a
loop of Python for the host's part, each run between the others; a comparison with a stored run is of these ratios, so that a slower
machine alone changes little. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import timeit
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles

import torch

from titan.bench.gpu.timing import synchronize
from titan.bench.micro.benchmarks import HOST, KERNELS, NUM_STEPS, STEPS
from titan.bench.micro.stage import Call, make_stage
from titan.bench.provenance import machine_name
from titan.bench.report import Report, bench_parser, count, figure_table, measure_and_publish, parse
from titan.bench.samples import Row, Spread
from titan.bench.turns import Turns, log

PARTS = {"kernel": KERNELS, "host": HOST}
NUM_REQUESTS = (1, 32)
NUM_WARM_UPS, MIN_ROUNDS = 3, 5
ROUND_SECONDS = 2e-5
"""Calls are timed together until they take that long, which a clock tells well."""
FASTEST, MEDIAN, RELATIVE, OVER_STORED = "fastest, us", "median, us", "x reference", "x stored"
COLUMNS = {FASTEST: ".1f", MEDIAN: "±.1f", RELATIVE: ".2f", OVER_STORED: ".2f"}

Times = dict[tuple[str, str], list[float]]
"""Seconds of benchmarks, by part and name."""


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


def benchmark_seconds(part: str, name: str, num_requests: int, seconds: float, seed: int) -> list[float]:
    """Times of a benchmark, which takes about ``seconds``; none where there is nothing to time."""
    stage = make_stage(num_requests, seed)
    call = PARTS[part][name](stage)
    if call is None:
        return []

    def run() -> None:
        call()
        synchronize(stage.backend.device)

    return call_seconds(run, seconds, NUM_STEPS if name in STEPS else math.inf)


def call_seconds(call: Call, seconds: float, max_calls: float) -> list[float]:
    """Seconds of a call, in rounds that take about ``seconds`` together; each is a mean over calls of `ROUND_SECONDS`."""
    timer = timeit.Timer(call)
    once = min(timer.repeat(NUM_WARM_UPS, 1))
    num_calls = math.ceil(ROUND_SECONDS / once)
    num_rounds = min(max(seconds / (num_calls * once), MIN_ROUNDS), (max_calls - NUM_WARM_UPS) / num_calls)
    return [each / num_calls for each in timer.repeat(int(num_rounds), num_calls)]


def reference_seconds(part: str) -> float:
    """What the machine itself does: the fastest of some float32 matrix products, or of some loops of Python."""
    if part == "host":
        return min(timeit.repeat(lambda: sum(i & 7 for i in range(5000)), number=1, repeat=50))
    matrix = torch.ones(256, 256, device="cuda" if torch.cuda.is_available() else "cpu")
    return min(timeit.repeat(lambda: (matrix @ matrix)[0, 0].item(), number=1, repeat=50))


def make_rows(times: Times, references: Mapping[str, float], stored: Mapping[str, float]) -> list[Row]:
    """What was found; medians come with their quartiles, as their range."""
    rows = []
    for (part, name), seconds in times.items():
        low, middle, high = quantiles(seconds)
        relative = min(seconds) / references[part]
        figures = {
            FASTEST: Spread.of([1e6 * min(seconds)]),
            MEDIAN: Spread(1e6 * middle, 1e6 * low, 1e6 * high, len(seconds)),
            RELATIVE: Spread.of([relative]),
        }
        if name in stored:
            figures[OVER_STORED] = Spread.of([relative / stored[name]])
        rows.append(Row({"benchmark": name, "part": part}, figures))
    return rows


def complaints(rows: Sequence[Row], stored: Mapping[str, float], threshold: float, *, is_selection: bool) -> list[str]:
    """What ``--fail`` fails for: rows that are slower than stored ones or gone, or none that could be compared."""
    found = [
        f"{row.labels['benchmark']}: {ratio:.2f} x the stored run, more than {threshold:g}"
        for row in rows
        if (ratio := row.median(OVER_STORED)) is not None and ratio > threshold
    ]
    missing = stored.keys() - {str(row.labels["benchmark"]) for row in rows}
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
    if args.fail and args.compare is None:
        raise ValueError("--fail is not allowed without --compare: it needs a stored run")
    selected = [(part, name) for part, named in PARTS.items() for name in named if all(word in name for word in args.select)]
    if not selected:
        names = ", ".join(name for named in PARTS.values() for name in named)
        raise ValueError(f"--select {' '.join(args.select)} is in no benchmark's name: there are {names}")
    stored = {} if args.compare is None else read_stored(args.compare)
    times: Times = {}
    references = dict.fromkeys(PARTS, math.inf)
    problems: list[str] = []

    def measure() -> None:
        turns = [(num_requests, *each) for num_requests in NUM_REQUESTS for each in selected]
        with Turns(len(turns), problems, lambda _: None) as bar, torch.inference_mode():
            for num_requests, part, name in turns:
                references[part] = min(references[part], reference_seconds(part))
                work = partial(benchmark_seconds, part, name, num_requests, args.seconds, args.seed)
                if found := bar.take(f"{name}[{num_requests}]", "with the demo pair", work):
                    times[part, f"{name}[{num_requests}]"] = found

    def complained(rows: Sequence[Row]) -> list[str]:
        return complaints(rows, stored, args.threshold, is_selection=bool(args.select)) if args.compare else []

    def report() -> Report:
        rows = make_rows(times, references, stored)
        return make_report(rows, [*problems, *complained(rows)], args.threshold)

    measure_and_publish(args, measure, report, {"target": "demo", "draft": "demo"})
    return int(bool(problems or (args.fail and complained(make_rows(times, references, stored)))))


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("kernels", __doc__)
    parser.add_argument(
        "--select", nargs="+", default=[], metavar="WORD", help="those whose names have all of these (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for each benchmark, about (default: %(default)s)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a run that --json wrote")
    parser.add_argument("--threshold", type=float, default=1.25, help="ratio to it from which to warn (default: %(default)s)")
    parser.add_argument("--fail", action="store_true", help="exit with status 1 if one is above it, or missing, or none compares")
    return parser


if __name__ == "__main__":
    sys.exit(main())
