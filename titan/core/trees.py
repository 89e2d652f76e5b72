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
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.checks import shown
from titan.core.limits import MAX_NODES

Parents = NDArray[np.int32]

MASS_TOLERANCE = 0.01
"""Largest difference of the sum of a q from 1; rounding to bfloat16 stays below it."""


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


class TreeLimits(NamedTuple):
    """Limits on what a drafter may propose, one entry per row of a plan."""

    num_nodes: Sequence[int]
    may_sample: Sequence[bool]  # whether tokens may be sampled: at temperatures above 0 only
    num_slots: Sequence[int]  # reserved after the root


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

    @classmethod
    def placeholder_chains(cls, lengths: Sequence[int], upload: Upload, device: torch.device) -> DraftTrees:
        """Return chains of these lengths with tokens 0, for passes that are only run to be measured."""
        limits = TreeLimits(lengths, [False] * len(lengths), lengths)
        chains = [DraftTree.chain([0] * length) for length in lengths]
        return cls.of(chains, limits, drafter="profile", vocab_size=1, upload=upload, device=device)

    @classmethod
    def of(
        cls,
        proposal: Sequence[DraftTree] | DraftTrees,
        limits: TreeLimits,
        *,
        drafter: str,
        vocab_size: int,
        upload: Upload,
        device: torch.device,
    ) -> DraftTrees:
        """Check a drafter's proposal, before it could touch slots or embeddings outside its request.

        Of each `DraftTree`, tokens, slots, shape, scores and q are checked. Of `DraftTrees`, whose values may be on a device, only
        shapes, dtypes and devices are checked. The drafter is responsible for the values: tokens are in the vocabulary, parents
        precede their children, no score is above its parent's, siblings of sampled trees differ, and all ``draft_rows`` exist.

        Args:
            proposal: one tree per row of the plan, or all trees on the device.
            limits: of the rows.
            drafter: its name, for errors.
            vocab_size: of the target.
            upload: uploads arrays to the device; ``draft_probs`` must be there already.
            device: where the trees are verified.

        Raises:
            ValueError: the proposal breaks a rule; the message has what was found and what is allowed.
        """
        if isinstance(proposal, DraftTrees):
            num_rows = proposal.num_rows
        elif isinstance(proposal, Sequence) and all(isinstance(tree, DraftTree) for tree in proposal):
            num_rows = len(proposal)
        else:
            raise ValueError(
                f"the drafter {drafter!r} proposed {shown(proposal)}: propose() must return a list of one DraftTree per row of the "
                f"plan, or DraftTrees"
            )
        if num_rows != len(limits.num_nodes):
            raise ValueError(f"the drafter {drafter!r} proposed {num_rows} trees: the plan has {len(limits.num_nodes)} rows")
        if isinstance(proposal, DraftTrees):
            proposal._check(limits, drafter, vocab_size, device)
            return proposal
        if not any(len(tree.token_ids) for tree in proposal):
            return cls.empty(num_rows, device)
        for tree, most, may_sample, num_slots in zip(proposal, *limits, strict=True):
            _check_tree(tree, most, may_sample, num_slots, drafter, vocab_size, device)
        return cls._join(proposal, upload)

    @classmethod
    def _join(cls, trees: Sequence[DraftTree], upload: Upload) -> DraftTrees:
        is_sampled = [tree.draft_probs is not None and tree.num_nodes > 0 for tree in trees]
        draft_rows = list[Ints]()
        num_inner = 0  # inner nodes of the sampled trees so far
        for tree, has_probs in zip(trees, is_sampled, strict=True):
            draft_rows.append(num_inner + tree.topology.inner_rows)
            num_inner += len(tree.topology.inner) if has_probs else 0
        columns_of_trees = (  # in the order of `NodeColumns`
            (
                *(tree.token_ids, tree.parents, tree.topology.depths, tree.topology.ancestor_bits),
                np.zeros(tree.num_nodes, np.float32) if tree.scores is None else tree.scores,
                np.full(tree.num_nodes, -1, np.int32) if tree.draft_slots is None else tree.draft_slots,
            )
            for tree in trees
        )
        columns = map(np.concatenate, zip(*columns_of_trees, strict=True))
        *nodes, rows = upload([*columns, np.concatenate(draft_rows).astype(np.int32)])
        given = [tree.draft_probs for tree in trees if tree.draft_probs is not None and tree.num_nodes]
        probs = [each / each.sum(1, keepdim=True) for each in given]  # a rounded q adds up to 1 only about
        return cls(
            start_loc=np.cumsum([0, *(tree.num_nodes for tree in trees)]),
            is_chain=np.array([tree.topology.is_chain for tree in trees]),
            is_sampled=np.array(is_sampled),
            has_scores=np.array([tree.scores is not None for tree in trees]),
            nodes=NodeColumns(*nodes),
            draft_probs=torch.cat(probs) if probs else None,
            draft_rows=rows if probs else None,
        )

    def _check(self, limits: TreeLimits, drafter: str, vocab_size: int, device: torch.device) -> None:
        """Check shapes, dtypes, devices and flags, without reading values from the device."""
        name = f"the drafter {drafter!r}"
        for row in np.flatnonzero(self.counts > limits.num_nodes).tolist():
            _check_count(int(self.counts[row]), limits.num_nodes[row], drafter)
        flags = (self.is_chain, self.is_sampled, self.has_scores)
        if self.start_loc.dtype != np.int64 or any(each.dtype != np.bool_ or len(each) != self.num_rows for each in flags):
            raise ValueError(f"{name} gave start_loc or flags of another dtype or length: they must be int64 and bool, one per row")
        if (growth := self.growth) is not None:
            if len(growth.first_scores) != self.num_rows:
                raise ValueError(f"{name} gave {len(growth.first_scores)} first_scores of its growth: they must be {self.num_rows}")
            if growth.seconds is not None and not 0 < growth.seconds < inf:
                raise ValueError(f"{name} gave seconds={growth.seconds} of its growth: they must be above 0 and finite, or None")
        num_nodes = self.num_nodes
        for field_name, column, dtype in zip(NodeColumns._fields, self.nodes, NODE_DTYPES, strict=True):
            is_fine = column.shape == (num_nodes,) and column.dtype == dtype and column.device == device
            if not is_fine or not column.is_contiguous():
                raise ValueError(
                    f"{name} gave {field_name} of shape {list(column.shape)} and {column.dtype} on {column.device}: it must be "
                    f"[{num_nodes}] and {dtype} on {device}, contiguous"
                )
        if self.is_sampled.any():
            if not all(limits.may_sample[row] for row in np.flatnonzero(self.is_sampled).tolist()):
                raise ValueError(f"{name} sampled a tree at temperature 0: it may at temperatures above 0 only")
            probs, rows = self.draft_probs, self.draft_rows
            num_entries = num_nodes + self.num_rows
            if not (
                (probs is not None and probs.shape[1:] == (vocab_size,) and probs.dtype == torch.float32 and probs.is_contiguous())
                and (rows is not None and rows.shape == (num_entries,) and rows.dtype == torch.int32 and rows.is_contiguous())
                and probs.device == rows.device == device
            ):
                found = [None if each is None else f"{list(each.shape)} {each.dtype} {each.device}" for each in (probs, rows)]
                raise ValueError(
                    f"{name} gave draft_probs {found[0]} and draft_rows {found[1]}: they must be [any, {vocab_size}] torch.float32 "
                    f"and [{num_entries}] torch.int32, contiguous and on {device}, where trees were sampled"
                )

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


