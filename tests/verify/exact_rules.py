"""Slow twins of verification: one obvious walk per request, the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from titan.core.trees import DraftTree

Probs = NDArray[np.float64]


def reference_walk(tree: DraftTree, draw: Callable[[Sequence[int]], int]) -> list[int]:
    """Emit the tokens of one verification step by sample-and-match.

    Args:
        tree: the draft tokens.
        draw: the target's token after the given tokens behind the root.

    Returns:
        Accepted tokens and the final token.
    """
    emitted: list[int] = []
    node = -1
    while True:
        token = draw(emitted)
        emitted.append(token)
        children = [
            child for child, parent in enumerate(tree.parents.tolist()) if parent == node and int(tree.token_ids[child]) == token
        ]
        if not children:
            return emitted
        node = children[0]


def reference_rejection(p: Probs, q: Probs, children: Sequence[int]) -> tuple[list[float], Probs]:
    """Recursive rejection at one node, with its residuals as vectors.

    Args:
        p: [vocab], the target's distribution.
        q: [vocab], what the children were drawn from without replacement.
        children: token ids in the order they were drawn.

    Returns:
        For each child the probability that it is accepted once it is tried; and the distribution of the token that follows
        when all are rejected, [vocab] (p itself where nothing is left, which then has probability 0).
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


def draws_without_replacement(q: Probs, num_children: int) -> list[tuple[tuple[int, ...], float]]:
    """Every ordered draw of that many tokens of q's support, with its probability."""
    draws = []
    for children in permutations(np.flatnonzero(q).tolist(), num_children):
        probability, left = 1.0, 1.0
        for child in children:
            probability *= q[child] / left
            left -= q[child]
        draws.append((children, probability))
    return draws
