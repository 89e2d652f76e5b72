"""The rules of acceptance as vectors in float64, one obvious walk per tree: what back ends are held to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from titan.core.random import Purpose, philox_uniform
from titan.core.trees import DraftTree

Probs = NDArray[np.float64]


def children_of(tree: DraftTree, node: int) -> list[int]:
    """In the order they are tried; -1 is the root."""
    return [child for child, parent in enumerate(tree.parents.tolist()) if parent == node]


def reference_rejection(p: Probs, q: Probs, children: Sequence[int]) -> tuple[list[float], Probs]:
    """Recursive rejection at one node, whose children were sampled from q without replacement, in this order.

    Returns for each child the probability that it is accepted once it is tried; and the distribution of the token that follows
    when all are rejected (p itself where nothing is left, which then has probability 0).
    """
    accept_probs = []
    residual, left = p / p.sum(), q / q.sum()
    for child in children:
        accept_probs.append(min(1.0, float(residual[child] / left[child])))
        rest = np.maximum(residual - left, 0)
        residual = rest / rest.sum() if rest.sum() > 0 else p / p.sum()
        left = left.copy()
        left[child] = 0
        left = left / left.sum() if left.sum() > 0 else left
    return accept_probs, residual


def inverse_cdf(probs: Probs, height: float) -> int:
    """The token at that height, in (0, 1)."""
    return int(np.searchsorted(np.cumsum(probs) / probs.sum(), height, side="right"))


def reference_outcome(tree: DraftTree, p: Probs, q: Probs, seed: int, position: int) -> tuple[list[int], int]:
    """The path that a sampled tree keeps by recursive rejection, and its final token.

    p and q, [1 + nodes, vocab], belong to the root and the nodes; the position is that of the token that follows the root.
    """
    path: list[int] = []
    while True:
        node, depth = path[-1] if path else -1, len(path)
        children = children_of(tree, node)
        accept_probs, residual = reference_rejection(p[1 + node], q[1 + node], tree.token_ids[children].tolist())
        for rank, (child, accept_prob) in enumerate(zip(children, accept_probs, strict=True)):
            if float(philox_uniform(seed, position + depth, Purpose.ACCEPT, sibling=rank)) < accept_prob:
                path.append(child)
                break
        else:
            purpose = Purpose.RESIDUAL if children else Purpose.SAMPLE  # past a leaf as without speculation
            return path, inverse_cdf(residual, float(philox_uniform(seed, position + depth, purpose)))
