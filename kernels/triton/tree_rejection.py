"""Rejection sampling on draft trees whose children were sampled from the draft's q, siblings without replacement.

At a node with target distribution p the children are tried in the order they were sampled. With l_k the q-mass of all tokens but
the first k children, child x_k is accepted with probability r_k(x_k) / q_k(x_k), at most 1, where q_k = q / l_k without these
children and r_k = max(p - s_k q, 0) / m_k; s_0 = 0, m_0 = 1, s_{k+1} = s_k + m_k / l_k and m_{k+1} = sum(max(p - s_{k+1} q, 0)).
When none is left the final token is sampled from the last residual. With one child it is the rule of Leviathan et al., "Fast
inference from transformers via speculative decoding", 2023; the recursion is that of Jeon et al., "Recursive speculative decoding",
2024.

There are two launches. A first child that is rejected leaves the residual max(p - q, 0), and of q all other tokens, whatever else
happens: the first launch sums both up for the root and every node that has children, in chunks of the vocabulary. The second walks
the trees, one program per tree. It needs only the scalars s, m and l of its current node, no residual vector, and reads the
vocabulary once per rejected child other than the first; an accepted child costs two numbers. p is never written out: it is
recomputed from logits, see `RowDistributions`.

Rules, random numbers and edge cases are those of `titan.kernels.torch.trees`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.philox import ACCEPT, RESIDUAL, SAMPLE, philox_uniform
from titan.kernels.triton.row_distribution import (
    CHUNK,
    RowDistributions,
    is_finite,
    load_distribution,
    load_logits,
    load_of_chunks,
    weigh_kept,
)
from titan.kernels.triton.sample_rows import invert_cdf
from titan.kernels.triton.tree_walk import NODES, VerifiedTrees, load_tree, store_path


@triton.jit
def _load_probs(logits_ptr, ids, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE: tl.constexpr):
    """Compute probabilities p of tokens of one row, float32."""
    logits = load_logits(logits_ptr, ids, VOCAB_SIZE)
    return weigh_kept(logits, ids, peak, scale, threshold, last_tie) * inverse_total


@triton.jit
def _load_residual(
    logits_ptr, q_ptr, ids, residual_scale, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE: tl.constexpr
):
    """Compute max(p - s q, 0) at tokens of one row, float32; s, float64, may be larger than any float32."""
    probs = _load_probs(logits_ptr, ids, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE)
    power = tl.where(residual_scale > 2.0**100, 2.0**100, 1.0)  # vectors of float64 would take registers that there are not
    q = tl.load(q_ptr + ids, mask=ids < VOCAB_SIZE, other=0.0) * power.to(tl.float32)
    factor = (residual_scale / power).to(tl.float32)
    return tl.maximum(probs - tl.minimum(q, 1.0 / factor) * factor, 0.0)


@triton.jit
def _first_residuals_kernel(
    residual_masses_ptr,  # [L, NUM_CHUNKS]
    untried_masses_ptr,  # [L, NUM_CHUNKS]
    token_ids_ptr,  # [N]
    parents_ptr,  # [N]
    start_loc_ptr,  # [S + 1]
    sampled_ptr,  # [trees that were sampled]
    draft_probs_ptr,  # [I, VOCAB_SIZE]
    stride_draft_probs,
    draft_rows_ptr,  # [L]
    logits_ptr,  # [L, VOCAB_SIZE]
    stride_logits,
    cuts_ptr,  # [L, 4]
    chunk_masses_ptr,  # [L, NUM_CHUNKS]
    VOCAB_SIZE: tl.constexpr,
):
    """One program per sampled tree, its root or one of its nodes, and chunk; nothing is written where there are no children."""
    request, node, chunk = tl.load(sampled_ptr + tl.program_id(0)), tl.program_id(1) - 1, tl.program_id(2)
    token_ids, parents, root_row = load_tree(request, token_ids_ptr, parents_ptr, start_loc_ptr)
    nodes = tl.arange(0, NODES)
    child = tl.min(tl.where(parents == node, nodes, NODES), axis=0)
    if child == NODES:
        return
    row = (root_row + 1 + node).to(tl.int64)
    peak, scale, threshold, last_tie, masses = load_distribution(row, cuts_ptr, chunk_masses_ptr, VOCAB_SIZE)
    if not is_finite(peak):
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row_ptr = logits_ptr + row * stride_logits
    q_ptr = draft_probs_ptr + tl.load(draft_rows_ptr + row).to(tl.int64) * stride_draft_probs
    inverse_total = (1.0 / tl.sum(masses, axis=0)).to(tl.float32)
    probs = _load_probs(row_ptr, ids, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE)
    q = tl.load(q_ptr + ids, mask=ids < VOCAB_SIZE, other=0.0)
    rest = tl.maximum(probs - q, 0.0)
    token = tl.sum(tl.where(nodes == child, token_ids, 0), axis=0)
    place = row * tl.num_programs(2) + chunk
    tl.store(residual_masses_ptr + place, tl.sum(rest.to(tl.float64), axis=0))
    tl.store(untried_masses_ptr + place, tl.sum(tl.where(ids == token, 0.0, q).to(tl.float64), axis=0))


@triton.jit(do_not_specialize=["max_nodes"])
def _reject_kernel(
    token_ids_ptr,  # [N]
    parents_ptr,  # [N]
    start_loc_ptr,  # [S + 1]
    paths_ptr,  # [S, max_nodes]
    final_tokens_ptr,  # [S]
    max_nodes,
    residual_masses_ptr,  # [L, NUM_CHUNKS]
    untried_masses_ptr,  # [L, NUM_CHUNKS]
    sampled_ptr,  # [trees that were sampled]
    draft_probs_ptr,  # [I, VOCAB_SIZE]
    stride_draft_probs,
    draft_rows_ptr,  # [L]
    seeds_ptr,  # [L]
    positions_ptr,  # [L]
    logits_ptr,  # [L, VOCAB_SIZE]
    stride_logits,
    cuts_ptr,  # [L, 4]
    chunk_masses_ptr,  # [L, NUM_CHUNKS]
    VOCAB_SIZE: tl.constexpr,
):
    """One program per sampled tree; each iteration of the loop tries one child of the current node."""
    request = tl.load(sampled_ptr + tl.program_id(0))
    token_ids, parents, root_row = load_tree(request, token_ids_ptr, parents_ptr, start_loc_ptr)
    nodes = tl.arange(0, NODES)
    path = tl.full((NODES,), -1, tl.int32)
    depth = tl.zeros((), tl.int32)

    # state of the current node
    row = root_row.to(tl.int64)
    peak, scale, threshold, last_tie, masses = load_distribution(row, cuts_ptr, chunk_masses_ptr, VOCAB_SIZE)
    total = tl.sum(masses, axis=0)
    child = tl.min(tl.where(parents == -1, nodes, NODES), axis=0)
    rank = tl.zeros((), tl.int32)
    s, m, left = tl.zeros((), tl.float64), tl.full((), 1.0, tl.float64), tl.full((), 1.0, tl.float64)
    untried = masses  # once a child was rejected: q-masses of all tokens that were not tried, by chunk
    residual_scale = tl.zeros((), tl.float64)  # s, or 0 if rounding leaves nothing of the residual

    while (child < NODES) & is_finite(peak):
        row_ptr = logits_ptr + row * stride_logits
        inverse_total = (1.0 / total).to(tl.float32)
        q_ptr = draft_probs_ptr + tl.load(draft_rows_ptr + row).to(tl.int64) * stride_draft_probs
        token = tl.sum(tl.where(nodes == child, token_ids, 0), axis=0)
        p = _load_probs(row_ptr, token, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE).to(tl.float64)
        q = tl.load(q_ptr + token).to(tl.float64)
        coin = philox_uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ACCEPT, rank)
        if coin * m * q < tl.maximum(p - s * q, 0.0) * left:
            path = tl.where(nodes == depth, child, path)
            depth += 1
            row = (root_row + 1 + child).to(tl.int64)
            peak, scale, threshold, last_tie, masses = load_distribution(row, cuts_ptr, chunk_masses_ptr, VOCAB_SIZE)
            total = tl.sum(masses, axis=0)
            child = tl.min(tl.where(parents == child, nodes, NODES), axis=0)
            rank = tl.zeros((), tl.int32)
            s, m, left = tl.zeros((), tl.float64), tl.full((), 1.0, tl.float64), tl.full((), 1.0, tl.float64)
            residual_scale = tl.zeros((), tl.float64)
        else:
            siblings = tl.where(parents == tl.sum(tl.where(nodes == child, parents, 0), axis=0), nodes, NODES)
            child = tl.min(tl.where(siblings > child, siblings, NODES), axis=0)
            rank += 1
            s += tl.where(left > 0.0, m / tl.where(left > 0.0, left, 1.0), 0.0)
            residual_scale = s
            if rank == 1:
                masses = load_of_chunks(residual_masses_ptr, row, VOCAB_SIZE)
                untried = load_of_chunks(untried_masses_ptr, row, VOCAB_SIZE)
            else:
                for chunk in range(triton.cdiv(VOCAB_SIZE, CHUNK)):
                    ids = chunk * CHUNK + tl.arange(0, CHUNK)
                    rest = _load_residual(
                        row_ptr, q_ptr, ids, residual_scale, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE
                    )
                    is_chunk = tl.arange(0, masses.shape[0]) == chunk
                    masses = tl.where(is_chunk, tl.sum(rest.to(tl.float64), axis=0), masses)
                ids = token // CHUNK * CHUNK + tl.arange(0, CHUNK)  # the chunk of the token that was just rejected
                is_untried, sibling = ids < VOCAB_SIZE, tl.min(siblings, axis=0)
                while sibling < child:
                    is_untried &= ids != tl.sum(tl.where(nodes == sibling, token_ids, 0), axis=0)
                    sibling = tl.min(tl.where(siblings > sibling, siblings, NODES), axis=0)
                mass = tl.sum(tl.load(q_ptr + ids, mask=is_untried, other=0.0).to(tl.float64), axis=0)
                untried = tl.where(tl.arange(0, untried.shape[0]) == token // CHUNK, mass, untried)
            left = tl.sum(untried, axis=0)
            m = tl.sum(masses, axis=0)
            if m == 0.0:
                m = tl.full((), 1.0, tl.float64)
                residual_scale = tl.zeros((), tl.float64)
                masses = load_of_chunks(chunk_masses_ptr, row, VOCAB_SIZE)

    final_token = tl.full((), -1, tl.int64)
    if is_finite(peak):
        purpose = tl.where(rank > 0, RESIDUAL, SAMPLE)  # past a leaf, as without speculation
        uniform = philox_uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), purpose, 0)
        chunk, part = invert_cdf(masses, uniform)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        inverse_total = (1.0 / total).to(tl.float32)
        row_ptr = logits_ptr + row * stride_logits
        if residual_scale > 0.0:
            q_ptr = draft_probs_ptr + tl.load(draft_rows_ptr + row).to(tl.int64) * stride_draft_probs
            rest = _load_residual(row_ptr, q_ptr, ids, residual_scale, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE)
        else:
            rest = _load_probs(row_ptr, ids, peak, scale, threshold, last_tie, inverse_total, VOCAB_SIZE)
        place, _ = invert_cdf(rest.to(tl.float64), part)
        final_token = (chunk * CHUNK + place).to(tl.int64)
    store_path(request, path, final_token, paths_ptr, final_tokens_ptr, max_nodes)


def reject_trees(
    trees: VerifiedTrees,
    sampled: Tensor,
    distributions: RowDistributions,
    draft_probs: Tensor,
    draft_rows: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> None:
    """Verify the trees whose children were sampled from ``draft_probs``; nothing is read back to the host.

    Args:
        trees: paths and final tokens of the sampled ones are written; a final token is -1 if the largest logit at the last
            accepted node is not finite.
        sampled: int64, indices of the sampled trees, one or more, distinct.
        distributions: the target's, of the L rows.
        draft_probs: float32 [I, vocab], q; rows may be strided.
        draft_rows: int32 [L], rows of q that the children of each row's node were sampled from, not read if it has none.
        seeds: int64 [L], the bits of the uint64 seeds.
        positions: int64 [L], of the token that follows the row, below 2**32.
    """
    masses, max_nodes = [torch.empty_like(distributions.chunk_masses) for _ in range(2)], trees.paths.shape[1]
    drafts = sampled, draft_probs, draft_probs.stride(0), draft_rows
    grid = len(sampled), 1 + max_nodes, distributions.chunk_masses.shape[1]
    distributions.launch(_first_residuals_kernel, grid, *masses, *trees[:3], *drafts)
    distributions.launch(_reject_kernel, grid[:1], *trees, max_nodes, *masses, *drafts, seeds, positions)
