"""Trial passes of a few tokens, in which modules are watched, compared and checked: attention returns its queries."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from titan.core.attention import AttentionSpec
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps
from titan.models.hf.modules import difference
from titan.models.hf.paged import PagedAttention, Pass

NUM_TOKENS = 3
"""Number of tokens of a trial pass."""
MAX_DIFFERENCE = 0.1
"""Largest difference of hidden states or logits by rounding, in norms; in float32 it is below 1e-4."""


class EchoedQueries:
    """Operations of a model whose attention returns its queries, so that they can be compared."""

    def __init__(self, ops: LayerOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def tree_attention(self, q: Tensor, _kv_layer: Tensor, _plan: Any, spec: AttentionSpec, _sinks: Tensor | None = None) -> Tensor:
        """Return the queries, as many of their numbers as values have: [T, H, D] -> [T, H * V]."""
        return q[..., : spec.value_dim].flatten(1)


def run_without_attention(attention: PagedAttention, ops: LayerOps, kv: KVTensor) -> AbstractContextManager[None]:
    """Let modules run a pass of `NUM_TOKENS` in which the attention returns its queries."""
    slots = torch.arange(NUM_TOKENS, device=kv.groups[0].device)
    return attention.running(Pass(cast("LayerOps", EchoedQueries(ops)), kv, slots, None))


def check_rows(decoder: Any, attention: PagedAttention, ops: LayerOps, kv: KVTensor) -> None:
    """Check that tokens meet in attention alone: a pass has those of several requests, and of branches of trees, side by side.

    Two trial passes have two tokens in common, in another order and beside another one.

    Raises:
        ValueError: what these two become depends on that.
    """
    outputs = []
    for tokens, positions in (([1, 2, 3], [0, 1, 2]), ([4, 3, 2], [0, 2, 1])):
        token_ids, position_ids = torch.tensor([[tokens], [positions]], device=kv.groups[0].device)
        with run_without_attention(attention, ops, kv):
            outputs.append(decoder(input_ids=token_ids, position_ids=position_ids, use_cache=False).last_hidden_state[0])
    found, expected = (each.nan_to_num() for each in (outputs[1][1:].flip(0), outputs[0][1:]))  # both may overflow
    if difference(found, expected) > MAX_DIFFERENCE:
        raise ValueError(f"tokens meet outside of attention in {type(decoder).__name__}, which is not supported")
