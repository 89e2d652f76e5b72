"""From logits to tokens: one token per row, each row with its own options and its own random number.

Randomness is counter-based: the uniform number of a row depends on (request seed, absolute position, purpose) alone, so
results do not depend on batch neighbours, batch order or preemption; nor on speculation, where proposals are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.request import Request
from titan.kernels import backend
from titan.kernels.torch.sampling import LazyProbs, argmax_rows, draw_compiled, draw_siblings, softmax_at
from titan.kernels.upload import upload
from titan.sample.logits import TransformedRows, transform_logits

if TYPE_CHECKING:
    from titan.kernels.triton.row_distribution import RowDistributions

WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)

TOP_P_CANDIDATES = 512
"""Most likely tokens tried first as the nucleus; rows whose nucleus is larger are sorted in full."""


OPTIONS = np.dtype([("temperature", "f4"), ("top_k", "i8"), ("top_p", "f4"), ("min_p", "f4"), ("seed", "u8"), ("position", "i8")])
"""Of one row: what `SamplingRows` has of each."""


class Purpose(IntEnum):
    """What a random number is drawn for; streams of different purposes are independent."""

    SAMPLE = 0
    CORRUPT = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """Options of the L rows of a batch of logits; arrays are [L]."""

    temperature: NDArray[np.float32]  # 0 = greedy
    top_k: NDArray[np.int64]  # <= 0: all
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]  # absolute position of the token to be sampled
    forbidden: Sequence[tuple[int, list[int]]]  # (row, token ids) that must not come out
    transforms: Sequence[TransformedRows] = ()  # of the requests whose options change their logits
    errors: dict[int, str] = field(default_factory=dict)  # why a row cannot be sampled from; noted when its transforms run

    @cached_property
    def has_cuts(self) -> bool:
        """Whether any row leaves tokens out by top-k, top-p or min-p."""
        return bool(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any())


def spread_options(
    requests: Sequence[Request],
    counts: NDArray[np.int64],
    depths: NDArray[np.int64],
    forbidden: Sequence[tuple[int, list[int]]] = (),
    transforms: Sequence[TransformedRows] = (),
) -> SamplingRows:
    """The rows of requests, each with the options of its request.

    Args:
        requests: n of them.
        counts: [n], rows of each.
        depths: [L], of the rows: 0 for the root, whose next token has the request's `num_tokens` as its position.
        forbidden: as in `SamplingRows`.
        transforms: likewise.
    """
    params = [request.params for request in requests]
    roots = [(p.temperature, p.top_k, p.top_p, p.min_p, r.seed, r.num_tokens) for p, r in zip(params, requests, strict=True)]
    options = np.repeat(np.array(roots, OPTIONS), counts)
    options["position"] += depths
    temperature, top_k, top_p, min_p, seeds, positions = (options[name] for name in OPTIONS.names or ())
    return SamplingRows(temperature, top_k, top_p, min_p, seeds, positions, forbidden, transforms)


def philox_uniform(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    purpose: Purpose | NDArray[np.int64],
    *,
    sibling: int | NDArray[np.int64] = 0,
) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1), one per (seed, position, purpose, sibling), by Philox 4x32-10.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Key = seed, counter = (position, purpose and sibling,
    0, 0).

    Args:
        seeds: the shape of the result, or one that is broadcast to it; so are the others.
        positions: below 2**32.
        purpose: the stream.
        sibling: which of the children of one node the number is for.
    """
    streams = np.asarray(purpose, np.int64) | np.asarray(sibling, np.int64) << 8
    keys, *counter = np.broadcast_arrays(*(array.astype(np.uint64) for array in (seeds, positions, streams)))
    counters = np.zeros((4, *keys.shape), np.uint64)
    counters[:2] = np.stack(counter) & WORD
    words = philox(counters, np.stack((keys & WORD, keys >> WORD_BITS)))
    # 52 bits and a half step: never 0 or 1
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    uniform: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniform


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox 4x32-10: random words from counters, the same for the same counter and key.

    Args:
        counters: [4, ...], below 2**32.
        keys: [2, ...], below 2**32.

    Returns:
        [4, ...], below 2**32.
    """
    c0, c1, c2, c3 = counters
    key0, key1 = keys
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> WORD_BITS) ^ c1 ^ key0, product1 & WORD
        c2, c3 = (product0 >> WORD_BITS) ^ c3 ^ key1, product0 & WORD
        key0 = (key0 + np.uint64(0x9E3779B9)) & WORD
        key1 = (key1 + np.uint64(0xBB67AE85)) & WORD
    return np.stack((c0, c1, c2, c3))


def sample_rows(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64] | None = None) -> Tensor:
    """Draw one token per row.

    Args:
        logits: [n, vocab] of the rows ``index``, any float dtype, as the model made them; not changed.
        rows: options, of which those of ``index`` are used.
        index: [n]; ``None``: all rows.

    Returns:
        int64 [n]; -1 where the row's largest logit is not finite, so that no token can be drawn.
    """
    index = np.arange(len(rows.temperature)) if index is None else index
    logits = _transformed(logits, rows, index)
    places = np.flatnonzero(rows.temperature[index])
    if len(places) and backend.takes_triton(logits.device):
        from titan.kernels.triton.sample_rows import draw_rows  # not every platform has triton

        seeds, positions = upload([rows.seeds[index].view(np.int64), rows.positions[index]], logits.device)
        return draw_rows(_distributions(logits, rows, index), seeds, positions, purpose=Purpose.SAMPLE)
    if len(places) == len(index):
        return _draw(logits, rows, index)
    tokens = argmax_rows(logits)
    if len(places):
        places_tensor = torch.from_numpy(places).to(logits.device)
        tokens[places_tensor] = _draw(logits.index_select(0, places_tensor), rows, index[places])
    return tokens


def _draw(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64]) -> Tensor:
    """`sample_rows` of logits that have been transformed, all with temperature > 0."""
    probs, seeds, positions = _lazy_probs(logits, rows, index), rows.seeds[index], rows.positions[index]
    tokens = draw_compiled(probs, seeds, positions, Purpose.SAMPLE)
    if tokens is None:
        uniform = torch.from_numpy(philox_uniform(seeds, positions, Purpose.SAMPLE)).to(logits.device)
        tokens = draw_siblings(probs.probs(), uniform[:, None], torch.ones_like(uniform))[:, 0]
    return tokens


def target_probs(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64]) -> Tensor:
    """The distribution that is sampled from: the logits' transforms, temperature, then top-k, top-p, min-p.

    Args:
        logits: [n, vocab] of the rows ``index``, all with temperature > 0, as the model made them; not changed.
        rows: options, of which those of ``index`` are used.
        index: [n].

    Returns:
        float32 [n, vocab], normalised; what is cut is 0. NaN in a row whose largest logit is not finite.
    """
    return lazy_probs(logits, rows, index).probs()


def lazy_probs(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64]) -> LazyProbs:
    """`target_probs` with their softmax still to come where that is all they need; the arguments are the same."""
    if backend.takes_triton(logits.device):
        from titan.kernels.triton.row_distribution import normalized_probs  # not every platform has triton

        return LazyProbs(normalized_probs(target_distributions(logits, rows, index)), None)
    return _lazy_probs(_transformed(logits, rows, index), rows, index)


def target_distributions(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64]) -> RowDistributions:
    """`target_probs` before they are written out, by the Triton kernels; the arguments are the same."""
    return _distributions(_transformed(logits, rows, index), rows, index)


def _distributions(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64]) -> RowDistributions:
    """Of logits that have been transformed."""
    from titan.kernels.triton.row_distribution import row_distributions  # not every platform has triton

    top_k = np.minimum(rows.top_k[index], logits.shape[1]).astype(np.int32)
    options = [rows.temperature[index], top_k, rows.top_p[index], rows.min_p[index]]
    temperature, top_k_tensor, top_p, min_p = upload(options, logits.device)
    return row_distributions(logits, temperature=temperature, top_k=top_k_tensor, top_p=top_p, min_p=min_p)


def _transformed(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64]) -> Tensor:
    """The logits of the rows ``index`` after their transforms; where there are none, the logits themselves."""
    if not rows.transforms and not rows.forbidden:
        return logits
    places = {row: place for place, row in enumerate(index.tolist())}
    requests = [moved for each in rows.transforms if (moved := each.moved(places)).paths]
    forbidden = [(places[row], token_ids) for row, token_ids in rows.forbidden if row in places]
    result = transform_logits(logits, requests, forbidden)
    rows.errors.update({int(index[place]): error for place, error in result.errors.items()})
    return result.logits


def _lazy_probs(logits: Tensor, rows: SamplingRows, index: NDArray[np.int64]) -> LazyProbs:
    """Of logits that have been transformed."""
    temperatures = torch.from_numpy(rows.temperature[index]).to(logits.device)
    if not rows.has_cuts:
        return LazyProbs(logits, temperatures)

    def column(values: NDArray[np.float32] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)[:, None]

    top_k, top_p, min_p = rows.top_k[index], rows.top_p[index], rows.min_p[index]
    vocab_size = logits.shape[-1]
    limits = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    if (limits < vocab_size).any():
        logits = _cut_top_k(logits, limits)
    probs = softmax_at(logits, temperatures)
    if (top_p < 1).any():
        probs = _cut_top_p(probs, column(top_p))
    if (min_p > 0).any():
        probs = probs.masked_fill(probs < column(min_p) * probs.amax(-1, keepdim=True), 0.0)
    # rows that are whole stay as they are, whatever their neighbours do
    is_cut = column((limits < vocab_size) | (top_p < 1) | (min_p > 0))
    return LazyProbs(probs / torch.where(is_cut, probs.sum(-1, keepdim=True), 1.0), None)


def _cut_top_k(logits: Tensor, limits: NDArray[np.int64]) -> Tensor:
    """Keep the ``limits`` [n] largest logits of each row; of those that tie, the first in the stable order of topk."""
    vocab_size = logits.shape[-1]
    largest = logits.topk(int(limits[limits < vocab_size].max()), dim=-1)
    limits_column = torch.from_numpy(limits).to(logits.device)[:, None]
    is_kept = torch.arange(largest.indices.shape[1], device=logits.device) < limits_column
    kept = largest.values.masked_fill(~is_kept, float("-inf"))
    cut = torch.full_like(logits, float("-inf")).scatter_(-1, largest.indices, kept)
    return torch.where(limits_column < vocab_size, cut, logits)


def _cut_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches ``top_p`` [n, 1]; rows with 1 stay whole."""
    vocab_size = probs.shape[-1]
    largest = probs.topk(min(TOP_P_CANDIDATES, vocab_size), dim=-1)
    is_open = (largest.values.sum(-1, keepdim=True) < top_p) & (top_p < 1)
    if largest.values.shape[1] < vocab_size and bool(is_open.any()):
        largest = probs.topk(vocab_size, dim=-1)
    mass_before = largest.values.cumsum(-1) - largest.values
    kept = largest.values.masked_fill(mass_before >= top_p, 0.0)
    nucleus = torch.zeros_like(probs).scatter_(-1, largest.indices, kept)
    return torch.where(top_p < 1, nucleus, probs)
