"""Attention over paged KV in the modules of transformers that call its attention interface: it writes KV, and attends in trees.

transformers builds no masks for it, because it is registered for attention alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.core.attention import LayerSpec
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps, PassInputs, TokenPlaces
from titan.models.hf.latents import AbsorbedLatents, absorb
from titan.models.hf.probe import ProbedModule

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


class PagedAttention:
    """The attention of a model, to which its modules are bound, and the pass that runs."""

    def __init__(self, model: Any, modules: Sequence[ProbedModule], dtype: torch.dtype) -> None:
        self._run: Pass | None = None
        # such modules (Llama 4) compute positions from the cache they are given, instead of those they are told
        self._counts_positions = bool(getattr(model.config.get_text_config(), "attn_temperature_tuning", False))
        owners = [i for i, each in enumerate(modules) if each.source is None]
        for i, each in enumerate(modules):
            module = model.get_submodule(each.name)
            bound = BoundAttention(
                self,
                each.spec,
                kv_index=owners.index(i if each.source is None else each.source),
                writes=each.source is None,
                sinks=None if each.sinks is None else module.get_parameter(each.sinks).detach().float(),
                latents=None if each.expanded is None else absorb(module, each.expanded, dtype, model.device),
            )
            setattr(module, BINDING, bound)

    @property
    def run(self) -> Pass:
        """The pass that runs; there must be one."""
        assert self._run is not None, "modules run in passes only"
        return self._run

    @contextmanager
    def running(self, run: Pass) -> Iterator[None]:
        """Let modules run in a pass."""
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def decode(self, decoder: nn.Module, token_ids: Tensor, inputs: PassInputs, kv: KVTensor, ops: LayerOps) -> Tensor:
        """Run a decoder on the query tokens of a pass, and write their KV: [T, hidden_size]."""
        cache = {"past_key_values": Positions(inputs.positions)} if self._counts_positions else {}
        with self.running(Pass(ops, kv, inputs.slot_mapping, ops.plan_attention(inputs.attention))):
            output = decoder(input_ids=token_ids[None], position_ids=inputs.positions[None], use_cache=False, **cache)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


@dataclass(slots=True, eq=False)
class BoundAttention:
    """An attention layer of a model, bound to its module.

    The keys and values of a module with latents are its latents and their rotated parts.
    """

    attention: PagedAttention
    spec: LayerSpec
    kv_index: int  # of the layer in the cache
    writes: bool  # False: it reads what another layer has written
    sinks: Tensor | None  # float32 [H]
    latents: AbsorbedLatents | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the tokens of the current pass: [1, H, T, D], [1, K, T, D], [1, K, T, V] -> [1, T, H, V]."""
        now, spec = self.attention.run, self.spec
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


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attend by the module's `BoundAttention`; transformers gives a mask and options besides, which it has read already."""
    bound: BoundAttention = getattr(module, BINDING)
    return bound.attend(query, key, value), None


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
        return key, value
