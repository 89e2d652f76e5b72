"""The distribution that each row of logits is sampled from: temperature, then top-k, top-p and min-p, without a sort or a copy.

All three cuts keep the most likely tokens and drop the rest, so each amounts to a threshold: a token is kept if its logit is above
it, or equals it and the token's id is not above a limit (ties are cut by id). A `RowDistributions` holds the logits and these
numbers; the probability of a token is recomputed where it is needed.

There are two launches. The first reduces the row in chunks to the largest logit and the sum of weights, where a token's weight is
``exp((logit - largest logit) / temperature)``. The second finds the thresholds, one program per row; a row without cuts returns at
once. It does not read the vocabulary again, but the groups of `GROUP` tokens whose largest logits, which the first launch noted,
reach a bound that provably drops nothing that is kept: few, unless the distribution is flat.

* The k-th largest logit of all is at least the k-th largest of the groups';
* the tokens below a bound weigh at most ``GROUP * sum over groups of min(weight of the group's largest, weight at the bound)``,
  and top-p drops at most ``1 - top_p`` of the total.

A threshold is found by bisection on the bits of a float, taken as an integer, so it is exact: over these groups, until at most
`MAX_CANDIDATES` tokens are left that it can be, and then over these, in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.tools import FLOAT_DTYPES, require, require_launchable
from titan.kernels.triton.upload import ALIGNMENT

CHUNK = tl.constexpr(4096)
"""Tokens that a program processes together."""

GROUP = tl.constexpr(64)
"""Tokens per group, of which only the largest logit is kept for the first bound."""

NEAR_TOKENS = tl.constexpr(1024)
"""Tokens of such groups that a program processes together: few, so that two programs fit on a multiprocessor."""

MAX_CANDIDATES = tl.constexpr(2048)
"""Largest number of logits per row that a program bisects in registers."""

NUM_LINEAR_STEPS = tl.constexpr(12)
"""Number of times that the range of logits is halved to get down to these, unless it is enough sooner; then that of their bits is,
which comes to an end even if more of them are equal, but takes many steps past 0."""

NUM_BOUND_STEPS = tl.constexpr(16)
"""Number of times the range of all floats is halved: the first bound is within 1 % of the best one."""


@dataclass(frozen=True, slots=True, eq=False)
class RowDistributions:
    """The distributions that R rows are sampled from; a row whose largest logit is not finite cannot be sampled from.

    The probability of a kept token is ``exp((logit - peak) * scale) / total``, where total is the sum of the row's chunk masses.
    A token is kept if its logit is above the threshold, or equal to it and the token's id is at most ``last_tie``.
    """

    logits: Tensor  # [R, vocab]
    # float32 [R, 4]: peak, the largest logit, +inf where the row holds NaN; scale, 1 / temperature; threshold; last_tie, which
    # float32 holds exactly, as it does all integers up to 2 ** 24
    cuts: Tensor
    chunk_masses: Tensor  # float64 [R, num_chunks], weights of the kept tokens, summed over `CHUNK` of them

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Tensor | int | None) -> None:
        """Launch a kernel that takes, after these arguments, the logits, their stride, and what describes the kept tokens."""
        described = self.logits, self.logits.stride(0), self.cuts, self.chunk_masses
        kernel[grid](*arguments, *described, VOCAB_SIZE=self.logits.shape[1], num_warps=8)


@triton.jit
def load_logits(row_ptr, ids, VOCAB_SIZE: tl.constexpr):
    """Load logits of one row as float32; -inf past its end, and +inf for NaN, which comparisons would miss."""
    logits = tl.load(row_ptr + ids, mask=ids < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("inf"))


@triton.jit
def weigh(logits, peak, scale):
    """Compute ``exp((logit - peak) / temperature)``; the peak is finite."""
    return tl.exp((logits - peak) * scale)


@triton.jit
def weigh_kept(logits, ids, peak, scale, threshold, last_tie):
    """Compute the weights of the tokens that the row's cuts keep, 0 for the others."""
    is_kept = (logits > threshold) | ((logits == threshold) & (ids <= last_tie))
    return tl.where(is_kept, weigh(logits, peak, scale), 0.0)


