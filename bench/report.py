"""What the benches write: the answer and its tables on the terminal, in Markdown, JSON, and a page with plots."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from titan.bench.charts import LineChart, StackedBars, render_chart
from titan.bench.progress import log
from titan.bench.provenance import Provenance, num_physical_cores, provenance_lines

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); text-align: right; }
.text { text-align: left; }
svg { max-width: 100%; height: auto; }
li { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Text cells under a header; columns after the first ``num_text_columns`` hold figures and are aligned to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text_columns: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """One measurement, ready to be shown and written.

    ``answer`` is the main finding in one sentence; ``notes`` say what was measured and what the columns mean; ``warnings`` what a
    reader must know before trusting a figure, such as rows that could not run; ``results`` are lists of dataclasses for the JSON
    file, by name.
    """

    title: str
    answer: str
    provenance: Provenance
    options: Mapping[str, Any]
    results: Mapping[str, Sequence[Any]]
    tables: Sequence[Table]
    charts: Sequence[LineChart | StackedBars] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    is_complete: bool = True  # False: it was interrupted


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add what every benchmark takes: --json, --markdown, --html, --threads, --seed."""
    parser.add_argument(
        "--json", type=_output_file, metavar="FILE", help="write the results, with every sample and their provenance"
    )
    parser.add_argument("--markdown", type=_output_file, metavar="FILE", help="write the tables")
    parser.add_argument("--html", type=_page_file, metavar="FILE", help="write a page with tables and plots, all in one file")
    default = num_physical_cores()
    parser.add_argument("--threads", type=positive, default=default, help="default: the physical cores, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default: %(default)s)")


def parse_with_preset(parser: argparse.ArgumentParser, argv: Sequence[str], quick: Mapping[str, Any]) -> argparse.Namespace:
    """Read a command line that may ask for ``--quick``: then ``quick`` are the defaults."""
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_args(argv)
    return args


def use_threads(args: argparse.Namespace) -> None:
    """Let torch use the threads that ``add_report_options`` asked for."""
    torch.set_num_threads(args.threads)


def measure_and_publish(measure: Callable[[], None], make_report: Callable[[bool], Report], args: argparse.Namespace) -> None:
    """Measure, and publish what was measured, whatever ends it; if that is nothing, no file is touched.

    Args:
        measure: keeps its own results. Ctrl-C ends it, and what it has is published.
        make_report: lays the results out; it is told whether the measurement came to its end.
        args: as for `publish`.

    Raises:
        KeyboardInterrupt: Ctrl-C came before anything was measured.
        ValueError: nothing could be measured, for the reasons that the report warns of; or as `publish`.
        Exception: what else ended the measurement, after the publication.
    """
    failure: BaseException | None = None
    try:
        measure()
    except BaseException as error:  # noqa: BLE001 - raised again below
        failure = error
    report = make_report(failure is None)
    if any(report.results.values()):
        if isinstance(failure, KeyboardInterrupt):
            log("interrupted: reporting what was measured so far")
            failure = None
        publish(report, args)
    elif failure is None:
        raise ValueError("; ".join(["nothing was measured", *report.warnings]))
    if failure is not None:
        raise failure


def publish(report: Report, args: argparse.Namespace) -> None:
    """Write the files that ``add_report_options`` asked for, each whatever becomes of the others, and print the report.

    Raises:
        ValueError: a file could not be written; the others are.
    """
    writers: list[tuple[Path | None, Callable[[Path, Report], None]]] = [
        (args.json, write_json),
        (args.markdown, lambda path, report: _write(path, markdown(report))),
        (args.html, lambda path, report: _write(path, html(report))),
    ]
    failures, written = [], []
    for path, write in writers:
        if path is not None:
            try:
                write(path, report)
            except Exception as error:  # noqa: BLE001 - hours of measurement are in the other files
                failures.append(f"{path} could not be written: {type(error).__name__}: {error}")
            else:
                written.append(path)
    print_report(report)
    for path in written:
        print(f"written: {path}")
    if failures:
        raise ValueError("; ".join(failures))


def print_report(report: Report) -> None:
    """Print the report: with rich on a terminal, as Markdown into a pipe."""
    console = Console()
    if not console.is_terminal:
        print(markdown(report), flush=True)
        return
    console.print(Text(report.title, style="bold"))
    console.print(Text(report.answer))
    for table in report.tables:
        console.print(_rich_table(table))
    if warnings := _warnings(report):
        console.print(Text(_one_line(warnings), style="yellow"))
    for line in (*report.notes, *provenance_lines(report.provenance)):
        console.print(Text(line, style="dim"))


