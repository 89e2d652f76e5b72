"""Passes of a decoder over few tokens on a CPU, each or several of them in one call of the C++ of this folder.

A pass of a small draft model takes little arithmetic, and several times as long operation by operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.batch import RaggedBatch, Window
from titan.core.growth import ShapePlan
from titan.core.kv_tensor import KVTensor
from titan.core.trees import allocate_columns
from titan.kernels.cpu.layers import NO_WINDOW, plan_struct
from titan.kernels.cpu.library import kernel
from titan.kernels.cpu.trees import NodeColumnsStruct
from titan.kernels.cpu.weights import WeightStruct

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LayerStruct(ctypes.Structure):
    """``DecoderLayer`` of the source."""

    _fields_ = [
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("qk_norm", _POINTER),
        ("qkv", WeightStruct),
        ("output", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("kv", _POINTER),
        ("window", _INT),
    ]


class DecoderStruct(ctypes.Structure):
    """``Decoder`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("embedding", "rope_table", "final_norm", "layers", "attention_seconds")),
        ("head", WeightStruct),
    ]


class _PassStruct(ctypes.Structure):
    """``DecoderPass`` of the source."""

    _fields_ = [
        ("num_tokens", _INT),
        ("num_rows", _INT),
        *((name, _POINTER) for name in ("token_ids", "positions", "slot_mapping", "rows", "ancestor_bits")),
        ("num_slots", _INT),
    ]


class TreeShapeStruct(ctypes.Structure):
    """``TreeShape`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_nodes", "num_inner")),
        *((name, _POINTER) for name in ("inner", "node_parents", "ranks", "inner_rows")),
    ]


@lru_cache(maxsize=4096)
def shape_struct(plan: ShapePlan) -> TreeShapeStruct:
    """A shape as the library reads it; the plan lives as long."""
    arrays = plan.inner, plan.node_parents, plan.ranks, plan.inner_rows
    return TreeShapeStruct(len(plan.parents), plan.inner.shape[1], *(array.ctypes.data for array in arrays))


TREE_GROWTH = np.dtype(
    [
        *((name, "i8") for name in ("shape", "root", "depth", "width", "num_children", "num_places")),
        *((name, "i8") for name in ("first_node", "first_row", "first_inner")),
        ("seed", "u8"),
        ("temperature", "f4"),
        ("is_sampled", "i4"),
    ]
)
"""``TreeGrowth`` of the source; ``shape`` is the address of a `TreeShapeStruct`, or 0."""


