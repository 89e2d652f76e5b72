"""The most likely tokens of each row, in order: one launch over chunks of the vocabulary, and one over what they found.

PyTorch's reduction to one took 35 us on an H200, whatever the number of rows up to 128, whose logits are read in 0.1 to 13 us; its
choice of eight with their probabilities took 90 to 510 us (`titan bench gpu_check --only sampling`).

Logits are compared as integers of the same order, so that what was taken is below all that can be left, -inf included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.row_distribution import CHUNK, checked_logits, is_finite, key_of, load_logits, logit_of

TAKEN = tl.constexpr(-(2**31))
"""The key of what was taken, or is not there; that of -inf is larger."""


@triton.jit
def _chunk_tops_kernel(
    keys_ptr,  # [R, NUM_CHUNKS, COUNT]
    ids_ptr,  # [R, NUM_CHUNKS, COUNT]
    totals_ptr,  # [R, NUM_CHUNKS], weights relative to the chunk's largest logit; None: they are not asked for
    logits_ptr,  # [R, VOCAB_SIZE]
    stride_logits,
    temperatures_ptr,  # [R], or None
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per row and chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row * stride_logits, ids, VOCAB_SIZE)
    entry = row * NUM_CHUNKS + chunk
    if totals_ptr is not None:
        peak, total = tl.max(logits, axis=0), 0.0
        if is_finite(peak):
            total = tl.sum(tl.exp((logits - peak) / tl.load(temperatures_ptr + row)), axis=0)
        tl.store(totals_ptr + entry, total)
    keys = tl.where(ids < VOCAB_SIZE, key_of(tl.where(logits == 0.0, 0.0, logits)), TAKEN)  # -0.0 is as large as 0.0
    for i in range(COUNT):
        best = tl.max(keys, axis=0)
        place = tl.min(tl.where(keys == best, ids, VOCAB_SIZE), axis=0)
        tl.store(keys_ptr + entry * COUNT + i, best)
        tl.store(ids_ptr + entry * COUNT + i, place)
        keys = tl.where(ids == place, TAKEN, keys)


@triton.jit
def _row_tops_kernel(
    tokens_ptr,  # [R, COUNT]
    logprobs_ptr,  # [R, COUNT], or None
    keys_ptr,  # [R, NUM_CHUNKS, COUNT]
    ids_ptr,  # [R, NUM_CHUNKS, COUNT]
    totals_ptr,  # [R, NUM_CHUNKS], or None
    temperatures_ptr,  # [R], or None
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,  # NUM_CHUNKS, padded to a power of two
    CANDIDATES: tl.constexpr,  # NUM_CHUNKS * COUNT, likewise
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, CANDIDATES)
    is_entry = entries < NUM_CHUNKS * COUNT
    keys = tl.load(keys_ptr + row * (NUM_CHUNKS * COUNT) + entries, mask=is_entry, other=TAKEN)
    ids = tl.load(ids_ptr + row * (NUM_CHUNKS * COUNT) + entries, mask=is_entry, other=VOCAB_SIZE)
    peak = logit_of(tl.max(keys, axis=0))
    is_sound = is_finite(peak)
    reference, temperature, log_total = tl.where(is_sound, peak, 0.0), 1.0, float("nan")
    if logprobs_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
        chunks = tl.arange(0, CHUNKS)
        is_chunk = chunks < NUM_CHUNKS
        totals = tl.load(totals_ptr + row * NUM_CHUNKS + chunks, mask=is_chunk, other=0.0)
        firsts = tl.load(keys_ptr + (row * NUM_CHUNKS + chunks) * COUNT, mask=is_chunk, other=TAKEN)
        chunk_peaks = tl.where(is_chunk, logit_of(firsts), float("-inf"))
        if is_sound:
            log_total = tl.log(tl.sum(totals * tl.exp((chunk_peaks - peak) / temperature), axis=0))
    for i in range(COUNT):
        best = tl.max(keys, axis=0)
        token = tl.min(tl.where(keys == best, ids, VOCAB_SIZE), axis=0)
        keys = tl.where(ids == token, TAKEN, keys)
        place = row * COUNT + i
        if logprobs_ptr is None:
            tl.store(tokens_ptr + place, tl.where(is_sound, token, -1).to(tl.int64))
        else:
            is_there = best != TAKEN
            logprob = (logit_of(best) - reference) / temperature - log_total
            tl.store(tokens_ptr + place, tl.where(is_there, token, 0).to(tl.int64))
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
    device, (num_rows, vocab_size) = logits.device, logits.shape
    num_chunks, has_logprobs = triton.cdiv(vocab_size, CHUNK), temperatures is not None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens, logprobs = empty(num_rows, count, dtype=torch.int64), empty(num_rows, count) if has_logprobs else None
    keys, ids = (empty(num_rows, num_chunks, count, dtype=torch.int32) for _ in range(2))
    totals = empty(num_rows, num_chunks) if has_logprobs else None
    sizes = {"VOCAB_SIZE": vocab_size, "NUM_CHUNKS": num_chunks, "COUNT": count}
    _chunk_tops_kernel[(num_rows, num_chunks)](
        keys, ids, totals, logits, logits.stride(0), temperatures, **sizes, CHUNK=CHUNK, num_warps=8
    )
    _row_tops_kernel[(num_rows,)](
        tokens,
        logprobs,
        keys,
        ids,
        totals,
        temperatures,
        **sizes,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CANDIDATES=triton.next_power_of_2(num_chunks * count),
        num_warps=1 if count == 1 else 4,
    )
    return tokens, logprobs
