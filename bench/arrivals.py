"""When requests arrive, whatever the engine does (an open loop): drawn, Poisson or in bursts, or as a trace says."""

from __future__ import annotations

import random
import re
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from titan.bench.workloads import read_text

BURSTY = re.compile(r"bursty(?::(\d*\.?\d+))?")
TRACE_LINE = re.compile(r"\s*(-?\d+\.?\d*)[\s,]+([1-9]\d*)[\s,]+([1-9]\d*)\s*")


class TraceEntry(NamedTuple):
    """One request of a trace."""

    time: float  # seconds after the first
    prompt_len: int  # tokens
    output_len: int  # tokens


def read_variation(text: str) -> float:
    """Read "poisson", which is 1, "bursty", which is 3, or "bursty:5": the coefficient of variation of the gaps.

    Raises:
        ValueError: it is none of them.
    """
    bursty = BURSTY.fullmatch(text)
    variation = 1.0 if text == "poisson" else float(bursty[1] or 3) if bursty else 0.0
    if not variation:
        allowed = "poisson, bursty, bursty:VARIATION with a number above 0, or a trace's file"
        raise ValueError(f"arrivals {text!r} are not allowed: they must be {allowed}")
    return variation


def draw_arrivals(variation: float, num_requests: int, seed: int) -> list[float]:
    """Seconds, from 0 on, with a mean gap of 1 s; gaps are independent and gamma distributed.

    Args:
        variation: coefficient of variation of the gaps: at 1 it is a Poisson process, above 1 requests come in bursts.
        num_requests: how many, at least 1.
        seed: the same gives the same times.
    """
    generator = random.Random(seed)
    shape = 1 / variation**2
    return list(accumulate((generator.gammavariate(shape, 1 / shape) for _ in range(num_requests - 1)), initial=0.0))


def read_trace(path: Path) -> list[TraceEntry]:
    """Read a trace: lines of time in seconds, prompt tokens and output tokens, apart by commas or blanks.

    Empty lines and those that begin with # are left out. Requests come in the order of their times, which count from the first.

    Raises:
        ValueError: the file is no text, a line is none of this, or there is no request.
    """
    name = f"trace {str(path)!r}"
    entries: list[TraceEntry] = []
    for number, line in enumerate(read_text(path, name).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = TRACE_LINE.fullmatch(line)
        if match is None:
            allowed = "time in seconds, prompt tokens, output tokens, 1 or more of each"
            raise ValueError(f"{name}, line {number}: {line!r} is not allowed: it must be {allowed}")
        entries.append(TraceEntry(float(match[1]), int(match[2]), int(match[3])))
    if not entries:
        raise ValueError(f"{name} is empty: it must have a line per request")
    entries.sort(key=lambda entry: entry.time)
    return [entry._replace(time=entry.time - entries[0].time) for entry in entries]
