"""What the benches write: the answer and its tables on the terminal and in Markdown, and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titan.bench.provenance import Provenance, collect_provenance, provenance_lines
from titan.bench.samples import Label, Row, Sample
from titan.bench.turns import log


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
    file, by name; ``versions`` are those of programs besides Titan, and what the "kernels" of its engine are.
    """

    title: str
    answer: str
    results: Mapping[str, Sequence[Any]]
    tables: Sequence[Table]
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


def in_one_round(rows: Sequence[Row]) -> str:
    """What the headline of a report adds if no rate of these rows was measured twice; else nothing."""
    return "" if any(row.figures["tokens/s"].num_rounds > 1 for row in rows) else " in one round"


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
    report = replace(report, tables=[table for table in report.tables if table.rows])
    provenance = replace(provenance, versions=provenance.versions | dict(report.versions))
    page = markdown(report, provenance)
    failures = []
    for path, text in ((args.json, json_text(report, provenance, args)), (args.markdown, page)):
        if path is not None:
            try:
                write_file(path, text)
            except OSError as error:  # hours of measurement are in the other file
                failures.append(f"{path} could not be written: {type(error).__name__}: {error}")
            else:
                log(f"written: {path}")
    print(page, flush=True)
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


def markdown(report: Report, provenance: Provenance) -> str:
    """Lay the report out as a Markdown page, which is legible in a terminal."""
    paragraphs = [[f"# {report.title}"], [report.answer]]
    for table in report.tables:
        paragraphs += [[f"## {table.title}"], table_lines(table)]
    if report.warnings:
        paragraphs.append([f"{count(len(report.warnings), 'warning')}: {'; '.join(report.warnings)}"])
    paragraphs += [list(report.notes), ["## Where the figures come from"], [f"- {line}" for line in provenance_lines(provenance)]]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


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
