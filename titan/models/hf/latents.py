"""Multi-head latent attention on its latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

A token's keys and values are linear in one latent that all heads share, so that the products with the matrices that expand it can
move to the queries and to the outputs: the cache holds latents, and every head attends to the same ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from titan.core.attention import LayerSpec
from titan.models.hf.widen import widen

MAX_ERROR = 1e-4
"""Largest difference in float32, relative to the largest number, between a module's own expansion and the absorbed matrices."""


class AbsorbedLatents:
    """The matrices that expand latents to the keys and values of each head: queries and outputs change sides instead.

    Args:
        up_keys: [H, K, latent], of the part of keys that is not rotated.
        up_values: [H, V, latent].
    """

    def __init__(self, up_keys: Tensor, up_values: Tensor) -> None:
        self._up_keys = up_keys.contiguous()
        self._up_values = up_values.transpose(1, 2).contiguous()

    def absorb(self, q: Tensor) -> Tensor:
        """Return queries of latents: [T, H, D] -> [T, H, latent + rotated]."""
        plain, rotated = q.split([self._up_keys.shape[1], q.shape[-1] - self._up_keys.shape[1]], -1)
        return torch.cat((torch.bmm(plain.transpose(0, 1), self._up_keys).transpose(0, 1), rotated), -1)

    def expand(self, attended: Tensor) -> Tensor:
        """Return values of sums of latents: [T, H, latent] -> [T, H, V]."""
        return torch.bmm(attended.transpose(0, 1), self._up_values).transpose(0, 1)


def has_latents(module: Any) -> bool:
    """Whether an attention module expands latents by a plain linear layer, right before it attends."""
    return callable(getattr(module, "expand_kv", None)) and type(getattr(module, "kv_b_proj", None)) is nn.Linear


def latent_spec(module: Any, spec: LayerSpec) -> LayerSpec:
    """Return the spec of a module's attention to latents, given that to expanded keys and values."""
    size = module.kv_b_proj.in_features
    attention = replace(spec.attention, value_dim=size)
    return replace(spec, num_kv_heads=1, head_dim=size + module.qk_rope_head_dim, attention=attention, is_latent=True)


def absorb(module: Any, spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> AbsorbedLatents:
    """Take the expansion out of a module, which hands over its latents from now on.

    Args:
        module: one that `has_latents`, with its weights.
        spec: of its attention to expanded keys and values.
        dtype: of the model, which weights that are quantised do not have.
        device: likewise.

    Raises:
        ValueError: the expansion is something else than these matrices.
    """
    linear: nn.Linear = module.kv_b_proj
    if type(linear.weight) is nn.Parameter and dtype == torch.float32:
        widen(linear)
    value_dim = spec.attention.value_dim or spec.head_dim
    num_plain = linear.out_features // spec.num_heads - value_dim
    identity = torch.eye(linear.in_features, dtype=dtype, device=device)
    with torch.no_grad():
        weight = linear(identity).T.view(spec.num_heads, num_plain + value_dim, linear.in_features)
    up_keys, up_values = weight.split([num_plain, value_dim], 1)

    generator, sizes = torch.Generator().manual_seed(0), (linear.in_features, module.qk_rope_head_dim)
    latents, rotated = (torch.randn(1, 1, 3, size, generator=generator).to(weight) for size in sizes)
    keys, values = module.expand_kv(latents, rotated)
    ours = torch.einsum("xytl,hkl->xhtk", latents, up_keys), torch.einsum("xytl,hvl->xhtv", latents, up_values)
    theirs = keys[..., :num_plain], values
    is_rotated = torch.equal(keys[..., num_plain:], rotated.expand_as(keys[..., num_plain:]))
    tolerance = MAX_ERROR if weight.dtype == torch.float32 else 1 / 32
    if not is_rotated or any(_error(*each) > tolerance for each in zip(ours, theirs, strict=True)):
        raise ValueError(f"{type(module).__name__} expands its latents in a way that is not supported")
    module.expand_kv = lambda latent, rotated: (latent, rotated)
    module.kv_b_proj = None
    return AbsorbedLatents(up_keys, up_values)


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
