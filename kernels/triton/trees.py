"""Selection and verification of draft trees on the device, where they stay; see `titan.kernels.interfaces.TreeOps`.

Legend: S trees to verify, N nodes, L = N + S rows of logits: for each tree its root, then its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.batch import prefix_sums
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees, Upload, allocate_nodes
from titan.kernels.interfaces import Candidates, Verified
from titan.kernels.tree_places import place_trees, with_draft_probs
from titan.kernels.triton.sample_rows import sample_rows
from titan.kernels.triton.sampling import TritonSampling
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_select import select_trees
from titan.kernels.triton.tree_walk import VerifiedTrees, walk_matches


class TritonTrees:
    """Tree operations in Triton kernels; nothing is read back to the host."""

    def __init__(self, device: torch.device, upload: Upload, sampling: TritonSampling) -> None:
        self._device = device
        self._upload = upload
        self._sampling = sampling

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        start_loc, is_chain, is_sampled, has_scores = place_trees(found, num_rows)
        trees = DraftTrees(start_loc, is_chain, is_sampled, has_scores, allocate_nodes(int(start_loc[-1]), self._device))
        for each in found:
            first, counts = self._upload([start_loc[each.rows].astype(np.int32), each.num_nodes.astype(np.int32)])
            select_trees(each, first, counts, trees.nodes)
        return with_draft_probs(trees, found, self._upload)

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        counts, nodes = trees.counts[rows], trees.nodes
        start_loc, max_nodes = prefix_sums(counts).astype(np.int32), max(int(counts.max()), 1)
        if sampling.is_greedy:
            found = VerifiedTrees.of(nodes.token_ids, nodes.parents, *self._upload([start_loc]), max_nodes=max_nodes)
            walk_matches(found, self._sampling.argmax(logits))
            return Verified(found.paths, found.final_tokens)
        is_sampled, ranks, of_logits = trees.is_sampled[rows], np.arange(len(rows)), sampling.repeat(counts + 1)
        options = of_logits.options
        distributions, [node_start_loc, node_rows, seeds, positions, index, entries] = self._sampling.distributions(
            logits,
            of_logits,
            start_loc,
            np.arange(trees.num_nodes) + 1 + np.repeat(ranks, counts),
            options["seed"].view(np.int64),
            options["position"],
            np.flatnonzero(is_sampled),
            np.arange(len(options)) + np.repeat(rows - ranks, counts + 1),
        )
        found = VerifiedTrees.of(nodes.token_ids, nodes.parents, node_start_loc, max_nodes=max_nodes)
        positions.index_add_(0, node_rows, nodes.depths)
        if not is_sampled.all():
            walk_matches(found, sample_rows(distributions, seeds, positions))
        if is_sampled.any():
            assert trees.draft_probs is not None and trees.draft_rows is not None
            draft_rows = trees.draft_rows.index_select(0, entries)
            reject_trees(found, index, distributions, trees.draft_probs, draft_rows, seeds, positions)
        return Verified(found.paths, found.final_tokens)
