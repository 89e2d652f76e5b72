"""Attention modules of the usual kind: projections, norms of heads, rotation, attention and output in five operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps
from titan.models.hf.modules import FusedNorm, PackedWeight, fuse_norm, is_close, is_plain_linear, is_unhooked, mixed_rows
from titan.models.hf.paged import BoundAttention
from titan.models.hf.trial_pass import NUM_TOKENS, run_without_attention

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")


class FusedAttention(nn.Module):
    """An attention module of one projection, RMSNorm of heads if it has them, and rotation of whole heads by halves."""

    def __init__(self, bound: BoundAttention, projection: PackedWeight, output: PackedWeight, norms: Sequence[FusedNorm]) -> None:
        super().__init__()
        self._bound, self._projection, self._output = bound, projection, output
        self._norm: Tensor | None = None
        self._eps = norms[0].eps if norms else 0.0
        if norms:
            counts = bound.spec.num_heads, bound.spec.num_kv_heads
            self._norm = torch.cat([norm.gains.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Attend from the tokens of the current pass, [1, T, hidden_size], with their cosines and sines, [1, T, D] each."""
        bound, projection, output = self._bound, self._projection, self._output
        now = bound.attention.run
        kv_layer = now.kv.layers[bound.kv_index]
        qkv = now.ops.linear(hidden_states[0], projection.weight, projection.bias)
        q = now.ops.rope_and_write_kv(qkv, now.rotation(position_embeddings), kv_layer, self._norm, self._eps)
        attended = now.ops.tree_attention(q, kv_layer, now.plan, bound.spec.attention, bound.sinks)
        return now.ops.linear(attended, output.weight, output.bias)[None], None


def fuse_attention(
    ops: LayerOps, bound: BoundAttention, module: nn.Module, arguments: dict[str, Any], kv: KVTensor, max_positions: int
) -> FusedAttention | None:
    """Return a fused module that computes what an attention module does; ``None`` if there is none.

    The arguments are those that its layer calls it with, by name, in a pass of `NUM_TOKENS`; both are tried, and write to ``kv``.
    """
    spec = bound.spec
    linears: list[Any] = [getattr(module, name, None) for name in PROJECTIONS]
    norms: list[Any] = [fuse_norm(ops, getattr(module, name)) for name in HEAD_NORMS if hasattr(module, name)]
    angles, shape = arguments.get("position_embeddings"), (1, NUM_TOKENS, spec.head_dim)
    if not bound.writes or bound.latents is not None or spec.attention.value_dim is not None or not is_unhooked(module):
        return None
    if not isinstance(angles, tuple) or [each.shape for each in angles] != [shape, shape] or "hidden_states" not in arguments:
        return None
    if not all(map(is_plain_linear, linears)) or any(each.dtype != linears[0].weight.dtype for each in angles):
        return None
    if norms and (len(norms) < len(HEAD_NORMS) or not all(norms) or len({(each.eps, *each.gains.shape) for each in norms}) > 1):
        return None
    if norms and len(norms[0].gains) != spec.head_dim:
        return None
    fused = FusedAttention(bound, PackedWeight(ops, *linears[:-1]), PackedWeight(ops, linears[-1]), norms)
    if isinstance(arguments.get("position_ids"), Tensor):  # some scale queries by them
        positions = torch.linspace(0, max_positions - 1, NUM_TOKENS, device=angles[0].device).long()
        arguments = {**arguments, "position_ids": positions[None]}
    return fused if _computes_the_same(fused, module, bound, ops, arguments, kv) else None


def _computes_the_same(
    fused: nn.Module, module: nn.Module, bound: BoundAttention, ops: LayerOps, arguments: dict[str, Any], kv: KVTensor
) -> bool:
    """Whether two attention modules have the same queries, keys, values and outputs, for random tokens at random angles."""
    weight, generator = module.get_parameter("q_proj.weight"), torch.Generator().manual_seed(1)
    angles = tuple(torch.randn(each.shape, generator=generator).to(weight) for each in arguments["position_embeddings"])
    tokens = mixed_rows(weight)[-NUM_TOKENS:][None]
    found = []
    for each in (fused, module):
        kv_layer = kv.layers[bound.kv_index].zero_()
        with run_without_attention(bound.attention, ops, kv):
            output, *rest = each(**{**arguments, "hidden_states": tokens, "position_embeddings": angles})
        found.append((output, kv_layer.clone(), rest))
    (output, written, rest), (expected, expected_kv, expected_rest) = found
    return rest == expected_rest and is_close(output, expected) and is_close(written, expected_kv)
