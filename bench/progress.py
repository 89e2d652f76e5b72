"""How far a run is and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A bar with the time left on a terminal, a line per finished unit elsewhere; a context manager.

    Args:
        num_units: runs of about the same length.
        clock: seconds; replaced in tests.
    """

    def __init__(self, num_units: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_units = num_units
        self.num_done = 0
        self._clock = clock
        self._first_done = 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = RichProgress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("starting", total=num_units)

    def __enter__(self) -> Progress:
        if self._is_bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Say what goes on now."""
        if self._is_bar:
            self._bar.update(self._task, description=text)
        else:
            log(text)

    def advance(self, text: str) -> None:
        """Count a unit as done; ``text`` says what it was."""
        self.num_done += 1
        if self.num_done == 1:
            self._first_done = self._clock()  # what came before was loading, and does not come again
        if self._is_bar:
            self._bar.update(self._task, advance=1, description=text)
        else:
            left = self.seconds_left
            log(f"{self.num_done}/{self.num_units} {text}" + ("" if left is None else f"; about {left:.0f} s left"))

    def leave_out(self, num_units: int) -> None:
        """Expect fewer units, as a variant does not run or has failed."""
        self.num_units -= num_units
        self._bar.update(self._task, total=self.num_units)

    @property
    def seconds_left(self) -> float | None:
        """Time that the units to come will take at the pace since the first; ``None`` before the second is done."""
        if self.num_done < 2:
            return None
        return (self._clock() - self._first_done) / (self.num_done - 1) * max(0, self.num_units - self.num_done)

    @property
    def _is_bar(self) -> bool:
        return self._bar.console.is_terminal


def log(message: str) -> None:
    """Show a line with the time on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)
