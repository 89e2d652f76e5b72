"""Checks of options: a `ValueError` names the argument, the value and what is allowed."""

from __future__ import annotations


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse what is no integer from ``low`` to ``high``; ``None`` = any number of them."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name}={value!r} is not allowed: it must be {allowed}")


def check_bool(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not allowed: it must be True or False")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse what is not among the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; allowed: {', '.join(map(repr, allowed))}")
