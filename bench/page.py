"""One page for a report, with nothing to load from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from titan.bench.charts import LineChart, StackedBars, render_chart

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); text-align: right; }
th.text, td.text { text-align: left; }
svg { max-width: 100%; height: auto; }
.warning { border-left: 4px solid #e69f00; padding-left: 0.6rem; }
code { overflow-wrap: anywhere; }
"""

TableParts = tuple[str, Sequence[str], Sequence[Sequence[str]], int]
"""Title, header, rows, number of text columns."""


def render_page(
    title: str,
    facts: Sequence[str],
    notes: Sequence[str],
    warnings: Sequence[str],
    tables: Sequence[TableParts],
    charts: Sequence[LineChart | StackedBars],
) -> str:
    """Lay out a page: notes, warnings, tables, plots, and where the figures come from.

    Args:
        title: of the page.
        facts: where the figures come from, a line each.
        notes: what was measured, a paragraph each.
        warnings: what a reader must know first, a paragraph each.
        tables: in order.
        charts: in order.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(note.removeprefix('- '))}</p>" for note in notes]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in warnings]
    for table in tables:
        parts.append(_table(*table))
    for chart in charts:
        parts.append(f"<h2>{escape(chart.title)}</h2>\n{render_chart(chart)}")
    parts.append("<h2>Where the figures come from</h2>\n<ul>")
    parts += [f"<li><code>{escape(fact.replace('`', ''))}</code></li>" for fact in facts]
    body = "\n".join([*parts, "</ul>"])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>"
    )


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if i < num_text_columns else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)) + "</tr>"

    body = "\n".join([line(header, "th"), *(line(row, "td") for row in rows)])
    return f'<h2>{escape(title)}</h2>\n<div class="scroll"><table>\n{body}\n</table></div>'
