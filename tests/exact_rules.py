"""The rules of acceptance as vectors in float64, one obvious walk per tree: what back ends are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan.core.random import Purpose, philox_uniform
from titan.core.trees import DraftTree

Probs = NDArray[np.float64]


def children_of(tree: DraftTree, node: int) -> list[int]:
    """In the order they are tried; -1 is the root."""
    return [child for child, parent in enumerate(tree.parents.tolist()) if parent == node]


def reference_walk(tree: DraftTree, sample: Callable[[Sequence[int]], int]) -> list[int]:
    """Emit the tokens of one verification step by sample-and-match.

    Args:
        tree: the draft tokens.
        sample: the target's token after the given tokens behind the root.

    Returns:
        Accepted tokens and the final token.
    """
    emitted: list[int] = []
    node = -1
    while True:
        token = sample(emitted)
        emitted.append(token)
        matching = [child for child in children_of(tree, node) if int(tree.token_ids[child]) == token]
        if not matching:
            return emitted
        node = matching[0]


def reference_rejection(p: Probs, q: Probs, children: Sequence[int]) -> tuple[list[float], Probs]:
    """Recursive rejection at one node, with its residuals as vectors.

    Args:
        p: [vocab], the target's distribution.
        q: [vocab], what the children were sampled from without replacement.
        children: token ids in the order they were sampled.

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


def samples_without_replacement(q: Probs, num_children: int) -> list[tuple[tuple[int, ...], float]]:
    """Every ordered sample of that many tokens of q's support, with its probability."""
    samples = []
    for children in permutations(np.flatnonzero(q).tolist(), num_children):
        probability, left = 1.0, 1.0
        for child in children:
            probability *= q[child] / left
            left -= q[child]
        samples.append((children, probability))
    return samples


class Outcome(NamedTuple):
    """What becomes of a tree, and how far the nearest random number was from deciding otherwise."""

    path: list[int]
    final_token: int
    margin: float


def inverse_cdf(probs: Probs, height: float) -> tuple[int, float]:
    """The token at that height, in (0, 1), and how far the height is from its neighbours."""
    cdf = np.cumsum(probs) / probs.sum()
    token = int(np.searchsorted(cdf, height, side="right"))
    above = cdf[cdf < 1 - 1e-12]  # the ends lead to no other token
    return token, float(np.abs(above - height).min(initial=1.0))


def reference_outcome(tree: DraftTree, p: Probs, q: Probs, seed: int, position: int) -> Outcome:
    """Recursive rejection down a tree that was sampled, with the random numbers of a seed.

    Args:
        tree: the draft tokens.
        p: [1 + nodes, vocab], at the root and the nodes.
        q: likewise; anything at leaves.
        seed: of the request.
        position: of the token that follows the root.
    """
    path: list[int] = []
    margin = 1.0
    while True:
        node, depth = path[-1] if path else -1, len(path)
        children = children_of(tree, node)
        accept_probs, residual = reference_rejection(p[1 + node], q[1 + node], tree.token_ids[children].tolist())
        for rank, (child, accept_prob) in enumerate(zip(children, accept_probs, strict=True)):
            coin = float(philox_uniform(seed, position + depth, Purpose.ACCEPT, sibling=rank))
            margin = min(margin, abs(coin - accept_prob))
            if coin < accept_prob:
                path.append(child)
                break
        else:
            purpose = Purpose.RESIDUAL if children else Purpose.SAMPLE  # past a leaf as without speculation
            token, distance = inverse_cdf(residual, float(philox_uniform(seed, position + depth, purpose)))
            return Outcome(path, token, min(margin, distance))
