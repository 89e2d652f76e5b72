"""Specs of growing draft trees, as data: a drafter's policy makes them, a runner executes them.

A tree grows in one of two ways. A **beam** expands the nodes with the greatest cumulative probability, as in Li et al., "EAGLE-2",
2024; a beam of width one trades the far end of a chain for siblings nearer the root. A **shape**, such as a chain, is fixed in
advance and filled with the most likely tokens or, for a sampled proposal, with tokens that are sampled without replacement.

Nodes that are fed to the draft have **slots**, counted from the one after the root, where their draft KV is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan.core.arrays import Ints
from titan.core.batch import pad_block_tables
from titan.core.limits import MAX_NODES
from titan.core.sampling_params import SamplingParams
from titan.core.trees import Parents, Topology, chain_parents, topology


class Worth(NamedTuple):
    """The values of nodes in one request's beam, and the prices of time; both in tokens.

    The **value** of a node at depth d with cumulative log-probability s is its expected probability of being accepted,
    ``agreement**d * exp(s)``. A price is a time, multiplied by the tokens per second that the engine emits anyway.

    A node is fed if its value times ``acceptance`` exceeds ``node_price + row_price``; the difference is its **profit**. A depth is
    fed if the profits of all requests that grow together, each divided by its ``pass_price``, add up to more than 1. A node stays
    in the tree if its value is at least ``node_price``.
    """

    agreement: float  # in (0, 1]
    acceptance: float  # expected p of a node's best child, in (0, 1]
    node_price: float  # price of verifying a node
    row_price: float  # price of feeding a node to the draft
    pass_price: float  # price of a pass of the draft, whatever it feeds; above 0


@dataclass(frozen=True, slots=True)
class BeamSpec:
    """A beam: expand the nodes with the greatest cumulative probability at each depth, and keep the best of all depths.

    Raises:
        ValueError: a field is not allowed, or the tree has, or feeds, more nodes than one int64 of ancestor bits allows.
    """

    max_nodes: int  # most nodes of the tree, at least 1
    depth: int  # greatest depth of its nodes, at least 1
    width: int  # nodes expanded per depth, at least 1
    num_children: int  # candidate tokens after each of them, at least `width`
    temperature: float  # temperature of the probabilities, above 0
    worth: Worth | None = None  # ends the growth where it does not pay; None: the tree grows to its depth

    def __post_init__(self) -> None:
        if not (self.max_nodes > 0 < self.depth and 0 < self.width <= self.num_children and self.temperature > 0):
            raise ValueError(
                f"{self} is not allowed: max_nodes, depth and width must be at least 1, num_children at least the width, and "
                f"temperature above 0"
            )
        if self.max_nodes > MAX_NODES or self.num_slots > MAX_NODES:
            raise ValueError(
                f"a beam of max_nodes={self.max_nodes} that feeds {self.num_slots} nodes, {self.width} at each depth up to "
                f"{self.depth}, is too large: at most {MAX_NODES} are allowed of either"
            )

    @property
    def num_slots(self) -> int:
        """Number of slots that are written."""
        return (self.depth - 1) * self.width

    @property
    def num_nodes(self) -> int:
        """Number of places of the tree: at most the number of its candidates."""
        return min(self.max_nodes, self.num_children * (1 + self.width * (self.depth - 1)))


@dataclass(frozen=True, slots=True, eq=False)
class ShapePlan:
    """A shape and the arrays needed to fill it; shared by all requests whose trees have the shape."""

    parents: Parents  # the path of first children first
    shape: Topology
    feeds: tuple[Ints, ...]  # the inner nodes by depth, from 1 on
    # int64 [5, num_inner], a column per inner node, the root first. Rows: depth; index of the parent's column; number of the
    # parent's earlier children; ancestor bits; number of children. All but the last are 0 for the root
    inner: Ints
    num_slots: int  # number of slots up to that of the last node that is fed
    max_children: int
    node_parents: Ints  # [num_nodes], column of the parent in `inner`
    slots: NDArray[np.int32]  # [num_nodes], where the node is fed: at its own index, or -1 for a leaf, which is not fed


@dataclass(frozen=True, slots=True, eq=False)
class ShapeSpec:
    """A shape whose nodes are filled with the most likely tokens, or with sampled ones."""

    plan: ShapePlan
    params: SamplingParams | None = None  # sampling options; None: the most likely tokens
    seed: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.plan.parents)

    @property
    def num_slots(self) -> int:
        return self.plan.num_slots


GrowthSpec = BeamSpec | ShapeSpec


class Feed(NamedTuple):
    """The tokens that one request feeds to a draft model, and the spec of the tree that grows after them."""

    row: int  # row of the plan
    block_ids: Sequence[int]
    start: int  # position of the first token
    token_ids: Sequence[int]  # committed tokens that the draft lacks; with a spec, the last is the root
    spec: GrowthSpec | None  # None: nothing grows
    block_table: Ints | None = None  # int64 [R, any], of all rows of the plan; None: not made yet

    @property
    def root(self) -> int:
        """Position of the last token."""
        return self.start + len(self.token_ids) - 1


def block_table_of(feeds: Sequence[Feed]) -> Ints:
    """Return the block tables of feeds, int64 [len(feeds), any]: the plan's own array if they are all its rows in order."""
    rows, of_plan = [feed.row for feed in feeds], feeds[0].block_table
    if of_plan is None:
        return pad_block_tables([feed.block_ids for feed in feeds])
    return of_plan if rows == [*range(len(of_plan))] else of_plan[rows]


