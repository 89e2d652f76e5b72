"""The operations of a layer on a CPU, in the C++ of this folder."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.attention import AttentionSpec
from titan.core.batch import AttentionLayout
from titan.kernels.cpu.compiled import FLOAT, INT, POINTER, CompiledKernels
from titan.kernels.cpu.structs import LayerStruct, SpecStruct, kv_struct, plan_struct, spec_struct
from titan.kernels.cpu.weights import is_packed, pack_weight, round_to_8_bits, weight_struct
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.torch.layers import TorchOps


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
        self.packs_8_bits = kernels.has_codes
        self._multiply = kernels.function("linear", dtype, POINTER, POINTER, INT, POINTER, POINTER)
        self._attend = kernels.function("tree_attention", dtype, *[POINTER] * 3, INT, POINTER, POINTER)
        of_writes = POINTER, INT, INT, INT, POINTER, INT, POINTER, INT, INT, INT
        self._write_rows = kernels.function("write_rows", dtype, *of_writes)
        self._unpack_rows = kernels.function("unpack_rows", dtype, POINTER, POINTER, INT, POINTER)
        self._norm = kernels.function("rms_norm", dtype, POINTER, POINTER, INT, POINTER, INT, INT, FLOAT)
        self._run_mlp = kernels.function("gated_mlp", dtype, POINTER, POINTER, POINTER, INT, POINTER)
        self._rotate = kernels.function("rope_and_write_kv", dtype, POINTER, INT, *[POINTER] * 3, INT, FLOAT)

    def pack(self, weight: Tensor, bits: int | None = None) -> Tensor:
        if is_packed(weight):
            return weight
        if bits is not None:
            round_to_8_bits(weight)
        return pack_weight(weight, self._kernels)

    def look_up(self, token_ids: Tensor, embedding: Tensor, size: int) -> Tensor:
        if not is_packed(embedding):
            return F.embedding(token_ids, embedding)
        token_ids = token_ids.contiguous()
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < len(embedding):
            raise IndexError(f"tokens {int(token_ids.min())} to {int(token_ids.max())} are not allowed: there are {len(embedding)}")
        struct, output = weight_struct(embedding, None, size), torch.empty(len(token_ids), size, dtype=self._dtype)
        self._unpack_rows(ctypes.addressof(struct), token_ids.data_ptr(), len(token_ids), output.data_ptr())
        return output

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_packed(weight):
            return F.linear(x, weight, bias)
        assert x.dtype == self._dtype
        x, struct = x.contiguous(), weight_struct(weight, bias, x.shape[1])
        output = x.new_empty(len(x), struct.num_outputs)
        self._multiply(ctypes.addressof(struct), x.data_ptr(), len(x), None, output.data_ptr())
        return output

    def plan_attention(self, layout: AttentionLayout) -> ctypes.Structure:
        return plan_struct(layout)

    def tree_attention(
        self, q: Tensor, kv_layer: Tensor, plan: ctypes.Structure, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        assert q.dtype == self._dtype and (sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()))
        num_tokens, num_heads, head_dim = q.shape
        if q.stride(1) != head_dim:
            q = q.contiguous()
        num_planes, num_kv_heads = kv_layer.shape[:2]
        layer = spec_struct(spec, num_heads, num_kv_heads, head_dim, num_planes == 1, sinks)
        kv, output = kv_struct(kv_layer, head_dim), q.new_empty(num_tokens, num_heads * layer.value_dim)
        structs = ctypes.addressof(plan), ctypes.addressof(layer)
        self._attend(*structs, q.data_ptr(), q.stride(0), ctypes.addressof(kv), output.data_ptr())
        return output

    def write_kv(self, kv_layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        num_tokens, num_kv_heads, head_dim = keys.shape
        kv = kv_struct(kv_layer, head_dim)
        for plane, rows in enumerate((keys,) if values is None else (keys, values)):
            assert rows.dtype == self._dtype
            if rows.stride(2) != 1:
                rows = rows.contiguous()
            token_stride, row_stride, _ = rows.stride()
            places = slots.data_ptr(), num_tokens, ctypes.addressof(kv), plane, num_kv_heads, head_dim
            self._write_rows(rows.data_ptr(), token_stride, row_stride, rows.shape[2], *places)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        is_wide = weight.dtype != x.dtype
        if x.dtype != self._dtype or (is_wide and weight.dtype != torch.float32):  # as modules of transformers may do
            return super().rms_norm(x, weight, eps)
        x, weight = x.contiguous(), weight.contiguous()
        num_rows, size = x.shape
        output = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), is_wide, output.data_ptr(), num_rows, size, eps)
        return output

    def rope_and_write_kv(self, qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, qk_norm: Tensor | None, eps: float) -> Tensor:
        assert qkv.dtype == places.rope_table.dtype == self._dtype
        num_kv_heads, head_dim = kv_layer.shape[1], places.rope_table.shape[-1]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        layer, is_wide = LayerStruct(), False  # by assignments, which take less time than keywords
        layer.rope_table, layer.kv = places.rope_table.data_ptr(), kv_struct(kv_layer, head_dim)
        layer.attention = SpecStruct(num_heads, num_kv_heads, head_dim)
        if qk_norm is not None:
            layer.qk_norm, is_wide = qk_norm.data_ptr(), qk_norm.dtype != self._dtype
            assert (not is_wide or qk_norm.dtype == torch.float32) and qk_norm.is_contiguous()
        tokens = qkv.data_ptr(), places.positions.data_ptr(), places.slots.data_ptr()
        self._rotate(ctypes.addressof(layer), is_wide, *tokens, len(qkv), eps)
        return qkv.view(len(qkv), -1, head_dim)[:, :num_heads]

    def gated_mlp(self, x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
        if not is_packed(gate_up) or not is_packed(down):
            return super().gated_mlp(x, gate_up, gate_up_bias, down, down_bias)
        assert x.dtype == self._dtype
        x = x.contiguous()
        first = weight_struct(gate_up, gate_up_bias, x.shape[1])
        second = weight_struct(down, down_bias, first.num_outputs // 2)
        output = x.new_empty(len(x), second.num_outputs)
        self._run_mlp(ctypes.addressof(first), ctypes.addressof(second), x.data_ptr(), len(x), output.data_ptr())
        return output
