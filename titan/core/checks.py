"""Checks of option values: each raises a `ValueError` that names the argument, the value and what is allowed.

They return the value as Python's own type: NumPy's scalars, arrays and tensors are taken wherever numbers and lists of them are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from functools import partial
from itertools import islice
from math import inf, isfinite, nan
from numbers import Integral, Real
from os import PathLike, fspath
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np

Choice = TypeVar("Choice")
Value = TypeVar("Value")

MAX_SHOWN = 200
"""Characters of a value, and of a text in it, in a message."""
MAX_NAMES = 5
"""Unknown names in a message."""
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = MAX_SHOWN


def shown(value: object) -> str:
    """Return what a message shows of a value: one line of bounded length, as Python would write it where that is short."""
    try:
        text = " ".join(_REPR.repr(value).splitlines())
    except ValueError:  # an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 2 * MAX_SHOWN else f"{text[:MAX_SHOWN]}...{text[-MAX_SHOWN:]}"


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or NumPy; truth values are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return a value that must be an integer from ``low`` to ``high``; ``None`` = no upper bound."""
    if not is_integer(value) or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name}={shown(value)} is not allowed: it must be {allowed}")
    return int(value)  # type: ignore[call-overload,no-any-return]


def check_number(name: str, value: object, *, low: float, high: float | None = None, open_low: bool = False) -> float:
    """Return a value that must be a number in these bounds, and finite in float32, as the engine uses it."""
    number = nan if isinstance(value, bool) or not isinstance(value, Real) else _as_float(value)
    used = as_float32(number)
    if not isfinite(used) or number < low or (open_low and used == low) or (high is not None and number > high):
        bounds = f"{'(' if open_low else '['}{low:g}, {'inf)' if high is None else f'{high:g}]'}"
        raise ValueError(f"{name}={shown(value)} is not allowed: it must be a number in {bounds}")
    return number


def check_bool(name: str, value: object) -> bool:
    """Return a value that must be True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={shown(value)} is not allowed: it must be True or False")
    return bool(value)


def check_choice(name: str, value: object, allowed: tuple[Choice, ...]) -> Choice:
    """Return the one of the allowed values that a value equals."""
    for choice in allowed:
        if isinstance(value, Hashable) and value == choice:
            return choice
    raise ValueError(f"{name}={shown(value)} is not supported; allowed: {', '.join(map(repr, allowed))}")


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return inf


def as_float32(value: float) -> float:
    """Round a number to float32."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return inf


def as_list(value: Any) -> Any:
    """Return the numbers of an array or a tensor as nested lists; anything else, and a tensor that cannot be listed, as it is."""
    try:
        return value.tolist()
    except (AttributeError, RuntimeError, NotImplementedError):
        return value


def option(default: Value, check: Callable[..., object], **allowed: object) -> Value:
    """Return a field of a frozen dataclass, whose value becomes ``check(name, value, **allowed)`` by `check_options`."""
    return field(default=default, metadata={"check": partial(check, **allowed)})


def optional(check: Callable[..., Value]) -> Callable[..., Value | None]:
    """Return a check that allows ``None`` as well."""
    return lambda name, value, **allowed: None if value is None else check(name, value, **allowed)


def check_options(options: Any) -> None:
    """Check the fields of a dataclass, all of them made by `option`, while it is made."""
    for each in fields(options):
        object.__setattr__(options, each.name, each.metadata["check"](each.name, getattr(options, each.name)))


def unknown_names(unknown: Iterable[str], allowed: Sequence[str], noun: str = "option") -> str:
    """Return a message on names that there are not, with the closest of the allowed ones, or all where a name is close to none."""
    listed, all_close = [], True
    for name in islice(unknown, MAX_NAMES):
        close = get_close_matches(name[:MAX_SHOWN], allowed, n=1, cutoff=0.65)
        listed.append(f"{shown(name)} (did you mean {close[0]!r}?)" if close else shown(name))
        all_close &= bool(close)
    return f"there is no {noun} {', '.join(listed)}" + ("" if all_close else f"; allowed: {', '.join(allowed)}")


def check_text(name: str, value: object, allowed: str = "a non-empty str or None") -> str | None:
    """Return a value that must be text that is not empty, or ``None``."""
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{name}={shown(value)} is not allowed: it must be {allowed}")
    return value


def check_path(name: str, value: object) -> str | None:
    """Return as text a value that must be a path, text that is not empty, or ``None``."""
    return check_text(name, fspath(value) if isinstance(value, PathLike) else value, "a non-empty str, a path or None")


def check_characters(name: str, text: str) -> None:
    """Refuse text that UTF-8 cannot hold, which tokenizers fail at."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{name}={shown(text)} has a surrogate, which is half a character: allowed is what UTF-8 can hold")


def missing_members(value: object, protocol: type) -> list[str]:
    """Return the names of the members of a protocol that an object lacks.

    Unlike `isinstance` from Python 3.12 on, this finds members that come from `__getattr__`, as those of a wrapper do.
    """
    annotated = [name for each in protocol.__mro__ for name in getattr(each, "__annotations__", ())]
    return [name for name in sorted({*dir(protocol), *annotated}) if not name.startswith("_") and not hasattr(value, name)]
