"""Verification: which draft tokens are kept, and which token follows them.

Deterministic proposals are verified by sample-and-match: the target draws its own token at the root and at every node, as it
would without speculation; the walk starts at the root and descends to the child that carries the drawn token. Where no child
does, the drawn token is emitted as the **recovered** token; past a leaf it is the **bonus** token. The output is thus
distributed exactly as the target's own, and with randomness keyed by position it is the same sequence.
At temperature 0 the draw is the argmax and the rule is greedy acceptance.

Sampled proposals, trees with ``draft_probs``, are verified by `titan.verify.rejection`. Trees that lie on the device are verified
there, by `titan.verify.device_accept`; on CUDA all trees of a step are, if one of them was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.batch import RaggedBatch
from titan.device_trees import DeviceTrees, Proposal
from titan.kernels import backend
from titan.kernels.row_sampling import argmax_rows, verify_compiled
from titan.kernels.upload import to_device
from titan.request import Request
from titan.sampling import lazy_probs, sample_rows
from titan.step import Acceptance, StepPlan
from titan.tree import DraftTree
from titan.verify.logprobs import emitted_logprobs
from titan.verify.rejection import reject, walked_tree
from titan.verify.rows import sampling_rows


def accept(plan: StepPlan, trees: Proposal, batch: RaggedBatch, logits: Tensor) -> Acceptance:
    """Choose the accepted path and the final token of every request.

    Args:
        plan: the step.
        trees: one per row of the plan.
        batch: the pass that made ``logits``.
        logits: [L, vocab], rows of a request in order: root, then nodes.
    """
    start_loc = batch.logits_start_loc
    is_sampled = not isinstance(trees, DeviceTrees) and any(tree.draft_probs is not None for tree in trees)
    if isinstance(trees, DeviceTrees) or (is_sampled and backend.takes_triton(logits.device)):
        from titan.verify.device_accept import accept_on_device  # not every platform has triton

        return accept_on_device(plan, trees, start_loc, logits)
    verified = _verify_plainly(plan.requests, trees, start_loc, logits) or _verify(plan.requests, trees, start_loc, logits)
    paths: list[list[int]] = []
    token_ids: list[list[int]] = []
    errors: list[str | None] = []
    for i, (tree, (first, end)) in enumerate(zip(trees, pairwise(start_loc.tolist()), strict=True)):
        path: list[int] = []
        emitted: list[int] = []
        error = None
        if first < end:
            if i in verified.last_rows:
                path = tree.path_to(verified.last_rows[i] - first - 1)
            else:
                path = walk(tree, verified.tokens[first:end])
            last_row = first + 1 + path[-1] if path else first
            emitted = tree.token_ids[path].tolist() if path else []
            if verified.tokens[last_row] >= 0:
                emitted.append(verified.tokens[last_row])
            else:
                error = verified.errors.get(last_row, "the target's logits are not finite")
        paths.append(path)
        token_ids.append(emitted)
        errors.append(error)
    logprobs = emitted_logprobs(plan.requests, batch.logits_start_loc, paths, token_ids, logits)
    return Acceptance(trees, paths, token_ids, errors, logprobs, verified.matches)


def walk(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """Follow the drawn tokens down a tree.

    Args:
        tree: the draft tokens.
        tokens: [1 + num_nodes], drawn at the root and the nodes.

    Returns:
        The nodes whose tokens were drawn, from the root down.
    """
    path, node = [], -1
    # children come after their parents, and of equal siblings the first is taken
    for child, (parent, token_id) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
        if parent == node and token_id == tokens[1 + node]:
            path.append(child)
            node = child
    return path


@dataclass(frozen=True, slots=True, eq=False)
class _Verified:
    """What is known of the rows of logits, on the host."""

    tokens: list[int]  # by row; of trees that were walked at their last row only; -1 where none can be drawn
    last_rows: dict[int, int] = field(default_factory=dict)  # by the index of a tree that was walked: where its path ends
    matches: dict[int, tuple[float, float]] = field(default_factory=dict)  # of the sampled trees
    errors: dict[int, str] = field(default_factory=dict)  # by row


def _verify_plainly(
    requests: list[Request], trees: list[DraftTree], start_loc: NDArray[np.int64], logits: Tensor
) -> _Verified | None:
    """Verify trees whose requests sample from the logits as they are; ``None`` where that cannot be done in one call."""
    walked = [i for i, (first, end) in enumerate(pairwise(start_loc.tolist())) if first < end]
    if not all(requests[i].is_plain for i in walked):
        return None
    ends = verify_compiled(
        logits,
        [walked_tree(trees[i], requests[i].params.temperature, requests[i].seed, requests[i].num_tokens) for i in walked],
        is_logits=True,
    )
    if ends is None:
        return _Verified(argmax_rows(logits).tolist()) if all(requests[i].takes_argmax for i in walked) else None
    tokens = [0] * len(logits)
    for end in ends:
        tokens[end.row] = end.token
    last_rows = {i: end.row for i, end in zip(walked, ends, strict=True)}
    matches = {i: end.matches for i, end in zip(walked, ends, strict=True) if trees[i].draft_probs is not None}
    return _Verified(tokens, last_rows, matches)


def _verify(requests: list[Request], trees: list[DraftTree], start_loc: NDArray[np.int64], logits: Tensor) -> _Verified:
    """Draw the tokens of the deterministic trees and verify the sampled ones, with one copy from the device."""
    rows = sampling_rows(requests, trees, start_loc)
    sampled = [i for i, tree in enumerate(trees) if tree.draft_probs is not None]
    if not sampled:
        return _Verified(sample_rows(logits, rows).tolist(), errors=rows.errors)
    is_sampled = np.repeat([tree.draft_probs is not None for tree in trees], start_loc[1:] - start_loc[:-1])
    matched_index, sampled_index = np.flatnonzero(~is_sampled), np.flatnonzero(is_sampled)
    sampled_trees, sampled_logits, matched_tokens = [trees[i] for i in sampled], logits, []
    if len(matched_index):
        matched_tokens.append(sample_rows(logits.index_select(0, to_device(matched_index, logits.device)), rows, matched_index))
        sampled_logits = logits.index_select(0, to_device(sampled_index, logits.device))
    target = lazy_probs(sampled_logits, rows, sampled_index)
    result = reject(sampled_trees, target, rows.seeds[sampled_index], rows.positions[sampled_index])
    matches = result.matches.double().view(torch.int64).flatten()
    host = torch.cat((result.last_rows, result.final_tokens, matches, *matched_tokens)).cpu().numpy()
    n = len(sampled)
    last_rows, tokens = sampled_index[host[:n]], np.zeros(len(logits), np.int64)
    tokens[last_rows], tokens[matched_index] = host[n : 2 * n], host[4 * n :]
    greedy_matches, sampled_matches = host[2 * n : 4 * n].view(np.float64).reshape(n, 2).T.tolist()
    return _Verified(
        tokens.tolist(),
        dict(zip(sampled, last_rows.tolist(), strict=True)),
        dict(zip(sampled, zip(greedy_matches, sampled_matches, strict=True), strict=True)),
        rows.errors,
    )
