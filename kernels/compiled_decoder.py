"""A whole pass of a decoder over few tokens on a CPU, in one call of the C++ of `cpu/`.

A pass of a small draft model takes 50 us of arithmetic, and several times as long operation by operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.kernels.attention_layout import AttentionLayout, Window
from titan.kernels.compiled_ops import NO_WINDOW, plan_struct
from titan.kernels.packed_weight import PackedWeightStruct

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LayerStruct(ctypes.Structure):
    """``DecoderLayer`` of the source."""

    _fields_ = [
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("qk_norm", _POINTER),
        ("qkv", PackedWeightStruct),
        ("output", PackedWeightStruct),
        ("gate_up", PackedWeightStruct),
        ("down", PackedWeightStruct),
        ("window", _INT),
    ]


class DecoderStruct(ctypes.Structure):
    """``Decoder`` of the source."""

    _fields_ = [
        *((name, _INT) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("embedding", "rope_table", "final_norm", "layers")),
    ]


class _PassStruct(ctypes.Structure):
    """``DecoderPass`` of the source."""

    _fields_ = [
        ("num_tokens", _INT),
        ("num_rows", _INT),
        *((name, _POINTER) for name in ("token_ids", "positions", "slot_mapping", "rows", "ancestor_bits", "kv")),
        ("num_slots", _INT),
    ]


def layer_struct(norms: tuple[Tensor, Tensor, Tensor | None], weights: Sequence[PackedWeightStruct], window: Window) -> LayerStruct:
    """A layer as the library reads it; the tensors must live as long.

    Args:
        norms: input norm, post norm, and the norms of queries and keys.
        weights: qkv, output, gate and up, down.
        window: of its attention.
    """
    pointers = (None if norm is None else norm.data_ptr() for norm in norms)
    return LayerStruct(*pointers, *weights, NO_WINDOW if window is None else window)


class CompiledDecoder:
    """The decoder up to its output head, for passes of at most `titan.kernels.packed_weight.MAX_ROWS` tokens.

    Args:
        library: the C++ of `cpu/`, compiled.
        dtype: of all tensors, one of `titan.kernels.cpu_library.COMPILED_DTYPES`.
        decoder: all but its layers; its tensors must live as long.
        layers: of the decoder.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, decoder: DecoderStruct, layers: Sequence[LayerStruct]) -> None:
        self._function = library[f"hidden_states_{str(dtype).removeprefix('torch.')}"]
        self._function.argtypes, self._function.restype = [_POINTER] * 4, None
        self._layers = (LayerStruct * len(layers))(*layers)
        decoder.num_layers, decoder.layers = len(layers), ctypes.addressof(self._layers)
        self._decoder = decoder

    def hidden_states(
        self, layout: AttentionLayout, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, rows: Tensor, kv: Tensor
    ) -> Tensor:
        """See `titan.models.decoder.Decoder.hidden_states`; T tokens, of which L are asked for.

        Args:
            layout: of the pass.
            token_ids: int64 [T].
            positions: int64 [T].
            slot_mapping: int64 [T].
            rows: int64 [L], ascending.
            kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim], updated in place.

        Returns:
            [L, hidden_size].
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
            kv.data_ptr(),
            kv.shape[3] * kv.shape[4],
        )
        hidden = kv.new_empty(len(rows), decoder.hidden_size)
        self._function(ctypes.addressof(decoder), ctypes.addressof(plan), ctypes.addressof(step), hidden.data_ptr())
        return hidden
