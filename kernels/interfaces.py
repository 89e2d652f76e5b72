"""What a decoder layer is made of beside its linear layers, and which implementation of it a device and a dtype get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.core.attention_layout import Window
from titan.kernels import backend
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.library import COMPILED_DTYPES, usable_library
from titan.kernels.torch.layers import TorchOps


class LayerOps(Protocol):
    """One implementation of the operations; T query tokens, H query heads, K KV heads of dimension D."""

    name: str

    def plan_attention(self, layout: Any, windows: Sequence[Window]) -> Any:
        """Prepare `tree_attention` for a batch, once for all layers.

        Args:
            layout: an `titan.core.attention_layout.AttentionLayout`; where `titan.kernels.backend.takes_triton`, a
                `titan.kernels.triton.layers.DeviceLayout`.
            windows: the distinct ones of the layers.
        """

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

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """End one part of a layer and begin the next: a linear layer, its addition to the residual stream, and a norm.

        Args:
            x: [T, in_features].
            weight: [out_features, in_features], packed or plain.
            bias: [out_features].
            residual: [T, out_features]; may be overwritten.
            norm_weight: [out_features], of `rms_norm`.
            eps: of that norm.

        Returns:
            The residual stream ``residual + x @ weight.T + bias``, and its norm, [T, out_features] each.
        """

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
            slot_mapping: int64 [T]; where a pass is padded, -1 writes nothing (not in PyTorch, which runs no padded ones).
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
    """The fastest implementation that runs here: Triton on CUDA, compiled C++ on a CPU with a compiler, else PyTorch.

    Args:
        device: of the model.
        dtype: of the model.

    Raises:
        ValueError: a card that Triton does not support, or the environment variable `TITAN_CPU_KERNELS` has an unknown value.
    """
    if backend.takes_triton(device):
        from titan.kernels.triton.layers import TritonOps  # not every platform has triton

        return TritonOps(device)
    library = usable_library() if device.type == "cpu" else None
    return TorchOps() if library is None or dtype not in COMPILED_DTYPES else CompiledOps(library, dtype)
