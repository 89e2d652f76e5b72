"""The most likely token of each row: one launch over chunks of the vocabulary, and one over what they found.

PyTorch's reduction took 35 us on an H200, whatever the number of rows up to 128, whose logits are read in 0.1 to 13 us
(`titan bench gpu_check --only sampling`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.row_distribution import is_finite, load_logits
from titan.kernels.triton.tools import FLOAT_DTYPES, require, require_launchable

CHUNK = 4096
"""Tokens that a program looks at."""


@triton.jit
def _chunk_argmax_kernel(
    peaks_ptr,  # [R, NUM_CHUNKS], the largest logit; +inf for NaN
    places_ptr,  # [R, NUM_CHUNKS], its first place
    logits_ptr,  # [R, VOCAB_SIZE]
    stride_logits,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per row and chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row * stride_logits, ids, VOCAB_SIZE)
    peak = tl.max(logits, axis=0)
    entry = row * NUM_CHUNKS + chunk
    tl.store(peaks_ptr + entry, peak)
    tl.store(places_ptr + entry, tl.min(tl.where(logits == peak, ids, VOCAB_SIZE), axis=0))


@triton.jit
def _row_argmax_kernel(
    tokens_ptr,  # [R]
    peaks_ptr,  # [R, NUM_CHUNKS]
    places_ptr,  # [R, NUM_CHUNKS]
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,  # NUM_CHUNKS, padded to a power of two
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    entries = row * NUM_CHUNKS + chunks
    peaks = tl.load(peaks_ptr + entries, mask=chunks < NUM_CHUNKS, other=float("-inf"))
    places = tl.load(places_ptr + entries, mask=chunks < NUM_CHUNKS, other=VOCAB_SIZE)
    peak = tl.max(peaks, axis=0)
    token = tl.min(tl.where(peaks == peak, places, VOCAB_SIZE), axis=0)
    tl.store(tokens_ptr + row, tl.where(is_finite(peak), token, -1).to(tl.int64))


def row_argmax(logits: Tensor) -> Tensor:
    """Return each row's most likely token, the first of ties; -1 if its logit is not finite, or the row holds NaN.

    Args:
        logits: [R, vocab], float32, float16 or bfloat16; rows may be strided.

    Returns:
        int64 [R].

    Raises:
        ValueError: logits of another shape, dtype or device, or an empty vocabulary.
    """
    require_launchable("logits", logits.device)
    require("logits", logits, shape=(None, None), dtypes=FLOAT_DTYPES, device=logits.device, contiguous=False)
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise ValueError(f"logits has shape {list(logits.shape)}: there must be at least one token")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        num_chunks = triton.cdiv(vocab_size, CHUNK)
        peaks = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
        places = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
        sizes = {"VOCAB_SIZE": vocab_size, "NUM_CHUNKS": num_chunks}
        _chunk_argmax_kernel[(num_rows, num_chunks)](peaks, places, logits, logits.stride(0), **sizes, CHUNK=CHUNK, num_warps=8)
        _row_argmax_kernel[(num_rows,)](tokens, peaks, places, **sizes, CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1)
    return tokens
