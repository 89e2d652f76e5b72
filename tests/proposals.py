"""Looking at what a drafter proposes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from titan.core.growth import ShapeSpec, shape_plan
from titan.core.step import StepPlan
from titan.core.trees import DraftTree, DraftTrees, Parents
from titan.draft.base import Drafter
from titan.engine import Engine
from titan.kernels.interfaces import Backend

BUSHY = [-1, -1, 0, 0, 1, 2, 5]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"draft_tree": "chain", "max_draft_tokens": 6},
    "auto": {"draft_tree": "auto", "max_draft_tokens": 6},
    "auto_16": {"draft_tree": "auto", "max_draft_tokens": 16},
    "dynamic": {"draft_tree": "dynamic", "max_draft_tokens": 6},
    "dynamic_63": {"draft_tree": "dynamic", "max_draft_tokens": 63},
    "parents": {"draft_tree": BUSHY, "max_draft_tokens": 7},
}


def filled(parents: Parents) -> ShapeSpec:
    return ShapeSpec(shape_plan(parents))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


class Proposal(NamedTuple):
    """Of one row of a step."""

    token_ids: list[int]  # of the request, before
    budget: int
    tree: DraftTree


def trees_on_host(backend: Backend, trees: DraftTrees) -> list[DraftTree]:
    """The trees one by one, with their q where they were sampled."""
    found = trees.on_host(backend.download(trees.nodes))
    return [_with_q(found[row], trees, row) for row in range(trees.num_rows)]


def _with_q(tree: DraftTree, trees: DraftTrees, row: int) -> DraftTree:
    if not trees.is_sampled[row] or not tree.num_nodes:
        return tree
    assert trees.draft_probs is not None and trees.draft_rows is not None
    of_root = int(trees.start_loc[row]) + row
    entries = torch.from_numpy(of_root + 1 + tree.topology.inner).to(trees.draft_rows.device)
    return replace(tree, draft_probs=trees.draft_probs[trees.draft_rows[entries].long()].cpu())


def record(engine: Engine) -> list[Proposal]:
    """A list that receives what is proposed for each row of each step."""
    proposals: list[Proposal] = []
    drafter: Drafter = engine.drafter
    propose = drafter.propose

    def recorded(plan: StepPlan) -> DraftTrees:
        trees = propose(plan)
        assert isinstance(trees, DraftTrees)
        for request, budget, tree in zip(plan.requests, plan.draft_budgets, trees_on_host(engine.backend, trees), strict=True):
            proposals.append(Proposal(list(request.token_ids), budget, tree))
        return trees

    drafter.propose = recorded  # type: ignore[method-assign]
    return proposals


def assert_same_trees(backend: Backend, actual: DraftTrees, expected: DraftTrees, rows: Iterable[int], tolerance: float) -> None:
    """The same nodes in the same places; scores and q but for rounding. On the host, no place is empty and all chains are known."""
    for name in ("is_sampled", "has_scores"):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist()
    ours, others = trees_on_host(backend, actual), trees_on_host(backend, expected)
    for row in rows:
        one, other = ours[row], others[row]
        if backend.is_host:
            assert one.num_nodes == actual.counts[row] and one.topology.is_chain == actual.is_chain[row]
        assert one.topology.is_chain or not actual.is_chain[row]
        for name in ("token_ids", "parents", "draft_slots"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        assert (one.scores is None, one.draft_probs is None) == (other.scores is None, other.draft_probs is None)
        if one.scores is not None and other.scores is not None:
            np.testing.assert_allclose(one.scores, other.scores, rtol=tolerance, atol=tolerance)
        if one.draft_probs is not None and other.draft_probs is not None:
            torch.testing.assert_close(one.draft_probs, other.draft_probs, rtol=tolerance, atol=1e-6)
