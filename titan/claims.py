"""Ownership of stateful objects (policies, drafters with a cache) that only one engine may use, as long as it lives."""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from weakref import WeakValueDictionary

from titan.core.checks import shown


def check_claim(owner: object, name: str, value: object) -> None:
    """Check that no other engine than ``owner`` has claimed a value.

    Raises:
        ValueError: another one has; ``name`` is the argument in the message.
    """
    if _owners.get(id(value), owner) is not owner:
        raise ValueError(
            f"{name}={shown(value)} is in use by another LLM, whose state it keeps: allowed is one for each, or this one once "
            f"the other LLM is deleted, or has swapped it away if it is a draft"
        )


def claim(owner: object, name: str, value: object) -> None:
    """Claim a value for an engine until `keep_claims`. The engine must keep it alive as long, as it is known by its id.

    Raises:
        ValueError: as `check_claim`.
    """
    with _claiming:
        check_claim(owner, name, value)
        _owners[id(value)] = owner


def keep_claims(owner: object, values: Iterable[object]) -> None:
    """Give up all claims of an engine except those on these values, which need not all be claimed."""
    kept = {*map(id, values)}
    with _claiming:
        for key in [key for key, each in _owners.items() if each is owner and key not in kept]:
            del _owners[key]


_owners: WeakValueDictionary[int, object] = WeakValueDictionary()
"""The engines of this process that have claimed a value, by its `id`."""
_claiming = RLock()
