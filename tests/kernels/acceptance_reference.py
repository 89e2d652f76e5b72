"""Oracles of the kernels for sampling and acceptance: one row or one request at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def reference_probs(logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """What one row of logits is sampled from; of equal tokens, those of the larger ids are cut first.

    Args:
        logits: [vocab], the largest of them finite.
        temperature: 0 = all on the first token.
        top_k: 0 or less: all.
        top_p: 1 = all.
        min_p: 0 = all.

    Returns:
        float64 [vocab].
    """
    scores, order = logits.double().sort(descending=True, stable=True)
    weights = ((scores - scores[0]) / (temperature or 1.0)).exp()
    if temperature == 0:
        weights[1:] = 0
    if top_k > 0:
        weights[top_k:] = 0
    if top_p < 1:
        before = torch.nn.functional.pad(weights.cumsum(0)[:-1], (1, 0))
        weights[before >= top_p * weights.sum()] = 0
    weights[weights < min_p] = 0
    return torch.zeros_like(scores).scatter(0, order, weights / weights.sum())


def reference_draw(probs: Tensor, uniform: float) -> int:
    """The token in [vocab] at which the cumulative distribution passes ``uniform``; never one of probability 0."""
    height, token = 0.0, -1
    for candidate, prob in enumerate(probs.tolist()):
        if prob > 0 and (token < 0 or height <= uniform):
            token = candidate
        height += prob
    return token


def reference_walk(token_ids: list[int], parents: list[int], wanted: list[int]) -> tuple[list[int], int]:
    """The path that one request accepts by sample-and-match, and its final token; ``wanted`` is the root's, then the nodes'."""
    path: list[int] = []
    node = -1
    while True:
        want = wanted[node + 1]
        children = [i for i, parent in enumerate(parents) if parent == node and token_ids[i] == want]
        if not children:
            return path, want
        node = children[0]
        path.append(node)


def reference_reject(
    p: Tensor,
    q: Tensor,
    token_ids: list[int],
    parents: list[int],
    *,
    coin: Callable[[int, int], float],
    uniform: Callable[[int, bool], float],
) -> tuple[list[int], int]:
    """The path that one request accepts by recursive rejection, and its final token, with residuals as vectors.

    Args:
        p: float64 [1 + nodes, vocab], the target's distributions at the root and the nodes.
        q: float64 [1 + nodes, vocab], what the children of the root and of the nodes were sampled from; not read at leaves.
        token_ids: of the nodes.
        parents: of the nodes; siblings stand in the order they were sampled.
        coin: row and rank among siblings -> the number that decides whether the child is accepted.
        uniform: row, and whether the node has children -> the number that the final token is sampled with.
    """
    path: list[int] = []
    node = -1
    while True:
        row = node + 1
        children = [i for i, parent in enumerate(parents) if parent == node]
        residual, left = p[row], q[row].clone()
        for rank, child in enumerate(children):
            token = token_ids[child]
            if coin(row, rank) * float(left[token]) < float(residual[token]):
                node = child
                path.append(child)
                break
            rest = (residual - left).clamp(min=0)
            residual = rest / rest.sum() if rest.sum() > 0 else p[row]
            left[token] = 0
            left = left / left.sum() if left.sum() > 0 else left
        else:
            return path, reference_draw(residual, uniform(row, bool(children)))
