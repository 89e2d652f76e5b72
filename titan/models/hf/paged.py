"""Attention over paged KV, bound to the modules of a model that call transformers' attention interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan.core.attention import Window
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps, PassInputs
from titan.models.hf.interface import BINDING, BoundAttention, Current, Pass
from titan.models.hf.latents import absorb
from titan.models.hf.probe import ProbedLayer


class PagedAttention:
    """See `titan.models.hf.model.Attending`.

    Args:
        layers: of the model, as probed, with weights; their modules are bound to this object.
        windows: the distinct windows of the layers.
        text_config: of the model.
    """

    def __init__(self, layers: Sequence[ProbedLayer], windows: Sequence[Window], text_config: Any) -> None:
        self._current = Current()
        self._windows = windows
        # such modules (Llama 4) compute positions from the cache they are given, instead of those they are told
        self._counts_positions = bool(getattr(text_config, "attn_temperature_tuning", False))
        owners = [i for i, layer in enumerate(layers) if layer.source is None]
        for i, layer in enumerate(layers):
            bound = BoundAttention(
                self._current,
                layer.spec,
                kv_index=owners.index(i if layer.source is None else layer.source),
                writes=layer.source is None,
                sinks=None if layer.sinks is None else layer.sinks.detach().float(),
                latents=None if layer.expanded is None else absorb(layer.module, layer.expanded),
            )
            setattr(layer.module, BINDING, bound)

    @contextmanager
    def passing(self, inputs: PassInputs, kv: KVTensor, ops: LayerOps) -> Iterator[dict[str, Any]]:
        """See `titan.models.hf.model.Attending`."""
        self._current.run = Pass(ops, kv, inputs.slot_mapping, ops.plan_attention(inputs.attention, self._windows))
        cache = {"past_key_values": Positions(inputs.positions)} if self._counts_positions else {}
        try:
            yield {"use_cache": False, **cache}
        finally:
            self._current.run = None


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
