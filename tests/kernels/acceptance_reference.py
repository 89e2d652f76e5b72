"""Oracles of the kernels for sampling and acceptance, in float64: one row, or one tree, at a time; see also `exact_rules`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from exact_rules import children_of, inverse_cdf
from torch import Tensor

from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTree

Option = tuple[float, int, float, float]


def sampling_rows(options: Sequence[Option]) -> SamplingRows:
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in options]
    return SamplingRows.of((each, i * (2**60 + 12345) % 2**64, i * 5 + 7) for i, each in enumerate(params))


def reference_probs(logits: Tensor, options: Sequence[Option]) -> Tensor:
    """What rows of logits, [n, vocab], are sampled from: float64, on the host; NaN in rows whose largest logit is not finite.

    Of equal tokens, those of the larger ids are cut first.
    """
    return torch.stack([_row_probs(*each) for each in zip(logits.cpu(), options, strict=True)])


def _row_probs(logits: Tensor, option: Option) -> Tensor:
    temperature, top_k, top_p, min_p = option
    scores, order = logits.double().sort(descending=True, stable=True)
    if not logits.max().isfinite():
        return torch.full_like(scores, torch.nan)
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


def reference_match(tree: DraftTree, p: Tensor, seed: int, position: int) -> tuple[list[int], int]:
    """The path that one tree keeps by sample-and-match, and its final token; -1 where there is no distribution.

    p, [1 + nodes, vocab], is the target's at the root and the nodes; the position is that of the token that follows the root.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        height = float(philox_uniform(seed, position + len(path), Purpose.SAMPLE))
        token = -1 if p[1 + node].isnan().any() else inverse_cdf(p[1 + node].numpy(), height)
        child = next((child for child in children_of(tree, node) if tree.token_ids[child] == token), None)
        if child is None:
            return path, token
        path.append(child)
