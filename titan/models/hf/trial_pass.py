"""Trial passes of a few tokens, in which modules are watched and compared: attention returns its queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from titan.core.attention import AttentionSpec
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps
from titan.models.hf.bound_attention import Current, Pass

NUM_TOKENS = 3
"""Number of tokens of a trial pass."""


class EchoedQueries:
    """Operations of a model whose attention returns its queries, so that they can be compared."""

    def __init__(self, ops: LayerOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def tree_attention(self, q: Tensor, _kv_layer: Tensor, _plan: Any, spec: AttentionSpec, _sinks: Tensor | None = None) -> Tensor:
        """Return the queries, as many of their numbers as values have: [T, H, D] -> [T, H * V]."""
        return q[..., : spec.value_dim].flatten(1)


@contextmanager
def run_without_attention(current: Current, ops: LayerOps, kv: KVTensor) -> Iterator[None]:
    """Let modules run a pass of `NUM_TOKENS` in which the attention returns its queries."""
    current.run = Pass(cast("LayerOps", EchoedQueries(ops)), kv, torch.arange(NUM_TOKENS, device=kv.groups[0].device), None)
    try:
        yield
    finally:
        current.run = None
