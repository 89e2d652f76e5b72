"""Verification: which draft tokens are kept, and which token follows them.

Sample-and-match, for deterministic proposals: the target draws its own token at the root and at every node, as it would
without speculation; the walk starts at the root and descends to the child that carries the drawn token. Where no child
does, the drawn token is emitted as the **recovered** token; past a leaf it is the **bonus** token. The output is thus
distributed exactly as the target's own, and with randomness keyed by position it is the same sequence.
At temperature 0 the draw is the argmax and the rule is greedy acceptance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.batch import RaggedBatch
from titan.sampling import sample_rows
from titan.step import Acceptance, StepPlan
from titan.tree import DraftTree
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
    tokens: NDArray[np.int64] = sample_rows(logits, rows).cpu().numpy()
    paths, last_rows = walk(trees, start_loc, tokens)
    token_ids: list[list[int]] = []
    errors: list[str | None] = []
    for i, (tree, path) in enumerate(zip(trees, paths, strict=True)):
        has_rows = start_loc[i + 1] > start_loc[i]
        final_token = int(tokens[last_rows[i]]) if has_rows else -1
        is_broken = has_rows and final_token < 0
        errors.append("the target's logits are not finite" if is_broken else None)
        token_ids.append([*tree.token_ids[path].tolist(), final_token] if has_rows and not is_broken else [])
    return Acceptance(paths, token_ids, errors)


def walk(
    trees: list[DraftTree], start_loc: NDArray[np.int64], tokens: NDArray[np.int64]
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Follow the drawn tokens down all trees at once, one depth at a time.

    Args:
        trees: one per request.
        start_loc: [R + 1], first row of each request in ``tokens``; a request without rows has no nodes.
        tokens: [L] drawn at the root and the nodes.

    Returns:
        The accepted nodes of each request, root downwards, and the row of the last node reached, int64 [R].
    """
    last_rows = start_loc[:-1].copy()
    num_nodes = np.array([tree.num_nodes for tree in trees])
    if not num_nodes.any():
        return [[] for _ in trees], last_rows
    owners = np.repeat(np.arange(len(trees)), num_nodes)
    first_rows = start_loc[owners] + 1  # of the owners' nodes
    node_rows = first_rows + np.concatenate([np.arange(count) for count in num_nodes])
    parent_rows = first_rows + np.concatenate([tree.parents for tree in trees])
    is_match = np.concatenate([tree.token_ids for tree in trees]) == tokens[parent_rows]
    while len(hits := np.flatnonzero(is_match & (parent_rows == last_rows[owners]))):
        # reversed, so that the first of two equal siblings is the one that stays
        last_rows[owners[hits[::-1]]] = node_rows[hits[::-1]]
    last_nodes = (last_rows - start_loc[:-1] - 1).tolist()
    return [tree.path_to(node) for tree, node in zip(trees, last_nodes, strict=True)], last_rows
