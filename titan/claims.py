"""Ownership of stateful objects (policies, drafters with a cache) that only one engine may use."""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from weakref import WeakSet

from titan.core.checks import shown


class Claims:
    """The objects that one engine owns, as long as it lives."""

    def __init__(self) -> None:
        self._values: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Check that no other engine owns a value.

        Raises:
            ValueError: another one does; ``name`` is the argument in the message.
        """
        with _claiming:
            is_claimed = any(value is claimed for each in _all_claims if each is not self for claimed in each._values)
        if is_claimed:
            raise ValueError(
                f"{name}={shown(value)} is in use by another LLM, whose state it keeps: allowed is one for each, or this one once "
                f"the other LLM is deleted, or has swapped it away if it is a draft"
            )

    def take(self, name: str, value: object) -> None:
        """Claim a value for this engine.

        Raises:
            ValueError: as `check`.
        """
        with _claiming:
            self.check(name, value)
            self._values = (*self._values, value)
            _all_claims.add(self)

    def keep(self, values: Iterable[object]) -> None:
        """Give up all claims except those on these values, which need not all be claimed."""
        kept = [*values]
        self._values = tuple(each for each in self._values if any(each is value for value in kept))


_all_claims: WeakSet[Claims] = WeakSet()
"""The claims of all engines of this process."""
_claiming = RLock()
