"""Selection and verification of draft trees in the C++ of this folder; see `titan.kernels.interfaces.TreeOps`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.sampling_rows import OPTIONS, SamplingRows
from titan.core.trees import DraftTrees, NodeColumns, Upload, allocate_nodes
from titan.kernels.cpu.compiled import BOOL, COMPILED_DTYPES, INT, POINTER, CompiledKernels, address
from titan.kernels.cpu.sampling import CompiledSampling, readable
from titan.kernels.interfaces import Candidates, Verified
from titan.kernels.tree_places import place_trees, with_draft_probs

CANDIDATE = np.dtype([("token", "i8"), ("score", "f4"), ("parent_slot", "i4"), ("slot", "i4")], align=True)
"""``Candidate`` of the C++."""


class NodeColumnsStruct(ctypes.Structure):
    """``NodeColumns`` of the C++."""

    _fields_ = [(name, POINTER) for name in NodeColumns._fields]


class TreesStruct(ctypes.Structure):
    """``VerifiedTrees`` of the C++."""

    _fields_ = [
        *((name, INT) for name in ("num_trees", "max_depth", "holds_probs")),
        *((name, POINTER) for name in ("rows", "start_loc", "is_sampled", "options", "token_ids", "parents")),
        *((name, POINTER) for name in ("draft_probs", "draft_rows", "paths", "final_tokens")),
    ]


class CompiledTrees:
    """See `titan.kernels.interfaces.TreeOps`.

    Args:
        kernels: the compiled C++ of this folder.
        sampling: of the same back end.
        upload: of the same back end.
    """

    def __init__(self, kernels: CompiledKernels, sampling: CompiledSampling, upload: Upload) -> None:
        self._sampling = sampling
        self._upload = upload
        self._select = kernels.plain_function("select_trees", None)
        self._verify = {dtype: kernels.function("verify_trees", dtype, POINTER, INT, POINTER) for dtype in COMPILED_DTYPES}

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        start_loc, is_chain, is_sampled, has_scores = place_trees(found, num_rows)
        trees = DraftTrees(start_loc, is_chain, is_sampled, has_scores, allocate_nodes(int(start_loc[-1]), None))
        struct = NodeColumnsStruct(*(column.data_ptr() for column in trees.nodes))
        for each in found:
            candidates = np.empty(each.token_ids.shape, CANDIDATE)
            columns = each.token_ids, each.scores, each.parent_slots, each.slots
            for name, column in zip(CANDIDATE.fields or (), columns, strict=True):
                candidates[name] = column.numpy()
            first_nodes, num_nodes = start_loc[each.rows], np.ascontiguousarray(each.num_nodes)
            self._select(
                POINTER(address(candidates, CANDIDATE)),
                *map(INT, candidates.shape),
                *(POINTER(address(each)) for each in (first_nodes, num_nodes)),
                ctypes.byref(struct),
            )
        return with_draft_probs(trees, found, self._upload)

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        holds_probs = bool(sampling.is_cut(logits.shape[1]).any())
        if holds_probs:
            values = self._sampling.probs(logits, sampling.repeat(trees.counts[rows] + 1))
        else:
            values = readable(logits)
        num_trees, max_depth = len(rows), max(int(trees.counts.max()), 1)
        paths, final_tokens = torch.empty((num_trees, max_depth), dtype=torch.int32), torch.empty(num_trees, dtype=torch.int64)
        nodes, probs, draft_rows = trees.nodes, trees.draft_probs, trees.draft_rows
        struct = TreesStruct(
            *(num_trees, max_depth, holds_probs),
            *(address(rows), address(trees.start_loc), address(trees.is_sampled, BOOL), address(sampling.options, OPTIONS)),
            *(nodes.token_ids.data_ptr(), nodes.parents.data_ptr()),
            None if probs is None else probs.data_ptr(),
            None if draft_rows is None else draft_rows.data_ptr(),
            *(paths.data_ptr(), final_tokens.data_ptr()),
        )
        self._verify[values.dtype](values.data_ptr(), values.shape[1], ctypes.addressof(struct))
        return Verified(paths, final_tokens)
