"""One decoder layer as plain functions over its weights.

Legend: T query tokens, H = num_heads, K = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan.kernels.interfaces import LayerOps, TokenPlaces
from titan.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The tensors of one layer; weights are [out_features, in_features], packed or plain.

    Plain attributes, because a look-up in an `nn.Module` costs 0.4 us and a layer makes a dozen of them.
    """

    input_norm: Tensor  # [hidden_size]
    qkv_weight: Tensor  # out_features: q heads, k heads, v heads
    output_weight: Tensor
    post_norm: Tensor  # [hidden_size]
    gate_up_weight: Tensor  # out_features: gate, up
    down_weight: Tensor
    rope_table: Tensor  # [max_positions, 2, D], see `titan.models.rope.rope_table`
    qkv_bias: Tensor | None = None
    qk_norm: Tensor | None = None  # [H + K, D]
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


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
        "input_norm": (hidden_size,),
        "qkv_weight": (qkv_size, hidden_size),
        "output_weight": (hidden_size, config.num_heads * config.head_dim),
        "post_norm": (hidden_size,),
        "gate_up_weight": (2 * intermediate_size, hidden_size),
        "down_weight": (hidden_size, intermediate_size),
    }
    if "attention_bias" in config.traits:
        shapes["qkv_bias"] = (qkv_size,)
    if "qk_norm" in config.traits:
        shapes["qk_norm"] = (config.num_heads + config.num_kv_heads, config.head_dim)
    if "output_bias" in config.traits:
        shapes["output_bias"] = (hidden_size,)
    if "mlp_bias" in config.traits:
        shapes |= {"gate_up_bias": (2 * intermediate_size,), "down_bias": (hidden_size,)}
    return shapes


def attention(
    normed: Tensor, weights: LayerWeights, config: DecoderConfig, layer: int, kv_layer: Tensor, step: LayerStep
) -> Tensor:
    """Write the tokens' keys and values and compute attention, without the output projection.

    Args:
        normed: [T, hidden_size].
        weights: of the layer.
        config: of the model.
        layer: index of the layer.
        kv_layer: [2, K, num_blocks, block_size, D], or quantised.
        step: what all layers share.

    Returns:
        [T, H * D].
    """
    ops = step.ops
    qkv = ops.linear(normed, weights.qkv_weight, weights.qkv_bias)
    places = TokenPlaces(weights.rope_table, step.positions, step.slots)
    q = ops.rope_and_write_kv(qkv, places, kv_layer, weights.qk_norm, config.rms_norm_eps)
    return ops.tree_attention(q, kv_layer, step.attention_plan, config.layers[layer].attention)


def gated(normed: Tensor, weights: LayerWeights, ops: LayerOps) -> Tensor:
    """Compute the gated feed-forward part, without the down projection: [T, hidden_size] -> [T, intermediate_size]."""
    return ops.silu_mul(ops.linear(normed, weights.gate_up_weight, weights.gate_up_bias))
