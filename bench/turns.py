"""Variants of a measurement take turns; one that fails is left out from then on, and the others go on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from tqdm import tqdm

from titan.bench.peers.client import PeerError

T = TypeVar("T")


class Turns:
    """Gives variants their turns, with a progress bar on stderr; a context manager.

    Args:
        num_turns: that are to come; without any, there is no bar.
        problems: gets a line for each variant that fails.
        recover: is told which variant failed, and makes what the variants share ready for the next.
    """

    def __init__(self, num_turns: int, problems: list[str], recover: Callable[[str], None]) -> None:
        self._problems = problems
        self._recover = recover
        self._failed: set[str] = set()
        self._bar = tqdm(total=num_turns, file=sys.stderr, unit="run", dynamic_ncols=True, disable=not num_turns)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def take(self, variant: str, place: str, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns; ``None`` if it fails, or if its variant failed before.

        Args:
            variant: whose turn it is.
            place: where in the measurement, such as "at 8 requests/s".
            work: returns no ``None``.
        """
        try:
            return self.part(variant, place, work)
        finally:
            self.end()

    def part(self, variant: str, place: str, work: Callable[[], T]) -> T | None:
        """Do a part of a turn, as `take` does all of it; `end` ends it."""
        self._bar.set_description(f"{variant} {place}")
        try:
            return None if variant in self._failed else work()
        except Exception as error:  # noqa: BLE001 - whatever ends one variant, the others go on
            self._failed.add(variant)
            self._problems.append(f"{variant} ended {place}: {error_line(error)}")
            self._recover(variant)
            return None

    def end(self) -> None:
        """Count a turn."""
        self._bar.update()


def error_line(error: Exception) -> str:
    """What went wrong, in one line; errors whose message is meant for people need no name."""
    text = str(error) if isinstance(error, (ValueError, PeerError)) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def log(message: str) -> None:
    """Show a line with the time on stderr."""
    tqdm.write(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr)
