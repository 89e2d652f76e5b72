"""Choosing draft trees and verifying them on the device, where they stay; see `titan.kernels.interfaces.TreeOps`.

Legend: S trees that are verified, N nodes, L = N + S rows of logits: of each tree its root, then its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.batch import prefix_sums
from titan.core.random import Purpose
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees, Upload, allocate_columns
from titan.kernels.interfaces import Candidates, Verified
from titan.kernels.tree_places import TreePlaces
from titan.kernels.triton.sample_rows import draw_rows
from titan.kernels.triton.sampling import TritonSampling
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_select import select_trees
from titan.kernels.triton.tree_walk import walk_matches


class TritonTrees:
    """Nothing is read back to the host.

    Args:
        device: of the trees.
        upload: brings arrays there.
        sampling: of the same back end.
    """

    def __init__(self, device: torch.device, upload: Upload, sampling: TritonSampling) -> None:
        self._device = device
        self._upload = upload
        self._sampling = sampling

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        places = TreePlaces.of(found, num_rows)
        columns = allocate_columns(places.num_nodes, self._device)
        for each in found:
            first, counts = self._upload([places.start_loc[each.rows].astype(np.int32), each.num_nodes.astype(np.int32)])
            select_trees(each.token_ids, each.scores, each.parent_slots, each.slots, first, counts, columns)
        return places.trees(columns, found, self._upload)

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        is_sampled = trees.is_sampled[rows]
        if not is_sampled.any() or is_sampled.all():
            return self._verify_part(logits, trees, rows, np.ones(len(rows), np.bool_), sampling)
        parts = [self._verify_part(logits, trees, rows, flags, sampling) for flags in (~is_sampled, is_sampled)]
        order = np.argsort(np.concatenate([np.flatnonzero(~is_sampled), np.flatnonzero(is_sampled)]))
        [index] = self._upload([order])
        return Verified(*(torch.cat(columns).index_select(0, index) for columns in zip(*parts, strict=True)))

    def _verify_part(self, logits: Tensor, trees: DraftTrees, rows: Ints, is_part: Flags, sampling: SamplingRows) -> Verified:
        """Verify the trees of a part, all of which were sampled, or none.

        Args:
            logits: [L, vocab] of all S trees.
            trees: of a plan.
            rows: [S], of the plan.
            is_part: [S].
            sampling: of the S requests.
        """
        counts, max_depth = trees.counts, max(int(trees.counts.max()), 1)
        part_rows, num_logits = rows[is_part], counts[rows] + 1
        logits_rows = np.flatnonzero(np.repeat(is_part, num_logits))
        is_in_part = np.isin(np.arange(trees.num_rows), part_rows)
        nodes = np.flatnonzero(np.repeat(is_in_part, counts))
        start_loc = prefix_sums(counts[part_rows])
        node_rows = np.arange(len(nodes)) + 1 + np.repeat(np.arange(len(part_rows)), counts[part_rows])
        options = sampling.take(np.flatnonzero(is_part)).repeat(counts[part_rows] + 1)
        first_entries = trees.start_loc[part_rows] + part_rows
        entries = np.arange(len(logits_rows)) + np.repeat(
            first_entries - start_loc[:-1] - np.arange(len(part_rows)), counts[part_rows] + 1
        )
        root_rows = start_loc[:-1] + np.arange(len(part_rows))
        columns = [nodes, logits_rows, node_rows, root_rows, entries, start_loc.astype(np.int32)]
        seeds, positions, node_index, logits_index, node_rows_index, roots_index, entries_index, node_start_loc = self._upload(
            [options.seeds.view(np.int64), options.positions, *columns]
        )
        if not is_part.all():
            logits = logits.index_select(0, logits_index)
        token_ids, parents, depths = trees.token_ids, trees.parents, trees.depths
        if len(nodes) < trees.num_nodes:
            token_ids, parents, depths = (column.index_select(0, node_index) for column in (token_ids, parents, depths))
        no_matches = torch.full((len(part_rows), 2), torch.nan, device=logits.device)
        if options.is_greedy:
            wanted = self._sampling.argmax(logits)
            return Verified(*walk_matches(token_ids, parents, node_start_loc, wanted, max_depth=max_depth), no_matches)
        distributions = self._sampling.distributions(logits, options)
        positions.index_add_(0, node_rows_index, depths)
        if not trees.is_sampled[part_rows[0]]:
            wanted = draw_rows(distributions, seeds, positions, purpose=Purpose.SAMPLE)
            return Verified(*walk_matches(token_ids, parents, node_start_loc, wanted, max_depth=max_depth), no_matches)
        assert trees.draft_probs is not None and trees.draft_rows is not None
        draft_probs, draft_rows = trees.draft_probs, trees.draft_rows.index_select(0, entries_index)
        nodes_of_trees = token_ids, parents, node_start_loc
        paths = reject_trees(distributions, draft_probs, draft_rows, *nodes_of_trees, seeds, positions, max_depth=max_depth)
        # how often draft tokens at the root would be accepted: of all rows, only these are written out
        p = self._sampling.probs(logits.index_select(0, roots_index), sampling.take(np.flatnonzero(is_part)))
        q_roots = draft_probs.index_select(0, draft_rows.index_select(0, roots_index))
        best = q_roots.max(1, keepdim=True)
        greedy = p.gather(1, best.indices).masked_fill(~best.values.isfinite(), torch.nan)  # then all places are empty
        return Verified(*paths, torch.cat((greedy, torch.minimum(p, q_roots).sum(1, keepdim=True)), 1))
