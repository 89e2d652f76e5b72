"""Choosing draft trees and verifying them by the C++ of this folder; see `titan.kernels.interfaces.TreeOps`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import NODE_FIELDS, DraftTrees, Upload, allocate_columns
from titan.kernels.cpu.library import kernel
from titan.kernels.cpu.sampling import CompiledSampling, readable
from titan.kernels.interfaces import Candidates, Verified
from titan.kernels.tree_places import TreePlaces

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

CANDIDATE = np.dtype([("token_id", "i8"), ("score", "f4"), ("parent_slot", "i4"), ("slot", "i4")], align=True)
"""``Candidate`` of the source."""


class NodeColumnsStruct(ctypes.Structure):
    """``NodeColumns`` of the source."""

    _fields_ = [(name, _POINTER) for name in NODE_FIELDS]


class _TreesStruct(ctypes.Structure):
    """``VerifiedTrees`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_trees", "max_depth")),
        *((name, _POINTER) for name in ("rows", "start_loc", "is_sampled", "temperatures", "seeds", "positions")),
        *((name, _POINTER) for name in ("token_ids", "parents", "draft_probs", "draft_rows")),
        *((name, _POINTER) for name in ("paths", "num_accepted", "final_tokens", "matches")),
    ]


class CompiledTrees:
    """See `titan.kernels.interfaces.TreeOps`.

    Args:
        library: the C++ of this folder, compiled.
        sampling: of the same back end.
        upload: likewise.
    """

    def __init__(self, library: ctypes.CDLL, sampling: CompiledSampling, upload: Upload) -> None:
        self._library = library
        self._sampling = sampling
        self._upload = upload

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        places = TreePlaces.of(found, num_rows)
        columns = allocate_columns(places.num_nodes, torch.device("cpu"))
        struct = NodeColumnsStruct(*(column.data_ptr() for column in columns))
        for each in found:
            candidates = np.empty(each.token_ids.shape, CANDIDATE)
            for name, column in (
                ("token_id", each.token_ids),
                ("score", each.scores),
                ("parent_slot", each.parent_slots),
                ("slot", each.slots),
            ):
                candidates[name] = column.numpy()
            first_nodes, num_nodes = places.start_loc[each.rows], np.ascontiguousarray(each.num_nodes)
            self._library.select_trees(
                _POINTER(address(candidates)),
                *map(_INT, candidates.shape),
                *(_POINTER(address(each)) for each in (first_nodes, num_nodes)),
                ctypes.byref(struct),
            )
        return places.trees(columns, found, self._upload)

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        temperatures: NDArray[np.float32] | None = None
        if sampling.has_cuts:
            values = self._sampling.probs(logits, sampling.repeat(trees.counts[rows] + 1))
        else:
            values, temperatures = readable(logits), sampling.temperature
        num_trees, max_depth = len(rows), max(int(trees.counts.max()), 1) if trees.num_nodes else 1
        found = Verified(
            torch.empty((num_trees, max_depth), dtype=torch.int32),
            torch.empty(num_trees, dtype=torch.int32),
            torch.empty(num_trees, dtype=torch.int64),
            torch.empty((num_trees, 2), dtype=torch.float32),
        )
        struct = _TreesStruct(
            num_trees,
            max_depth,
            address(rows),
            address(trees.start_loc),
            address(trees.is_sampled),
            None if temperatures is None else address(temperatures),
            address(sampling.seeds),
            address(sampling.positions),
            trees.token_ids.data_ptr(),
            trees.parents.data_ptr(),
            None if trees.draft_probs is None else trees.draft_probs.data_ptr(),
            None if trees.draft_rows is None else trees.draft_rows.data_ptr(),
            *(column.data_ptr() for column in found),
        )
        function = kernel(self._library, "verify_trees", values.dtype)
        function(_POINTER(values.data_ptr()), _INT(values.shape[1]), ctypes.byref(struct))
        return found


def address(array: NDArray[Any]) -> int:
    """Where the numbers of an array lie."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]  # faster than array.ctypes