def markdown(report: Report) -> str:
    """Lay the report out as a Markdown page, which has no plots."""
    paragraphs = [[f"# {report.title}"], [report.answer]]
    for table in report.tables:
        paragraphs += [[f"## {table.title}"], table_lines(table.header, table.rows, table.num_text_columns)]
    if warnings := _warnings(report):
        paragraphs.append([_one_line(warnings)])
    paragraphs += [list(report.notes), ["## Where the figures come from"], provenance_lines(report.provenance)]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def html(report: Report) -> str:
    """Lay the report out as one page with nothing to load from elsewhere."""
    title = escape(report.title)
    parts = [f"<h1>{title}</h1>\n<p><strong>{escape(report.answer)}</strong></p>"]
    parts += [f"<h2>{escape(chart.title)}</h2>\n{render_chart(chart)}" for chart in report.charts]
    parts += map(_html_table, report.tables)
    if warnings := _warnings(report):
        parts.append(f"<details><summary>{count(len(warnings), 'warning')}</summary>\n{_html_list(warnings)}\n</details>")
    parts += [f"<p>{escape(note.removeprefix('- '))}</p>" for note in report.notes]
    facts = [line.removeprefix("- ").replace("`", "") for line in provenance_lines(report.provenance)]
    parts.append(f"<h2>Where the figures come from</h2>\n{_html_list(facts)}")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>"
    )


def write_json(path: Path, report: Report) -> None:
    """Write provenance, options (paths as text), warnings, and each list of dataclasses under its name."""
    document: dict[str, Any] = {
        "title": report.title,
        "answer": report.answer,
        "is_complete": report.is_complete,
        "provenance": asdict(report.provenance),
        "options": dict(report.options),
        "warnings": list(report.warnings),
    }
    document |= {name: [asdict(row) for row in rows] for name, rows in report.results.items()}
    _write(path, json.dumps(document, indent=2, default=str))


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int) -> list[str]:
    """Lay out a Markdown table that is also legible in a terminal; columns after the first ones are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        text = [cell.ljust(width) for cell, width in zip(cells[:num_text_columns], widths, strict=False)]
        figures = [cell.rjust(width) for cell, width in zip(cells[num_text_columns:], widths[num_text_columns:], strict=True)]
        return f"| {' | '.join(text + figures)} |"

    rule = ["-" * width if i < num_text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return [line(header), line(rule), *(line(row) for row in rows)]


def format_figure(value: float | None, digits: int, *, suffix: str = "", scale: float = 1.0) -> str:
    """Write ``value * scale`` with its suffix; "-" if there is none."""
    return "-" if value is None else f"{value * scale:.{digits}f}{suffix}"


def fastest_answer(noun: str, found: Mapping[float, tuple[str, str]]) -> str:
    """Say what is fastest.

    Args:
        noun: of what.
        found: by temperature, the fastest one and its tokens per second over no draft.
    """
    places = [f"at temperature {temperature:g} {name}, {ratio} x no draft" for temperature, (name, ratio) in sorted(found.items())]
    return f"Fastest {noun} by tokens/s: {'; '.join(places)}." if places else f"No {noun} could be compared with no draft."


def count(number: int, noun: str) -> str:
    """Write a number of things, such as "1 request" or "8 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def positive(text: str) -> int:
    """Read an integer of at least 1, as a type of `argparse`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be an integer of at least 1")
    return value


def _output_file(text: str) -> Path:
    """Read the name of a file to write, as a type of `argparse`; its folder may be missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it is a folder")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())  # the root exists
    if there != path and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not allowed: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not allowed: {there} cannot be written to")
    return path


def _page_file(text: str) -> Path:
    """Read the name of a page to write, which nobody should measure for in vain."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a page needs matplotlib: pip install 'titan-spec[bench]'")
    return _output_file(text)


def _warnings(report: Report) -> list[str]:
    interrupted = [] if report.is_complete else ["interrupted: only what was measured until then is shown"]
    return [*interrupted, *report.warnings]


def _one_line(warnings: Sequence[str]) -> str:
    return f"{count(len(warnings), 'warning')}: {'; '.join(warnings)}"


def _html_list(lines: Sequence[str]) -> str:
    return "\n".join(["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"])


def _html_table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if i < table.num_text_columns else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)) + "</tr>"

    body = "\n".join([line(table.header, "th"), *(line(row, "td") for row in table.rows)])
    return f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table>\n{body}\n</table></div>'


def _rich_table(table: Table) -> RichTable:
    laid_out = RichTable(title=table.title, title_justify="left", header_style="bold")
    for i, name in enumerate(table.header):
        laid_out.add_column(name, justify="left" if i < table.num_text_columns else "right")
    for row in table.rows:
        laid_out.add_row(*(Text(cell) for cell in row))
    return laid_out


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
