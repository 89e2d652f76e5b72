"""The operations of a layer by Triton kernels, for which a batch is laid out on the device.

The kernels read the lengths of a batch from tensors, so that a CUDA graph of them serves every batch of the same shapes.

Legend: T query tokens, R requests, padded ones included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.batch import Window
from titan.kernels.triton import gate, rope_kv, tree_attention
from titan.kernels.triton import norm as fused_norm
from titan.kernels.triton.attention_plan import DeviceLayout, TreeAttentionPlan
from titan.kernels.triton.attention_planner import plan_tree_attention

MIN_CAPABILITY = (8, 0)
"""Compute capability that Triton supports; the first with bfloat16."""


class TritonOps:
    """See `titan.kernels.interfaces.LayerOps`; a batch is laid out as a `DeviceLayout`.

    Args:
        device: where the kernels run.

    Raises:
        ValueError: a card that Triton does not support.
    """

    name = "Triton"
    packs = False

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
            raise ValueError(
                f"device={str(device)!r} is a {torch.cuda.get_device_name(device)} of compute capability "
                f"{'.'.join(map(str, capability))}: the Triton kernels, and bfloat16, need "
                f"{'.'.join(map(str, MIN_CAPABILITY))} or more; device='cpu' runs without"
            )

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def plan_attention(self, layout: DeviceLayout, windows: Sequence[Window]) -> TreeAttentionPlan:
        return plan_tree_attention(layout, windows)

    def tree_attention(self, q: Tensor, kv_layer: Tensor, plan: TreeAttentionPlan, *, scale: float, window: Window) -> Tensor:
        return tree_attention.tree_attention(q, kv_layer, plan, scale=scale, window=window)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused_norm.rms_norm(x, weight, eps)

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return residual, fused_norm.rms_norm(self.linear(x, weight, bias), norm_weight, eps, residual)

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
        return rope_kv.rope_and_write_kv(
            qkv, rope_table, positions, slot_mapping, kv_layer, num_heads=num_heads, qk_norm=qk_norm, eps=eps
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gate.silu_mul(gate_up)