def _check_count(num_nodes: int, most: int, drafter: str) -> None:
    if num_nodes > most:
        raise ValueError(f"the drafter {drafter!r} proposed {num_nodes} nodes: at most {most} were allowed")


def _check_tree(
    tree: DraftTree, most: int, may_sample: bool, num_slots: int, drafter: str, vocab_size: int, device: torch.device
) -> None:
    """Check the tree of a row, given its entries of `TreeLimits`."""
    _check_count(tree.num_nodes, most, drafter)
    token_ids = tree.token_ids
    if tree.num_nodes and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise ValueError(f"the drafter {drafter!r} proposed token ids {token_ids.tolist()}: allowed are 0 to {vocab_size - 1}")
    slots, probs, scores = tree.draft_slots, tree.draft_probs, tree.scores
    if scores is not None and not (np.isfinite(scores) & (scores <= np.append(scores, 0.0)[tree.parents])).all():
        raise ValueError(
            f"the drafter {drafter!r} gave scores {scores.tolist()}: allowed are cumulative log-probabilities, finite, at most 0, "
            f"and none above its parent's"
        )
    if slots is not None and tree.num_nodes and not -1 <= slots.min() <= slots.max() < num_slots:
        raise ValueError(f"the drafter {drafter!r} gave draft_slots {slots.tolist()}: allowed are -1 to {num_slots - 1}")
    if probs is None:
        return
    if not may_sample or probs.shape[1:] != (vocab_size,) or probs.device != device:
        where = "above 0" if may_sample else "0"
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs of shape {list(probs.shape)} on {probs.device} at temperature {where}: they "
            f"must be [nodes with children, {vocab_size}] on {device}, at temperatures above 0 only"
        )
    if not ((probs >= 0).all() & ((probs.sum(1) - 1).abs() < MASS_TOLERANCE).all()):
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs that are no distributions: each row must have numbers from 0 on that add up "
            f"to 1"
        )
    if len(set(zip(tree.parents.tolist(), token_ids.tolist(), strict=True))) < tree.num_nodes:
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs for equal siblings, with token ids {token_ids.tolist()} and parents "
            f"{tree.parents.tolist()}: siblings must be sampled without replacement"
        )
    rows = torch.from_numpy(tree.topology.inner_rows[1 + tree.parents]).to(device)
    q = probs[rows, torch.from_numpy(token_ids).to(device)]
    if not (q > 0).all():
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs that are 0 at tokens that were sampled: q must be above 0 there"
        )
