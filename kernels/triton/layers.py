"""The operations of a layer in Triton kernels, which take the layout of a batch on the device.

The kernels read the lengths of a batch from tensors, so that one CUDA graph serves every batch of the same shapes.

Legend: T query tokens, R requests, padded ones included.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.gate import gelu_mul, silu_mul
from titan.kernels.triton.kv_writes import write_kv
from titan.kernels.triton.norm import rms_norm
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.kernels.triton.short_weights import NUM_PROGRAMS, is_short, numbers, pack_short, short_linear
from titan.kernels.triton.tree_attention import tree_attention

MIN_CAPABILITY = (8, 0)
"""Least compute capability that Triton supports; the first with bfloat16."""


class TritonOps:
    """See `titan.kernels.interfaces.LayerOps`; the layout of a batch is a `DeviceLayout`.

    Raises:
        ValueError: a card that Triton does not support.
    """

    name = "Triton"
    packs = False
    tree_attention = staticmethod(tree_attention)
    rms_norm = staticmethod(rms_norm)
    rope_and_write_kv = staticmethod(rope_and_write_kv)
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    write_kv = staticmethod(write_kv)

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
            raise ValueError(
                f"device={str(device)!r} is a {torch.cuda.get_device_name(device)} of compute capability "
                f"{'.'.join(map(str, capability))}: the Triton kernels, and bfloat16, need "
                f"{'.'.join(map(str, MIN_CAPABILITY))} or more; device='cpu' runs without"
            )

        self.packs_8_bits, self._device = dtype == torch.bfloat16, device

    @cached_property
    def _arrivals(self) -> Tensor:
        """Made by the first product that needs it, which is none that is captured."""
        return torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=self._device)

    def pack(self, weight: Tensor, bits: int | None = None) -> Tensor:
        return weight if bits is None or is_short(weight) else pack_short(weight)

    def look_up(self, token_ids: Tensor, embedding: Tensor, size: int) -> Tensor:
        return F.embedding(token_ids, numbers(embedding, size) if is_short(embedding) else embedding)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return short_linear(x, weight, bias, self._arrivals) if is_short(weight) else F.linear(x, weight, bias)

    def plan_attention(self, layout: DeviceLayout) -> TreeAttentionPlan:
        return TreeAttentionPlan(layout)

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return residual, rms_norm(self.linear(x, weight, bias), norm_weight, eps, residual)

    def gated_mlp(self, x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
        return self.linear(self.silu_mul(self.linear(x, gate_up, gate_up_bias)), down, down_bias)
