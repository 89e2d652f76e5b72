"""Variants of a measurement that share an engine: one that fails is left out from then on, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from titan.bench.engine_run import make_idle
from titan.bench.peers.client import PeerError
from titan.engine import Engine

T = TypeVar("T")


class Survivors:
    """Runs variants as long as they do not fail.

    Args:
        engine: that they share; idle after a failure.
        problems: gets a line for each variant that fails.
    """

    def __init__(self, engine: Engine, problems: list[str]) -> None:
        self._engine = engine
        self._problems = problems
        self._failed: set[str] = set()

    def attempt(self, variant: str, place: str, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns; ``None`` if it fails, or if its variant failed before.

        Args:
            variant: whose work it is.
            place: where in the measurement, such as "at 8 requests/s".
            work: returns no ``None``.
        """
        if variant in self._failed:
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever ends one variant, the others go on
            self._failed.add(variant)
            self._problems.append(f"{variant} ended {place}: {error_line(error)}")
            make_idle(self._engine)
            return None


def error_line(error: Exception) -> str:
    """What went wrong, in one line; errors whose message is meant for people need no name."""
    text = str(error) if isinstance(error, (ValueError, PeerError)) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
