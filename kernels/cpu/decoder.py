"""Passes of a decoder over few tokens on a CPU, each or several of them in one call of the C++ of `cpu/`.

A pass of a small draft model takes little arithmetic, and several times as long operation by operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.attention_layout import AttentionLayout, Int, Window
from titan.kernels.cpu.layers import NO_WINDOW, plan_struct
from titan.kernels.cpu.library import kernel
from titan.kernels.cpu.rows import WeightStruct

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

MAX_NODES = 63
"""``kMaxNodes`` of the source."""


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
        *((name, _POINTER) for name in ("token_ids", "positions", "slot_mapping", "rows", "ancestor_bits", "kv")),
        ("num_slots", _INT),
    ]


class TreeShapeStruct(ctypes.Structure):
    """``TreeShape`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_nodes", "num_inner")),
        *((name, _POINTER) for name in ("inner", "node_parents", "ranks")),
    ]


TREE_GROWTH = np.dtype(
    [
        *((name, "i8") for name in ("shape", "root", "depth", "width", "num_children", "budget", "first_inner")),
        ("seed", "u8"),
        ("temperature", "f4"),
        ("is_drawn", "i4"),
    ]
)
"""``TreeGrowth`` of the source; ``shape`` is the address of a `TreeShapeStruct`, or 0."""


class _GrowingStruct(ctypes.Structure):
    """``Growing`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_requests", "block_size", "table_width", "target_vocab_size", "num_slots")),
        *((name, _POINTER) for name in ("growths", "block_table", "kv", "root_logits", "fed_tokens", "num_fed")),
        *((name, _POINTER) for name in ("num_nodes", "token_ids", "parents", "draft_slots", "scores", "probs")),
        ("num_passes", _INT),
        ("pass_seconds", ctypes.c_double),
    ]


class GrownTrees(NamedTuple):
    """Trees of n requests, each a row; what lies behind its nodes means nothing, as do parents, slots and scores of shapes."""

    num_nodes: list[int]
    token_ids: Int  # [n, 63]; -1 where a shape has more children than there are tokens
    parents: NDArray[np.int32]  # [n, 63]
    draft_slots: NDArray[np.int32]  # [n, 63]
    scores: NDArray[np.float32]  # [n, 63]
    probs: Tensor | None  # float32 [inner nodes of drawn shapes, target vocabulary]; None without such
    num_passes: int
    pass_seconds: float  # that they took together


def layer_struct(norms: tuple[Tensor, Tensor, Tensor | None], weights: Sequence[WeightStruct], window: Window) -> LayerStruct:
    """A layer as the library reads it; the tensors must live as long.

    Args:
        norms: input norm, post norm, and the norms of queries and keys.
        weights: qkv, output, gate and up, down.
        window: of its attention.
    """
    pointers = (None if norm is None else norm.data_ptr() for norm in norms)
    return LayerStruct(*pointers, *weights, NO_WINDOW if window is None else window)


class CompiledDecoder:
    """A decoder for passes of few tokens: at most `titan.kernels.cpu.rows.max_rows` are fast.

    Args:
        library: the C++ of `cpu/`, compiled.
        decoder: all but its layers; its tensors must live as long.
        layers: of the decoder.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim], updated in place.
    """

    def __init__(self, library: ctypes.CDLL, decoder: DecoderStruct, layers: Sequence[LayerStruct], kv: Tensor) -> None:
        self._forward, self._grow = (kernel(library, name, kv.dtype) for name in ("forward", "grow"))
        self._forward.argtypes, self._grow.argtypes = [_POINTER] * 4, [_POINTER] * 2
        self._forward.restype = self._grow.restype = None
        self._layers = (LayerStruct * len(layers))(*layers)
        decoder.num_layers, decoder.layers = len(layers), ctypes.addressof(self._layers)
        self._attention_seconds = ctypes.c_double()
        decoder.attention_seconds = ctypes.addressof(self._attention_seconds)
        self._decoder = decoder
        self._kv = kv
        self._num_slots = kv.shape[3] * kv.shape[4]

    @property
    def attention_seconds(self) -> float:
        """That the attention of all passes has taken."""
        return self._attention_seconds.value

    def forward(self, layout: AttentionLayout, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, rows: Tensor) -> Tensor:
        """Logits of L of T tokens: [L, vocab_size], dtype of the decoder.

        Args:
            layout: of the pass.
            token_ids: int64 [T].
            positions: int64 [T].
            slot_mapping: int64 [T].
            rows: int64 [L], ascending.
        """
        decoder = self._decoder
        plan, _arrays = plan_struct(layout, np.arange(len(layout.seq_lens)))
        plan.num_heads, plan.num_kv_heads, plan.head_dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        step = _PassStruct(
            len(token_ids),
            len(rows),
            token_ids.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            rows.data_ptr(),
            layout.ancestor_bits.data_ptr(),
            self._kv.data_ptr(),
            self._num_slots,
        )
        logits = self._kv.new_empty(len(rows), decoder.head.num_outputs)
        self._forward(ctypes.addressof(decoder), ctypes.addressof(plan), ctypes.addressof(step), logits.data_ptr())
        return logits

    def grow(
        self, growths: NDArray[Any], block_table: Int, roots: Tensor | tuple[Int, Int], target_vocab_size: int, num_probs: int
    ) -> GrownTrees:
        """Grow the draft trees of n requests, all depths in one call.

        Args:
            growths: `TREE_GROWTH` [n].
            block_table: int64 [n, blocks], contiguous, covering the slots of all nodes that are fed.
            roots: logits [n, target_vocab_size], contiguous; or the committed tokens to be fed first, int64 [F], and how many of
                them are each request's, int64 [n], the last of which is its root.
            target_vocab_size: tokens from there on are not proposed.
            num_probs: inner nodes of all shapes that are drawn.
        """
        n = len(growths)
        num_nodes, token_ids = np.empty(n, np.int64), np.empty((n, MAX_NODES), np.int64)
        parents, draft_slots = np.empty((2, n, MAX_NODES), np.int32)
        scores = np.empty((n, MAX_NODES), np.float32)
        probs = torch.empty(num_probs, target_vocab_size) if num_probs else None
        root_logits, fed_tokens, num_fed = (roots.data_ptr(), 0, 0) if isinstance(roots, Tensor) else (0, *_addresses(*roots))
        struct = _GrowingStruct(
            n,
            self._kv.shape[4],
            block_table.shape[1],
            target_vocab_size,
            self._num_slots,
            *_addresses(growths, block_table),
            self._kv.data_ptr(),
            root_logits,
            fed_tokens,
            num_fed,
            *_addresses(num_nodes, token_ids, parents, draft_slots, scores),
            0 if probs is None else probs.data_ptr(),
        )
        self._grow(ctypes.addressof(self._decoder), ctypes.addressof(struct))
        passes = struct.num_passes, struct.pass_seconds
        return GrownTrees(num_nodes.tolist(), token_ids, parents, draft_slots, scores, probs, *passes)


def _addresses(*arrays: NDArray[Any]) -> list[int]:
    return [array.ctypes.data for array in arrays]
