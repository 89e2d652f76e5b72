"""Drafts as they are written on the command line, such as ``DIR,tree=dynamic,tokens=8``, and the drafters made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from titan.bench.step_times import model_of
from titan.core.checks import check_integer
from titan.core.options import SpeculationOptions, draft_tree_of
from titan.draft.base import Drafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import is_registered, open_draft_model, open_drafter
from titan.draft.vocabulary import VocabularyMap
from titan.engine import Engine
from titan.kernels.interfaces import Backend, Model
from titan.models.decoder import Decoder

TRUNCATED = "truncated"
OPTIONS = ("tree", "tokens", "sampling")


class LoadedDraft(NamedTuple):
    """A draft model, whose weights drafters share."""

    model: Model
    vocabulary: VocabularyMap | None = None  # from its tokens to the target's, if they are others


Models = dict[str, LoadedDraft]
"""Draft models by name."""


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """How to draft; tree, number of tokens and sampling are as `titan.LLM` takes them."""

    name: str  # for people
    model: str  # "demo", a folder, a hub id, "ngram" or another registered name, or "truncated:N"
    num_layers: int | None = None  # the draft is so many first layers of the target
    tree: str | Sequence[int] = "auto"
    num_tokens: int = 4
    sampling: str = "auto"

    @classmethod
    def parse(cls, text: str, num_tokens: int) -> DraftRecipe:
        """Read a recipe; ``num_tokens`` is what it does not say.

        Raises:
            ValueError: an option is unknown, comes twice or has a value that is not allowed.
        """
        model, *fields = re.split(r",(?=[a-z]+=)", text)
        options = dict(field.partition("=")[::2] for field in fields)
        kind, _, count = model.partition(":")
        try:
            if not model or "," in model or len(options) < len(fields) or not options.keys() <= set(OPTIONS):
                raise ValueError(f"it must be a name, then options such as tokens=4, of {', '.join(OPTIONS)}, each at most once")
            recipe = cls(
                text,
                model,
                _integer(TRUNCATED, count) if kind == TRUNCATED else None,
                draft_tree_of(options.get("tree", "auto")),
                _integer("tokens", options.get("tokens", str(num_tokens))),
                options.get("sampling", "auto"),
            )
            # the engine's own rules, and its words for them
            SpeculationOptions(max_draft_tokens=recipe.num_tokens, draft_tree=recipe.tree, draft_sampling=recipe.sampling)
        except ValueError as error:
            raise ValueError(f"draft {text!r} is not allowed: {error}") from error
        return recipe

    def make_drafter(self, engine: Engine, models: Models) -> Drafter:
        """Make the drafter.

        Args:
            engine: that will draft with it.
            models: those there are, whose weights are shared; that of this recipe is added.

        Raises:
            ValueError: the draft cannot be used with this target.
        """
        shared = engine.draft_context()
        context = replace(shared, max_draft_tokens=self.num_tokens, draft_tree=self.tree, draft_sampling=self.sampling)
        if is_registered(self.model):
            return open_drafter(self.model, context)()
        if self.model not in models:
            if self.num_layers is not None:
                models[self.model] = LoadedDraft(truncate(model_of(engine.runner), self.num_layers, engine.backend))
            else:
                drafter = open_draft_model(self.model, context)()
                models[self.model] = LoadedDraft(drafter.model, drafter.vocabulary)
        return DraftModelDrafter(self.name, models[self.model].model, context, models[self.model].vocabulary)


def truncate(model: Decoder, num_layers: int, backend: Backend) -> Decoder:
    """Return the first layers of a prepared model with its embedding, final norm and head; the weights are shared.

    Raises:
        ValueError: the model has not so many and more.
    """
    config = model.config
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(f"{TRUNCATED}:{num_layers} is not allowed: the target has {config.num_layers} layers, so 1 to one less")
    shorter = replace(config, layers=config.layers[:num_layers], ropes=config.ropes[:num_layers])
    draft = Decoder(shorter, dtype=model.dtype, backend=backend)
    draft.embedding, draft.final_norm, draft.lm_head = model.embedding, model.final_norm, model.lm_head
    draft.layers = nn.ModuleList(list(model.layers)[:num_layers])
    draft.prepare(weight_bits=model.weight_bits)
    return draft


def _integer(name: str, text: str) -> int:
    """Read a number of at least 1."""
    return check_integer(name, int(text) if text.isdecimal() else text, 1)
