"""Verification: which draft tokens are kept, and which token follows them.

Deterministic proposals are verified by sample-and-match: the target draws its own token at the root and at every node, as it
would without speculation; the walk starts at the root and descends to the child that carries the drawn token. Where no child
does, the drawn token is emitted as the **recovered** token; past a leaf it is the **bonus** token. The output is thus
distributed exactly as the target's own, and with randomness keyed by position it is the same sequence.
At temperature 0 the draw is the argmax and the rule is greedy acceptance.

Sampled proposals, trees with ``draft_probs``, are verified by `titan.verify.rejection`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.batch import RaggedBatch
from titan.kernels import backend
from titan.kernels.upload import to_device
from titan.sampling import SamplingRows, sample_rows, target_probs
from titan.step import Acceptance, StepPlan
from titan.tree import EMPTY_TREE, DraftTree
from titan.verify.logprobs import emitted_logprobs
from titan.verify.rejection import reject, reject_by_kernels
from titan.verify.rows import sampling_rows


def accept(plan: StepPlan, trees: list[DraftTree], batch: RaggedBatch, logits: Tensor) -> Acceptance:
    """Choose the accepted path and the final token of every request.

    Args:
        plan: the step.
        trees: one per row of the plan.
        batch: the pass that made ``logits``.
        logits: [L, vocab], rows of a request in order: root, then nodes.
    """
    start_loc = batch.logits_start_loc
    rows = sampling_rows(plan.requests, trees, start_loc)
    sampled = [i for i, tree in enumerate(trees) if tree.draft_probs is not None]
    matches: dict[int, tuple[float, float]] = {}
    if sampled:
        tokens, sampled_rows, sampled_matches = _match_and_reject(sampled, trees, start_loc, logits, rows)
        last_rows = walk([EMPTY_TREE if tree.draft_probs is not None else tree for tree in trees], start_loc, tokens)
        last_rows[sampled] = sampled_rows
        matches = {i: (match[0], match[1]) for i, match in zip(sampled, sampled_matches.tolist(), strict=True)}
    else:
        tokens = sample_rows(logits, rows).cpu().numpy()
        last_rows = walk(trees, start_loc, tokens)
    paths = [tree.path_to(int(row - first) - 1) for tree, row, first in zip(trees, last_rows, start_loc[:-1], strict=True)]
    token_ids: list[list[int]] = []
    errors: list[str | None] = []
    for i, (tree, path) in enumerate(zip(trees, paths, strict=True)):
        has_rows = start_loc[i + 1] > start_loc[i]
        final_token = int(tokens[last_rows[i]]) if has_rows else -1
        is_broken = has_rows and final_token < 0
        errors.append(rows.errors.get(int(last_rows[i]), "the target's logits are not finite") if is_broken else None)
        token_ids.append([*tree.token_ids[path].tolist(), *([final_token] if has_rows and not is_broken else [])])
    logprobs = emitted_logprobs(plan.requests, start_loc, paths, token_ids, logits)
    return Acceptance(paths, token_ids, errors, logprobs, matches)


def walk(trees: list[DraftTree], start_loc: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Follow the drawn tokens down all trees at once, one depth at a time.

    Args:
        trees: one per request.
        start_loc: [R + 1], first row of each request in ``tokens``; a request without rows has no nodes.
        tokens: [L] drawn at the root and the nodes.

    Returns:
        The row of the last node reached by each request, or of its root: int64 [R].
    """
    last_rows = start_loc[:-1].copy()
    num_nodes = np.array([tree.num_nodes for tree in trees])
    if not num_nodes.any():
        return last_rows
    owners = np.repeat(np.arange(len(trees)), num_nodes)
    first_rows = start_loc[owners] + 1  # of the owners' nodes
    node_rows = first_rows + np.concatenate([np.arange(count) for count in num_nodes])
    parent_rows = first_rows + np.concatenate([tree.parents for tree in trees])
    is_match = np.concatenate([tree.token_ids for tree in trees]) == tokens[parent_rows]
    while len(hits := np.flatnonzero(is_match & (parent_rows == last_rows[owners]))):
        # reversed, so that the first of two equal siblings is the one that stays
        last_rows[owners[hits[::-1]]] = node_rows[hits[::-1]]
    return last_rows


def _match_and_reject(
    sampled: list[int], trees: list[DraftTree], start_loc: NDArray[np.int64], logits: Tensor, rows: SamplingRows
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Draw the tokens of the deterministic trees and verify the sampled ones, with one copy from the device.

    Returns:
        Tokens by row, int64 [L], of sampled trees at their last row only; these last rows, int64 [sampled]; and the `matches` of
        the sampled trees, float64 [sampled, 2].
    """
    device = logits.device
    is_sampled = np.repeat(np.isin(np.arange(len(trees)), sampled), np.diff(start_loc))
    matched_index, sampled_index = np.flatnonzero(~is_sampled), np.flatnonzero(is_sampled)
    matched_rows, sampled_rows = to_device(matched_index, device), to_device(sampled_index, device)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)
    if len(matched_index):
        tokens[matched_rows] = sample_rows(logits.index_select(0, matched_rows), rows, matched_index)
    sampled_logits = logits.index_select(0, sampled_rows) if len(matched_index) else logits
    sampled_trees = [trees[i] for i in sampled]
    if backend.takes_triton(device):
        result = reject_by_kernels(sampled_trees, sampled_logits, rows, sampled_index)
    else:
        probs = target_probs(sampled_logits, rows, sampled_index)
        result = reject(sampled_trees, probs, rows.seeds[sampled_index], rows.positions[sampled_index])
    last_rows = sampled_rows[result.last_rows]
    tokens[last_rows] = result.final_tokens
    host = torch.cat((tokens, last_rows, result.matches.double().view(torch.int64).flatten())).cpu().numpy()
    tokens_end, rows_end = len(logits), len(logits) + len(sampled)
    return host[:tokens_end], host[tokens_end:rows_end], host[rows_end:].view(np.float64).reshape(-1, 2)