@triton.jit
def is_finite(peak):
    """Whether a row with this largest logit can be sampled from."""
    return tl.abs(peak) < float("inf")


@triton.jit
def load_of_chunks(ptr, row, VOCAB_SIZE: tl.constexpr):
    """Load what the chunks of one row have in a table [R, number of chunks]; 0 past the last, up to a power of two."""
    NUM_CHUNKS: tl.constexpr = triton.cdiv(VOCAB_SIZE, CHUNK)
    chunks = tl.arange(0, triton.next_power_of_2(NUM_CHUNKS))
    return tl.load(ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0.0)


@triton.jit
def load_distribution(row, cuts_ptr, chunk_masses_ptr, VOCAB_SIZE: tl.constexpr):
    """Load one row of a `RowDistributions`: peak, scale, threshold, last tie, and the chunks' masses."""
    peak, scale, threshold = tl.load(cuts_ptr + 4 * row), tl.load(cuts_ptr + 4 * row + 1), tl.load(cuts_ptr + 4 * row + 2)
    last_tie = tl.load(cuts_ptr + 4 * row + 3).to(tl.int32)
    return peak, scale, threshold, last_tie, load_of_chunks(chunk_masses_ptr, row, VOCAB_SIZE)


@triton.jit
def _inverse(temperature):
    """Return 1 / temperature; if that is tiny or 0, a number so large that only the most likely token has a weight."""
    return tl.div_rn(1.0, tl.maximum(temperature, 1e-30))


