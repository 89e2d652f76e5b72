"""When requests arrive, whatever the engine does (an open loop): Poisson, bursty, or as a trace says."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

POISSON = "poisson"
BURSTY = "bursty"
BURSTY_VARIATION = 3.0
"""Coefficient of variation of "bursty", unless it is given."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace."""

    time: float  # seconds after the first
    prompt_len: int  # tokens
    output_len: int  # tokens


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Arrivals whose gaps are independent and gamma distributed; with a variation of 1 they are a Poisson process.

    Args:
        variation: coefficient of variation of the gaps, their standard deviation over their mean; above 1 arrivals come in bursts.

    Raises:
        ValueError: ``variation`` is not a positive number.
    """

    variation: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.variation) and self.variation > 0):
            raise ValueError(f"a coefficient of variation of {self.variation} is not allowed: it must be above 0")

    @classmethod
    def parse(cls, text: str) -> ArrivalProcess:
        """Read "poisson", "bursty" or, with a coefficient of variation, "bursty:5".

        Raises:
            ValueError: it is none of them.
        """
        name, _, variation = text.partition(":")
        try:
            if name == POISSON and not variation:
                return cls()
            if name == BURSTY:
                return cls(float(variation or BURSTY_VARIATION))
        except ValueError as error:
            raise ValueError(f"arrivals {text!r} are not allowed: after {BURSTY}: stands a number above 0") from error
        raise ValueError(f"arrivals {text!r} are unknown: allowed are {POISSON}, {BURSTY}, {BURSTY}:VARIATION, or a trace's file")

    def times(self, rate: float, seed: int) -> Iterator[float]:
        """Yield times without end, in seconds; the first request arrives at 0.

        Args:
            rate: mean arrivals per second.
            seed: the same gives the same times.

        Raises:
            ValueError: ``rate`` is not positive.
        """
        _check_rate(rate)
        generator = random.Random(seed)
        shape = 1 / self.variation**2
        time = 0.0
        while True:
            yield time
            time += generator.gammavariate(shape, 1 / (rate * shape))


def read_trace(path: Path) -> list[TraceEntry]:
    """Read a trace: lines of time in seconds, prompt tokens and output tokens, apart by commas or blanks.

    Empty lines and those that begin with # are left out. Times count from the first.

    Raises:
        ValueError: the file is no text, a line is none of this, times go back, or there is no request; the message names the line.
    """
    entries: list[TraceEntry] = []
    start = 0.0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"trace {str(path)!r} is not allowed: the file is no text in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        fields = line.replace(",", " ").split()
        if not fields or fields[0].startswith("#"):
            continue
        where = f"trace {str(path)!r}, line {number}: {line!r}"
        try:
            time, prompt_len, output_len = float(fields[0]), int(fields[1]), int(fields[2])
        except (ValueError, IndexError) as error:
            raise ValueError(f"{where} is not allowed: it must be time in seconds, prompt tokens, output tokens") from error
        if len(fields) > 3 or not math.isfinite(time) or prompt_len < 1 or output_len < 1:
            raise ValueError(f"{where} is not allowed: three numbers, and at least one token of prompt and of output")
        if not entries:
            start = time
        if entries and time - start < entries[-1].time:
            raise ValueError(f"{where} goes back in time: requests must come in the order of their arrival")
        entries.append(TraceEntry(time - start, prompt_len, output_len))
    if not entries:
        raise ValueError(f"trace {str(path)!r} is empty: it must have a line per request")
    return entries


def mean_rate(times: Sequence[float]) -> float:
    """Requests per second of ascending arrival times: gaps over the time that they take.

    Raises:
        ValueError: all arrive together, so that there is no rate.
    """
    if len(times) < 2 or times[-1] <= times[0]:
        raise ValueError("requests that all arrive at once have no rate: at least two different times are needed")
    return (len(times) - 1) / (times[-1] - times[0])


def stretch(entries: Sequence[TraceEntry], rate: float) -> list[TraceEntry]:
    """Replay a trace faster or slower, so that its mean rate is ``rate`` requests per second.

    Raises:
        ValueError: ``rate`` is not positive, or the trace has no rate.
    """
    _check_rate(rate)
    factor = mean_rate([entry.time for entry in entries]) / rate
    return [TraceEntry(entry.time * factor, entry.prompt_len, entry.output_len) for entry in entries]


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate={rate} is not allowed: it must be above 0")
