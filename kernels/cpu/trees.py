"""Verification of draft trees in the C++ of this folder; see `titan.kernels.interfaces.TreeOps`."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.sampling_rows import OPTIONS, SamplingRows
from titan.core.trees import DraftTrees, Upload
from titan.kernels.cpu.compiled import BOOL, COMPILED_DTYPES, INT, POINTER, CompiledKernels, address
from titan.kernels.cpu.sampling import CompiledSampling, readable
from titan.kernels.cpu.structs import TreesStruct
from titan.kernels.interfaces import Verified
from titan.kernels.torch.trees import TorchTrees


class CompiledTrees(TorchTrees):
    """See `titan.kernels.interfaces.TreeOps`.

    Args:
        kernels: the compiled C++ of this folder.
        sampling: of the same back end.
        upload: of the same back end.
    """

    def __init__(self, kernels: CompiledKernels, sampling: CompiledSampling, upload: Upload) -> None:
        super().__init__(sampling, upload)
        self._verify = {dtype: kernels.function("verify_trees", dtype, POINTER, INT, POINTER) for dtype in COMPILED_DTYPES}

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        if sampling.is_greedy and not trees.num_nodes:  # less to prepare: half of the time with cold caches
            return Verified(_no_paths(len(rows)), self._sampling.argmax(logits))
        logits = readable(logits)
        num_trees, max_depth = len(rows), max(int(trees.counts.max()), 1)
        paths, final_tokens = torch.empty((num_trees, max_depth), dtype=torch.int32), torch.empty(num_trees, dtype=torch.int64)
        nodes, probs, draft_rows = trees.nodes, trees.draft_probs, trees.draft_rows
        struct = TreesStruct(
            *(num_trees, max_depth),
            *(address(rows), address(trees.start_loc), address(trees.is_sampled, BOOL), address(sampling.options, OPTIONS)),
            *(nodes.token_ids.data_ptr(), nodes.parents.data_ptr()),
            None if probs is None else probs.data_ptr(),
            None if draft_rows is None else draft_rows.data_ptr(),
            *(paths.data_ptr(), final_tokens.data_ptr()),
        )
        self._verify[logits.dtype](logits.data_ptr(), logits.shape[1], ctypes.addressof(struct))
        return Verified(paths, final_tokens)


@lru_cache(maxsize=1024)
def _no_paths(num_trees: int) -> Tensor:
    return torch.full((num_trees, 1), -1, dtype=torch.int32)
