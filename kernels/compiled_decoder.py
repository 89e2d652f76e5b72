"""Passes of a decoder over few tokens on a CPU, each or several of them in one call of the C++ of `cpu/`.

A pass of a small draft model takes little arithmetic, and several times as long operation by operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from titan.kernels.attention_layout import AttentionLayout, Int, Window
from titan.kernels.compiled_ops import NO_WINDOW, plan_struct
from titan.kernels.cpu_library import kernel
from titan.kernels.few_row_linear import WeightStruct

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
        ("window", _INT),
    ]


class DecoderStruct(ctypes.Structure):
    """``Decoder`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("embedding", "rope_table", "final_norm", "layers")),
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


class _ChainsStruct(ctypes.Structure):
    """``Chains`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_requests", "max_depth", "block_size", "table_width")),
        *((name, _POINTER) for name in ("depths", "roots", "block_table", "kv")),
        ("num_slots", _INT),
        ("token_ids", _POINTER),
        ("logits", _POINTER),
    ]


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
    """A decoder for passes of few tokens: at most `titan.kernels.few_row_linear.max_rows` are fast.

    Args:
        library: the C++ of `cpu/`, compiled.
        decoder: all but its layers; its tensors must live as long.
        layers: of the decoder.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim], updated in place.
    """

    def __init__(self, library: ctypes.CDLL, decoder: DecoderStruct, layers: Sequence[LayerStruct], kv: Tensor) -> None:
        self._forward, self._follow = (kernel(library, name, kv.dtype) for name in ("forward", "follow"))
        self._forward.argtypes, self._follow.argtypes = [_POINTER] * 4, [_POINTER] * 2
        self._forward.restype = self._follow.restype = None
        self._layers = (LayerStruct * len(layers))(*layers)
        decoder.num_layers, decoder.layers = len(layers), ctypes.addressof(self._layers)
        self._decoder = decoder
        self._kv = kv
        self._num_slots = kv.shape[3] * kv.shape[4]

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

    def follow(self, first_tokens: Tensor, depths: Int, roots: Int, block_table: Int) -> tuple[Tensor, Tensor]:
        """See `titan.compiled_runner.CompiledRunner.follow`; the longest chains come first.

        Args:
            first_tokens: int64 [n].
            depths: int64 [n], descending.
            roots: int64 [n].
            block_table: int64 [n, blocks], contiguous.
        """
        num_requests, max_depth = len(first_tokens), int(depths[0])
        token_ids = first_tokens.new_zeros(max_depth, num_requests)
        token_ids[0] = first_tokens
        logits = self._kv.new_empty(max_depth - 1, num_requests, self._decoder.head.num_outputs)
        struct = _ChainsStruct(
            num_requests,
            max_depth,
            self._kv.shape[4],
            block_table.shape[1],
            depths.ctypes.data,
            roots.ctypes.data,
            block_table.ctypes.data,
            self._kv.data_ptr(),
            self._num_slots,
            token_ids.data_ptr(),
            logits.data_ptr(),
        )
        self._follow(ctypes.addressof(self._decoder), ctypes.addressof(struct))
        return token_ids, logits
