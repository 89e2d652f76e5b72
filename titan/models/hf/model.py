"""A model of transformers with the interface of Titan's own decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from titan.core.arrays import Ints
from titan.core.kv_tensor import KVLayout, KVTensor
from titan.kernels.interfaces import Backend, PassInputs
from titan.models.config import ModelConfig
from titan.models.hf.interface import BINDING, BoundAttention, Current, Pass
from titan.models.hf.latents import absorb
from titan.models.hf.probe import ProbedLayer
from titan.models.hf.split import Head, find_decoder


class TransformersModel:
    """A causal language model whose modules are transformers', over paged KV; see `titan.kernels.interfaces.Model`.

    Args:
        model: with its weights on the back end's device; its attention modules are bound to this object.
        config: of the model.
        layers: of the model, as probed.
        dtype: of weights, activations and logits.
        backend: that runs the attention.
        max_positions: positions that can be run; ``None``: those of the config.
    """

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        layers: list[ProbedLayer],
        *,
        dtype: torch.dtype,
        backend: Backend,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = backend.device
        self.max_positions = config.max_position_embeddings if max_positions is None else max_positions
        self.ops = backend.layer_ops(dtype, config.traits)
        self._current = Current()
        self._decoder: nn.Module = find_decoder(model)
        self._head = Head(model, self._decoder)
        self._counts_positions = counts_positions(model.config)
        self._bind(layers)

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of the model's KV."""
        return self.config.kv_layout(self.dtype)

    def check_positions(self, positions: Ints) -> None:
        """Check that the model has these positions.

        Raises:
            IndexError: a position is not in 0 to ``max_positions - 1``.
        """
        if positions.max() >= self.max_positions or positions.min() < 0:
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not allowed: there are {self.max_positions}")

    def hidden_states(self, inputs: PassInputs, kv: KVTensor) -> Tensor:
        """Run the decoder on the query tokens of a pass, and write their KV: [L, hidden_size]."""
        plan = self.ops.plan_attention(inputs.attention, self.config.windows)
        self._current.run = Pass(self.ops, kv, inputs.slot_mapping, plan)
        options = {"past_key_values": Positions(inputs.positions)} if self._counts_positions else {}
        try:
            output = self._decoder(
                input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False, **options
            )
        finally:
            self._current.run = None
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if inputs.logits_rows is None else hidden.index_select(0, inputs.logits_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head: [L, hidden_size] -> [L, vocab_size]."""
        return self._head(hidden)

    def _bind(self, layers: list[ProbedLayer]) -> None:
        own = [each for each in layers if each.source is None]
        for layer in layers:
            spec, latents = layer.spec, None
            if spec.is_latent:
                assert layer.expanded is not None
                latents = absorb(layer.module, layer.expanded)
            sinks = None if layer.sinks is None else layer.sinks.detach().float()
            source = layer if layer.source is None else layers[layer.source]
            bound = BoundAttention(self._current, spec, own.index(source), layer.source is None, sinks, latents)
            setattr(layer.module, BINDING, bound)


class Positions:
    """A cache without content, for modules that count positions from what their cache holds (Llama 4's temperature tuning).

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


def counts_positions(config: Any) -> bool:
    """Whether attention modules compute positions from the cache they are given, instead of those they are told."""
    return bool(getattr(config.get_text_config(), "attn_temperature_tuning", False))
