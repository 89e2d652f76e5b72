"""A causal language model of transformers in two parts: its decoder, and the head that turns hidden states into logits."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from titan.models.hf.composite import is_composite, module_path
from titan.models.hf.modules import PackedLinear, mixed_rows


class DecoderOutput:
    """The output of a decoder, of which only the hidden states are there; all else is ``None``."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        if index != 0:
            raise IndexError(f"the output of a decoder has no entry {index}")
        return self.last_hidden_state


class GivenStates(nn.Module):
    """Stands in for a decoder: it returns the hidden states that it was given, whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> DecoderOutput:
        assert self.states is not None, "called by a head only"
        return DecoderOutput(self.states)


def find_decoder(model: Any) -> Any:
    """Return the module of a model that turns tokens into hidden states.

    Raises:
        ValueError: the model has none apart from its head.
    """
    for module in (model.get_decoder(), getattr(model, "model", None), model.base_model):
        takes_tokens = isinstance(module, nn.Module) and "input_ids" in inspect.signature(module.forward).parameters
        if module is not model and takes_tokens:
            return find_decoder(module) if isinstance(getattr(module, "lm_head", None), nn.Module) else module
    raise ValueError(f"{type(model).__name__} has no decoder apart from its head, which is not supported")


def find_attending(model: Any) -> Any:
    """Return what chooses how layers attend: the decoder, or the model around one that is none of transformers' models.

    A composite model is not asked itself: transformers goes by the code of its class, which may have layers for images alone.
    """
    from transformers import PreTrainedModel

    decoder = find_decoder(model)
    return decoder if isinstance(decoder, PreTrainedModel) else model


class Head:
    """All that a model does with the hidden states of its decoder: the output layer with its own scales and caps."""

    def __init__(self, model: Any, decoder: nn.Module, device: torch.device) -> None:
        path = module_path(model, decoder)
        output_layer = model.get_output_embeddings()
        if is_composite(model.config):  # it puts embeddings of images and text together around its decoder
            place = module_path(model, output_layer)[:-1]
            model, path = model.get_submodule(".".join(place)), path[len(place) :][:1]
        self._states = GivenStates()
        self._model = _replace(model, path, self._states)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._layer = self._find_layer(output_layer)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits: [L, hidden_size] -> [L, vocab_size]."""
        return self._run_model(hidden) if self._layer is None else self._layer(hidden)

    def _find_layer(self, layer: Any) -> PackedLinear | None:
        """Return the output layer, if logits are nothing but its output."""
        if not isinstance(layer, PackedLinear):
            return None
        hidden = mixed_rows(torch.empty(layer.in_features, dtype=layer.dtype, device=self._token.device))
        with torch.no_grad():
            logits, outputs = self._run_model(hidden), layer(hidden)
        return layer if logits.dtype == outputs.dtype and torch.equal(logits, outputs) else None

    def _run_model(self, hidden: Tensor) -> Tensor:
        self._states.states = hidden[None]
        logits: Tensor = self._model(input_ids=self._token, use_cache=False).logits
        self._states.states = None
        return logits[0]


def _replace(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with another one at a place inside of it."""
    twin = copy.copy(module)
    inner = replacement if len(path) == 1 else _replace(module.get_submodule(path[0]), path[1:], replacement)
    twin.__dict__["_modules"] = {**module._modules, path[0]: inner}
    return twin
