"""Attention over paged KV, bound to the modules of a model that call transformers' attention interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps, PassInputs
from titan.models.hf.bound_attention import BINDING, BoundAttention, Current, Pass
from titan.models.hf.describe import TransformersConfig
from titan.models.hf.latents import absorb


class PagedAttention:
    """Attention that a model's modules are bound to; see `titan.models.hf.model.Attending`."""

    def __init__(self, model: Any, config: TransformersConfig, dtype: torch.dtype) -> None:
        self.current = Current()
        # such modules (Llama 4) compute positions from the cache they are given, instead of those they are told
        self._counts_positions = bool(getattr(model.config.get_text_config(), "attn_temperature_tuning", False))
        owners = [i for i, each in enumerate(config.modules) if each.source is None]
        for i, each in enumerate(config.modules):
            module = model.get_submodule(each.name)
            bound = BoundAttention(
                self.current,
                each.spec,
                kv_index=owners.index(i if each.source is None else each.source),
                writes=each.source is None,
                sinks=None if each.sinks is None else module.get_parameter(each.sinks).detach().float(),
                latents=None if each.expanded is None else absorb(module, each.expanded, dtype, model.device),
            )
            setattr(module, BINDING, bound)

    @contextmanager
    def passing(self, inputs: PassInputs, kv: KVTensor, ops: LayerOps) -> Iterator[dict[str, Any]]:
        """See `titan.models.hf.model.Attending`."""
        self.current.run = Pass(ops, kv, inputs.slot_mapping, ops.plan_attention(inputs.attention))
        cache = {"past_key_values": Positions(inputs.positions)} if self._counts_positions else {}
        try:
            yield {"use_cache": False, **cache}
        finally:
            self.current.run = None


class Positions:
    """A cache without content, for modules that count positions from what their cache holds.

    Args:
        positions: int64 [T] of the query tokens: such a module adds 0, 1, ... to the length that it is told.
    """

    is_compileable = False

    def __init__(self, positions: Tensor) -> None:
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # noqa: ARG002 - the signature of transformers
        """Return what added to 0, 1, ... gives the positions: int64 [T]."""
        return self._offsets

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values as they are."""
        return key, value
