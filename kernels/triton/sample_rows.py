"""Sampling of one token per row of logits, each row with its own options and its own random number.

Sampling inverts the cumulative distribution in the order of the vocabulary, in float64, first over chunks, then over the tokens of
one chunk. It follows `titan.kernels.torch.sampling`, so both choose the same tokens unless a number falls on a border between two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.random import Purpose
from titan.kernels.triton.philox import philox_uniform
from titan.kernels.triton.row_distribution import CHUNK, RowDistributions, is_finite, load_distribution, load_logits, weigh_kept


@triton.jit
def invert_cdf(masses, uniform):
    """Return the index of the mass, of a power of two, that a number in (0, 1) falls on, int32, and how far into it, 0 to 1.

    The mass is never 0, whatever rounding does, as long as there are others.
    """
    SIZE: tl.constexpr = masses.shape[0]
    places = tl.arange(0, SIZE)
    cdf = tl.cumsum(masses, axis=0)
    height = uniform * tl.sum(masses, axis=0)
    is_possible = masses > 0.0
    last = tl.max(tl.where(is_possible, places, 0), axis=0)
    place = tl.minimum(tl.min(tl.where(is_possible & (cdf > height), places, SIZE), axis=0), last)
    mass = tl.sum(tl.where(places == place, masses, 0.0), axis=0)
    end = tl.sum(tl.where(places == place, cdf, 0.0), axis=0)
    part = tl.where(mass > 0.0, (height - (end - mass)) / tl.where(mass > 0.0, mass, 1.0), 0.0)
    return place, tl.minimum(tl.maximum(part, 0.0), 1.0)


@triton.jit(do_not_specialize=["purpose"])
def _sample_kernel(
    tokens_ptr,  # [R]
    seeds_ptr,  # [R]
    positions_ptr,  # [R]
    purpose,
    logits_ptr,  # [R, VOCAB_SIZE]
    stride_logits,
    cuts_ptr,  # [R, 4]
    chunk_masses_ptr,  # [R, NUM_CHUNKS]
    VOCAB_SIZE: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    peak, scale, threshold, last_tie, masses = load_distribution(row, cuts_ptr, chunk_masses_ptr, VOCAB_SIZE)
    token = tl.full((), -1, tl.int64)
    if is_finite(peak):
        uniform = philox_uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), purpose, 0)
        chunk, part = invert_cdf(masses, uniform)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = load_logits(logits_ptr + row * stride_logits, ids, VOCAB_SIZE)
        weights = weigh_kept(logits, ids, peak, scale, threshold, last_tie)
        place, _ = invert_cdf(weights.to(tl.float64), part)
        token = (chunk * CHUNK + place).to(tl.int64)
    tl.store(tokens_ptr + row, token)


def sample_rows(distributions: RowDistributions, seeds: Tensor, positions: Tensor, purpose: Purpose = Purpose.SAMPLE) -> Tensor:
    """Sample one token from each distribution.

    Args:
        distributions: R of them.
        seeds: int64 [R], the bits of the uint64 seeds.
        positions: int64 [R], below 2**32.
        purpose: of the random numbers; the sibling is the first.

    Returns:
        int64 [R]; -1 if the row's largest logit is not finite.
    """
    tokens = torch.empty_like(seeds)
    distributions.launch(_sample_kernel, (len(tokens),), tokens, seeds, positions, purpose.value)
    return tokens
