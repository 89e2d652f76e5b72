"""Structs that the C++ of this folder takes for passes of a decoder, its layers, and the growth of draft trees."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, LayerSpec, window_length
from titan.core.batch import AttentionLayout
from titan.core.kv_tensor import SCALE_BYTES
from titan.core.trees import NodeColumns
from titan.kernels.cpu.compiled import FLOAT, INT, POINTER, address
from titan.kernels.cpu.weights import WeightStruct

LAYER_NORMS = ("input_norm", "gate_up_norm", "output_norm", "down_norm", "qk_norm", "row_norm")
"""Names in `titan.models.layers.LayerWeights`, in the order of the C++."""


NO_WINDOW = 2**40
"""Size of a window that hides nothing."""

ARRAYS = ("query_start_loc", "seq_lens", "tree_starts", "block_table", "positions", "visible_lens", "ancestor_bits")
"""Names in `titan.core.batch.AttentionLayout`, in the order of the C++."""


class PlanStruct(ctypes.Structure):
    """``AttentionPlan`` of the C++."""

    _fields_ = [("num_requests", INT), ("table_width", INT), *((name, POINTER) for name in ARRAYS)]
    layout: AttentionLayout  # whose arrays it points to


class SpecStruct(ctypes.Structure):
    """``AttentionSpec`` of the C++."""

    _fields_ = [
        *((name, INT) for name in ("num_heads", "num_kv_heads", "head_dim")),
        ("scale", FLOAT),
        ("softcap", FLOAT),
        *((name, INT) for name in ("window", "is_chunked", "value_dim", "is_latent")),
        ("sinks", POINTER),
    ]


class KVLayerStruct(ctypes.Structure):
    """``KVLayer`` of the C++."""

    _fields_ = [
        ("data", POINTER),
        *((name, INT) for name in ("plane_stride", "head_stride", "block_stride", "block_size", "is_quantised")),
    ]


class LayerStruct(ctypes.Structure):
    """``DecoderLayer`` of the C++."""

    _fields_ = [
        *((name, POINTER) for name in (*LAYER_NORMS, "rope_table")),
        ("qkv", WeightStruct),
        ("output", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("kv", KVLayerStruct),
        ("attention", SpecStruct),
    ]


class DecoderStruct(ctypes.Structure):
    """``Decoder`` of the C++."""

    _fields_ = [
        *((name, INT) for name in ("num_layers", "hidden_size", "vocab_size", "has_gelu", "has_wide_norms")),
        ("eps", FLOAT),
        ("embedding_scale", FLOAT),
        *((name, POINTER) for name in ("embedding", "final_norm", "layers", "team")),
        ("head", WeightStruct),
    ]


WORTH = np.dtype([(name, "f4") for name in ("agreement", "acceptance", "node_price", "row_price", "pass_price")])
"""``Worth`` of the C++."""

TREE_GROWTH = np.dtype(
    [
        *((name, "i8") for name in ("parents", "root", "depth", "width", "num_children", "max_nodes", "row", "first_probs")),
        ("seed", "u8"),
        ("temperature", "f4"),
        ("is_sampled", "i4"),
        ("worth", WORTH),
    ],
    align=True,
)
"""``TreeGrowth`` of the C++; ``parents`` is an address, or 0."""


class NodeColumnsStruct(ctypes.Structure):
    """``NodeColumns`` of the C++."""

    _fields_ = [(name, POINTER) for name in NodeColumns._fields]


class GrowingStruct(ctypes.Structure):
    """``Growing`` of the C++."""

    _fields_ = [
        *((name, INT) for name in ("num_requests", "table_width", "target_vocab_size")),
        *((name, POINTER) for name in ("growths", "block_table", "fed_tokens", "num_fed")),
        ("nodes", NodeColumnsStruct),
        *((name, POINTER) for name in ("draft_rows", "counts", "is_chain", "probs", "first_scores")),
        *((name, INT) for name in ("num_passes", "num_rows")),
        ("pass_seconds", ctypes.c_double),
    ]


def kv_struct(kv_layer: Tensor, head_dim: int) -> KVLayerStruct:
    """Return the cache of a layer, [num_planes, num_kv_heads, num_blocks, ...], as the library reads it; it must outlive that."""
    is_quantised = kv_layer.dtype == torch.int8
    block_size = kv_layer.shape[3] // (head_dim + SCALE_BYTES) if is_quantised else kv_layer.shape[3]
    return KVLayerStruct(kv_layer.data_ptr(), *kv_layer.stride()[:3], block_size, is_quantised)


def spec_struct(
    spec: AttentionSpec, num_heads: int, num_kv_heads: int, head_dim: int, is_latent: bool, sinks: Tensor | None
) -> SpecStruct:
    """Return what the attention of a layer computes as the library reads it; the sinks must outlive it."""
    is_chunked, window = isinstance(spec.window, Chunk), NO_WINDOW if spec.window is None else window_length(spec.window)
    value_dim = head_dim if spec.value_dim is None else spec.value_dim
    numbers = num_heads, num_kv_heads, head_dim, spec.scale, spec.softcap or 0.0, window, is_chunked, value_dim, is_latent
    return SpecStruct(*numbers, None if sinks is None else sinks.data_ptr())


def plan_struct(layout: AttentionLayout) -> PlanStruct:
    """Return a batch as the library reads it; the layout lives as long as that."""
    arrays = (address(getattr(layout, name)) for name in ARRAYS)
    plan = PlanStruct(len(layout.seq_lens), layout.block_table.shape[1], *arrays)
    plan.layout = layout
    return plan


def layer_struct(
    tensors: Sequence[Tensor | None], weights: Sequence[WeightStruct], kv_layer: Tensor, spec: LayerSpec
) -> LayerStruct:
    """Return a layer as the library reads it; the tensors must outlive it.

    Args:
        tensors: its `LAYER_NORMS`, and its rope table.
        weights: qkv, output, gate and up, down.
        kv_layer: [2, num_kv_heads, num_blocks, ...], see `titan.core.kv_tensor.KVTensor`.
        spec: of its heads and their attention.
    """
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    attention = spec_struct(spec.attention, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.is_latent, None)
    return LayerStruct(*pointers, *weights, kv_struct(kv_layer, spec.head_dim), attention)
