"""What the benches write: where the figures come from, tables in Markdown, and JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

import titan


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over the rounds."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where figures come from."""

    command: str
    commit: str
    date: str  # UTC
    machine: str
    num_threads: int
    load_average: list[float]  # over 1, 5 and 15 minutes, before the run
    versions: dict[str, str]


def collect_provenance(module: str, argv: Sequence[str]) -> Provenance:
    """Describe this process: ``python -m module argv``, here and now."""
    return Provenance(
        command=f"python -m {module} {shlex.join(argv)}".rstrip(),
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=f"{_cpu_name()}, {num_physical_cores()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        num_threads=torch.get_num_threads(),
        load_average=list(psutil.getloadavg()),
        versions={
            "titan": titan.__version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    )


def num_physical_cores() -> int:
    """Return the physical cores that this process may use."""
    num_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or num_usable, num_usable)


def provenance_lines(provenance: Provenance) -> list[str]:
    """Describe a run in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in provenance.versions.items())
    load = ", ".join(f"{value:.2f}" for value in provenance.load_average)
    return [
        f"- command: `{provenance.command}`",
        f"- commit: {provenance.commit}",
        f"- date: {provenance.date}",
        f"- machine: {provenance.machine}; {provenance.num_threads} threads",
        f"- versions: {versions}",
        f"- load average before the run: {load}",
    ]


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int) -> list[str]:
    """Lay out a Markdown table that is also legible in a terminal; columns after the first ones are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        text = [cell.ljust(width) for cell, width in zip(cells[:num_text_columns], widths, strict=False)]
        figures = [cell.rjust(width) for cell, width in zip(cells[num_text_columns:], widths[num_text_columns:], strict=True)]
        return f"| {' | '.join(text + figures)} |"

    rule = ["-" * width if i < num_text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return [line(header), line(rule), *(line(row) for row in rows)]


def write_json(path: Path, provenance: Provenance, options: dict[str, Any], results: dict[str, Sequence[Any]]) -> None:
    """Write a run: ``provenance``, ``options`` (paths as text), and each list of dataclasses under its name."""
    document: dict[str, Any] = {"provenance": asdict(provenance), "options": options}
    document |= {name: [asdict(row) for row in rows] for name, rows in results.items()}
    _write(path, json.dumps(document, indent=2, default=str))


def write_markdown(path: Path, title: str, paragraphs: Sequence[Sequence[str]]) -> None:
    """Write a page: paragraphs are lists of lines."""
    _write(path, "\n\n".join(["# " + title, *("\n".join(lines) for lines in paragraphs if lines)]))


def log(message: str) -> None:
    """Show progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def format_figure(value: float | None, digits: int, *, suffix: str = "", scale: float = 1.0) -> str:
    """Write ``value * scale`` with its suffix; "-" if there is none."""
    return "-" if value is None else f"{value * scale:.{digits}f}{suffix}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _commit() -> str:
    """The checkout's commit, "with changes" if anything but results differs from it; "unknown" outside one."""
    folder = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(folder)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)bench/results"]
        changes = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changes.strip() else commit


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
