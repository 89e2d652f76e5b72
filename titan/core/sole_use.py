"""What keeps the state of one engine, and must not be given to a second one: drafters with KV, scheduling policies."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from titan.core.checks import shown

_uses: WeakKeyDictionary[object, dict[str, object]] = WeakKeyDictionary()
"""By user: what it uses, by the argument that it was given as."""


def check_unused(user: object, name: str, value: object) -> None:
    """Refuse what another user uses.

    Raises:
        ValueError: it is in use.
    """
    if any(given is value for other, uses in list(_uses.items()) if other is not user for given in uses.values()):
        raise ValueError(
            f"{name}={shown(value)} is in use by another LLM, whose state it keeps: allowed is one for each, or this one once the "
            f"other LLM is deleted or has swapped it away"
        )


def use(user: object, name: str, value: object) -> None:
    """Note that a user uses this from now on, in place of what it was given as the same argument."""
    _uses.setdefault(user, {})[name] = value
