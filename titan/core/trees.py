"""Draft trees: the contract between drafting and verification.

A tree has nodes ``0 .. num_nodes - 1``; ``parents[i] < i`` is the parent of node ``i``, or -1 if that is the **root**: the last
committed token of the request, which is never counted as a node. Node ``i`` writes its KV to slot ``root slot + 1 + i``, while its
rope position is ``root position + depth``. A chain is the tree whose parents are ``-1, 0, 1, ...``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.limits import MAX_NODES

Parents = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Properties of a tree that follow from its parents; shared by all trees of the same shape."""

    depths: Ints  # [num_nodes], children of the root have depth 1
    ancestor_bits: Ints  # [num_nodes]; bit j of entry i says that node j is i or one of its ancestors
    child_ranks: Ints  # [num_nodes], number of earlier children of the node's parent
    inner: Ints  # [num_inner], the distinct parents, ascending: the root (-1) and the nodes that have children
    inner_rows: Ints  # [1 + num_nodes], indices of the root and the nodes among the inner ones; 0 for a leaf
    is_chain: bool


@lru_cache(maxsize=4096)
def topology(parents: bytes) -> Topology:
    """Derive a tree's topology from its int32 parents (given as bytes, so that the result is cached by shape).

    Raises:
        ValueError: there are too many nodes, or the parents are not topological.
    """
    parent_of = np.frombuffer(parents, np.int32)
    num_nodes = len(parent_of)
    if num_nodes > MAX_NODES:
        raise ValueError(f"a draft tree of {num_nodes} nodes is too large: at most {MAX_NODES} are allowed")
    if not ((parent_of >= -1) & (parent_of < np.arange(num_nodes))).all():
        raise ValueError(f"parents={parent_of.tolist()} is not topological: -1 <= parents[i] < i must hold")
    depths, bits, ranks = np.zeros((3, num_nodes), np.int64)
    num_children: dict[int, int] = {}
    for node, parent in enumerate(parent_of.tolist()):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        bits[node] = 1 << node | (0 if parent < 0 else int(bits[parent]))
        ranks[node] = num_children.get(parent, 0)
        num_children[parent] = int(ranks[node]) + 1
    inner = np.unique(parent_of).astype(np.int64)
    inner_rows = np.zeros(1 + num_nodes, np.int64)
    inner_rows[1 + inner] = np.arange(len(inner))
    for array in (depths, bits, ranks, inner, inner_rows):
        array.flags.writeable = False  # shared by all trees of the shape
    return Topology(
        depths=depths,
        ancestor_bits=bits,
        child_ranks=ranks,
        inner=inner,
        inner_rows=inner_rows,
        is_chain=bool((parent_of == np.arange(num_nodes) - 1).all()),
    )


