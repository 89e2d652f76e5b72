"""Distributions, samples and the most likely tokens in plain PyTorch; see `titan.kernels.interfaces.SamplingOps`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from titan.core.arrays import Flags, Ints
from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import Upload

TOP_P_CANDIDATES = 512
"""Number of most likely tokens in which the nucleus is searched first; then it is in 16 times as many, and so on."""


class TorchSampling:
    """Sampling operations on any device."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def argmax(self, logits: Tensor) -> Tensor:
        best, tokens = logits.max(-1)
        return tokens.masked_fill(~torch.isfinite(best), -1)

    def top_candidates(self, logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        best = logits.topk(min(count, logits.shape[1]), dim=-1)
        largest, column = best.values[:, :1].float(), temperatures[:, None]
        log_total = ((logits.float() - largest) / column).logsumexp(-1, keepdim=True)
        padding = (0, count - best.values.shape[1])
        return pad(best.indices, padding), pad((best.values.float() - largest) / column - log_total, padding, value=float("-inf"))

    def probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if rows.is_greedy:
            return _certain(logits)
        is_greedy, is_cut = rows.options["temperature"] == 0, rows.is_cut(logits.shape[-1])
        if is_cut.all():
            return _cut(logits, rows)
        probs = softmax_at(logits, _column(np.where(is_greedy, np.float32(1), rows.options["temperature"]), logits)[:, 0])
        if is_greedy.any():
            probs = torch.where(_column(is_greedy, logits), _certain(logits), probs)
        if is_cut.any():  # only these rows take the time of cuts
            index = np.flatnonzero(is_cut)
            places = torch.from_numpy(index).to(logits.device)
            probs[places] = _cut(logits[places], rows.take(index))
        return probs

    def sample_children(
        self, logits: Tensor, rows: SamplingRows, num_children: Ints, places: Tensor, probs: Tensor, children: Tensor
    ) -> None:
        written, count = self.probs(logits, rows), int(num_children.max())
        probs.index_copy_(0, places, written)
        uniform = philox_uniform(
            rows.options["seed"][:, None], rows.options["position"][:, None], Purpose.DRAFT, sibling=np.arange(count)
        )
        children[places, :count] = draw_siblings(written, *self._upload([uniform, num_children]))


def _column(values: NDArray[np.float32] | Ints | Flags, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _certain(logits: Tensor) -> Tensor:
    """Put all mass on each row's most likely token, the first of ties: float32 [n, vocab]; NaN if its logit is not finite."""
    best, tokens = logits.max(-1, keepdim=True)
    certain = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter_(1, tokens, 1.0)
    return certain.masked_fill_(~best.isfinite(), torch.nan)


def _cut(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Compute the distributions of rows above temperature 0 from which top-k, top-p or min-p may remove tokens."""
    temperature, top_k, top_p, min_p = (rows.options[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    vocab_size = logits.shape[-1]
    limits = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    if (limits < vocab_size).any():
        logits = _cut_top_k(logits, limits)
    probs = softmax_at(logits, _column(temperature, logits)[:, 0])
    if (top_p < 1).any():
        probs = _cut_top_p(probs, _column(top_p, logits))
    if (min_p > 0).any():
        probs = probs.masked_fill(probs < _column(min_p, logits) * probs.amax(-1, keepdim=True), 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _cut_top_k(logits: Tensor, limits: Ints) -> Tensor:
    """Keep the ``limits`` [n] largest logits of each row, of equal ones the first."""
    vocab_size, most = logits.shape[-1], int(limits[limits < logits.shape[-1]].max())
    values, tokens = logits.topk(most + 1, dim=-1)
    column = _column(limits, logits)
    is_kept = torch.arange(most + 1, device=logits.device) < column
    return torch.where(column < vocab_size, _keep(logits, values, tokens, is_kept, float("-inf")), logits)


def _cut_top_p(probs: Tensor, top_p: Tensor, num_candidates: int = TOP_P_CANDIDATES) -> Tensor:
    """Keep the fewest most likely tokens whose mass reaches ``top_p`` [n, 1], of equal ones the first; rows with 1 are not cut."""
    vocab_size, is_cut = probs.shape[-1], top_p < 1
    values, tokens = probs.topk(min(num_candidates, vocab_size), dim=-1)
    is_kept = values.cumsum(-1) - values < top_p
    nucleus = torch.where(is_cut, _keep(probs, values, tokens, is_kept, 0.0), probs)
    is_open = is_kept[:, -1] & is_cut[:, 0]  # none of the candidates is cut
    if num_candidates < vocab_size and bool(is_open.any()):
        nucleus[is_open] = _cut_top_p(probs[is_open], top_p[is_open], 16 * num_candidates)
    return nucleus


def _keep(numbers: Tensor, values: Tensor, tokens: Tensor, is_kept: Tensor, other: float) -> Tensor:
    """Keep the largest numbers of each row, of equal ones the first.

    Args:
        numbers: [n, vocab].
        values: [n, k], the largest of each row, in descending order.
        tokens: int64 [n, k], of these; changed.
        is_kept: bool [n, k], which of these are kept; if one is, so are those before it.
        other: what the other numbers become.
    """
    num_kept, most = is_kept.sum(-1, keepdim=True), values.shape[1]
    least = values.gather(1, (num_kept - 1).clamp(min=0))
    is_tied = (num_kept < most) & (values.gather(1, num_kept.clamp(max=most - 1)) == least)
    for i in is_tied[:, 0].nonzero()[:, 0].tolist():  # `topk` lists any of those that are equal
        num_larger = int((values[i] > least[i]).sum())
        tokens[i, num_larger : num_kept[i]] = (numbers[i] == least[i]).nonzero()[: num_kept[i] - num_larger, 0]
    kept = (torch.where(is_kept, each, each[:, :1]) for each in (tokens, values))  # the others write the first once more
    return torch.full_like(numbers, other).scatter_(-1, *kept)


def softmax_at(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute the softmax of logits divided by a temperature per row.

    Args:
        logits: [n, vocab], any float dtype; not changed.
        temperatures: float32 [n], above 0.

    Returns:
        float32 [n, vocab]; NaN in a row whose largest logit is not finite.
    """
    scaled = logits.to(torch.float32, copy=True)
    scaled -= scaled.amax(-1, keepdim=True)  # a tiny temperature might make it infinite
    return scaled.div_(temperatures[:, None]).softmax(-1)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token per row by inverting the CDF.

    Args:
        probs: float32 [n, vocab], not necessarily normalised, at least one entry > 0 per row.
        uniform: float64 [n] in (0, 1).

    Returns:
        int64 [n]; never a token of probability 0.
    """
    cdf = probs.double().cumsum(-1)
    total = cdf[:, -1]
    # strictly below the total, despite rounding: so the CDF exceeds it, and first does at a token of probability above 0
    height = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, height[:, None], right=True)[:, 0]


def draw_siblings(probs: Tensor, uniform: Tensor, num_children: Tensor) -> Tensor:
    """Sample children without replacement: int64 [n, K], -1 past a row's children, or if no token is left.

    Args:
        probs: float32 [n, vocab], not necessarily normalised.
        uniform: float64 [n, K] in (0, 1), one per sample.
        num_children: int64 [n], samples of each row, at most K.
    """
    columns = []
    rest = probs
    for rank in range(uniform.shape[1]):
        drawn = draw(rest, uniform[:, rank]).clamp(max=rest.shape[1] - 1)  # out of range if nothing is left
        is_possible = (rest.gather(1, drawn[:, None])[:, 0] > 0) & (num_children > rank)
        columns.append(torch.where(is_possible, drawn, -1))
        if rank + 1 < uniform.shape[1]:
            rest = rest.scatter(1, drawn[:, None], 0.0)
    return torch.stack(columns, 1)
