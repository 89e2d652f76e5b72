"""The operations of a layer in plain PyTorch: what runs on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.attention_layout import AttentionLayout, Window
from titan.kernels.cpu.linear import linear_add
from titan.kernels.torch import attention as torch_attention
from titan.kernels.torch.attention import AttentionPlan
from titan.kernels.torch.cache import write_kv
from titan.kernels.torch.norm import rms_norm


class TorchOps:
    """See `titan.kernels.interfaces.LayerOps`."""

    name = "PyTorch"

    def plan_attention(self, layout: AttentionLayout, windows: Sequence[Window]) -> AttentionPlan:
        return torch_attention.plan_attention(layout, windows)

    def tree_attention(self, q: Tensor, kv_layer: Tensor, plan: AttentionPlan, *, scale: float, window: Window) -> Tensor:
        return torch_attention.tree_attention(q, kv_layer, plan, scale=scale, window=window)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = linear_add(x, weight, bias, residual)
        return residual, self.rms_norm(residual, norm_weight, eps)

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        rope_table: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        kv_layer: Tensor,
        *,
        num_heads: int,
        qk_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        num_kv_heads, head_dim = kv_layer.shape[1], kv_layer.shape[-1]
        heads = qkv.view(len(qkv), -1, head_dim)
        num_qk_heads = num_heads + num_kv_heads
        qk = heads[:, :num_qk_heads]
        if qk_norm is not None:
            qk = rms_norm(qk, qk_norm, eps)
        cos, sin = rope_table.index_select(0, positions).unsqueeze(2).unbind(1)
        torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin, out=heads[:, :num_qk_heads])
        write_kv(kv_layer, heads[:, num_heads:].view(len(qkv), 2, -1, head_dim), slot_mapping)
        return heads[:, :num_heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