@lru_cache(maxsize=MAX_NODES + 1)
def chain_parents(num_nodes: int) -> Parents:
    """Return the parents of a chain: int32 ``-1, 0, 1, ...``."""
    parents = np.arange(num_nodes, dtype=np.int32) - 1
    parents.flags.writeable = False
    return parents


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """The draft tokens of one request, as a drafter may return them; also a view of one row of `DraftTrees`.

    Args:
        token_ids: int64 [num_nodes].
        parents: int32 [num_nodes], topological: ``-1 <= parents[i] < i``.
        draft_probs: float32 [num_inner, vocab], q of the inner nodes (see `Topology`): their children were sampled from it, one
            after another without replacement. ``None``: the proposal is deterministic, q is a point mass.
        draft_slots: int32 [num_nodes], slots where the drafter's own KV of the nodes is, counted from the slot after the root; -1 =
            none of this node; ``None``: none of any node.
        scores: float32 [num_nodes], cumulative log-probabilities by which the draft chose the nodes: at most 0, and at most that of
            the parent. ``None``: nodes were not chosen by probability.

    Raises:
        ValueError: shapes differ, integers are not whole, there are too many nodes, the parents are not topological, or draft_probs
            is not a float32 tensor.
    """

    token_ids: Ints
    parents: Parents
    draft_probs: Tensor | None = None
    draft_slots: NDArray[np.int32] | None = None
    scores: NDArray[np.float32] | None = None
    topology: Topology = field(init=False, repr=False)  # depends only on the parents

    def __post_init__(self) -> None:
        dtypes = {"token_ids": np.int64, "parents": np.int32, "draft_slots": np.int32, "scores": np.float32}
        num_nodes = self.num_nodes
        for name, dtype in dtypes.items():
            if getattr(self, name) is None:
                continue
            given = np.asarray(getattr(self, name))
            if given.shape != (num_nodes,):
                raise ValueError(f"{name} has shape {list(given.shape)}: it must be [{num_nodes}], one per node")
            values = given.astype(dtype, copy=False)
            if values is not given and dtype != np.float32 and (values != given).any():
                raise ValueError(f"{name} has {given.tolist()}: they must be integers")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "topology", topology(self.parents.tobytes()))
        if self.draft_probs is None:
            return
        if not isinstance(self.draft_probs, Tensor) or self.draft_probs.dtype != torch.float32:
            found = getattr(self.draft_probs, "dtype", None)
            raise ValueError(
                f"draft_probs is a {type(self.draft_probs).__name__} of {found}: it must be a torch tensor of torch.float32, the "
                f"distribution that was sampled from"
            )
        num_inner = len(self.topology.inner)
        if len(self.draft_probs) != num_inner:
            raise ValueError(f"draft_probs has {len(self.draft_probs)} rows: the tree has {num_inner} nodes with children")

    @classmethod
    def chain(cls, token_ids: Sequence[int] | Ints, draft_probs: Tensor | None = None) -> DraftTree:
        """Return the tree in which each token follows the one before it."""
        return cls(np.asarray(token_ids), chain_parents(len(token_ids)), draft_probs)

    @property
    def num_nodes(self) -> int:
        """Number of draft tokens, the root not counted."""
        return len(self.token_ids)


EMPTY_TREE = DraftTree.chain([])
"""A tree without draft tokens: the request decodes one token."""


Upload = Callable[[Sequence[NDArray[Any]]], list[Tensor]]
"""Uploads arrays to a device."""


Column = TypeVar("Column")


class NodeColumns(NamedTuple, Generic[Column]):
    """Columns of a table of N places for nodes: tensors or arrays."""

    token_ids: Column  # int64 [N]; -1 = empty
    parents: Column  # int32 [N], index within the tree; -1 = the root, -2 = none, in an empty place
    depths: Column  # int64 [N], 1 for children of the root; 1 in an empty place
    ancestor_bits: Column  # int64 [N], bits of the node and its ancestors; of an empty place, its own bit alone
    scores: Column  # float32 [N], cumulative log-probabilities; -inf in an empty place
    draft_slots: Column  # int32 [N], slot of the draft's KV, counted from the slot after the root; -1 = none


NODE_DTYPES = NodeColumns(torch.int64, torch.int32, torch.int64, torch.int64, torch.float32, torch.int32)
"""Dtypes of the tensors of `NodeColumns`."""


