"""Plots of adaptive speculation: tokens/s, and draft tokens per request and step, over the number of requests at once.

From a file of ``titan bench adaptive``, in any format of matplotlib: ``python -m titan.bench.plot adaptive.json adaptive.svg``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.bench.options import output_file
from titan.bench.samples import Row, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {"tokens/s": "tokens/s", "nodes/step": "draft tokens per request and step"}
"""The figures that are shown, and what stands beside their axes."""

LINES: Mapping[str, Mapping[str, Any]] = {
    "off": {"linestyle": "--", "color": "0.4"},
    "adaptive": {"linewidth": 2.4, "zorder": 3, "color": "tab:green"},
}
"""How the lines of some settings look; those of fixed numbers have `FIXED_COLORS` in turn."""

FIXED_COLORS = ("tab:blue", "tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn into a file of that name.

    Raises:
        ValueError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        raise ValueError(f"a plot needs {error.name}: pip install '.[bench]' in Titan's folder") from error
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ValueError(f"no plot can be written to {path}: allowed are names that end in .{', .'.join(sorted(formats))}")


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Write a plot, the same for the same rows; text stays text in SVG.

    Args:
        rows: as `draw` takes them.
        path: of the file, as `check_plot` allows; its suffix names the format.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "titan"}):
        draw(rows).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(rows: Sequence[Row]) -> Figure:
    """Return a plot, with a line per setting, and in it the median and the range over the rounds.

    Args:
        rows: of `titan.bench.adaptive`; those of all numbers of requests together are left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        lines: dict[str, dict[float, Spread]] = {}
        for row in rows:
            if not isinstance(at_once := row.labels["at once"], str):
                lines.setdefault(str(row.labels["setting"]), {})[at_once] = row.figures[name]
        colors = cycle(FIXED_COLORS)
        for setting, line in lines.items():
            _draw_line(axes, line, label=setting, **(LINES.get(setting) or {"color": next(colors), "alpha": 0.8}))
        places = sorted({at_once for line in lines.values() for at_once in line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="requests at once", ylabel=title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    return figure


def _draw_line(axes: Axes, line: Mapping[float, Spread], **look: Any) -> None:
    medians = [each.median for each in line.values()]
    ranges = [each.median - each.minimum for each in line.values()], [each.maximum - each.median for each in line.values()]
    axes.errorbar([*line], medians, ranges, marker="o", markersize=4, capsize=2, **look)


def read_rows(document: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a JSON file of `titan bench adaptive`.

    Raises:
        ValueError: it is of another bench.
    """
    if document.get("title") != "Adaptive speculation":
        raise ValueError(f"the title of the file is {document.get('title')!r}: allowed are files of titan bench adaptive")
    return [Row(row["labels"], {name: Spread(**spread) for name, spread in row["figures"].items()}) for row in document["rows"]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: the first file is of another bench, or as `check_plot`.
        OSError: a file cannot be read or written.
    """
    parser = argparse.ArgumentParser("python -m titan.bench.plot", None, __doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("json", type=Path, help="measurement")
    parser.add_argument("plot", type=output_file, help="file to write")
    args = parser.parse_args(argv)
    check_plot(args.plot)
    plot_rows(read_rows(json.loads(args.json.read_text(encoding="utf-8"))), args.plot)


if __name__ == "__main__":
    main()
