"""The operations of a layer in plain PyTorch; see `titan.kernels.interfaces.LayerOps`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.attention import AttentionSpec
from titan.core.batch import AttentionLayout
from titan.core.kv_tensor import kv_planes
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.torch.attention import RequestQuery, attend
from titan.kernels.torch.quantised_kv import quantise


class TorchOps:
    """Layer operations on any device."""

    name = "PyTorch"
    packs = False
    packs_8_bits = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pack(self, weight: Tensor, bits: int | None = None) -> Tensor:
        return weight

    def look_up(self, token_ids: Tensor, embedding: Tensor, size: int) -> Tensor:
        return F.embedding(token_ids, embedding)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def plan_attention(self, layout: AttentionLayout) -> Any:
        return [RequestQuery(layout, i, self.device) for i in range(len(layout.seq_lens))]

    def tree_attention(self, q: Tensor, kv_layer: Tensor, plan: Any, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        return torch.cat([attend(q[query.rows], kv_layer, query, spec, sinks) for query in plan])

    def write_kv(self, kv_layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        padded = [keys] if values is None else [keys, F.pad(values, (0, keys.shape[-1] - values.shape[-1]))]
        rows = torch.stack(padded).transpose(1, 2)  # [num_planes, K, T, D]
        is_quantised = kv_layer.dtype == torch.int8
        stored = kv_planes(kv_layer, keys.shape[-1]) if is_quantised else (kv_layer,)
        block_size = stored[0].shape[3]
        blocks, places = slots // block_size, slots % block_size
        for each, written in zip(stored, quantise(rows) if is_quantised else (rows,), strict=True):
            each[:, :, blocks, places] = written

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Apply RMSNorm: Zhang and Sennrich, "Root mean square layer normalization", 2019."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        # rounded before the multiplication if the weight has the dtype of x, as in transformers
        return (normed.to(weight.dtype) * weight).to(x.dtype)

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual + self.linear(x, weight, bias)
        return residual, self.rms_norm(residual, norm_weight, eps)

    def rope_and_write_kv(self, qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, qk_norm: Tensor | None, eps: float) -> Tensor:
        num_kv_heads, head_dim = kv_layer.shape[1], places.rope_table.shape[-1]
        heads = qkv.view(len(qkv), -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        queries_and_keys, values = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if qk_norm is not None:
            queries_and_keys = self.rms_norm(queries_and_keys, qk_norm, eps)
        cos, sin = places.rope_table.index_select(0, places.positions).unsqueeze(2).unbind(1)
        queries_and_keys = queries_and_keys * cos + queries_and_keys.roll(head_dim // 2, -1) * sin
        queries: Tensor = queries_and_keys[:, :num_heads]
        keys = queries_and_keys[:, num_heads:]
        self.write_kv(kv_layer, places.slots, keys, values)
        return queries

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def gated_mlp(self, x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
        return self.linear(self.silu_mul(self.linear(x, gate_up, gate_up_bias)), down, down_bias)