class MainPathOrder(NamedTuple):
    """A reordered shape: the path of first children, then the other nodes in their old order."""

    nodes: Ints  # old index of each node in the new order
    parents: Parents


def main_path_order(parents: Sequence[int] | Ints | Parents) -> MainPathOrder:
    """Put the path of first children of a shape first, so that accepting it moves no KV.

    Args:
        parents: of the nodes, -1 for children of the root.
    """
    return _main_path_order(np.asarray(parents, np.int32).tobytes())


@lru_cache(maxsize=4096)
def _main_path_order(parents: bytes) -> MainPathOrder:
    old_parents = np.frombuffer(parents, np.int32)
    path: list[int] = []
    for node, parent in enumerate(old_parents.tolist()):
        if parent == (path[-1] if path else -1):
            path.append(node)
    nodes = np.array([*path, *(node for node in range(len(old_parents)) if node not in path)], np.int64)
    new_index = np.append(np.argsort(nodes), -1).astype(np.int32)  # the root stays -1
    new_parents: Parents = new_index[old_parents[nodes]]
    new_parents.flags.writeable = False
    return MainPathOrder(nodes, new_parents)


def shape_plan(parents: Sequence[int] | Ints | Parents) -> ShapePlan:
    """Return the plan of a shape; it is computed once.

    Args:
        parents: of its nodes, at least one; -1 for children of the root. A parent comes before its children.
    """
    return _shape_plan(np.asarray(parents, np.int32).tobytes())


@lru_cache(maxsize=4096)
def _shape_plan(parents: bytes) -> ShapePlan:
    shape, parent_of = topology(parents), np.frombuffer(parents, np.int32)
    node_parents = shape.inner_rows[1 + parent_of]
    inner = shape.inner[1:]  # without the root
    depths = shape.depths[inner]
    columns = depths, node_parents[inner], shape.child_ranks[inner], shape.ancestor_bits[inner]
    num_children = np.bincount(node_parents)
    slots = np.full(len(parent_of), -1, np.int32)
    slots[inner] = inner
    feeds = tuple(inner[depths == depth] for depth in range(1, int(depths.max(initial=0)) + 1))
    return ShapePlan(
        parents=parent_of,
        shape=shape,
        feeds=feeds,
        inner=np.stack((*(np.append(0, column) for column in columns), num_children)),
        num_slots=int(shape.inner[-1]) + 1,
        max_children=int(num_children.max()),
        node_parents=node_parents,
        slots=slots,
    )


@cache
def chain_spec(num_nodes: int) -> ShapeSpec:
    """Return the spec of a chain of the most likely tokens."""
    return ShapeSpec(shape_plan(chain_parents(num_nodes)))
