"""The README's tables of figures, made from the files in bench/results.

    python -m titan.bench.tables            write them into README.md
    python -m titan.bench.tables --check    only say whether they are up to date

A table stands between two comments; the first names its kind and its files, of which later ones win:

    <!-- table: ratios pair.json pair-32.json -->
    <!-- end of table -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titan.bench.draft_rows import NO_DRAFT, Setting
from titan.bench.report import table_lines

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "bench/results"
MARKED = re.compile(r"(?P<begin><!-- table: (?P<kind>\S+) (?P<files>[^>]*?) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)
COMPARISONS = [
    ("titan", "transformers-static", "Titan without a draft, over `transformers` `generate` (static batch)"),
    ("titan", "transformers-continuous", "Titan without a draft, over `transformers` `generate_batch`"),
    ("titan", "vllm", "Titan without a draft, over vLLM"),
    ("titan", "openvino", "Titan without a draft, over OpenVINO GenAI"),
    ("titan", "llama.cpp", "Titan without a draft, over llama.cpp"),
    ("titan", "titan-static", "Titan without a draft, over the same in static batches"),
    ("titan", "titan-single", "Titan without a draft, over the same without batching"),
    ("titan-draft", "titan", "Titan with {max_draft_tokens} draft tokens, over Titan without a draft"),
    ("titan-draft", "transformers-assisted", "Titan with {max_draft_tokens} draft tokens, over `transformers` assisted generation"),
    ("titan-draft", "vllm-draft", "Titan with {max_draft_tokens} draft tokens, over vLLM with them"),
    ("titan-draft", "openvino-draft", "Titan with {max_draft_tokens} draft tokens, over OpenVINO GenAI with them"),
]
"""Mode, baseline, and what their ratio is called."""

Document = dict[str, Any]
"""A file that `titan.bench.report.write_json` wrote."""


def ratios_table(documents: Sequence[Document]) -> list[str]:
    """Tokens per second of throughput runs over those of their baselines: medians, and half the range over the rounds."""
    rows = {(row["mode"], row["concurrency"], row["dtype"]): (row, document) for document in documents for row in document["rows"]}
    dtypes = list(dict.fromkeys(dtype for _, _, dtype in rows))
    concurrencies = sorted({concurrency for _, concurrency, _ in rows})
    cells = []
    for mode, baseline, name in COMPARISONS:
        label = name
        for concurrency in concurrencies:
            found = [rows.get((mode, concurrency, dtype)) for dtype in dtypes]
            spreads = [None if each is None else each[0]["ratios"].get(baseline) for each in found]
            if any(spreads):
                options = next(each for each in found if each is not None)[1]["options"]
                figures = [_ratio(spread) if spread else "-" for spread in spreads]
                cells.append([label.format(**options), str(concurrency), *figures])
                label = ""
    return table_lines(["tokens/s", "requests", *dtypes], cells, num_text_columns=1)


def trees_table(documents: Sequence[Document]) -> list[str]:
    """Shapes of draft trees by temperature: tokens per step of the target, and tokens per second over no draft."""
    rows = {(row["variant"], row["temperature"]): row for document in documents for row in document["rows"]}
    temperatures = sorted({temperature for _, temperature in rows})
    cells = []
    variants = [
        variant for warmest in reversed(temperatures) for variant, each in rows if each == warmest and variant != "no draft"
    ]
    for variant in dict.fromkeys(variants):  # the highest temperature has them all
        found = [rows.get((variant, temperature)) for temperature in temperatures]
        figures = [_steps_and_speed(row["tokens_per_step"], row["speed_up"]) if row else "-" for row in found]
        cells.append([variant, *figures])
    return table_lines(["draft tree", *(f"temperature {temperature:g}" for temperature in temperatures)], cells, num_text_columns=1)


def rates_table(documents: Sequence[Document]) -> list[str]:
    """Tokens per second of throughput runs, each with its ratio over Titan without a draft in the same rounds."""
    rows = {(row["dtype"], row["mode"], row["concurrency"]): row for document in documents for row in document["rows"]}
    concurrencies = sorted({concurrency for _, _, concurrency in rows})
    cells = []
    for dtype, mode in dict.fromkeys(key[:2] for key in rows):
        found = [rows.get((dtype, mode, concurrency)) for concurrency in concurrencies]
        cells.append([dtype, mode, *(_rate(row) if row else "-" for row in found)])
    return table_lines(["dtype", "mode", *(f"{concurrency} at once" for concurrency in concurrencies)], cells, num_text_columns=2)


def latency_table(documents: Sequence[Document]) -> list[str]:
    """Latency under load, in seconds: medians and 99th percentiles, goodput, and whether the engine was saturated."""
    rows = {(row["engine"], row["rate"]): row for document in documents for row in document["rows"]}
    cells = [
        [
            engine,
            f"{rate:g}",
            *(f"{row[name][percentile]:.2f}" for name in ("to_first_token", "latency") for percentile in ("p50", "p99")),
            f"{row['goodput']['median']:.2f}",
            "-" if row["excess"] is None else "yes" if row["excess"] > 0 else "no",
        ]
        for (engine, rate), row in rows.items()
    ]
    header = ["engine", "requests/s", "first token P50, s", "P99", "latency P50, s", "P99", "goodput/s", "saturated"]
    return table_lines(header, cells, num_text_columns=1)


def drafts_table(documents: Sequence[Document]) -> list[str]:
    """Drafts by workload: tokens per step of the target, and tokens per second over no draft."""
    rows = {(row["draft"], Setting(row["workload"], row["temperature"])): row for document in documents for row in document["rows"]}
    settings = list(dict.fromkeys(setting for _, setting in rows))
    cells = []
    for draft in dict.fromkeys(draft for draft, _ in rows if draft != NO_DRAFT):
        found = [rows.get((draft, setting)) for setting in settings]
        cells.append([draft, *(_steps_and_speed(row["mean_acceptance_length"], row["speed_up"]) if row else "-" for row in found)])
    return table_lines(["draft", *map(str, settings)], cells, num_text_columns=1)


KINDS: dict[str, Callable[[Sequence[Document]], list[str]]] = {
    "ratios": ratios_table,
    "rates": rates_table,
    "trees": trees_table,
    "latency": latency_table,
    "drafts": drafts_table,
}
"""Tables by the name that a comment gives."""


def render(text: str, folder: Path) -> str:
    """Return a page with its tables made anew.

    Args:
        text: the page.
        folder: where the files are that its comments name.

    Raises:
        ValueError: a comment names an unknown kind or a missing file, or lacks its end.
    """
    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError("a table has no end: <!-- end of table --> must follow <!-- table: KIND FILES -->")

    def fill(match: re.Match[str]) -> str:
        kind, names = match["kind"], match["files"].split()
        if kind not in KINDS:
            raise ValueError(f"table {kind!r} is unknown: allowed are {', '.join(KINDS)}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"table {kind!r} names {', '.join(missing)}, which {folder} does not have")
        documents = [json.loads((folder / name).read_text(encoding="utf-8")) for name in names]
        return match["begin"] + "\n".join(KINDS[kind](documents)) + "\n" + match["end"]

    return MARKED.sub(fill, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if --check found a table that is out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m titan.bench.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and bench/results (default: the checkout)")
    args = parser.parse_args(argv)
    page = args.root / "README.md"
    text = page.read_text(encoding="utf-8")
    made = render(text, args.root / RESULTS)
    if made == text:
        return 0
    if args.check:
        print("README.md has tables that are out of date: run python -m titan.bench.tables", file=sys.stderr)
        return 1
    page.write_text(made, encoding="utf-8")
    return 0


def _ratio(spread: dict[str, float]) -> str:
    half_range = (spread["maximum"] - spread["minimum"]) / 2 / spread["median"]
    return f"{spread['median']:.2f}x ±{half_range * 100:.0f} %"


def _steps_and_speed(length: float, speed_up: dict[str, float] | None) -> str:
    return f"{length:.2f}" if speed_up is None else f"{length:.2f} ({speed_up['median']:.2f}x)"


def _rate(row: dict[str, Any]) -> str:
    ratio = row["ratios"].get("titan")
    rate = f"{row['tokens_per_second']['median']:.1f}"
    return rate if ratio is None else f"{rate} ({ratio['median']:.2f}x)"


if __name__ == "__main__":
    sys.exit(main())
