"""Shapes of draft trees: which node hangs where, before it is known which tokens the nodes carry.

A shape is its int32 parents; -1 is the root. Functions that are asked the same again and again take it as bytes.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from titan.tree import Parents, topology


@lru_cache(maxsize=4096)
def main_path_first(parents: bytes) -> tuple[int, ...]:
    """The nodes of a shape (int32 parents, as bytes): the path of first children, then the others as they were."""
    parent_of = np.frombuffer(parents, np.int32).tolist()
    path: list[int] = []
    for node, parent in enumerate(parent_of):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return (*path, *(node for node in range(len(parent_of)) if node not in path))


def in_main_path_order(parents: Parents) -> Parents:
    """The same shape with the path of first children first: int32 [num_nodes]."""
    order = np.array(main_path_first(parents.tobytes()), np.int64)
    new_index = np.append(np.argsort(order), -1).astype(np.int32)  # the root stays -1
    in_order: Parents = new_index[parents[order]]
    in_order.flags.writeable = False
    return in_order


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


@lru_cache(maxsize=4096)
def inner_by_depth(parents: bytes) -> tuple[NDArray[np.int64], ...]:
    """The inner nodes of a shape (int32 parents, as bytes) by their depth, from 1 on."""
    shape = topology(parents)
    inner = shape.inner[1:]  # without the root
    depths = shape.depths[inner]
    return tuple(inner[depths == depth].astype(np.int64) for depth in range(1, int(depths.max(initial=0)) + 1))


def chain_slots(num_nodes: int) -> NDArray[np.int32]:
    """Draft slots of a chain: its last node is proposed but never fed."""
    return np.append(np.arange(num_nodes - 1, dtype=np.int32), np.int32(-1))
