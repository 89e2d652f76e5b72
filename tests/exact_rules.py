"""Recursive rejection at one node, with residuals as vectors in float64, and all that can be tried there: for exact enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from torch import Tensor


def reference_rejection(p: Tensor, q: Tensor, children: Sequence[int]) -> tuple[list[float], Tensor]:
    """The rule that the oracle of the back ends, `acceptance_reference.reference_reject`, applies node by node.

    Args:
        p: float64 [vocab], the target's distribution.
        q: float64 [vocab], what the children were sampled from without replacement.
        children: token ids in the order they were sampled.

    Returns:
        For each child the probability that it is accepted once it is tried, NaN for 0 where it is 0 of 0; and the distribution of
        the token that follows when all are rejected, [vocab] (p itself where nothing is left, which then has probability 0).
    """
    accept_probs = []
    residual, left = p, q
    for child in children:
        accept_probs.append(float((residual[child] / left[child]).clamp(max=1)))
        rest = (residual - left).clamp(min=0)
        residual = rest / rest.sum() if rest.sum() > 0 else p
        left = left.clone()
        left[child] = 0
        left = left / left.sum() if left.sum() > 0 else left
    return accept_probs, residual


def samples_without_replacement(q: Tensor, num_children: int) -> list[tuple[tuple[int, ...], float]]:
    """Every ordered sample of that many tokens of q's support, with its probability."""
    samples = []
    for children in permutations(q.nonzero()[:, 0].tolist(), num_children):
        probability, left = 1.0, 1.0
        for child in children:
            probability *= float(q[child]) / left
            left -= float(q[child])
        samples.append((children, probability))
    return samples
