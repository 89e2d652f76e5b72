"""Draft trees: the contract between drafting and verification.

A tree has nodes ``0 .. num_nodes-1``; ``parents[i] < i`` is the node's parent, -1 makes it a child of the **root**,
the last committed token of the request, which is never counted as a node. Node ``i`` writes its KV to slot
``root slot + 1 + i`` while its rope position is ``root position + depth``. A chain is the tree whose parents
are ``-1, 0, 1, ...``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Parents = NDArray[np.int32]

MAX_NODES = 63
"""Most nodes in a tree: the ancestors of a node are the bits of one int64."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """The draft tokens of one request.

    Args:
        token_ids: int64 [num_nodes].
        parents: int32 [num_nodes], topological: ``-1 <= parents[i] < i``.
        draft_probs: float32 [num_inner, vocab], the distributions q that the children of the `inner` nodes were drawn from, one
            after the other without replacement; ``None``: the proposal is deterministic, q is a point mass.
        scores: float32 [num_nodes], cumulative log-probabilities by which the draft chose the nodes; ``None``: they were not chosen
            by probability.
        draft_slots: int32 [num_nodes], where the drafter's own KV of a node is, counted from the slot behind the root; -1 where
            it has none; ``None``: it has none at all.

    Raises:
        ValueError: lengths differ, too many nodes, parents that are not topological, or draft_probs of another dtype.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int32]
    draft_probs: Tensor | None = None
    draft_slots: NDArray[np.int32] | None = None
    scores: NDArray[np.float32] | None = None
    topology: Topology = field(init=False, repr=False)  # what follows from the parents alone

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, np.int64))
        object.__setattr__(self, "parents", np.asarray(self.parents, np.int32))
        num_nodes = len(self.token_ids)
        if num_nodes != len(self.parents):
            raise ValueError(f"token_ids has {num_nodes} nodes but parents has {len(self.parents)}: they must be equal")
        object.__setattr__(self, "topology", topology(self.parents.tobytes()))
        if self.draft_probs is not None and len(self.draft_probs) != len(self.inner):
            raise ValueError(f"draft_probs has {len(self.draft_probs)} rows: the tree has {len(self.inner)} nodes with children")
        if self.draft_probs is not None and self.draft_probs.dtype != torch.float32:
            raise ValueError(f"draft_probs is {self.draft_probs.dtype}: it must be torch.float32, as it was drawn from")

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int] | NDArray[np.int64],
        draft_probs: Tensor | None = None,
        draft_slots: NDArray[np.int32] | None = None,
    ) -> DraftTree:
        """The tree in which each token follows the one before it."""
        return cls(np.asarray(token_ids, np.int64), chain_parents(len(token_ids)), draft_probs, draft_slots)

    @property
    def num_nodes(self) -> int:
        """Number of draft tokens, the root not counted."""
        return len(self.token_ids)

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root's child down to ``node``; none for the root itself, -1."""
        path, parents = [], self.parents.tolist()
        while node >= 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    @property
    def depths(self) -> NDArray[np.int32]:
        """Depth of each node, int32 [num_nodes]; children of the root have depth 1."""
        return self.topology.depths

    @property
    def ancestor_bits(self) -> NDArray[np.int64]:
        """Bit ``j`` of entry ``i`` says that node ``j`` is ``i`` or one of its ancestors: int64 [num_nodes]."""
        return self.topology.ancestor_bits

    @property
    def query_rows(self) -> NDArray[np.int64]:
        """See `Topology.query_rows`."""
        return self.topology.query_rows

    @property
    def inner(self) -> NDArray[np.int32]:
        """The nodes that have children, ascending, the root (-1) first: int32 [num_inner]."""
        return self.topology.inner

    @property
    def is_chain(self) -> bool:
        """Whether every node has the node before it as its parent."""
        return self.topology.is_chain


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """What follows from the parents alone; shared by all trees of the same shape."""

    depths: NDArray[np.int32]  # [num_nodes]
    ancestor_bits: NDArray[np.int64]  # [num_nodes]
    child_ranks: NDArray[np.int64]  # [num_nodes], how many earlier children the node's parent has
    inner: NDArray[np.int32]  # [num_inner], the distinct parents, ascending
    row_depths: NDArray[np.int64]  # [1 + num_nodes], of the root and the nodes
    inner_rows: NDArray[np.int64]  # [1 + num_nodes], places of the root and the nodes among the inner ones; -1 for a leaf
    max_depth: int
    is_chain: bool
    # of the root and the nodes as queries, int64 [4, 1 + num_nodes]: slots, positions and ends of the visible context, each counted
    # from the root's slot, and ancestor bits; each node of a chain sees whatever lies before it, without bits
    query_rows: NDArray[np.int64]


@lru_cache(maxsize=4096)
def topology(parents: bytes) -> Topology:
    """Derive a tree's topology from its int32 parents (given as bytes, so that each shape is looked at once).

    Raises:
        ValueError: too many nodes, or parents that are not topological.
    """
    parent_of = np.frombuffer(parents, np.int32)
    _check_parents(parent_of)
    depths = np.zeros(len(parent_of), np.int32)
    bits = np.zeros(len(parent_of), np.uint64)
    ranks = np.zeros(len(parent_of), np.int64)
    num_children: dict[int, int] = {}
    for node, parent in enumerate(parent_of.tolist()):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        bits[node] = np.uint64(1 << node) | (np.uint64(0) if parent < 0 else bits[parent])
        ranks[node] = num_children.get(parent, 0)
        num_children[parent] = int(ranks[node]) + 1
    is_chain = bool((parent_of == np.arange(len(parent_of)) - 1).all())
    inner = np.unique(parent_of)
    inner_rows = np.full(1 + len(parent_of), -1)
    inner_rows[1 + inner] = np.arange(len(inner))
    row_depths = np.append(0, depths)
    arrays = depths, bits.view(np.int64), ranks, inner, row_depths, inner_rows
    rows = query_rows(row_depths, None if is_chain else bits.view(np.int64))
    for array in (*arrays, rows):
        array.flags.writeable = False  # shared by all trees of the shape
    return Topology(*arrays, int(depths.max(initial=0)), is_chain, rows)


def query_rows(row_depths: NDArray[np.int64], ancestor_bits: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """`Topology.query_rows` of a tree.

    Args:
        row_depths: [1 + num_nodes], of the root and the nodes.
        ancestor_bits: [num_nodes]; ``None`` for a chain.
    """
    slots = np.arange(len(row_depths))
    if ancestor_bits is None:
        return np.stack((slots, slots, slots + 1, np.zeros_like(slots)))
    return np.stack((slots, row_depths, np.ones_like(slots), np.append(0, ancestor_bits)))


def _check_parents(parents: Parents) -> None:
    num_nodes = len(parents)
    if num_nodes > MAX_NODES:
        raise ValueError(f"a draft tree of {num_nodes} nodes is too large: at most {MAX_NODES} are allowed")
    if num_nodes and not ((parents >= -1) & (parents < np.arange(num_nodes))).all():
        raise ValueError(f"parents={parents.tolist()} is not topological: -1 <= parents[i] < i must hold")


@lru_cache(maxsize=MAX_NODES + 1)
def chain_parents(num_nodes: int) -> NDArray[np.int32]:
    """Parents of a chain: int32 ``-1, 0, 1, ...``."""
    parents = np.arange(num_nodes, dtype=np.int32) - 1
    parents.flags.writeable = False
    return parents


EMPTY_TREE = DraftTree.chain([])
"""No draft tokens: the request decodes one token."""
