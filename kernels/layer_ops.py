"""What a decoder layer is made of beside its linear layers, and which implementation of it a device and a dtype get."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.kernels.attention_layout import AttentionLayout, Window
from titan.kernels.compiled_ops import COMPILED_DTYPES, CompiledOps
from titan.kernels.cpu_library import load_library
from titan.kernels.torch_ops import TorchOps

CPU_KERNELS = "TITAN_CPU_KERNELS"
"""Environment variable: "torch" keeps the kernels of a CPU from being compiled."""


class LayerOps(Protocol):
    """One implementation of the operations; T query tokens, H query heads, K KV heads of dimension D."""

    name: str

    def plan_attention(self, layout: AttentionLayout, windows: Sequence[Window]) -> Any:
        """Prepare `tree_attention` for a batch, once for all layers; ``windows`` are the distinct ones of the layers."""

    def tree_attention(self, q: Tensor, kv_layer: Tensor, plan: Any, *, scale: float, window: Window) -> Tensor:
        """Attend from every query token to the slots that it sees.

        Args:
            q: [T, H, D], the last dimension contiguous.
            kv_layer: [2, K, num_blocks, block_size, D], keys and values; the tokens' own are written.
            plan: from `plan_attention` of the same implementation.
            scale: multiplies the scores.
            window: this layer's sliding window, one of those planned for.

        Returns:
            [T, H * D], dtype of ``q``.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, in float32: [T, size] -> [T, size]."""

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
        """Rotate queries and keys by their positions, and write keys and values to their slots.

        Args:
            qkv: [T, (H + 2 * K) * D]; may be overwritten.
            rope_table: [max_positions, 2, D], see `titan.models.rope.rope_table`.
            positions: int64 [T].
            slot_mapping: int64 [T].
            kv_layer: [2, K, num_blocks, block_size, D], updated in place.
            num_heads: H.
            qk_norm: [H + K, D], weights of an RMSNorm of each head before its rotation.
            eps: of that norm.

        Returns:
            The queries: [T, H, D].
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``: [T, 2 * size] -> [T, size]."""


def choose_layer_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """The fastest implementation that runs here: compiled ones on a CPU with a C++ compiler, else PyTorch.

    Args:
        device: of the model.
        dtype: of the model.

    Raises:
        ValueError: the environment variable `CPU_KERNELS` has an unknown value.
    """
    choice = os.environ.get(CPU_KERNELS, "auto")
    if choice not in ("auto", "torch"):
        raise ValueError(f"{CPU_KERNELS}={choice} is not allowed: allowed are 'auto' and 'torch'")
    if choice == "auto" and device.type == "cpu" and dtype in COMPILED_DTYPES:
        loaded = load_library()
        if loaded.library is not None:
            return CompiledOps(loaded.library, dtype)
    return TorchOps()
