"""Where the trees that are chosen from candidates lie, which follows from what the host knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.batch import prefix_sums
from titan.core.trees import DraftTrees, Upload
from titan.kernels.interfaces import Candidates


class TreePlaces(NamedTuple):
    """What the host knows of the trees of a step; see `DraftTrees`."""

    start_loc: Ints
    is_chain: Flags
    is_sampled: Flags
    has_scores: Flags

    @classmethod
    def of(cls, found: Sequence[Candidates], num_rows: int) -> TreePlaces:
        """Of the requests that have candidates, and of those that draft nothing."""
        counts = np.zeros(num_rows, np.int64)
        is_chain, is_sampled, has_scores = np.zeros((3, num_rows), np.bool_)
        for each in found:
            counts[each.rows], is_chain[each.rows] = each.num_nodes, each.is_chain
            has_scores[each.rows], is_sampled[each.rows] = each.has_scores, each.probs is not None
        return cls(prefix_sums(counts), is_chain, is_sampled, has_scores)

    @property
    def num_nodes(self) -> int:
        """Places of all trees."""
        return int(self.start_loc[-1])

    def trees(self, columns: Sequence[Tensor], found: Sequence[Candidates], upload: Upload) -> DraftTrees:
        """The trees, once the columns are filled.

        Args:
            columns: of the nodes.
            found: what they were chosen from.
            upload: brings arrays to the device.
        """
        for each in found:
            if each.probs is not None and each.probs_rows is not None:
                draft_rows = self._draft_rows(columns[-1], each.rows, each.probs_rows, upload)
                return DraftTrees.from_columns(*self, columns, each.probs, draft_rows)
        return DraftTrees.from_columns(*self, columns)

    def _draft_rows(self, draft_slots: Tensor, rows: Ints, probs_rows: Ints, upload: Upload) -> Tensor:
        """`DraftTrees.draft_rows`, by the slots of the nodes; arguments are those of `Candidates`."""
        first_nodes = self.start_loc[rows]
        counts = self.start_loc[rows + 1] - first_nodes + 1
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
        slots = draft_slots.index_select(0, nodes) if len(draft_slots) else torch.zeros_like(nodes)
        values = by_slot.view(-1).index_select(0, first_columns + torch.where(is_node, slots + 1, 0))
        return values.new_zeros(self.num_nodes + len(self.is_chain)).index_copy_(0, entries, values)
