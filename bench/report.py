"""What the benches write: the answer and its tables on the terminal and in Markdown, JSON, and a page with plots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from titan.bench.charts import LineChart, render_chart
from titan.bench.provenance import Provenance, collect_provenance, provenance_lines
from titan.bench.samples import Label, Row, Sample
from titan.bench.turns import log

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
    file, by name; ``versions`` are those of programs besides Titan.
    """

    title: str
    answer: str
    results: Mapping[str, Sequence[Any]]
    tables: Sequence[Table]
    charts: Sequence[LineChart] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def figure_table(title: str, rows: Sequence[Row | Sample], labels: Sequence[str], columns: Mapping[str, str]) -> Table:
    """Lay rows out: columns of labels, then of figures.

    ``columns`` are format specs by figure, as of `titan.bench.samples.Spread`; a figure that no row has gets no column.
    """
    used = {name: spec for name, spec in columns.items() if any(name in row.figures for row in rows)}
    cells = [
        [
            *(format_label(row.labels.get(label, "-")) for label in labels),
            *(format(row.figures[name], spec) if name in row.figures else "-" for name, spec in used.items()),
        ]
        for row in rows
    ]
    return Table(title, [*labels, *used], cells, num_text_columns=len(labels))


def format_label(label: Label) -> str:
    """Write a label, numbers without needless digits."""
    return label if isinstance(label, str) else f"{label:g}"


def measure_and_publish(
    args: argparse.Namespace,
    measure: Callable[[], Iterable[object]],
    make_report: Callable[[], Report],
    models: Mapping[str, str] | None = None,
) -> None:
    """Measure, and publish what was measured, whatever ends it; if that is nothing, no file is touched.

    Args:
        args: from `parse`.
        measure: keeps its own results. Ctrl-C ends it, and what it has is published. Whenever it yields, the JSON file gets what
            is known so far, which outlives the process, whatever ends it.
        make_report: lays the results out.
        models: by role, as `collect_provenance` takes them; by default those of the options.

    Raises:
        KeyboardInterrupt: Ctrl-C came before anything was measured.
        ValueError: nothing could be measured, for the reasons that the report warns of; or a file could not be written.
        Exception: what else ended the measurement, after the publication.
    """
    options = {"target": getattr(args, "model", None), "draft": getattr(args, "draft_model", None)}
    provenance = collect_provenance(args.command, models=options if models is None else models, seed=args.seed)
    failure: BaseException | None = None
    try:
        for _ in measure():
            if args.json is not None and any((report := make_report()).results.values()):
                write_file(args.json, json_text(report, provenance, args))
    except BaseException as error:  # noqa: BLE001 - raised again below
        failure = error
    report = make_report()
    if not any(report.results.values()):
        raise failure or ValueError("; ".join(["nothing was measured", *report.warnings]))
    if failure is not None:
        report = replace(report, warnings=["interrupted: only what was measured until then is shown", *report.warnings])
    publish(report, provenance, args)
    if failure is not None and not isinstance(failure, KeyboardInterrupt):
        raise failure


def publish(report: Report, provenance: Provenance, args: argparse.Namespace) -> None:
    """Print the report and write the files that were asked for, each whatever becomes of the others; what is empty is left out.

    Raises:
        ValueError: a file could not be written; the others are.
    """
    charts = [chart for chart in report.charts if any(each.points for each in chart.series)]
    report = replace(report, tables=[table for table in report.tables if table.rows], charts=charts)
    provenance = replace(provenance, versions=provenance.versions | dict(report.versions))
    writers = {"json": json_text, "markdown": markdown, "html": html}
    failures = []
    for kind, write in writers.items():
        path: Path | None = getattr(args, kind)
        if path is not None:
            try:
                write_file(path, write(report, provenance, args))
            except Exception as error:  # noqa: BLE001 - hours of measurement are in the other files
                failures.append(f"{path} could not be written: {type(error).__name__}: {error}")
            else:
                log(f"written: {path}")
    print(markdown(report, provenance, args), flush=True)
    if failures:
        raise ValueError("; ".join(failures))


def write_file(path: Path, text: str) -> None:
    """Write a file whose folder may be missing; whatever ends the process meanwhile, the old file or the new one is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def json_text(report: Report, provenance: Provenance, args: argparse.Namespace) -> str:
    """Provenance, options (paths as text), warnings, and each list of dataclasses under its name."""
    document = {name: getattr(report, name) for name in ("title", "answer", "warnings")}
    document |= {"provenance": asdict(provenance), "options": vars(args)}
    document |= {name: [asdict(row) for row in rows] for name, rows in report.results.items()}
    return json.dumps(document, indent=1, default=str)


def markdown(report: Report, provenance: Provenance, _: argparse.Namespace) -> str:
    """Lay the report out as a Markdown page, which has no plots and is legible in a terminal."""
    paragraphs = [[f"# {report.title}"], [report.answer]]
    for table in report.tables:
        paragraphs += [[f"## {table.title}"], table_lines(table)]
    if report.warnings:
        paragraphs.append([f"{count(len(report.warnings), 'warning')}: {'; '.join(report.warnings)}"])
    paragraphs += [list(report.notes), ["## Where the figures come from"], [f"- {line}" for line in provenance_lines(provenance)]]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def html(report: Report, provenance: Provenance, _: argparse.Namespace) -> str:
    """Lay the report out as one page with nothing to load from elsewhere: answer, plots, tables, folded warnings."""
    title = escape(report.title)
    parts = [f"<h1>{title}</h1>\n<p><strong>{escape(report.answer)}</strong></p>"]
    parts += [f"<h2>{escape(chart.title)}</h2>\n{render_chart(chart)}" for chart in report.charts]
    parts += map(_html_table, report.tables)
    if report.warnings:
        summary = count(len(report.warnings), "warning")
        parts.append(f"<details><summary>{summary}</summary>\n{_html_list(report.warnings)}\n</details>")
    parts += [f"<p>{escape(note.removeprefix('- '))}</p>" for note in report.notes]
    parts.append(f"<h2>Where the figures come from</h2>\n{_html_list(provenance_lines(provenance))}")
    head = f'<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width"/>\n<title>{title}</title>'
    page = ["<head>", head, f"<style>{STYLE}</style>", "</head>", "<body>", *parts, "</body>"]
    return "\n".join(["<!doctype html>", '<html lang="en">', *page, "</html>"])


def table_lines(table: Table) -> list[str]:
    """Lay out a Markdown table that is also legible in a terminal; columns after the first ones are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    is_text = [i < table.num_text_columns for i in range(len(widths))]

    def line(cells: Sequence[str]) -> str:
        parts = zip(cells, widths, is_text, strict=True)
        return f"| {' | '.join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in parts)} |"

    rule = ["-" * width if left else "-" * (width - 1) + ":" for width, left in zip(widths, is_text, strict=True)]
    return [line(table.header), line(rule), *map(line, table.rows)]


def count(number: int, noun: str) -> str:
    """Write a number of things, such as "1 request" or "8 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _html_list(lines: Sequence[str]) -> str:
    return "\n".join(["<ul>", *(f"<li>{escape(line.replace('`', ''))}</li>" for line in lines), "</ul>"])


def _html_table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        starts = [f'<{tag} class="text">' if i < table.num_text_columns else f"<{tag}>" for i in range(len(cells))]
        return "<tr>" + "".join(f"{start}{escape(cell)}</{tag}>" for start, cell in zip(starts, cells, strict=True)) + "</tr>"

    body = "\n".join([line(table.header, "th"), *(line(row, "td") for row in table.rows)])
    return f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table>\n{body}\n</table></div>'
