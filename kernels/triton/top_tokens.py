"""The most likely tokens of each row, in order: one launch over chunks of the vocabulary, and one over what they found.

PyTorch's reduction to one took 35 us on an H200, whatever the number of rows up to 128, whose logits are read in 0.1 to 13 us; its
choice of eight with their probabilities took 90 to 510 us (`titan bench gpu_check --only sampling`).

A token's rank is an int64: above, its logit as an integer of the same order, so that what was taken is below all that can be left,
-inf included; below, what its id leaves of the vocabulary's size, so that of ties the first has the highest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.row_distribution import CHUNK, checked_logits, is_finite, key_of, load_logits, logit_of

TAKEN = tl.constexpr(-(2**63))
"""The rank of what was taken, or is not there; that of -inf is larger."""


@triton.jit
def _logit_of_rank(rank):
    """Return the logit of a token of this rank, float32."""
    return logit_of((rank >> 32).to(tl.int32))


@triton.jit
def _chunk_tops_kernel(
    ranks_ptr,  # [R, NUM_CHUNKS, COUNT]
    totals_ptr,  # [R, NUM_CHUNKS], weights relative to the chunk's largest logit; None: they are not asked for
    logits_ptr,  # [R, VOCAB_SIZE]
    stride_logits,
    temperatures_ptr,  # [R], or None
    VOCAB_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One program per row and chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row * stride_logits, ids, VOCAB_SIZE)
    entry = row * tl.num_programs(1) + chunk
    if totals_ptr is not None:
        peak, total = tl.max(logits, axis=0), 0.0
        if is_finite(peak):
            total = tl.sum(tl.exp((logits - peak) / tl.load(temperatures_ptr + row)), axis=0)
        tl.store(totals_ptr + entry, total)
    keys = key_of(tl.where(logits == 0.0, 0.0, logits)).to(tl.int64)  # -0.0 is as large as 0.0
    ranks = tl.where(ids < VOCAB_SIZE, (keys << 32) + (VOCAB_SIZE - ids), TAKEN)
    for i in range(COUNT):
        best = tl.max(ranks, axis=0)
        tl.store(ranks_ptr + entry * COUNT + i, best)
        ranks = tl.where(ranks == best, TAKEN, ranks)


@triton.jit
def _row_tops_kernel(
    tokens_ptr,  # [R, COUNT]
    logprobs_ptr,  # [R, COUNT], or None
    ranks_ptr,  # [R, NUM_CHUNKS, COUNT]
    totals_ptr,  # [R, NUM_CHUNKS], or None
    temperatures_ptr,  # [R], or None
    VOCAB_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One program per row."""
    NUM_CHUNKS: tl.constexpr = triton.cdiv(VOCAB_SIZE, CHUNK)
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, triton.next_power_of_2(NUM_CHUNKS * COUNT))
    is_entry = entries < NUM_CHUNKS * COUNT
    ranks = tl.load(ranks_ptr + row * (NUM_CHUNKS * COUNT) + entries, mask=is_entry, other=TAKEN)
    peak = _logit_of_rank(tl.max(ranks, axis=0))
    is_sound = is_finite(peak)
    reference, temperature, log_total = tl.where(is_sound, peak, 0.0), 1.0, float("nan")
    if logprobs_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
        if is_sound:
            is_first = is_entry & (entries % COUNT == 0)  # of its chunk
            totals = tl.load(totals_ptr + row * NUM_CHUNKS + entries // COUNT, mask=is_first, other=0.0)
            weights = totals * tl.exp((_logit_of_rank(ranks) - peak) / temperature)
            log_total = tl.log(tl.sum(tl.where(is_first, weights, 0.0), axis=0))
    for i in range(COUNT):
        best = tl.max(ranks, axis=0)
        ranks = tl.where(ranks == best, TAKEN, ranks)
        token = VOCAB_SIZE - (best & 0x7FFFFFFF)
        place = row * COUNT + i
        if logprobs_ptr is None:
            tl.store(tokens_ptr + place, tl.where(is_sound, token, -1))
        else:
            is_there = best != TAKEN
            logprob = (_logit_of_rank(best) - reference) / temperature - log_total
            tl.store(tokens_ptr + place, tl.where(is_there, token, 0))
            tl.store(logprobs_ptr + place, tl.where(is_there, logprob, float("-inf")))


def row_argmax(logits: Tensor) -> Tensor:
    """Return each row's most likely token, int64 [R], of ties the first; -1 if its logit is not finite, or the row holds NaN."""
    return _tops(logits, 1, None)[0][:, 0]


def top_candidates(logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of each row with their log-probabilities, of ties the first ones.

    See `titan.kernels.interfaces.SamplingOps`; where the vocabulary has fewer tokens, the rest are 0.
    """
    tokens, logprobs = _tops(logits, count, temperatures)
    assert logprobs is not None
    return tokens, logprobs


def _tops(logits: Tensor, count: int, temperatures: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the tokens, [R, count], and, given temperatures, their log-probabilities."""
    logits = checked_logits(logits)
    num_rows, vocab_size = logits.shape
    num_chunks, has_logprobs = triton.cdiv(vocab_size, CHUNK), temperatures is not None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens, ranks = (empty(*shape, dtype=torch.int64) for shape in ((num_rows, count), (num_rows, num_chunks, count)))
    logprobs, totals = (empty(num_rows, count), empty(num_rows, num_chunks)) if has_logprobs else (None, None)
    found, sizes = (ranks, totals), {"VOCAB_SIZE": vocab_size, "COUNT": count}
    _chunk_tops_kernel[(num_rows, num_chunks)](*found, logits, logits.stride(0), temperatures, **sizes, num_warps=8)
    num_warps = 1 if count == 1 else 4
    _row_tops_kernel[(num_rows,)](tokens, logprobs, *found, temperatures, **sizes, num_warps=num_warps)
    return tokens, logprobs
