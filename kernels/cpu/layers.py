"""The operations of a layer on a CPU, in the C++ of this folder."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, Window
from titan.core.batch import AttentionLayout
from titan.core.kv_tensor import SCALE_BYTES
from titan.kernels.cpu.compiled import FLOAT, INT, POINTER, CompiledKernels, address
from titan.kernels.cpu.weights import is_packed, pack_weight, weight_struct
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.torch.layers import TorchOps

NO_WINDOW = 2**40
"""Size of a window that hides nothing."""


ARRAYS = ("query_start_loc", "seq_lens", "tree_starts", "block_table", "positions", "visible_lens")


class PlanStruct(ctypes.Structure):
    """``AttentionPlan`` of the C++."""

    _fields_ = [
        ("num_requests", INT),
        ("num_heads", INT),
        ("num_kv_heads", INT),
        ("head_dim", INT),
        ("block_size", INT),
        ("table_width", INT),
        *((name, POINTER) for name in ARRAYS),
    ]


class SpecStruct(ctypes.Structure):
    """``AttentionSpec`` of the C++."""

    _fields_ = [
        ("scale", FLOAT),
        ("softcap", FLOAT),
        *((name, INT) for name in ("window", "is_chunked", "value_dim", "is_latent")),
        ("sinks", POINTER),
    ]


class KVLayerStruct(ctypes.Structure):
    """``KVLayer`` of the C++."""

    _fields_ = [("data", POINTER), ("plane_stride", INT), ("head_stride", INT), ("block_stride", INT)]


def kv_struct(kv_layer: Tensor) -> KVLayerStruct:
    """Return the cache of a layer, [num_planes, num_kv_heads, num_blocks, ...], as the library reads it; it must outlive that."""
    return KVLayerStruct(kv_layer.data_ptr(), *kv_layer.stride()[:3])


def spec_struct(spec: AttentionSpec, head_dim: int, is_latent: bool, sinks: Tensor | None) -> SpecStruct:
    """Return what a layer computes as the library reads it; the sinks must outlive it."""
    is_chunked = isinstance(spec.window, Chunk)
    window = spec.window.size if isinstance(spec.window, Chunk) else NO_WINDOW if spec.window is None else spec.window
    value_dim = head_dim if spec.value_dim is None else spec.value_dim
    pointer = None if sinks is None else sinks.data_ptr()
    return SpecStruct(spec.scale, spec.softcap or 0.0, window, is_chunked, value_dim, is_latent, pointer)


def plan_struct(layout: AttentionLayout) -> PlanStruct:
    """Return a batch as the library reads it, which must outlive it; the caller fills in the numbers of heads."""
    sizes = len(layout.seq_lens), 0, 0, 0, layout.block_size, layout.block_table.shape[1]
    return PlanStruct(*sizes, *(address(getattr(layout, name)) for name in ARRAYS))


@dataclass(slots=True, eq=False)
class CompiledPlan:
    """A plan of attention, made once per step and used by every layer."""

    struct: PlanStruct
    layout: AttentionLayout  # that the struct points to


class CompiledOps(TorchOps):
    """See `titan.kernels.interfaces.LayerOps`.

    Args:
        kernels: the compiled C++ of this folder.
        dtype: of all tensors, one of `titan.kernels.cpu.compiled.COMPILED_DTYPES`.
    """

    name = "compiled C++"
    packs = True

    def __init__(self, kernels: CompiledKernels, dtype: torch.dtype) -> None:
        super().__init__(torch.device("cpu"))
        self._kernels, self._dtype = kernels, dtype
        self._multiply = kernels.function("linear", dtype, POINTER, POINTER, INT, POINTER, POINTER)
        of_attention = POINTER, POINTER, POINTER, INT, POINTER, POINTER, POINTER
        of_writes = POINTER, INT, INT, INT, POINTER, INT, POINTER, INT, INT, INT, INT
        suffixes = "", "_int8"  # of the stored numbers
        self._attend = {each: kernels.function(f"tree_attention{each}", dtype, *of_attention) for each in suffixes}
        self._write_rows = {each: kernels.function(f"write_rows{each}", dtype, *of_writes) for each in suffixes}
        self._look_up = kernels.function("look_up", dtype, POINTER, POINTER, INT, POINTER)
        self._norm = kernels.function("rms_norm", dtype, POINTER, POINTER, INT, POINTER, INT, INT, FLOAT)
        self._gate = kernels.function("silu_mul", dtype, POINTER, POINTER, INT, INT)
        self._run_mlp = kernels.function("gated_mlp", dtype, POINTER, POINTER, POINTER, INT, POINTER)
        rope_arguments = *[POINTER] * 6, INT, FLOAT, *[INT] * 5
        self._rotate = {each: kernels.function(f"rope_and_write_kv{each}", dtype, *rope_arguments) for each in suffixes}

    def pack(self, weight: Tensor) -> Tensor:
        return pack_weight(weight, self._kernels)

    def look_up(self, token_ids: Tensor, embedding: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        if not is_packed(embedding):
            return F.embedding(token_ids, embedding)
        assert dtype == self._dtype
        token_ids = token_ids.contiguous()
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < len(embedding):
            raise IndexError(f"tokens {int(token_ids.min())} to {int(token_ids.max())} are not allowed: there are {len(embedding)}")
        struct, output = weight_struct(embedding, None, size), torch.empty(len(token_ids), size, dtype=dtype)
        self._look_up(ctypes.addressof(struct), token_ids.data_ptr(), len(token_ids), output.data_ptr())
        return output

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_packed(weight):
            return F.linear(x, weight, bias)
        x, struct = x.contiguous(), weight_struct(weight, bias, x.shape[1])
        output = x.new_empty(len(x), struct.num_outputs)
        self._multiply(ctypes.addressof(struct), x.data_ptr(), len(x), None, output.data_ptr())
        return output

    def plan_attention(self, layout: AttentionLayout, windows: Sequence[Window]) -> CompiledPlan:
        return CompiledPlan(plan_struct(layout), layout)

    def tree_attention(
        self, q: Tensor, kv_layer: Tensor, plan: CompiledPlan, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        assert q.dtype == self._dtype and (sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()))
        num_tokens, num_heads, head_dim = q.shape
        if q.stride(1) != head_dim:
            q = q.contiguous()
        layer, kv = spec_struct(spec, head_dim, kv_layer.shape[0] == 1, sinks), kv_struct(kv_layer)
        output = q.new_empty(num_tokens, num_heads * layer.value_dim)
        struct = plan.struct
        struct.num_heads, struct.num_kv_heads, struct.head_dim = num_heads, kv_layer.shape[1], head_dim
        self._attend["_int8" if kv_layer.dtype == torch.int8 else ""](
            ctypes.addressof(struct),
            ctypes.addressof(layer),
            q.data_ptr(),
            q.stride(0),
            ctypes.addressof(kv),
            address(plan.layout.ancestor_bits),
            output.data_ptr(),
        )
        return output

    def write_kv(self, kv_layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        num_tokens, num_kv_heads, head_dim = keys.shape
        block_size, suffix = kv_layer.shape[3], ""
        if kv_layer.dtype == torch.int8:
            block_size, suffix = block_size // (head_dim + SCALE_BYTES), "_int8"
        kv = kv_struct(kv_layer)
        for plane, rows in enumerate((keys,) if values is None else (keys, values)):
            assert rows.dtype == self._dtype
            if rows.stride(2) != 1:
                rows = rows.contiguous()
            token_stride, row_stride, _ = rows.stride()
            places = slots.data_ptr(), num_tokens, ctypes.addressof(kv), plane, num_kv_heads, head_dim, block_size
            self._write_rows[suffix](rows.data_ptr(), token_stride, row_stride, rows.shape[2], *places)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        num_rows, size = x.shape
        output = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), weight.dtype != x.dtype, output.data_ptr(), num_rows, size, eps)
        return output

    def rope_and_write_kv(self, qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, qk_norm: Tensor | None, eps: float) -> Tensor:
        num_tokens, num_kv_heads, head_dim = len(qkv), kv_layer.shape[1], places.rope_table.shape[-1]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        block_size, suffix = kv_layer.shape[3], ""
        if kv_layer.dtype == torch.int8:
            block_size, suffix = block_size // (head_dim + SCALE_BYTES), "_int8"
        kv = kv_struct(kv_layer)
        self._rotate[suffix](
            qkv.data_ptr(),
            places.rope_table.data_ptr(),
            places.positions.data_ptr(),
            places.slots.data_ptr(),
            ctypes.addressof(kv),
            None if qk_norm is None else qk_norm.data_ptr(),
            qk_norm is not None and qk_norm.dtype != qkv.dtype,
            eps,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
        )
        return qkv.view(num_tokens, -1, head_dim)[:, :num_heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, size)
        self._gate(gate_up.data_ptr(), output.data_ptr(), num_rows, size)
        return output

    def gated_mlp(self, x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
        if not is_packed(gate_up) or not is_packed(down):
            return super().gated_mlp(x, gate_up, gate_up_bias, down, down_bias)
        x = x.contiguous()
        first = weight_struct(gate_up, gate_up_bias, x.shape[1])
        second = weight_struct(down, down_bias, first.num_outputs // 2)
        output = x.new_empty(len(x), second.num_outputs)
        self._run_mlp(ctypes.addressof(first), ctypes.addressof(second), x.data_ptr(), len(x), output.data_ptr())
        return output