class _GrowingStruct(ctypes.Structure):
    """``Growing`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_requests", "block_size", "table_width", "target_vocab_size", "num_slots")),
        *((name, _POINTER) for name in ("growths", "block_table", "root_logits", "fed_tokens", "num_fed")),
        ("nodes", NodeColumnsStruct),
        *((name, _POINTER) for name in ("draft_rows", "is_chain", "probs")),
        ("num_passes", _INT),
        ("pass_seconds", ctypes.c_double),
    ]


class GrownTrees(NamedTuple):
    """Draft trees of n requests."""

    columns: list[Tensor]  # of the nodes, see `titan.core.trees.DraftTrees`
    draft_rows: Tensor  # int32 [nodes + rows of the plan]
    is_chain: NDArray[np.int32]  # [n]
    probs: Tensor | None  # float32 [inner nodes of sampled shapes, target vocabulary]; None without such
    num_passes: int
    pass_seconds: float  # that they took together


def layer_struct(
    norms: tuple[Tensor, Tensor, Tensor | None], weights: Sequence[WeightStruct], kv_layer: Tensor, window: Window
) -> LayerStruct:
    """A layer as the library reads it; the tensors must live as long.

    Args:
        norms: input norm, post norm, and the norms of queries and keys.
        weights: qkv, output, gate and up, down.
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim], contiguous.
        window: of its attention.
    """
    pointers = (None if norm is None else norm.data_ptr() for norm in norms)
    return LayerStruct(*pointers, *weights, kv_layer.data_ptr(), NO_WINDOW if window is None else window)


class CompiledDecoder:
    """A decoder for passes of few tokens: at most `titan.kernels.cpu.weights.max_rows` are fast.

    Args:
        library: the C++ of this folder, compiled.
        decoder: all but its layers; its tensors must live as long.
        layers: of the decoder.
        kv: of the decoder, updated in place.
    """

    def __init__(self, library: ctypes.CDLL, decoder: DecoderStruct, layers: Sequence[LayerStruct], kv: KVTensor) -> None:
        self._dtype = kv.layout.dtype
        self._forward, self._grow = (kernel(library, name, self._dtype) for name in ("forward", "grow"))
        self._forward.argtypes, self._grow.argtypes = [_POINTER] * 4, [_POINTER] * 2
        self._forward.restype = self._grow.restype = None
        self._layers = (LayerStruct * len(layers))(*layers)
        decoder.num_layers, decoder.layers = len(layers), ctypes.addressof(self._layers)
        self._attention_seconds = ctypes.c_double()
        decoder.attention_seconds = ctypes.addressof(self._attention_seconds)
        self._decoder = decoder
        self._block_size = kv.block_size
        self._num_slots = kv.num_blocks * kv.block_size

    @property
    def attention_seconds(self) -> float:
        """That the attention of all passes has taken."""
        return self._attention_seconds.value

    def forward(self, batch: RaggedBatch) -> Tensor:
        """Logits of L of T tokens, whose nodes are in their places: [L, vocab_size], dtype of the decoder."""
        decoder, layout = self._decoder, batch.attention
        plan, _arrays = plan_struct(layout, np.arange(len(layout.seq_lens)))
        plan.num_heads, plan.num_kv_heads, plan.head_dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        arrays = batch.token_ids, layout.positions, batch.slot_mapping, batch.logits_rows, layout.ancestor_bits
        step = _PassStruct(len(batch.token_ids), len(batch.logits_rows), *_addresses(*arrays), self._num_slots)
        logits = torch.empty(len(batch.logits_rows), decoder.head.num_outputs, dtype=self._dtype)
        self._forward(ctypes.addressof(decoder), ctypes.addressof(plan), ctypes.addressof(step), logits.data_ptr())
        return logits

    def grow(
        self,
        growths: NDArray[Any],
        block_table: Ints,
        roots: Tensor | tuple[Ints, Ints],
        target_vocab_size: int,
        *,
        num_nodes: int,
        num_rows: int,
        num_probs: int,
    ) -> GrownTrees:
        """Grow the draft trees of n requests, all depths in one call.

        Args:
            growths: `TREE_GROWTH` [n].
            block_table: int64 [n, blocks], contiguous, covering the slots of all nodes that are fed.
            roots: logits [n, vocab_size], contiguous; or the committed tokens to be fed first, int64 [F], and how many of
                them are each request's, int64 [n], the last of which is its root.
            target_vocab_size: tokens from there on are not proposed.
            num_nodes: places of all trees.
            num_rows: of the plan.
            num_probs: inner nodes of all shapes that are sampled.
        """
        columns = allocate_columns(num_nodes, torch.device("cpu"))
        draft_rows, is_chain = torch.zeros(num_nodes + num_rows, dtype=torch.int32), np.empty(len(growths), np.int32)
        probs = torch.empty(num_probs, target_vocab_size) if num_probs else None
        root_logits, fed_tokens, num_fed = (roots.data_ptr(), 0, 0) if isinstance(roots, Tensor) else (0, *_addresses(*roots))
        struct = _GrowingStruct(
            len(growths),
            self._block_size,
            block_table.shape[1],
            target_vocab_size,
            self._num_slots,
            *_addresses(growths, block_table),
            root_logits,
            fed_tokens,
            num_fed,
            NodeColumnsStruct(*(column.data_ptr() for column in columns)),
            draft_rows.data_ptr(),
            *_addresses(is_chain),
            0 if probs is None else probs.data_ptr(),
        )
        self._grow(ctypes.addressof(self._decoder), ctypes.addressof(struct))
        return GrownTrees(columns, draft_rows, is_chain, probs, struct.num_passes, struct.pass_seconds)


def _addresses(*arrays: NDArray[Any]) -> list[int]:
    return [array.ctypes.data for array in arrays]
