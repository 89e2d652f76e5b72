"""The operations of a layer on a CPU, in the C++ of `cpu/`.

They do in one pass over the data what PyTorch does in several operations, and attention reads the blocks in place, which PyTorch
must gather first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.batch import AttentionLayout, Window
from titan.kernels.cpu.library import address, kernel
from titan.kernels.cpu.linear import linear, linear_add
from titan.kernels.cpu.weights import can_pack, pack_weight
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.torch.attention import RequestQuery, attend, plan_requests

CPU = torch.device("cpu")

NO_WINDOW = 2**40
"""Size of a window that hides nothing."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
MAX_SHORT_QUERY = 64
"""Longest query that the C++ attends; longer ones go to PyTorch's kernel, request by request: it is the fastest for many rows."""

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "tree_attention": (_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _INT),
    "rms_norm": (_POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT),
    "rope_and_write_kv": (*[_POINTER] * 5, _INT, _POINTER, _FLOAT, *[_INT] * 4),
    "silu_mul": (_POINTER, _POINTER, _INT, _INT),
}
"""Argument types of the library's functions, each of which exists for every dtype."""


ARRAYS = ("requests", "query_start_loc", "seq_lens", "tree_starts", "block_table", "positions", "visible_lens")


class PlanStruct(ctypes.Structure):
    """``AttentionPlan`` of the C++."""

    _fields_ = [
        ("num_requests", _INT),
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("block_size", _INT),
        ("table_width", _INT),
        *((name, _POINTER) for name in ARRAYS),
    ]


def plan_struct(layout: AttentionLayout, requests: Ints) -> tuple[PlanStruct, tuple[Ints, ...]]:
    """Return a batch as the library reads it, and the arrays that must outlive it; the caller fills in the numbers of heads.

    Args:
        layout: of the batch.
        requests: int64, indices of the requests to attend.
    """
    arrays = (requests, *(getattr(layout, name) for name in ARRAYS[1:]))
    sizes = len(requests), 0, 0, 0, layout.block_size, layout.block_table.shape[1]
    return PlanStruct(*sizes, *map(address, arrays)), arrays


@dataclass(slots=True, eq=False)
class CompiledPlan:
    """A plan of attention, made once per step and used by every layer."""

    struct: PlanStruct
    arrays: tuple[Ints, ...]  # what the struct points to
    ancestor_bits: Ints
    long: Sequence[RequestQuery]


class CompiledOps:
    """See `titan.kernels.interfaces.LayerOps`.

    Args:
        library: the compiled C++ of this folder.
        dtype: of all tensors, one of `titan.kernels.cpu.library.COMPILED_DTYPES`.
    """

    name = "compiled C++"

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        functions: dict[str, Any] = {}
        for name, arguments in ARGUMENTS.items():
            function = kernel(library, name, dtype)
            function.argtypes = list(arguments)
            function.restype = None
            functions[name] = function
        self._functions = functions
        self.packs = can_pack(dtype)

    def pack(self, weight: Tensor) -> Tensor:
        return pack_weight(weight) if self.packs else weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def plan_attention(self, layout: AttentionLayout, windows: Sequence[Window]) -> CompiledPlan:
        query_lens = np.diff(layout.query_start_loc)
        struct, arrays = plan_struct(layout, np.flatnonzero(query_lens <= MAX_SHORT_QUERY))
        long = plan_requests(layout, np.flatnonzero(query_lens > MAX_SHORT_QUERY), windows, CPU)
        return CompiledPlan(struct, arrays, layout.ancestor_bits, long)

    def tree_attention(self, q: Tensor, kv_layer: Tensor, plan: CompiledPlan, *, scale: float, window: Window) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        if q.stride(1) != head_dim:
            q = q.contiguous()
        output = q.new_empty(num_tokens, num_heads * head_dim)
        struct = plan.struct
        struct.num_heads, struct.num_kv_heads, struct.head_dim = num_heads, kv_layer.shape[1], head_dim
        self._functions["tree_attention"](
            ctypes.addressof(struct),
            q.data_ptr(),
            q.stride(0),
            kv_layer.data_ptr(),
            kv_layer.stride(1),
            address(plan.ancestor_bits),
            output.data_ptr(),
            scale,
            NO_WINDOW if window is None else window,
        )
        for query in plan.long:
            output[query.rows] = attend(q[query.rows], kv_layer, query, scale=scale, window=window)
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = torch.empty_like(x)
        self._functions["rms_norm"](x.data_ptr(), weight.data_ptr(), output.data_ptr(), x.shape[0], x.shape[1], eps)
        return output

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = linear_add(x, weight, bias, residual)
        return residual, self.rms_norm(residual, norm_weight, eps)

    def rope_and_write_kv(self, qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, qk_norm: Tensor | None, eps: float) -> Tensor:
        num_kv_heads, head_dim = kv_layer.shape[1], kv_layer.shape[4]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        self._functions["rope_and_write_kv"](
            qkv.data_ptr(),
            *(each.data_ptr() for each in places),
            kv_layer.data_ptr(),
            kv_layer.stride(1),
            None if qk_norm is None else qk_norm.data_ptr(),
            eps,
            *(len(heads), num_heads, num_kv_heads, head_dim),
        )
        return heads[:, :num_heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        size = gate_up.shape[1] // 2
        output = gate_up.new_empty(gate_up.shape[0], size)
        self._functions["silu_mul"](gate_up.data_ptr(), output.data_ptr(), gate_up.shape[0], size)
        return output
