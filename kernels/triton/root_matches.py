"""How often draft tokens behind the root would be accepted: what drafting learns from a verification besides its outcome."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.row_distribution import RowDistributions, is_finite, load_distribution, load_logits, weigh_kept
from titan.kernels.triton.tools import require


@triton.jit
def _root_matches_kernel(
    matches_ptr,  # [S, 2]
    node_start_loc_ptr,  # [S + 1]
    draft_probs_ptr,  # [I, VOCAB_SIZE]
    stride_draft_probs,
    draft_rows_ptr,  # [L]
    logits_ptr,  # [L, VOCAB_SIZE]
    stride_logits,
    peaks_ptr,  # [L]
    scales_ptr,  # [L]
    thresholds_ptr,  # [L]
    last_ties_ptr,  # [L]
    chunk_masses_ptr,  # [L, NUM_CHUNKS]
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per request."""
    request = tl.program_id(0)
    first_node = tl.load(node_start_loc_ptr + request)
    row = (first_node + request).to(tl.int64)
    peak, scale, threshold, last_tie, masses = load_distribution(
        row, peaks_ptr, scales_ptr, thresholds_ptr, last_ties_ptr, chunk_masses_ptr, NUM_CHUNKS, CHUNKS
    )
    greedy, sampled = tl.full((), float("nan"), tl.float32), tl.full((), float("nan"), tl.float64)
    if (tl.load(node_start_loc_ptr + request + 1) > first_node) & is_finite(peak):
        q_ptr = draft_probs_ptr + tl.load(draft_rows_ptr + row).to(tl.int64) * stride_draft_probs
        inverse_total = (1.0 / tl.sum(masses, axis=0)).to(tl.float32)
        largest, sampled = tl.full((), -1.0, tl.float32), tl.zeros((), tl.float64)
        for chunk in range(NUM_CHUNKS):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            logits = load_logits(logits_ptr + row * stride_logits, ids, VOCAB_SIZE)
            probs = weigh_kept(logits, ids, peak, scale, threshold, last_tie) * inverse_total
            draft_probs = tl.load(q_ptr + ids, mask=ids < VOCAB_SIZE, other=0.0)
            sampled += tl.sum(tl.minimum(probs, draft_probs).to(tl.float64), axis=0)
            largest_here = tl.max(draft_probs, axis=0)
            if largest_here > largest:
                largest = largest_here
                place = tl.min(tl.where(draft_probs == largest, ids, VOCAB_SIZE), axis=0)
                greedy = tl.sum(tl.where(ids == place, probs, 0.0), axis=0)
    tl.store(matches_ptr + request * 2, greedy)
    tl.store(matches_ptr + request * 2 + 1, sampled.to(tl.float32))


def root_matches(distributions: RowDistributions, draft_probs: Tensor, draft_rows: Tensor, node_start_loc: Tensor) -> Tensor:
    """How likely a draft token after the root is accepted, if the draft takes its most likely one, and if it samples one.

    The arguments are those of `titan.kernels.triton.tree_rejection.reject_trees`, the L = N + S rows per request that of the root,
    then those of its nodes; nothing is read back to the host.

    Args:
        distributions: the target's, p, of the L rows.
        draft_probs: float32 [I, vocab], q; rows may be strided.
        draft_rows: int32 [L], which of them the children of a row's node were drawn from.
        node_start_loc: int32 [S + 1], first node of each request, and N.

    Returns:
        float32 [S, 2]: p of the token that q finds most likely, and ``sum(min(p, q))``. NaN where the request has no draft
        tokens, or the root's largest logit is not finite.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device.
    """
    device, (num_rows, vocab_size) = distributions.logits.device, distributions.logits.shape
    require("draft_probs", draft_probs, shape=(None, vocab_size), dtypes=(torch.float32,), device=device, contiguous=False)
    require("draft_rows", draft_rows, shape=(num_rows,), dtypes=(torch.int32,), device=device)
    require("node_start_loc", node_start_loc, shape=(None,), dtypes=(torch.int32,), device=device)
    num_requests = len(node_start_loc) - 1
    if not 0 <= num_requests <= num_rows:
        raise ValueError(
            f"node_start_loc has {len(node_start_loc)} entries: it must have 1 to {num_rows + 1}, one more than requests, "
            f"each of which has one of the {num_rows} rows"
        )
    matches = torch.empty(num_requests, 2, dtype=torch.float32, device=device)
    if num_requests:
        arguments = (matches, node_start_loc, draft_probs, draft_probs.stride(0), draft_rows, *distributions.kernel_arguments)
        _root_matches_kernel[(num_requests,)](*arguments, **distributions.sizes, num_warps=8)
    return matches
