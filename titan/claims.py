"""What keeps the state of one engine, so that no other of this process may use it: a policy, or a drafter with a cache."""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from weakref import WeakSet

from titan.core.checks import shown


class Claims:
    """What one engine has taken; it is given up with the engine."""

    def __init__(self) -> None:
        self._values: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Check that no other engine has taken a value.

        Raises:
            ValueError: another has; the message calls the value by this name.
        """
        with _claiming:
            is_claimed = any(value is claimed for each in _all_claims if each is not self for claimed in each._values)
        if is_claimed:
            raise ValueError(
                f"{name}={shown(value)} is in use by another LLM, whose state it keeps: allowed is one for each, or this one once "
                f"the other LLM is deleted, or has swapped it away if it is a draft"
            )

    def take(self, name: str, value: object) -> None:
        """Take a value.

        Raises:
            ValueError: as `check`.
        """
        with _claiming:
            self.check(name, value)
            self._values = (*self._values, value)
            _all_claims.add(self)

    def keep(self, values: Iterable[object]) -> None:
        """Give up all but these, of which some may never have been taken."""
        kept = [*values]
        self._values = tuple(each for each in self._values if any(each is value for value in kept))


_all_claims: WeakSet[Claims] = WeakSet()
"""Those of this process that may have taken something."""
_claiming = RLock()
