"""Oracles of the kernels of a layer, named after them, in float64, and how near these must come."""

from __future__ import annotations

import torch
from torch import Tensor

from titan.kernels.interfaces import TokenPlaces
from titan.kernels.triton.tools import INTERPRETED
from titan.models.rope import Rope, rope_table

HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SLACK = 1e-6 if INTERPRETED else 1e-5


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """Within half a unit in the last place, up to float32 arithmetic."""
    torch.testing.assert_close(actual.double(), exact, rtol=HALF_ULP[actual.dtype] + SLACK, atol=SLACK)


def make_table(num_positions: int, head_dim: int) -> Tensor:
    frequencies = tuple(100.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    return rope_table(Rope("default", frequencies, 1.0), head_dim, num_positions)


def reference_rope_and_write_kv(
    qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, num_heads: int, qk_norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """What `rope_and_write_kv` computes, token by token: the queries, float64 [T, H, D].

    ``kv_layer`` is updated in place; in float64, it keeps what is written unrounded. ``qk_norm`` is [H + K, D].
    """
    _, num_kv_heads, _, block_size, head_dim = kv_layer.shape
    q = torch.empty(len(qkv), num_heads, head_dim, dtype=torch.float64, device=qkv.device)
    for token, row in enumerate(qkv.double()):
        query_heads, keys, values = row.view(-1, head_dim).split([num_heads, num_kv_heads, num_kv_heads])
        heads = torch.cat((query_heads, keys))
        if qk_norm is not None:
            heads = reference_rms_norm(heads, qk_norm, eps)
        cos, sin = places.rope_table[places.positions[token]].double()
        heads = heads * cos + heads.roll(head_dim // 2, -1) * sin
        q[token] = heads[:num_heads]
        slot = int(places.slots[token])
        if slot >= 0:
            kv_layer[:, :, slot // block_size, slot % block_size] = torch.stack((heads[num_heads:], values)).to(kv_layer.dtype)
    return q


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` computes, in float64: ``x`` [..., size], ``weight`` broadcast against it."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    """What `silu_mul` computes, in float64: [T, 2 * intermediate_size] -> [T, intermediate_size]."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def reference_gelu_mul(gate_up: Tensor) -> Tensor:
    """What `gelu_mul` computes, in float64: [T, 2 * intermediate_size] -> [T, intermediate_size]."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
