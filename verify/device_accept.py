"""Verification of trees that lie on the device: by the rules of `titan.verify.accept`, with one look at the results.

One copy brings the trees and what became of them to the host. Only where a request that has nodes has an option that looks at the
drafted prefix of a row (penalties, logit bias, logits processors, ``min_tokens`` while it holds stops back) are the trees of the
step brought there before, in a copy of their own.

Legend: S requests whose roots were reached, N nodes, L = N + S rows of logits: of each request its root, then its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.device_trees import DeviceTrees, Proposal, TreeOutline
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.torch.sampling import argmax_rows
from titan.kernels.triton.root_matches import root_matches
from titan.kernels.triton.sample_rows import draw_rows
from titan.kernels.triton.tree_nodes import TreeNodes
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_walk import TreePaths, walk_matches
from titan.kernels.upload import download, to_device, upload
from titan.sample.distributions import Purpose, SamplingRows, spread_options, target_distributions
from titan.verify.assemble import Found, assemble
from titan.verify.rejection import joined
from titan.verify.rows import looks_at_prefix, prefix_options

Ints = NDArray[np.int64]


def accept_on_device(plan: StepPlan, proposal: Proposal, start_loc: Ints, logits: Tensor) -> Acceptance:
    """Choose the accepted path and the final token of every request.

    Args:
        plan: the step.
        proposal: the trees of its rows; those that are on the host are brought to the device.
        start_loc: [rows of the plan + 1], prefix sums of the rows of logits.
        logits: [L, vocab].
    """
    requests, counts = plan.requests, np.diff(start_loc)
    host_trees, trees = (None, proposal) if isinstance(proposal, DeviceTrees) else (proposal, on_device(proposal, logits.device))
    errors: dict[int, str] = {}
    if all(request.takes_argmax for request in requests):
        part = _Part(trees, counts, is_drawn=False)
        verified = [_Verified(part.rows, _walk(part, argmax_rows(logits)))]
    else:
        if host_trees is None and any(
            looks_at_prefix(request) for request, count in zip(requests, counts, strict=True) if count > 1
        ):
            host_trees = trees.on_host(download(trees.columns))
        # where it is not known which nodes there are, nothing looks at them: the prefix of a root is empty
        options = prefix_options(requests, host_trees or [EMPTY_TREE] * len(requests), start_loc)
        rows = spread_options(requests, counts, np.zeros(len(logits), np.int64), *options)
        parts = [_Part(trees, counts, is_drawn=is_drawn) for is_drawn in (False, True)]
        verified = [_verify(part, logits, rows) for part in parts if part.rows]
        errors = rows.errors

    tensors = [tensor for each in verified for tensor in each.tensors]
    fetched = download([*tensors, *(trees.columns if host_trees is None else ())])
    if host_trees is None:
        host_trees = trees.on_host(fetched[len(tensors) :])
    found: dict[int, Found] = {}
    for each in verified:
        found |= each.found(fetched)
        del fetched[: len(each.tensors)]
    return assemble(plan, host_trees, start_loc, logits, found, errors)


def on_device(trees: Sequence[DraftTree], device: torch.device) -> DeviceTrees:
    """Bring trees to the device in one copy; their ``draft_probs`` are there already."""
    drawn = [tree for tree in trees if tree.draft_probs is not None and tree.num_nodes]
    first_probs = accumulate((len(tree.inner) for tree in drawn), initial=0)
    draft_rows = [first + np.maximum(tree.topology.inner_rows, 0) for tree, first in zip(drawn, first_probs, strict=False)]
    num_nodes = [tree.num_nodes for tree in trees]
    no_scores, no_slots = np.zeros(sum(num_nodes), np.float32), np.full(sum(num_nodes), -1, np.int32)  # the host keeps them
    *columns, rows = upload(
        [
            np.concatenate([tree.token_ids for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([tree.depths for tree in trees]).astype(np.int64),
            np.concatenate([tree.ancestor_bits for tree in trees]),
            no_scores,
            no_slots,
            np.concatenate([*draft_rows, np.zeros(0)]).astype(np.int32),
        ],
        device,
    )
    outlines = [TreeOutline(n, is_drawn=n > 0 and tree.draft_probs is not None) for n, tree in zip(num_nodes, trees, strict=True)]
    draft_probs = joined([tree.draft_probs for tree in drawn if tree.draft_probs is not None]) if drawn else None
    return DeviceTrees(outlines, TreeNodes(*columns), draft_probs, rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Verified:
    """What became of some of the trees, on the device."""

    rows: list[int]  # of the plan
    paths: TreePaths
    matches: Tensor | None = None  # float32 [rows, 2], of trees that were drawn

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.paths if self.matches is None else (*self.paths, self.matches)

    def found(self, fetched: Sequence[NDArray[Any]]) -> dict[int, Found]:
        """By row, from `tensors` and any others behind them, brought to the host."""
        paths, num_accepted, final_tokens = (array.tolist() for array in fetched[:3])
        matches = [None] * len(self.rows) if self.matches is None else map(tuple, fetched[3].tolist())
        columns = zip(self.rows, paths, num_accepted, final_tokens, matches, strict=True)
        return {row: Found(path[:count], final, match) for row, path, count, final, match in columns}


class _Part:
    """The trees whose tokens were drawn, or the others, as the kernels take them.

    Args:
        trees: of all rows of the plan.
        counts: [rows of the plan], rows of logits of each; where there are none, the row is no part of it.
        is_drawn: which of the trees.
    """

    def __init__(self, trees: DeviceTrees, counts: Ints, *, is_drawn: bool) -> None:
        num_nodes = np.diff(trees.node_start_loc)
        is_part = (counts > 0) & np.array([outline.is_drawn == is_drawn for outline in trees.outlines])
        self.trees = trees
        self.rows: list[int] = np.flatnonzero(is_part).tolist()
        self.logits_rows = np.flatnonzero(np.repeat(is_part, counts))
        self.is_whole = len(self.logits_rows) == counts.sum()
        self.node_start_loc = np.cumsum([0, *num_nodes[is_part]])
        self.max_depth = int(num_nodes.max(initial=1))
        self._nodes = np.flatnonzero(np.repeat(is_part, num_nodes))

    @property
    def node_rows(self) -> Ints:
        """Where the nodes are among the part's own rows of logits: int64 [nodes]."""
        root_rows = self.node_start_loc[:-1] + np.arange(len(self.rows))
        return np.delete(np.arange(len(self.logits_rows)), root_rows)

    def of_rows(self, logits: Tensor) -> Tensor:
        """Its rows of all logits."""
        return logits if self.is_whole else logits.index_select(0, to_device(self.logits_rows, logits.device))

    def of_nodes(self, values: Tensor) -> Tensor:
        """What its nodes have of a column of all nodes."""
        return values if self.is_whole else values.index_select(0, to_device(self._nodes, values.device))

    def kernel_arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and parents of its nodes, and the first node of each tree."""
        nodes = self.trees.nodes
        start_loc = to_device(self.node_start_loc.astype(np.int32), nodes.token_ids.device)
        return self.of_nodes(nodes.token_ids), self.of_nodes(nodes.parents), start_loc


def _walk(part: _Part, wanted: Tensor) -> TreePaths:
    """Walk down the trees of a part with the tokens that its rows of logits want."""
    return walk_matches(*part.kernel_arguments(), wanted, max_depth=part.max_depth)


def _verify(part: _Part, logits: Tensor, rows: SamplingRows) -> _Verified:
    """Draw at each row of a part and walk down; where its trees were drawn, reject.

    Args:
        part: with rows.
        logits: [L, vocab], as the model made them.
        rows: options of all rows of logits, each with the position of the token behind its root.
    """
    index, trees = part.logits_rows, part.trees
    distributions = target_distributions(part.of_rows(logits), rows, index)
    node_rows, seeds, positions = upload([part.node_rows, rows.seeds[index].view(np.int64), rows.positions[index]], logits.device)
    positions.index_add_(0, node_rows, part.of_nodes(trees.nodes.depths))
    if trees.outlines[part.rows[0]].is_drawn:
        assert trees.draft_probs is not None and trees.draft_rows is not None
        nodes, q = part.kernel_arguments(), (trees.draft_probs, trees.draft_rows)
        paths = reject_trees(distributions, *q, *nodes, seeds, positions, max_depth=part.max_depth)
        return _Verified(part.rows, paths, root_matches(distributions, *q, nodes[-1]))
    return _Verified(part.rows, _walk(part, draw_rows(distributions, seeds, positions, purpose=Purpose.SAMPLE)))
