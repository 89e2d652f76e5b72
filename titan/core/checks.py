"""Checks of option values: each raises a `ValueError` that names the argument, the value and what is allowed."""

from __future__ import annotations


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check that a value is an integer from ``low`` to ``high``; ``None`` = no upper bound."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name}={value!r} is not allowed: it must be {allowed}")


def check_bool(name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not allowed: it must be True or False")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check that a value is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; allowed: {', '.join(map(repr, allowed))}")


def check_text(name: str, value: object) -> None:
    """Check that a value is text that is not empty, or ``None``."""
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{name}={value!r} is not allowed: it must be a non-empty str or None")
