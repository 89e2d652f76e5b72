"""Drafts as they are written on the command line, such as ``DIR,tree=dynamic,tokens=8``, and the drafters made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from titan.bench.loading import load_decoder
from titan.bench.step_times import model_of
from titan.core.checks import check_integer
from titan.core.options import SpeculationOptions
from titan.draft.base import DraftContext, Drafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import open_drafter
from titan.draft.vocabulary import VocabularyMap
from titan.engine import Engine
from titan.kernels.interfaces import Backend, Model
from titan.models.decoder import Decoder
from titan.models.loader import resolve_model

TRUNCATED = "truncated"
OPTIONS = ("tree", "tokens", "sampling", "bits")


class LoadedDraft(NamedTuple):
    """A draft model, whose weights drafters share."""

    model: Model
    vocabulary: VocabularyMap | None = None  # from its tokens to the target's, if they are others


Models = dict[tuple[str, int | None], LoadedDraft]
"""Draft models by name and bits."""


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """How to draft; tree, number of tokens and sampling are as `titan.LLM` takes them."""

    name: str  # for people
    model: str  # "demo", a folder, a hub id, "ngram" or another registered name, or "truncated:N"
    num_layers: int | None = None  # the draft is so many first layers of the target
    tree: str | tuple[int, ...] = "auto"
    num_tokens: int = 4
    sampling: str = "auto"
    bits: int | None = None  # the weights of linear layers are rounded to integers of so many bits and back

    @classmethod
    def parse(cls, text: str, num_tokens: int) -> DraftRecipe:
        """Read a recipe; ``num_tokens`` is what it does not say.

        Raises:
            ValueError: an option is unknown, comes twice or has a value that is not allowed.
        """
        model, *fields = text.split(",")
        options = dict(field.partition("=")[::2] for field in fields)
        tree = options.get("tree", "auto")
        kind, _, count = model.partition(":")
        try:
            if not model or len(options) < len(fields) or not options.keys() <= set(OPTIONS):
                raise ValueError(f"it must be a name, then options such as tokens=4, of {', '.join(OPTIONS)}, each at most once")
            recipe = cls(
                text,
                model,
                int(count) if kind == TRUNCATED else None,
                tuple(map(int, tree.split("/"))) if tree[-1:].isdigit() else tree,
                int(options.get("tokens", num_tokens)),
                options.get("sampling", "auto"),
                int(options["bits"]) if "bits" in options else None,
            )
            check_integer("tokens", recipe.num_tokens, 1)
            check_integer("bits", 8 if recipe.bits is None else recipe.bits, 2, 8)
            # the engine's own rules, and its words for them
            SpeculationOptions(max_draft_tokens=recipe.num_tokens, draft_tree=recipe.tree, draft_sampling=recipe.sampling)
        except ValueError as error:
            raise ValueError(f"draft {text!r} is not allowed: {error}") from error
        return recipe

    def make_drafter(self, engine: Engine, target: str, models: Models) -> Drafter:
        """Make the drafter.

        Args:
            engine: that will draft with it.
            target: the engine's model, as it was given.
            models: those there are, whose weights are shared; that of this recipe is added.

        Raises:
            ValueError: the draft cannot be used with this target.
        """
        shared = engine.draft_context()
        context = replace(shared, max_draft_tokens=self.num_tokens, draft_tree=self.tree, draft_sampling=self.sampling)
        key = (self.model, self.bits)
        if key not in models:
            found = self._load(engine, target, context)
            if isinstance(found, Drafter):
                return found
            models[key] = found
        return DraftModelDrafter(self.name, models[key].model, context, models[key].vocabulary)

    def _load(self, engine: Engine, target: str, context: DraftContext) -> LoadedDraft | Drafter:
        """The draft model; a drafter that has none."""
        if self.num_layers is not None:
            whole = model_of(engine.runner) if self.bits is None else _load_rounded(target, "target", self.bits, engine)
            return LoadedDraft(truncate(whole, self.num_layers, engine.backend))
        drafter = open_drafter(self.model, engine.config.model, context)()
        if isinstance(drafter, DraftModelDrafter):
            if self.bits is None:
                return LoadedDraft(drafter.model, drafter.vocabulary)
            check_same_tokens(drafter, f"bits={self.bits}")
            return LoadedDraft(_load_rounded(self.model, "draft", self.bits, engine))
        if self.bits is not None:
            raise ValueError(f"bits={self.bits} needs a draft model, and {self.model!r} is none")
        return drafter


def check_same_tokens(drafter: DraftModelDrafter, option: str) -> None:
    """Refuse an option for a draft with other tokens than the target's, whose weights are loaded in another order."""
    if drafter.vocabulary is not None:
        raise ValueError(f"{option} needs a draft with the target's tokens, and those of {drafter.name!r} are others")


def truncate(model: Decoder, num_layers: int, backend: Backend) -> Decoder:
    """Return the first layers of a prepared model with its embedding, final norm and head; the weights are shared.

    Raises:
        ValueError: the model has not so many and more.
    """
    config = model.config
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(f"{TRUNCATED}:{num_layers} is not allowed: the target has {config.num_layers} layers, so 1 to one less")
    shorter = replace(config, layers=config.layers[:num_layers], ropes=config.ropes[:num_layers])
    draft = Decoder(shorter, dtype=model.dtype, backend=backend, is_empty=True)
    draft.embedding, draft.final_norm, draft.lm_head = model.embedding, model.final_norm, model.lm_head
    draft.layers = nn.ModuleList(list(model.layers)[:num_layers])
    draft.prepare(weight_bits=model.weight_bits)
    return draft


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round each row to integers of so many bits, symmetric around 0, and scale it back: [rows, columns], same dtype.

    The weights' half of the vector-wise scheme in Dettmers et al., "LLM.int8()", 2022.
    """
    largest = 2 ** (bits - 1) - 1
    values = weight.float()
    scale = values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / largest
    result: Tensor = ((values / scale).round() * scale).to(weight.dtype)
    return result


def _load_rounded(name: str, role: Literal["target", "draft"], bits: int, engine: Engine) -> Decoder:
    """Load a model once more, because packed weights cannot be rounded, and round its linear layers; a tied embedding stays."""
    model = load_decoder(resolve_model(name, role), dtype=engine.dtype, backend=engine.backend, pack=False)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("_weight") or path == "lm_head":
                weight.copy_(rounded(weight, bits))
    model.prepare()
    model.weight_bits = bits
    return model