class GrowthReport(NamedTuple):
    """The cost of growing the trees of a step with a draft model, and the model's confidence."""

    num_passes: int
    num_rows: int  # tokens of all these passes
    seconds: float | None  # duration of all these passes, above 0; None where the host does not wait for them
    # float32 [R], log-probability of the first child of each root, even if it was dropped; NaN: unknown
    first_scores: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class DraftTrees:
    """The trees of a step, one per row of its plan, R rows; tensors are on the device that verifies them.

    The host knows how many **places** each tree has, N in total, but not how many of them hold a token. The others, at the end of a
    tree, are **empty**: they are children of no node, so that nothing is ever accepted there. Where tensors are in the host's
    memory, trees have no empty places: each would be a row of the target's pass.
    """

    start_loc: Ints  # [R + 1], on the host: prefix sums of places
    is_chain: Flags  # [R], on the host: whether the tree is known to be a chain
    is_sampled: Flags  # [R], on the host: whether its tokens were sampled from q
    has_scores: Flags  # [R], on the host: whether its nodes were chosen by their scores
    nodes: NodeColumns[Any]  # tensors; arrays if the trees are on the host
    draft_probs: Tensor | None = None  # float32 [any, vocab], the distributions q
    # int32 [N + R], rows of draft_probs: per tree that of the root, then those of its nodes; their children were sampled from them.
    # Arbitrary for leaves, and for trees that were not sampled
    draft_rows: Tensor | None = None
    growth: GrowthReport | None = None  # None: not grown by a draft model

    @property
    def num_rows(self) -> int:
        """Number of rows of the plan, R."""
        return len(self.start_loc) - 1

    @property
    def num_nodes(self) -> int:
        """Number of places of all trees, N."""
        return int(self.start_loc[-1])

    @property
    def counts(self) -> Ints:
        """Number of places of each tree, [R]."""
        return self.start_loc[1:] - self.start_loc[:-1]

    @staticmethod
    @lru_cache(maxsize=1024)
    def empty(num_rows: int, device: torch.device | None = None) -> DraftTrees:
        """Return empty trees for all rows, on the device; ``None`` = on the host."""
        flags = np.zeros(num_rows, np.bool_)
        start_loc = np.zeros(num_rows + 1, np.int64)
        flags.flags.writeable = start_loc.flags.writeable = False  # shared by all steps
        nodes: NodeColumns[Any] = allocate_nodes(0, device)
        if device is None:
            nodes = NodeColumns(*(column.numpy() for column in nodes))
        return DraftTrees(start_loc, is_chain=flags, is_sampled=flags, has_scores=flags, nodes=nodes)

    def on_host(self, nodes: Sequence[NDArray[Any]]) -> DraftTrees:
        """Return the trees on the host, without empty places and without q.

        Args:
            nodes: copies of the node columns on the host.
        """
        return replace(self, nodes=NodeColumns(*nodes), draft_probs=None, draft_rows=None)._without_empty_places()

    def without_nodes(self) -> DraftTrees:
        """Return empty trees for all rows, on the host, with the report of this growth."""
        empty = DraftTrees.empty(self.num_rows)
        return empty if self.growth is None else replace(empty, growth=self.growth)

    def packed(self) -> DraftTrees:
        """Return the trees without empty places, and with `is_chain` set for each chain; tensors must be in the host's memory."""
        trees = self._without_empty_places()
        parents, bounds = np.asarray(trees.nodes.parents), pairwise(trees.start_loc.tolist())
        is_chain = [np.array_equal(parents[first:last], chain_parents(last - first)) for first, last in bounds]
        return replace(trees, is_chain=np.array(is_chain))

    def _without_empty_places(self) -> DraftTrees:
        is_node = self.nodes.token_ids >= 0
        if is_node.all():
            return self
        start_loc = np.concatenate(([0], np.asarray(is_node).cumsum()))[self.start_loc]
        nodes, draft_rows = NodeColumns(*(column[is_node] for column in self.nodes)), self.draft_rows
        if draft_rows is not None:  # each root has an entry before those of its nodes
            draft_rows = draft_rows[np.insert(np.asarray(is_node), self.start_loc[:-1], True)]
        return replace(self, start_loc=start_loc, nodes=nodes, draft_rows=draft_rows)

    def __getitem__(self, row: int) -> DraftTree:
        """Return the tree of one row, with its q as long as the trees have it; they must be on the host."""
        first, end = int(self.start_loc[row]), int(self.start_loc[row + 1])
        token_ids, parents, *_, scores, draft_slots = (column[first:end] for column in self.nodes)
        tree = DraftTree(token_ids, parents, draft_slots=draft_slots, scores=scores if self.has_scores[row] else None)
        if self.draft_probs is None or self.draft_rows is None or not self.is_sampled[row] or not tree.num_nodes:
            return tree
        inner = torch.from_numpy(first + row + 1 + tree.topology.inner)
        return replace(tree, draft_probs=self.draft_probs[self.draft_rows[inner].long()])


def allocate_nodes(num_nodes: int, device: torch.device | None) -> NodeColumns[Tensor]:
    """Allocate uninitialised columns for ``num_nodes`` nodes."""
    return NodeColumns(*(torch.empty(num_nodes, dtype=dtype, device=device) for dtype in NODE_DTYPES))
