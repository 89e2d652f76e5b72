"""Inputs that change nothing: what runs over them compiles its kernels, before an engine serves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.core.batch import AttentionLayout, RaggedBatch, prefix_sums
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.kernels.interfaces import Backend, Candidates


def idle_batch(query_lens: Sequence[int], block_size: int) -> RaggedBatch:
    """Return a batch that writes no KV: each token sees the first slot of block 0 alone.

    Args:
        query_lens: of the requests; all but the first count as ending in a branching tree.
        block_size: tokens per KV block.
    """
    num_requests, query_start_loc = len(query_lens), prefix_sums(query_lens)
    nothing, one_each = np.zeros(query_start_loc[-1], np.int64), np.ones(num_requests, np.int64)
    layout = AttentionLayout(
        query_start_loc=query_start_loc,
        seq_lens=one_each,
        block_table=np.zeros((num_requests, 1), np.int64),
        tree_starts=np.minimum(np.arange(num_requests), 1),
        positions=nothing,
        visible_lens=nothing + 1,
        ancestor_bits=nothing,
        block_size=block_size,
    )
    return RaggedBatch(nothing, nothing - 1, query_start_loc[1:] - 1, np.arange(num_requests + 1), layout)


def verify_idle_trees(backend: Backend, vocab_size: int, dtype: torch.dtype, num_candidates: int) -> None:
    """Select two trees of one node, one of which is sampled, from this many candidates each, and verify them."""
    shape = 1, num_candidates
    no_slot = torch.full(shape, -1, device=backend.device)
    token_ids, scores = no_slot + 1, torch.zeros(shape, device=backend.device)
    logits = torch.zeros(4, vocab_size, dtype=dtype, device=backend.device)
    rows = SamplingRows.of([(SamplingParams(temperature=0.0), 0, 0), (SamplingParams(temperature=1.0, top_k=1), 0, 0)])
    one, yes = np.array([1]), np.array([True])
    greedy = Candidates(np.array([0]), one, yes, False, token_ids, scores, no_slot, no_slot)
    of_probs = np.zeros((1, 1 + num_candidates), np.int64)
    probs = choose_idle_children(backend, logits)
    sampled = Candidates(np.array([1]), one, yes, False, token_ids, scores, no_slot, no_slot, probs, of_probs)
    trees = backend.trees.select([greedy, sampled], 2)
    backend.trees.verify(logits, trees, np.arange(2), rows)


def choose_idle_children(backend: Backend, logits: Tensor) -> Tensor:
    """Find the most likely tokens of logits that say nothing, [any, vocab]; sample one, and return its distribution: [1, vocab]."""
    backend.sampling.argmax(logits)
    rows = SamplingRows.of([(SamplingParams(temperature=1.0, top_k=1), 0, 0)])
    backend.sampling.probs(logits[:1], rows)  # which several children of a node are sampled from
    [place], probs = backend.upload([np.zeros(1, np.int64)]), torch.empty(1, logits.shape[1], device=backend.device)
    token_ids = torch.zeros(1, 1, dtype=torch.int64, device=backend.device)
    backend.sampling.sample_children(logits[:1], rows, np.ones(1, np.int64), place, probs, token_ids)
    return probs
