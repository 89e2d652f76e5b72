"""One decoder layer as plain functions over its weights.

Legend: T query tokens, H = num_heads, K = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.kernels.interfaces import LayerOps, TokenPlaces
from titan.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The tensors of one layer; weights are [out_features, in_features], packed or plain.

    Plain attributes, because a look-up in an `nn.Module` costs 0.4 us and a layer makes a dozen of them.
    """

    qkv_weight: Tensor  # out_features: q heads, k heads, v heads
    output_weight: Tensor
    gate_up_weight: Tensor  # out_features: gate, up
    down_weight: Tensor
    rope_table: Tensor  # [max_positions, 2, D], see `titan.models.rope.rope_table`
    # RMSNorms, [hidden_size]: of what attention and feed-forward part read, and of what they add to the residual stream
    input_norm: Tensor | None = None
    gate_up_norm: Tensor | None = None
    output_norm: Tensor | None = None
    down_norm: Tensor | None = None
    qk_norm: Tensor | None = None  # [H + K, D], of each head of queries and keys
    row_norm: Tensor | None = None  # [(H + K) * D], of all queries together, and of all keys
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Projection(NamedTuple):
    """The last operation of a part of a layer, whose output goes to the residual stream."""

    weight: Tensor  # [hidden_size, in_features], packed or plain
    bias: Tensor | None  # [hidden_size]
    norm: Tensor | None  # [hidden_size], of the output


@dataclass(frozen=True, slots=True, eq=False)
class LayerStep:
    """What all layers of one pass share."""

    ops: LayerOps
    attention_plan: Any  # from ``ops.plan_attention``
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a layer of this config has, by their names in `LayerWeights`."""
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkv_weight": (qkv_size, hidden_size),
        "output_weight": (hidden_size, config.num_heads * config.head_dim),
        "gate_up_weight": (2 * intermediate_size, hidden_size),
        "down_weight": (hidden_size, intermediate_size),
        **dict.fromkeys(config.family.norms, (hidden_size,)),
    }
    if "attention_bias" in config.traits:
        shapes["qkv_bias"] = (qkv_size,)
    if "qk_norm" in config.traits:
        shapes["qk_norm"] = (config.num_heads + config.num_kv_heads, config.head_dim)
    if "row_norm" in config.traits:
        shapes["row_norm"] = ((config.num_heads + config.num_kv_heads) * config.head_dim,)
    if "output_bias" in config.traits:
        shapes["output_bias"] = (hidden_size,)
    if "mlp_bias" in config.traits:
        shapes |= {"gate_up_bias": (2 * intermediate_size,), "down_bias": (hidden_size,)}
    return shapes


def attention(
    normed: Tensor, weights: LayerWeights, config: DecoderConfig, layer: int, kv_layer: Tensor, step: LayerStep
) -> Tensor:
    """Write the tokens' keys and values and compute attention, without the output projection: [T, hidden_size] -> [T, H * D]."""
    ops = step.ops
    qkv = ops.linear(normed, weights.qkv_weight, weights.qkv_bias)
    if weights.row_norm is not None:
        sizes = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        (q, k, v), (q_norm, k_norm) = qkv.split((*sizes, sizes[1]), -1), weights.row_norm.split(sizes)
        qkv = torch.cat((ops.rms_norm(q, q_norm, config.rms_norm_eps), ops.rms_norm(k, k_norm, config.rms_norm_eps), v), -1)
    places = TokenPlaces(weights.rope_table, step.positions, step.slots)
    q = ops.rope_and_write_kv(qkv, places, kv_layer, weights.qk_norm, config.rms_norm_eps)
    return ops.tree_attention(q, kv_layer, step.attention_plan, config.layers[layer].attention)


def gated(normed: Tensor, weights: LayerWeights, config: DecoderConfig, ops: LayerOps) -> Tensor:
    """Compute the gated feed-forward part, without the down projection: [T, hidden_size] -> [T, intermediate_size]."""
    gate_up = ops.linear(normed, weights.gate_up_weight, weights.gate_up_bias)
    return ops.gelu_mul(gate_up) if "gelu_tanh" in config.traits else ops.silu_mul(gate_up)


def norm(x: Tensor, weight: Tensor | None, eps: float, ops: LayerOps) -> Tensor:
    """Apply an RMSNorm, if there is one: [T, hidden_size] -> [T, hidden_size]."""
    return x if weight is None else ops.rms_norm(x, weight, eps)


def add_part(
    x: Tensor, projection: Projection, residual: Tensor, next_norm: Tensor | None, eps: float, ops: LayerOps
) -> tuple[Tensor, Tensor]:
    """Add the output of a part of a layer to the residual stream, and apply the norm of the part that reads it next.

    ``x``, [T, in_features], is what the part's last projection reads. The residual stream, [T, hidden_size], may be overwritten.

    Returns:
        The residual stream, and what the next part reads: [T, hidden_size] each.
    """
    weight, bias, own_norm = projection
    if own_norm is None and next_norm is not None:
        return ops.linear_add_norm(x, weight, bias, residual, next_norm, eps)
    residual = residual + norm(ops.linear(x, weight, bias), own_norm, eps, ops)
    return residual, norm(residual, next_norm, eps, ops)
