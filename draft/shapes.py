"""Shapes of draft trees: which node hangs where, before it is known which tokens the nodes carry.

A shape is its int32 parents; -1 is the root. Functions that are asked the same again and again take it as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan.core.trees import MAX_NODES, Parents, topology


class MainPathOrder(NamedTuple):
    """A shape with its path of first children first, then the other nodes as they were."""

    nodes: NDArray[np.int64]  # in the new order
    parents: Parents


@lru_cache(maxsize=4096)
def main_path_order(parents: bytes) -> MainPathOrder:
    """Put the path of first children of a shape (int32 parents, as bytes) first."""
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


def in_main_path_order(parents: Parents) -> Parents:
    """The same shape with the path of first children first: int32 [num_nodes]."""
    return main_path_order(parents.tobytes()).parents


@lru_cache(maxsize=4096)
def expected_shape(rank_acceptance: tuple[float, ...], num_nodes: int, *, is_caterpillar: bool) -> Parents:
    """The tree of that many nodes that is expected to have the most accepted, if acceptance depends on sibling rank alone.

    Chen et al., "Sequoia", 2024, by best-first search: a node is reached with the product of the acceptances on its path. The best
    there is if acceptance does not rise with the rank.

    Args:
        rank_acceptance: probability that the child of rank 0, 1, ... is the accepted one, given that its parent is.
        num_nodes: at least 1.
        is_caterpillar: only first children have children, so that one node is fed per depth.

    Returns:
        int32 parents [num_nodes], the path of first children first.
    """
    parents: list[int] = []
    open_nodes: list[tuple[float, int, int]] = [(-rank_acceptance[0], -1, 0)]  # (-reach, parent, rank)
    while len(parents) < num_nodes:
        reach, parent, rank = heappop(open_nodes)
        node = len(parents)
        parents.append(parent)
        if rank + 1 < len(rank_acceptance):
            heappush(open_nodes, (reach / rank_acceptance[rank] * rank_acceptance[rank + 1], parent, rank + 1))
        if rank == 0 or not is_caterpillar:
            heappush(open_nodes, (reach * rank_acceptance[0], node, 0))
    return in_main_path_order(np.array(parents, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class ShapePlan:
    """What filling a shape needs to know of it; shared by all requests whose trees have the shape."""

    parents: Parents
    feeds: tuple[NDArray[np.int64], ...]  # by depth, from 1 on: the inner nodes
    # int64 [6, num_inner], of the inner nodes, the root first: the node, -1 for the root; depth, 0 for the root; the parent's place
    # among them, 0 for the root; how many earlier children the parent has; ancestor bits; number of children
    inner: NDArray[np.int64]
    max_children: int
    max_fed: int  # nodes of one depth
    # of all nodes: [num_nodes] each
    node_parents: NDArray[np.int64]  # the parent's place among the inner nodes
    ranks: NDArray[np.int64]
    slots: NDArray[np.int32]  # an inner node is fed at its own place; -1 for a leaf, which is not fed


@lru_cache(maxsize=4096)
def shape_plan(parents: bytes) -> ShapePlan:
    """Look at a shape (int32 parents, as bytes; at least one node)."""
    shape, parent_of = topology(parents), np.frombuffer(parents, np.int32)
    node_parents = shape.inner_rows[1 + parent_of]
    inner = shape.inner[1:]  # without the root
    depths = shape.depths[inner].astype(np.int64)
    columns = depths, node_parents[inner], shape.child_ranks[inner], shape.ancestor_bits[inner]
    num_children = np.bincount(node_parents)
    feeds = tuple(inner[depths == depth].astype(np.int64) for depth in range(1, int(depths.max(initial=0)) + 1))
    slots = np.where(shape.inner_rows[1:] >= 0, np.arange(len(parent_of), dtype=np.int32), np.int32(-1))
    slots.flags.writeable = False
    return ShapePlan(
        parents=parent_of,
        feeds=feeds,
        inner=np.stack((shape.inner.astype(np.int64), *(np.append(0, column) for column in columns), num_children)),
        max_children=int(num_children.max()),
        max_fed=max(map(len, feeds), default=0),
        node_parents=node_parents,
        ranks=shape.child_ranks,
        slots=slots,
    )


@lru_cache(maxsize=MAX_NODES + 1)
def chain_slots(num_nodes: int) -> NDArray[np.int32]:
    """Draft slots of a chain: its last node is proposed but never fed."""
    slots = np.append(np.arange(num_nodes - 1, dtype=np.int32), np.int32(-1))
    slots.flags.writeable = False
    return slots
