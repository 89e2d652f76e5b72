"""Drafts as they are written on the command line, and the drafters made of them.

A recipe is a name and options: ``demo``, ``ngram``, ``truncated:1``, ``DIR,tree=dynamic,tokens=8``, ``demo,bits=8``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from accelerate import init_empty_weights
from titan.bench.profiling import model_of
from torch import Tensor, nn

from titan.core.options import SpeculationOptions
from titan.draft.base import Drafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import create_drafter
from titan.engine import Engine
from titan.kernels.interfaces import Backend
from titan.models.decoder import Decoder, is_linear_weight
from titan.models.loader import load_model, resolve_model

TRUNCATED = "truncated"
OPTIONS = ("tree", "tokens", "sampling", "bits")
BITS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """How to draft.

    Args:
        text: as it was written.
        model: "demo", a folder, a hub id, "ngram" or another registered name; unused if ``num_layers`` is given.
        num_layers: the draft is the target's first layers, with its embedding, final norm and head.
        tree: shape, as `titan.LLM`'s ``draft_tree``.
        num_tokens: most draft tokens per request and step.
        sampling: as `titan.LLM`'s ``draft_sampling``.
        bits: the weights of the linear layers are rounded to integers of so many bits and back.
    """

    text: str
    model: str
    num_layers: int | None = None
    tree: str | tuple[int, ...] = "auto"
    num_tokens: int = 4
    sampling: str = "auto"
    bits: int | None = None

    @classmethod
    def parse(cls, text: str, num_tokens: int) -> DraftRecipe:
        """Read a recipe; ``num_tokens`` is what it does not say.

        Raises:
            ValueError: an option is unknown, comes twice or has a value that is not allowed.
        """
        name, *fields = text.split(",")
        options: dict[str, str] = {}
        for field in fields:
            key, sign, value = field.partition("=")
            if key not in OPTIONS or not sign or key in options:
                raise ValueError(
                    f"draft {text!r}: {field!r} is not an option; allowed are NAME=VALUE once each of {', '.join(OPTIONS)}"
                )
            options[key] = value
        try:
            kind, colon, count = name.partition(":")
            num_layers = int(count) if kind == TRUNCATED and colon else None
            bits = int(options["bits"]) if "bits" in options else None
            if not name or name == TRUNCATED:
                raise ValueError("it begins with demo, a folder, a hub id, ngram, or truncated:LAYERS")
            if bits is not None and bits not in BITS:
                raise ValueError(f"bits={bits} is not allowed: it must be {BITS[0]} to {BITS[-1]}")
            recipe = cls(
                text,
                name,
                num_layers,
                _parse_tree(options.get("tree", "auto")),
                int(options.get("tokens", num_tokens)),
                options.get("sampling", "auto"),
                bits,
            )
            if recipe.num_tokens < 1:
                raise ValueError(f"tokens={recipe.num_tokens} is not allowed: it must be at least 1")
            # the engine's own rules, and its words for them
            SpeculationOptions(max_draft_tokens=recipe.num_tokens, draft_tree=recipe.tree, draft_sampling=recipe.sampling)
        except ValueError as error:
            raise ValueError(f"draft {text!r} is not allowed: {error}") from error
        return recipe

    def make_drafter(self, engine: Engine, target: str) -> Drafter:
        """Load or cut the draft for an engine.

        Args:
            engine: that will draft with it.
            target: the engine's model, as it was given.

        Raises:
            ValueError: the draft cannot be used with this target.
        """
        context = replace(
            engine._draft_context(), max_draft_tokens=self.num_tokens, draft_tree=self.tree, draft_sampling=self.sampling
        )
        if self.num_layers is not None:
            model = model_of(engine.runner) if self.bits is None else _load_rounded(target, "target", self.bits, engine)
            return DraftModelDrafter(self.text, truncate(model, self.num_layers, engine.backend), context)
        drafter = create_drafter(self.model, context)
        if self.bits is None:
            return drafter
        if not isinstance(drafter, DraftModelDrafter):
            raise ValueError(f"draft {self.text!r}: bits={self.bits} needs a draft model, and {self.model!r} is none")
        return DraftModelDrafter(self.text, _load_rounded(self.model, "draft", self.bits, engine), context)


def truncate(model: Decoder, num_layers: int, backend: Backend) -> Decoder:
    """Return the first layers of a model with its embedding, final norm and head; the weights are shared.

    Args:
        model: ready to run.
        num_layers: 1 to one less than the model has.
        backend: of the model.

    Raises:
        ValueError: there are not as many layers.
    """
    config = model.config
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(f"{TRUNCATED}:{num_layers} is not allowed: the target has {config.num_layers} layers, so 1 to one less")
    shorter = replace(config, num_layers=num_layers, layer_windows=config.layer_windows[:num_layers])
    with init_empty_weights(include_buffers=False):
        draft = Decoder(shorter, dtype=model.dtype, backend=backend, max_positions=model.max_positions)
    draft.embedding, draft.final_norm, draft.lm_head = model.embedding, model.final_norm, model.lm_head
    draft.layers = nn.ModuleList(list(model.layers)[:num_layers])
    draft.prepare()
    return draft


@torch.no_grad()
def round_weights(model: Decoder, bits: int) -> None:
    """Round the unpacked weights of a model's linear layers as `rounded`, in place; a tied embedding stays as it is."""
    for name, weight in model.named_parameters():
        if is_linear_weight(name.rpartition(".")[2]):
            weight.copy_(rounded(weight, bits))


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round each row to integers of so many bits, symmetric around 0, and scale it back: [rows, columns], same dtype.

    The weights' half of the vector-wise scheme in Dettmers et al., "LLM.int8()", 2022.
    """
    largest = 2 ** (bits - 1) - 1
    values = weight.float()
    scale = values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / largest
    result: Tensor = ((values / scale).round() * scale).to(weight.dtype)
    return result


def _parse_tree(text: str) -> str | tuple[int, ...]:
    """A shape's name, or the parents of its nodes with slashes between them."""
    try:
        return tuple(int(parent) for parent in text.split("/"))
    except ValueError:
        return text


def _load_rounded(name: str, role: Literal["target", "draft"], bits: int, engine: Engine) -> Decoder:
    """Load a model once more, because packed weights cannot be rounded."""
    model = load_model(resolve_model(name, role), dtype=engine.dtype, backend=engine.backend, pack=False)
    round_weights(model, bits)
    model.prepare()
    return model
