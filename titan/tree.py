"""Draft trees: the contract between drafting and verification.

A tree has nodes ``0 .. num_nodes-1``; ``parents[i] < i`` is the node's parent, -1 makes it a child of the **root**,
the last committed token of the request, which is never counted as a node. Node ``i`` writes its KV to slot
``root slot + 1 + i`` while its rope position is ``root position + depth``. A chain is the tree whose parents
are ``-1, 0, 1, ...``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MAX_NODES = 63
"""Most nodes in a tree: the ancestors of a node are the bits of one int64."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """The draft tokens of one request.

    Args:
        token_ids: int64 [num_nodes].
        parents: int32 [num_nodes], topological: ``-1 <= parents[i] < i``.

    Raises:
        ValueError: lengths differ, too many nodes, or parents that are not topological.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int32]

    def __post_init__(self) -> None:
        num_nodes = len(self.token_ids)
        if num_nodes != len(self.parents):
            raise ValueError(f"token_ids has {num_nodes} nodes but parents has {len(self.parents)}: they must be equal")
        if num_nodes > MAX_NODES:
            raise ValueError(f"a draft tree of {num_nodes} nodes is too large: at most {MAX_NODES} are allowed")
        if num_nodes and not ((self.parents >= -1) & (self.parents < np.arange(num_nodes))).all():
            raise ValueError(f"parents={self.parents.tolist()} is not topological: -1 <= parents[i] < i must hold")

    @classmethod
    def chain(cls, token_ids: Sequence[int] | NDArray[np.int64]) -> DraftTree:
        """The tree in which each token follows the one before it."""
        return cls(np.asarray(token_ids, np.int64), chain_parents(len(token_ids)))

    @property
    def num_nodes(self) -> int:
        """Number of draft tokens, the root not counted."""
        return len(self.token_ids)

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root's child down to ``node``; none for the root itself, -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    @property
    def depths(self) -> NDArray[np.int32]:
        """Depth of each node, int32 [num_nodes]; children of the root have depth 1."""
        return topology(self.parents.tobytes()).depths

    @property
    def ancestor_bits(self) -> NDArray[np.int64]:
        """Bit ``j`` of entry ``i`` says that node ``j`` is ``i`` or one of its ancestors: int64 [num_nodes]."""
        return topology(self.parents.tobytes()).ancestor_bits

    @property
    def is_chain(self) -> bool:
        """Whether every node has the node before it as its parent."""
        return topology(self.parents.tobytes()).is_chain


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """What follows from the parents alone; shared by all trees of the same shape."""

    depths: NDArray[np.int32]  # [num_nodes]
    ancestor_bits: NDArray[np.int64]  # [num_nodes]
    is_chain: bool


@lru_cache(maxsize=4096)
def topology(parents: bytes) -> Topology:
    """Derive depths and ancestor bits from int32 parents (given as bytes, so that shapes are computed once)."""
    parent_of = np.frombuffer(parents, np.int32)
    depths = np.zeros(len(parent_of), np.int32)
    bits = np.zeros(len(parent_of), np.uint64)
    for node, parent in enumerate(parent_of.tolist()):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        bits[node] = np.uint64(1 << node) | (np.uint64(0) if parent < 0 else bits[parent])
    is_chain = bool((parent_of == np.arange(len(parent_of)) - 1).all())
    return Topology(depths, bits.view(np.int64), is_chain)


@lru_cache(maxsize=MAX_NODES + 1)
def chain_parents(num_nodes: int) -> NDArray[np.int32]:
    """Parents of a chain: int32 ``-1, 0, 1, ...``."""
    parents = np.arange(num_nodes, dtype=np.int32) - 1
    parents.flags.writeable = False
    return parents


EMPTY_TREE = DraftTree.chain([])
"""No draft tokens: the request decodes one token."""
