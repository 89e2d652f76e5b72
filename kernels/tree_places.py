"""Parts of draft tree selection that all back ends share: the layout of the trees, and the distributions of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.batch import prefix_sums
from titan.core.trees import DraftTrees, Upload
from titan.kernels.interfaces import Candidates


def place_trees(found: Sequence[Candidates], num_rows: int) -> tuple[Ints, Flags, Flags, Flags]:
    """Return the first four fields of `DraftTrees` for a step, which the host knows; rows without candidates get empty trees."""
    counts = np.zeros(num_rows, np.int64)
    is_chain, is_sampled, has_scores = np.zeros((3, num_rows), np.bool_)
    for each in found:
        counts[each.rows] = each.num_nodes
        is_chain[each.rows] = each.is_chain
        has_scores[each.rows] = each.has_scores
        is_sampled[each.rows] = each.probs_rows is not None and each.probs_rows[:, 0] >= 0
    return prefix_sums(counts), is_chain, is_sampled, has_scores


def with_draft_probs(trees: DraftTrees, found: Sequence[Candidates], upload: Upload) -> DraftTrees:
    """Return selected trees with the distributions that their tokens were sampled from, taken from their candidates."""
    for each in found:
        if each.probs is not None and each.probs_rows is not None:
            draft_rows = _draft_rows(trees, each.rows, each.probs_rows, upload)
            return replace(trees, draft_probs=each.probs, draft_rows=draft_rows)
    return trees


def _draft_rows(trees: DraftTrees, rows: Ints, probs_rows: Ints, upload: Upload) -> Tensor:
    """Compute `DraftTrees.draft_rows` from the slots of the nodes; ``rows`` and ``probs_rows`` are fields of `Candidates`."""
    first_nodes = trees.start_loc[rows]
    counts = trees.counts[rows] + 1
    owners = np.repeat(np.arange(len(rows)), counts)
    index = np.arange(len(owners)) - (counts.cumsum() - counts)[owners]  # 0 for the root, then 1 + node
    by_slot, first_columns, nodes, is_node, entries = upload(
        [
            probs_rows.astype(np.int32),
            owners * probs_rows.shape[1],
            np.where(index > 0, first_nodes[owners] + index - 1, 0),
            index > 0,
            (first_nodes + rows)[owners] + index,
        ]
    )
    slots = trees.nodes.draft_slots.index_select(0, nodes) if trees.num_nodes else torch.zeros_like(nodes)
    values = by_slot.view(-1).index_select(0, first_columns + torch.where(is_node, slots + 1, 0))
    return values.new_zeros(trees.num_nodes + trees.num_rows).index_copy_(0, entries, values)
