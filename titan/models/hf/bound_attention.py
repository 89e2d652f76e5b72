"""The attention that transformers' modules call: it writes keys and values to the paged cache, and attends in trees.

transformers builds no masks for it, because it is registered for attention alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.core.attention import LayerSpec
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps, TokenPlaces
from titan.models.hf.latents import AbsorbedLatents

IMPLEMENTATION = "titan"
"""Name under which the attention is registered."""
BINDING = "titan_attention"
"""Attribute of an attention module that holds its `BoundAttention`."""


@dataclass(slots=True, eq=False)
class Pass:
    """What the attention layers of a model need in the pass that runs."""

    ops: LayerOps
    kv: KVTensor
    slots: Tensor  # int64 [T], where keys and values are written
    plan: Any  # from ``ops.plan_attention``
    rotations: dict[int, tuple[Any, TokenPlaces]] = field(default_factory=dict)  # by id, with what has it

    def rotation(self, angles: tuple[Tensor, Tensor]) -> TokenPlaces:
        """Return the tokens' places with their cosines and sines, [1, T, D] each, as `LayerOps.rope_and_write_kv` takes them."""
        if (found := self.rotations.get(id(angles))) is not None:
            return found[1]
        (cos,), (sin,) = angles
        half = sin.shape[1] // 2
        table = torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), 1)), 1)
        places = TokenPlaces(table, torch.arange(len(table), device=table.device), self.slots)
        self.rotations[id(angles)] = angles, places
        return places


@dataclass(slots=True, eq=False)
class Current:
    """The pass that runs, which all attention layers of a model look up; ``None`` between passes."""

    run: Pass | None = None


@dataclass(slots=True, eq=False)
class BoundAttention:
    """An attention layer of a model, bound to its module.

    The keys and values of a module with latents are its latents and their rotated parts.
    """

    current: Current
    spec: LayerSpec
    kv_index: int  # of the layer in the cache
    writes: bool  # False: it reads what another layer has written
    sinks: Tensor | None = None  # float32 [H]
    latents: AbsorbedLatents | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the tokens of the current pass: [1, H, T, D], [1, K, T, D], [1, K, T, V] -> [1, T, H, V]."""
        now, spec = self.current.run, self.spec
        assert now is not None, "modules run in passes only"
        kv_layer, q = now.kv.layers[self.kv_index], query[0].transpose(0, 1)
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if self.latents is not None:
            q, keys = self.latents.absorb(q), torch.cat((keys, values), -1)
        if spec.head_dim > q.shape[-1]:  # values are longer than keys
            q, keys = (F.pad(each, (0, spec.head_dim - each.shape[-1])) for each in (q, keys))
        if self.writes:
            now.ops.write_kv(kv_layer, now.slots, keys, None if self.latents is not None else values)
        attended = now.ops.tree_attention(q, kv_layer, now.plan, spec.attention, self.sinks).view(len(q), spec.num_heads, -1)
        return (attended if self.latents is None else self.latents.expand(attended))[None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the signature of transformers
    scaling: float | None = None,  # noqa: ARG001
    **options: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Attend by the module's `BoundAttention`; the signature is that of transformers' attention functions."""
    bound: BoundAttention = getattr(module, BINDING)
    return bound.attend(query, key, value), None
