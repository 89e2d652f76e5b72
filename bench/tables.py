"""The README's tables of figures, made from the files in bench/results.

    python -m titan.bench.tables            write them into README.md
    python -m titan.bench.tables --check    only say whether they are up to date

A table stands between two comments; the first has the arguments of `make_table` in TOML:

    <!-- table
    files = ["pair.json", "pair-32.json"]
    rows = ["tokens/s", "at once"]
    columns = "dtype"
    cells = [{ "tokens/s" = "Titan over vLLM", mode = "titan", text = "{x vllm:±.2fx}" }]
    -->
    <!-- end of table -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from titan.bench.report import Table, format_label, table_lines
from titan.bench.samples import Label, Row, Spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "bench/results"
MARKED = re.compile(r"(<!-- table\n(?P<arguments>.*?)-->\n).*?(<!-- end of table -->)", re.DOTALL)
FIGURE = re.compile(r"\{(?P<name>[^{}:]+):(?P<spec>[^{}]*)\}")


def make_table(
    folder: Path, *, files: Sequence[str], rows: Sequence[str], columns: str, cells: Sequence[Mapping[str, str]]
) -> list[str]:
    """The lines of a table that has a column per value of one label.

    Args:
        folder: where the files are.
        files: of `titan.bench.report`; of rows with the same labels the last one counts.
        rows: labels whose values stand before the cells; lines are in the order of the column that has most of them.
        columns: the label.
        cells: "text" of cells with figures and their format specs, such as "{tokens/step:.2f}"; a row that lacks one has no cell.
            Other entries are labels: those in ``rows`` are given to the cells, the others the rows of the files must have.

    Raises:
        ValueError: no row of the files has what a cell needs.
    """
    known = read_rows([folder / name for name in files])
    values = list(dict.fromkeys(row.labels[columns] for row in known))
    lines: list[list[str]] = []
    for cell in cells:
        given = {label: cell[label] for label in rows if label in cell}
        wanted = {label: value for label, value in cell.items() if label not in ("text", *given)}
        found: dict[Label, dict[tuple[str, ...], str]] = {value: {} for value in values}
        for row in known:
            text = fill(cell["text"], row.figures)
            if text is not None and wanted.items() <= row.labels.items():
                labels = {**row.labels, **given}
                found[row.labels[columns]][tuple(format_label(labels[label]) for label in rows)] = text
        order = dict.fromkeys(line for column in sorted(found.values(), key=len, reverse=True) for line in column)
        if not order:
            raise ValueError(f"table cells {dict(cell)} are not allowed: {', '.join(files)} have no such row")
        lines += [[*line, *(found[value].get(line, "-") for value in values)] for line in order]
    repeats = [False, *(line[0] == before[0] for before, line in pairwise(lines))]
    lines = [["" if is_repeated else line[0], *line[1:]] for line, is_repeated in zip(lines, repeats, strict=True)]
    heads = [value if isinstance(value, str) else f"{columns} {value:g}" for value in values]
    return table_lines(Table("", [*rows, *heads], lines))


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """The rows of files that `titan.bench.report` wrote; of those with the same labels the last."""
    rows: dict[frozenset[tuple[str, Label]], Row] = {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            figures = {name: Spread(**spread) for name, spread in row["figures"].items()}
            rows[frozenset(row["labels"].items())] = Row(row["labels"], figures)
    return list(rows.values())


def fill(text: str, figures: Mapping[str, Spread]) -> str | None:
    """Write figures into a cell; ``None`` if one is missing."""
    if not {match["name"] for match in FIGURE.finditer(text)} <= figures.keys():
        return None
    return FIGURE.sub(lambda match: format(figures[match["name"]], match["spec"]), text)


def render(page: str, folder: Path) -> str:
    """Return a page with its tables made anew, from files in ``folder``.

    Raises:
        ValueError: a table has no end, or its comment is not allowed.
    """
    if page.count("<!-- table\n") != len(MARKED.findall(page)):
        raise ValueError("a table has no end: <!-- end of table --> must follow the comment that begins it")

    def write(match: re.Match[str]) -> str:
        lines = make_table(folder, **tomllib.loads(match["arguments"]))
        return "\n".join([match[1].rstrip("\n"), *lines, match[3]])

    return MARKED.sub(write, page)


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


if __name__ == "__main__":
    sys.exit(main())
