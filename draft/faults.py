"""What becomes of what a drafter raises: a warning, since a step needs no drafts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from titan.draft.base import Drafter

T = TypeVar("T")


def answer_of(drafter: Drafter, ask: Callable[[], T], otherwise: T) -> T:
    """Return what a drafter answers; if it raises, warn of it, and return ``otherwise``."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, it costs drafts and no request
        message = f"the drafter {drafter.name!r} failed, which costs drafts and no request: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return otherwise
