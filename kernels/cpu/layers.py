"""The operations of a layer on a CPU, in the C++ of `cpu/`.

They do in one pass over the data what PyTorch does in several operations, and attention reads the blocks in place, which PyTorch
must gather first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.batch import AttentionLayout, Window
from titan.kernels.cpu.compiled import CompiledKernels, address
from titan.kernels.cpu.weights import is_packed, look_up, pack_weight, weight_struct
from titan.kernels.interfaces import TokenPlaces

NO_WINDOW = 2**40
"""Size of a window that hides nothing."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "linear": (_POINTER, _POINTER, _INT, _POINTER, _POINTER),
    "tree_attention": (_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _INT),
    "rms_norm": (_POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT),
    "rope_and_write_kv": (*[_POINTER] * 5, _INT, _POINTER, _FLOAT, *[_INT] * 4),
    "silu_mul": (_POINTER, _POINTER, _INT, _INT),
}
"""Argument types of the library's functions, each of which exists for every dtype."""

ARRAYS = ("query_start_loc", "seq_lens", "tree_starts", "block_table", "positions", "visible_lens")


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


def plan_struct(layout: AttentionLayout) -> PlanStruct:
    """Return a batch as the library reads it, which must outlive it; the caller fills in the numbers of heads."""
    sizes = len(layout.seq_lens), 0, 0, 0, layout.block_size, layout.block_table.shape[1]
    return PlanStruct(*sizes, *(address(getattr(layout, name)) for name in ARRAYS))


@dataclass(slots=True, eq=False)
class CompiledPlan:
    """A plan of attention, made once per step and used by every layer."""

    struct: PlanStruct
    layout: AttentionLayout  # that the struct points to


class CompiledOps:
    """See `titan.kernels.interfaces.LayerOps`.

    Args:
        kernels: the compiled C++ of this folder.
        dtype: of all tensors, one of `titan.kernels.cpu.compiled.COMPILED_DTYPES`.
    """

    name = "compiled C++"
    packs = True

    def __init__(self, kernels: CompiledKernels, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._functions = {name: kernels.function(name, dtype, *arguments) for name, arguments in ARGUMENTS.items()}

    def pack(self, weight: Tensor) -> Tensor:
        return pack_weight(weight, self._kernels)

    def look_up(self, token_ids: Tensor, embedding: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return look_up(token_ids, embedding, size, dtype) if is_packed(embedding) else F.embedding(token_ids, embedding)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(x, weight, bias, None) if is_packed(weight) else F.linear(x, weight, bias)

    def plan_attention(self, layout: AttentionLayout, windows: Sequence[Window]) -> CompiledPlan:
        return CompiledPlan(plan_struct(layout), layout)

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
            address(plan.layout.ancestor_bits),
            output.data_ptr(),
            scale,
            NO_WINDOW if window is None else window,
        )
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = torch.empty_like(x)
        self._functions["rms_norm"](x.data_ptr(), weight.data_ptr(), output.data_ptr(), x.shape[0], x.shape[1], eps)
        return output

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if is_packed(weight):
            residual = self._linear(x, weight, bias, residual.contiguous())
        else:
            residual = F.linear(x, weight, bias).add_(residual)
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

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        x, struct = x.contiguous(), weight_struct(weight, bias, x.shape[1])
        output, added = x.new_empty(len(x), struct.num_outputs), None if residual is None else residual.data_ptr()
        self._functions["linear"](ctypes.addressof(struct), x.data_ptr(), len(x), added, output.data_ptr())
        return output
