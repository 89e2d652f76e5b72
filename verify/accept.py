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
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from titan.core.device_trees import DeviceTrees, Proposal
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree
from titan.execute.batch import RaggedBatch
from titan.kernels import backend
from titan.kernels.torch.sampling import argmax_rows, verify_compiled
from titan.sample.distributions import SamplingRows, lazy_probs, sample_rows
from titan.verify.assemble import Found, assemble
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
    if isinstance(trees, DeviceTrees) or (
        backend.takes_triton(logits.device) and any(tree.draft_probs is not None for tree in trees)
    ):
        from titan.verify.device_accept import accept_on_device  # not every platform has triton

        return accept_on_device(plan, trees, start_loc, logits)
    roots = {i: first for i, (first, end) in enumerate(pairwise(start_loc.tolist())) if first < end}
    errors: dict[int, str] = {}
    found = _verify_plainly(plan.requests, trees, roots, logits)
    if found is None:
        rows = sampling_rows(plan.requests, trees, start_loc)
        found, errors = _verify(trees, roots, rows, logits), rows.errors
    return assemble(plan, trees, start_loc, logits, found, errors)


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


def _verify_plainly(
    requests: list[Request], trees: list[DraftTree], roots: dict[int, int], logits: Tensor
) -> dict[int, Found] | None:
    """Verify trees whose requests sample from the logits as they are; ``None`` where that cannot be done in one call.

    Args:
        requests: of all rows of the plan.
        trees: likewise.
        roots: by row of the plan, the row of logits of its root.
        logits: [L, vocab].
    """
    if not all(requests[i].is_plain for i in roots):
        return None
    ends = verify_compiled(
        logits,
        [walked_tree(trees[i], requests[i].params.temperature, requests[i].seed, requests[i].num_tokens) for i in roots],
        is_logits=True,
    )
    if ends is None:
        return _walk_all(trees, roots, argmax_rows(logits)) if all(requests[i].takes_argmax for i in roots) else None
    return {
        i: Found(trees[i].path_to(end.row - root - 1), end.token, None if trees[i].draft_probs is None else end.matches)
        for (i, root), end in zip(roots.items(), ends, strict=True)
    }


def _verify(trees: list[DraftTree], roots: dict[int, int], rows: SamplingRows, logits: Tensor) -> dict[int, Found]:
    """Draw the tokens of the deterministic trees and verify the sampled ones; arguments as those of `_verify_plainly`."""
    sampled = {i: root for i, root in roots.items() if trees[i].draft_probs is not None}
    if not sampled:
        return _walk_all(trees, roots, sample_rows(logits, rows))
    is_sampled = np.zeros(len(logits), bool)
    for i, root in sampled.items():
        is_sampled[root : root + 1 + trees[i].num_nodes] = True
    matched_index, sampled_index = np.flatnonzero(~is_sampled), np.flatnonzero(is_sampled)
    tokens = torch.zeros(len(logits), dtype=torch.int64)
    if len(matched_index):
        matched = torch.from_numpy(matched_index)
        tokens[matched] = sample_rows(logits.index_select(0, matched), rows, matched_index)
        logits = logits.index_select(0, torch.from_numpy(sampled_index))
    target = lazy_probs(logits, rows, sampled_index)
    result = reject([trees[i] for i in sampled], target, rows.seeds[sampled_index], rows.positions[sampled_index])
    found = _walk_all(trees, {i: root for i, root in roots.items() if i not in sampled}, tokens)
    last_rows = sampled_index[result.last_rows.numpy()].tolist()
    columns = zip(sampled.items(), last_rows, result.final_tokens.tolist(), result.matches.tolist(), strict=True)
    for (i, root), last_row, final_token, (greedy, drawn) in columns:
        found[i] = Found(trees[i].path_to(last_row - root - 1), final_token, (greedy, drawn))
    return found


def _walk_all(trees: list[DraftTree], roots: dict[int, int], tokens: Tensor) -> dict[int, Found]:
    """Follow tokens, int64 [L], drawn at the roots and the nodes, down the trees of these roots."""
    drawn, found = tokens.tolist(), {}
    for i, root in roots.items():
        path = walk(trees[i], drawn[root : root + 1 + trees[i].num_nodes])
        found[i] = Found(path, drawn[root + 1 + path[-1] if path else root])
    return found