@triton.jit
def key_of(logit):
    """Map floats to int32 in the same order; its own inverse except for the type."""
    bits = logit.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """Map int32 to floats: the inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sum_up_chunks_kernel(
    chunk_peaks_ptr,  # [R, NUM_CHUNKS]
    chunk_masses_ptr,  # [R, NUM_CHUNKS]
    group_peaks_ptr,  # [R, NUM_CHUNKS, CHUNK / GROUP]
    logits_ptr,  # [R, VOCAB_SIZE]
    stride_logits,
    temperature_ptr,  # [R]
    VOCAB_SIZE: tl.constexpr,
):
    """One program per row and chunk."""
    GROUPS: tl.constexpr = CHUNK // GROUP
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row * stride_logits, ids, VOCAB_SIZE)
    group_peaks = tl.max(tl.reshape(logits, (GROUPS, GROUP)), axis=1)
    peak = tl.max(group_peaks, axis=0)
    mass = tl.zeros((), tl.float64)
    if is_finite(peak):
        weights = weigh(logits, peak, _inverse(tl.load(temperature_ptr + row)))
        mass = tl.sum(weights.to(tl.float64), axis=0)
    entry = row * tl.num_programs(1) + chunk
    tl.store(chunk_peaks_ptr + entry, peak)
    tl.store(chunk_masses_ptr + entry, mass)
    tl.store(group_peaks_ptr + entry * GROUPS + tl.arange(0, GROUPS), group_peaks)


@triton.jit
def _find_bound(group_peaks, peak, scale, limit, BY_COUNT: tl.constexpr):
    """Return the key of a bound close to the largest valid one, or of -inf.

    By count, at least ``limit`` of the groups' peaks must reach it; else all tokens below it must provably weigh ``limit`` or less.
    """
    group_weights = weigh(group_peaks, peak, scale)
    low, high = key_of(tl.full((), float("-inf"), tl.float32)), key_of(peak)
    for _ in range(NUM_BOUND_STEPS):
        middle = (low | high) - ((low ^ high) >> 1)  # ceil((low + high) / 2), where the sum may overflow
        bound = logit_of(middle)
        if BY_COUNT:
            is_fine = tl.sum((group_peaks >= bound).to(tl.int32), axis=0) >= limit
        else:
            is_fine = tl.sum(tl.minimum(group_weights, weigh(bound, peak, scale)), axis=0) * GROUP <= limit
        low, high = tl.where(is_fine, middle, low), tl.where(is_fine, high, middle - 1)
    return low


@triton.jit
def _load_near(row_ptr, near_groups_ptr, first, num_near, VOCAB_SIZE: tl.constexpr):
    """Load ids and logits, [NEAR_TOKENS] each, of listed groups from the ``first`` on; past the last, ids are too large."""
    tokens = tl.arange(0, NEAR_TOKENS)
    places = first + tokens // GROUP
    groups = tl.load(near_groups_ptr + places, mask=places < num_near, other=VOCAB_SIZE // GROUP + 1)
    ids = groups * GROUP + tokens % GROUP
    return ids, load_logits(row_ptr, ids, VOCAB_SIZE)


@triton.jit
def _find_threshold(
    row_ptr,
    near_groups_ptr,
    num_near,
    candidates_ptr,
    low,
    wanted,
    peak,
    scale,
    BY_COUNT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
):
    """Return the key of the largest threshold, from ``low`` on, reached by ``wanted`` tokens, or by tokens of that weight.

    With it come the number, int32, and the weight, float64, of the tokens above it. It is reached at ``low``.
    """
    high = tl.where(peak == 0.0, 0, key_of(peak))  # -0.0 is as large as 0.0
    count_above, mass_above = tl.zeros((), tl.int32), tl.zeros((), tl.float64)  # of the tokens above `high`
    num_reaching = num_near * GROUP  # an upper bound until they are counted
    middle, step = low, 0
    while (low < high) & (num_reaching - count_above > MAX_CANDIDATES):
        threshold = logit_of(middle)
        counts, masses = tl.zeros((NEAR_TOKENS,), tl.int32), tl.zeros((NEAR_TOKENS,), tl.float64)
        for first in range(0, num_near, NEAR_TOKENS // GROUP):
            _, logits = _load_near(row_ptr, near_groups_ptr, first, num_near, VOCAB_SIZE)
            counts += (logits >= threshold).to(tl.int32)
            masses += tl.where(logits >= threshold, weigh(logits, peak, scale), 0.0).to(tl.float64)
        count, mass = tl.sum(counts, axis=0), tl.sum(masses, axis=0)
        is_enough = ((count if BY_COUNT else mass) >= wanted) | (step == 0)
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle - 1)
        num_reaching = tl.where(is_enough, count, num_reaching)
        count_above, mass_above = tl.where(is_enough, count_above, count), tl.where(is_enough, mass_above, mass)
        middle = (low | high) - ((low ^ high) >> 1)  # ceil((low + high) / 2), where the sum may overflow
        if step < NUM_LINEAR_STEPS:
            middle = tl.maximum(key_of(logit_of(low) / 2 + logit_of(high) / 2), low + 1)
        step += 1

    num_candidates = tl.zeros((), tl.int32)
    for first in range(0, num_near, NEAR_TOKENS // GROUP):
        _, logits = _load_near(row_ptr, near_groups_ptr, first, num_near, VOCAB_SIZE)
        is_candidate = ((logits >= logit_of(low)) & (logits < logit_of(high + 1))).to(tl.int32)
        places = num_candidates + tl.cumsum(is_candidate, axis=0) - 1
        tl.store(candidates_ptr + places, logits, mask=(is_candidate > 0) & (places < MAX_CANDIDATES))
        num_candidates += tl.sum(is_candidate, axis=0)
    tl.debug_barrier()  # next, values written by other threads are read
    places = tl.arange(0, MAX_CANDIDATES)
    values = tl.load(candidates_ptr + places, mask=places < num_candidates, other=float("-inf")).to(tl.float32)
    weights = weigh(values, peak, scale).to(tl.float64)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        reaches = values >= logit_of(middle)
        if BY_COUNT:
            is_enough = count_above + tl.sum(reaches.to(tl.int32), axis=0) >= wanted
        else:
            is_enough = mass_above + tl.sum(tl.where(reaches, weights, 0.0), axis=0) >= wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle - 1)
    is_above = values > logit_of(low)
    count_above += tl.sum(is_above.to(tl.int32), axis=0)
    return low, count_above, mass_above + tl.sum(tl.where(is_above, weights, 0.0), axis=0)


@triton.jit
def _sum_kept(row_ptr, near_groups_ptr, num_near, peak, scale, threshold, num_ties, VOCAB_SIZE: tl.constexpr):
    """Return the last of the first ``num_ties`` tokens at the threshold, and the masses of what is kept, by chunks, float64."""
    CHUNKS: tl.constexpr = triton.next_power_of_2(triton.cdiv(VOCAB_SIZE, CHUNK))
    num_ties_before = tl.zeros((), tl.int32)
    last_tie = tl.full((), -1, tl.int32)
    masses = tl.zeros((CHUNKS,), tl.float64)
    for first in range(0, num_near, NEAR_TOKENS // GROUP):
        ids, logits = _load_near(row_ptr, near_groups_ptr, first, num_near, VOCAB_SIZE)
        is_tie = (logits == threshold) & (ids < VOCAB_SIZE)
        num_ties_here = tl.sum(is_tie.to(tl.int32), axis=0)
        if num_ties_before + num_ties_here > num_ties:
            is_tie = is_tie & (num_ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0) <= num_ties)
        last_tie = tl.maximum(last_tie, tl.max(tl.where(is_tie, ids, -1), axis=0))
        num_ties_before += num_ties_here
        weights = weigh_kept(logits, ids, peak, scale, threshold, last_tie).to(tl.float64)
        shape: tl.constexpr = (NEAR_TOKENS // GROUP, GROUP)
        group_masses = tl.sum(tl.reshape(weights, shape), axis=1)
        chunks_of_groups = tl.max(tl.reshape(ids, shape), axis=1) // CHUNK
        is_of_chunk = chunks_of_groups[:, None] == tl.arange(0, CHUNKS)[None, :]
        masses += tl.sum(tl.where(is_of_chunk, group_masses[:, None], 0.0), axis=0)
    return last_tie, masses


@triton.jit
def _cut_rows_kernel(
    cuts_ptr,  # [R, 4]
    chunk_peaks_ptr,  # [R, NUM_CHUNKS]
    chunk_masses_ptr,  # [R, NUM_CHUNKS], in: relative to the chunks' peaks; out: to the row's, of the kept tokens
    group_peaks_ptr,  # [R, NUM_GROUPS]
    near_groups_ptr,  # [R, NUM_GROUPS]
    candidates_ptr,  # [R, MAX_CANDIDATES]
    logits_ptr,  # [R, VOCAB_SIZE]
    stride_logits,
    temperature_ptr,  # [R]
    top_k_ptr,  # [R]
    top_p_ptr,  # [R]
    min_p_ptr,  # [R]
    VOCAB_SIZE: tl.constexpr,
):
    """One program per row."""
    NUM_CHUNKS: tl.constexpr = triton.cdiv(VOCAB_SIZE, CHUNK)
    NUM_GROUPS: tl.constexpr = NUM_CHUNKS * (CHUNK // GROUP)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits
    chunks = tl.arange(0, triton.next_power_of_2(NUM_CHUNKS))
    chunk_peaks = tl.load(chunk_peaks_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
    peak = tl.max(chunk_peaks, axis=0)
    temperature = tl.load(temperature_ptr + row)
    scale = _inverse(temperature)
    threshold = tl.full((), float("-inf"), tl.float32)
    last_tie = tl.full((), VOCAB_SIZE - 1, tl.int32)
    masses = load_of_chunks(chunk_masses_ptr, row, VOCAB_SIZE)

    if is_finite(peak):
        masses *= tl.exp((chunk_peaks.to(tl.float64) - peak) * scale)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        has_top_k, has_top_p = (top_k > 0) & (top_k < VOCAB_SIZE), top_p < 1.0
        if temperature == 0.0:
            threshold = peak
            chunk = tl.min(tl.where(chunk_peaks == peak, chunks, NUM_CHUNKS), axis=0)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            last_tie = tl.min(tl.where(load_logits(row_ptr, ids, VOCAB_SIZE) == peak, ids, VOCAB_SIZE), axis=0)
            masses = tl.where(chunks == chunk, 1.0, 0.0).to(tl.float64)
        elif has_top_k | has_top_p | (min_p > 0.0):
            total = tl.sum(masses, axis=0)
            lowest = tl.full((), float("-inf"), tl.float32)
            if min_p > 0.0:
                lowest = peak + tl.log(min_p) / scale
            groups = tl.arange(0, triton.next_power_of_2(NUM_GROUPS))
            is_group = groups < NUM_GROUPS
            group_peaks = tl.load(group_peaks_ptr + row * NUM_GROUPS + groups, mask=is_group, other=float("-inf"))
            if has_top_k:
                low = _find_bound(group_peaks, peak, scale, top_k, True)
            elif has_top_p:
                low = _find_bound(group_peaks, peak, scale, (1.0 - top_p) * total, False)
            else:
                low = key_of(lowest)
            is_near = ((group_peaks >= logit_of(low)) & is_group).to(tl.int32)
            num_near = tl.sum(is_near, axis=0)
            near_groups_ptr += row * NUM_GROUPS
            tl.store(near_groups_ptr + tl.cumsum(is_near, axis=0) - 1, groups, mask=is_near > 0)
            tl.debug_barrier()  # next, groups listed by other threads are read

            candidates_ptr += row * MAX_CANDIDATES
            num_ties = tl.full((), VOCAB_SIZE, tl.int32)  # how many of the tokens at the threshold are kept
            if has_top_k:
                low, count_above, mass_above = _find_threshold(
                    row_ptr, near_groups_ptr, num_near, candidates_ptr, low, top_k, peak, scale, True, VOCAB_SIZE
                )
                num_ties = top_k - count_above
                total = mass_above + num_ties * weigh(logit_of(low), peak, scale)
            if has_top_p:
                target = top_p * total
                low, _, mass_above = _find_threshold(
                    row_ptr, near_groups_ptr, num_near, candidates_ptr, low, target, peak, scale, False, VOCAB_SIZE
                )
                weight = tl.maximum(weigh(logit_of(low), peak, scale).to(tl.float64), 1e-300)
                num_ties = tl.minimum(tl.ceil((target - mass_above) / weight), VOCAB_SIZE).to(tl.int32)
                num_ties = tl.maximum(num_ties, 1)
            threshold = logit_of(low)
            num_ties = tl.where(lowest > threshold, VOCAB_SIZE, num_ties)
            threshold = tl.maximum(threshold, lowest)
            last_tie, masses = _sum_kept(row_ptr, near_groups_ptr, num_near, peak, scale, threshold, num_ties, VOCAB_SIZE)

    tl.store(cuts_ptr + 4 * row, peak)
    tl.store(cuts_ptr + 4 * row + 1, scale)
    tl.store(cuts_ptr + 4 * row + 2, threshold)
    tl.store(cuts_ptr + 4 * row + 3, last_tie.to(tl.float32))
    tl.store(chunk_masses_ptr + row * NUM_CHUNKS + chunks, masses, mask=chunks < NUM_CHUNKS)


def checked_logits(logits: Tensor) -> Tensor:
    """Return logits that kernels take, whose rows may be strided.

    Kernels are compiled for whether 16 divides the address and the stride. Logits of one vocabulary are alike in that: others are
    copied.

    Raises:
        ValueError: logits of another shape, dtype or device than kernels take, or an empty vocabulary.
    """
    require_launchable("logits", logits.device)
    require("logits", logits, shape=(None, None), dtypes=FLOAT_DTYPES, device=logits.device, contiguous=False)
    vocab_size = logits.shape[1]
    if vocab_size == 0:
        raise ValueError(f"logits has shape {list(logits.shape)}: there must be at least one token")
    is_alike = (logits.stride(0) % ALIGNMENT == 0) == (vocab_size % ALIGNMENT == 0) and logits.data_ptr() % ALIGNMENT == 0
    return logits if is_alike else logits.new_empty(logits.shape).copy_(logits)


def row_distributions(logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> RowDistributions:
    """Compute what each row is sampled from; a temperature of 0 leaves only the most likely token, the first of ties.

    Nothing is read back to the host. Ties at the edge of top-k and top-p are cut by token id: smaller ids are kept.

    Args:
        logits: [R, vocab], float32, float16 or bfloat16; rows may be strided. The result refers to them, or to a copy.
        temperature: float32 [R]; 0 = greedy.
        top_k: int32 [R]; 0 or less, or the vocabulary size or more: all.
        top_p: float32 [R]; the smallest set of most likely tokens whose mass, after top-k, reaches it; 1 = all, 0 = one.
        min_p: float32 [R]; tokens less likely than this share of the most likely one are dropped.

    Raises:
        ValueError: as `checked_logits`.
    """
    logits = checked_logits(logits)
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    num_groups = num_chunks * (CHUNK // GROUP).value

    def empty(num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(num_rows, num_columns, dtype=dtype, device=logits.device)

    chunk_peaks, chunk_masses, group_peaks = empty(num_chunks), empty(num_chunks, torch.float64), empty(num_groups)
    found, rows = (chunk_peaks, chunk_masses, group_peaks), (logits, logits.stride(0), temperature)
    _sum_up_chunks_kernel[(num_rows, num_chunks)](*found, *rows, VOCAB_SIZE=vocab_size, num_warps=8)
    cuts, near_groups, candidates = empty(4), empty(num_groups, torch.int32), empty(MAX_CANDIDATES.value, logits.dtype)
    _cut_rows_kernel[(num_rows,)](
        cuts, *found, near_groups, candidates, *rows, top_k, top_p, min_p, VOCAB_SIZE=vocab_size, num_warps=8
    )
    return RowDistributions(logits, cuts, chunk_masses)


@triton.jit
def _probs_kernel(
    probs_ptr,  # [R, VOCAB_SIZE]; None: rows are where addresses say
    addresses_ptr,  # [R]; 0: nowhere
    logits_ptr,  # [R, VOCAB_SIZE]
    stride_logits,
    cuts_ptr,  # [R, 4]
    chunk_masses_ptr,  # [R, NUM_CHUNKS]
    VOCAB_SIZE: tl.constexpr,
):
    """One program per row and chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if probs_ptr is None:
        address = tl.load(addresses_ptr + row)
        if address == 0:
            return
        probs_row_ptr = address.to(tl.pointer_type(tl.float32))
    else:
        probs_row_ptr = probs_ptr + row * VOCAB_SIZE
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    peak, scale, threshold, last_tie, masses = load_distribution(row, cuts_ptr, chunk_masses_ptr, VOCAB_SIZE)
    probs = tl.full((CHUNK,), float("nan"), tl.float32)
    if is_finite(peak):
        logits = load_logits(logits_ptr + row * stride_logits, ids, VOCAB_SIZE)
        total = tl.sum(masses, axis=0)
        probs = weigh_kept(logits, ids, peak, scale, threshold, last_tie) * (1.0 / total).to(tl.float32)
    tl.store(probs_row_ptr + ids, probs, mask=ids < VOCAB_SIZE)


def normalized_probs(distributions: RowDistributions) -> Tensor:
    """Write out the probabilities: float32 [R, vocab], 0 for cut tokens, NaN in rows that cannot be sampled from."""
    probs = torch.empty(distributions.logits.shape, dtype=torch.float32, device=distributions.logits.device)
    distributions.launch(_probs_kernel, distributions.chunk_masses.shape, probs, None)
    return probs


def write_probs(distributions: RowDistributions, addresses: Tensor) -> None:
    """Write each row of `normalized_probs` where its address says: int64 [R], 0 = nowhere.

    By its address, a CUDA graph finds memory that is allocated after it was captured.
    """
    distributions.launch(_probs_kernel, distributions.chunk_masses.shape, None, addresses)


def row_bytes(vocab_size: int) -> int:
    """Return the bytes of a row of probabilities."""
    return torch.float32.itemsize * vocab_size
