"""A heap whose items can be removed and given other keys."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Heap(Generic[T]):
    """Items in order of their keys, those with equal keys in order of arrival.

    A removed item stays in the list until it comes to the top, removed items are the majority, or no item is left.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._entries: dict[T, tuple[Any, int, T]] = {}  # of all items but removed ones
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: T, key: Any) -> None:
        """Add an item, or give it another key."""
        entry = self._entries[item] = key, next(self._numbers), item
        heappush(self._heap, entry)

    def discard(self, item: T) -> None:
        """Remove an item, if it is there."""
        self._entries.pop(item, None)
        if not self._entries or len(self._heap) > 2 * len(self._entries) + 16:
            heap = list(self._entries.values())
            heapify(heap)
            self._heap = heap

    def top(self) -> tuple[T, Any]:
        """Return the item of the least key, and its key; there must be one."""
        heap = self._heap
        while self._entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        key, _, item = heap[0]
        return item, key
