"""Structs that the C++ of this folder takes for passes of a decoder, its layers, and trees, as its headers declare them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, window_length
from titan.core.batch import AttentionLayout
from titan.core.kv_tensor import SCALE_BYTES
from titan.kernels.cpu.compiled import FLOAT, INT, POINTER, address

NO_WINDOW = 2**40
"""Size of a window that hides nothing."""

_HEADERS = "".join(file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.h")))
_INTEGERS = {"int64_t": INT, "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64, "WeightFormat": INT}

STRUCTS: dict[str, type[ctypes.Structure]] = {}
"""All structs that Python fills in, by their names in the C++."""


def _declared(name: str) -> type[ctypes.Structure]:
    """Return a struct of the C++, which declares one field a line; the structs in it must be in `STRUCTS`."""
    types = {**_INTEGERS, "float": FLOAT, "double": ctypes.c_double, **STRUCTS}
    [body] = re.findall(rf"^struct {name} {{\n(.*?)^}};", _HEADERS, re.MULTILINE | re.DOTALL)
    fields = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+);", body, re.MULTILINE)
    assert len(fields) == len(re.findall(";", re.sub("//.*", "", body))), f"{name} declares more than one field a line"
    members = {"_fields_": [(field, POINTER if star else types[kind]) for kind, star, field in fields]}
    return STRUCTS.setdefault(name, type(name, (ctypes.Structure,), members))


def constant(name: str) -> int:
    """Return an integer of the C++, which must not depend on the processor."""
    [value] = re.findall(rf"\b{name} = (\d+)(?:[;,]| }})", _HEADERS)
    return int(value)


WeightStruct = _declared("Weight")
KVLayerStruct = _declared("KVLayer")
PlanStruct = _declared("AttentionPlan")
SpecStruct = _declared("AttentionSpec")
LayerStruct = _declared("DecoderLayer")
DecoderStruct = _declared("Decoder")
NodeColumnsStruct = _declared("NodeColumns")
_declared("Worth")  # this and "Options" are parts of the next one
_declared("Options")
TREE_GROWTH = np.dtype(_declared("TreeGrowth"))
GrowingStruct = _declared("Growing")
TreesStruct = _declared("VerifiedTrees")

ARRAYS = [name for name, kind, *_ in PlanStruct._fields_ if kind is POINTER]
"""Names in `titan.core.batch.AttentionLayout`."""

LAYER_TENSORS = [name for name, kind, *_ in LayerStruct._fields_ if kind is POINTER]
"""Names in `titan.models.layers.LayerWeights`."""


def kv_struct(kv_layer: Tensor, head_dim: int) -> ctypes.Structure:
    """Return the cache of a layer, [num_planes, num_kv_heads, num_blocks, ...], as the library reads it; it must outlive that."""
    is_quantised = kv_layer.dtype == torch.int8
    block_size = kv_layer.shape[3] // (head_dim + SCALE_BYTES) if is_quantised else kv_layer.shape[3]
    return KVLayerStruct(kv_layer.data_ptr(), *kv_layer.stride()[:3], block_size, is_quantised)


def spec_struct(
    spec: AttentionSpec, num_heads: int, num_kv_heads: int, head_dim: int, is_latent: bool, sinks: Tensor | None
) -> ctypes.Structure:
    """Return what the attention of a layer computes as the library reads it; the sinks must outlive it."""
    is_chunked, window = isinstance(spec.window, Chunk), NO_WINDOW if spec.window is None else window_length(spec.window)
    value_dim = head_dim if spec.value_dim is None else spec.value_dim
    numbers = num_heads, num_kv_heads, head_dim, spec.scale, spec.softcap or 0.0, window, is_chunked, value_dim, is_latent
    return SpecStruct(*numbers, None if sinks is None else sinks.data_ptr())


def plan_struct(layout: AttentionLayout) -> ctypes.Structure:
    """Return a batch as the library reads it; the layout lives as long as that."""
    arrays = (address(getattr(layout, name)) for name in ARRAYS)
    plan = PlanStruct(len(layout.seq_lens), layout.block_table.shape[1], *arrays)
    plan.layout = layout
    return plan
