"""Shapes of draft trees, chosen before the tokens of their nodes are known."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush

from titan.core.growth import main_path_order
from titan.core.trees import Parents


@lru_cache(maxsize=4096)
def expected_shape(rank_acceptance: tuple[float, ...], num_nodes: int, *, is_caterpillar: bool) -> Parents:
    """Return the tree with the most accepted nodes in expectation, if acceptance depends only on sibling rank.

    Best-first search for the tree of Chen et al., "Sequoia", 2024: a node is reached with the product of the acceptances on its
    path. The tree is optimal if acceptance does not rise with the rank.

    Args:
        rank_acceptance: probability that the child of rank 0, 1, ... is the accepted one, given that its parent is.
        num_nodes: of the tree, at least 1.
        is_caterpillar: whether only first children have children, so that one node is fed per depth.

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
    return main_path_order(parents).parents
