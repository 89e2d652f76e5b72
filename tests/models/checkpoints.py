"""Tiny checkpoints of `families`, what transformers generates with them, and drafts that agree with most of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, SIZES, VOCAB_SIZE, Family
from text_tools import make_tokenizer
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging

logging.disable_progress_bar()

MAX_TOKENS = 32
PROMPT_LENS = (1, 48, 7, 23)  # longer than every window and chunk, and shorter
MIN_MARGIN = 1e-4
"""Between the logits of the two most likely tokens: below it, rounding could decide."""
MIN_DISTINCT = 8
"""Tokens in all continuations of a model together."""
NOISES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Of the weights of a draft, relative to them; the largest that leaves it `MIN_AGREEMENT`."""
MIN_AGREEMENT = 0.7
STD, SMALL_STD = 0.2, 0.05
SMALL = re.compile("embed|wte|wpe|^transformer.w.weight|bias$")
"""Names of weights with the smaller standard deviation."""


def make_prompts() -> list[list[int]]:
    """Make the prompts of all families: random tokens, none of them special, of `PROMPT_LENS`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENS]


def make_config(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Make a config of ``overrides`` and of those of `SIZES` that it has fields for; configs within it likewise."""
    known, own_name = {field.name for field in fields(config_class)}, config_class.attribute_map  # type: ignore[arg-type]
    options = {own_name.get(name, name): size for name, size in SIZES.items() if own_name.get(name, name) in known}
    for name, option in overrides.items():
        part = config_class.sub_configs.get(name)
        if part is None or option is None:
            options[name] = deepcopy(option)
        else:
            part = CONFIG_MAPPING[option["model_type"]] if part is AutoConfig else part
            options[name] = make_config(part, {key: each for key, each in option.items() if key != "model_type"})
    return config_class(**options)


class Checkpoint:
    """A random model of a family, in a folder; a draft, in another; and what the model generates."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family = family
        self.folder = folder

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model in float32, whose `generate` does not stop at an end of sequence."""
        torch.manual_seed(self.family.seed)
        config = make_config(CONFIG_MAPPING[self.family.model_type], self.family.config)
        has_images = self.family.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        auto_model: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        model: PreTrainedModel = auto_model.from_config(config, dtype=torch.float32)
        randomise(model)
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model.eval()

    @cached_property
    def draft(self) -> PreTrainedModel:
        """The model with noise in its weights.

        Raises:
            ValueError: no noise of `NOISES` leaves it `MIN_AGREEMENT`.
        """
        for noise in NOISES:
            draft = deepcopy(self.model)
            generator = torch.Generator().manual_seed(99)
            for _, weight in weights_of(draft):
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
            if self.agreement(draft) >= MIN_AGREEMENT:
                return draft
        raise ValueError(f"no draft agrees with {MIN_AGREEMENT:.0%} of the tokens: give {self.family.name} another seed")

    @cached_property
    def path(self) -> str:
        """The model's folder."""
        return self._save(self.model, "target")

    @cached_property
    def draft_path(self) -> str:
        """The draft's folder."""
        return self._save(self.draft, "draft")

    @cached_property
    def continuations(self) -> list[list[int]]:
        """What transformers' `generate` writes at temperature 0 after each of `make_prompts`, alone."""
        return [self._generate(prompt) for prompt in make_prompts()]

    @cached_property
    def logprobs(self) -> list[Tensor]:
        """Log-probabilities of the continuations' tokens: float32 [MAX_TOKENS] each."""
        logprobs = [logits.log_softmax(-1) for logits in self._logits(self.model)]
        return [
            each.gather(1, torch.tensor(tokens)[:, None])[:, 0] for each, tokens in zip(logprobs, self.continuations, strict=True)
        ]

    def agreement(self, draft: PreTrainedModel) -> float:
        """Share of the continuations' tokens that are the most likely ones of ``draft`` as well."""
        tops = torch.cat([logits.argmax(-1) for logits in self._logits(draft)])
        return (tops == torch.tensor(self.continuations).flatten()).float().mean().item()

    def margin(self) -> float:
        """Least difference between the logits of the two most likely tokens, over the continuations."""
        top2 = torch.cat([logits.topk(2).values for logits in self._logits(self.model)])
        return (top2[:, 0] - top2[:, 1]).min().item()

    def check(self) -> None:
        """Assert that the continuations are a test of anything: no near-tie, and not the same few tokens."""
        distinct = len(set().union(*self.continuations))
        assert distinct >= MIN_DISTINCT, f"{distinct} distinct tokens: give {self.family.name} another seed"
        assert self.margin() > MIN_MARGIN, f"a near-tie: give {self.family.name} another seed"

    @torch.no_grad()
    def _generate(self, prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        written = self.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False
        )
        return written[0, len(prompt) :].tolist()  # type: ignore[no-any-return, union-attr, call-overload]

    @torch.no_grad()
    def _logits(self, model: PreTrainedModel) -> Iterator[Tensor]:
        """Logits of ``model`` for the continuation of each prompt in turn: float32 [MAX_TOKENS, vocab_size]."""
        for prompt, continuation in zip(make_prompts(), self.continuations, strict=True):
            yield model(torch.tensor([prompt + continuation]), use_cache=False).logits[0, len(prompt) - 1 : -1]

    def _save(self, model: PreTrainedModel, role: str) -> str:
        folder = self.folder / self.family.name.replace(":", "-") / role
        model.save_pretrained(folder)
        make_tokenizer(VOCAB_SIZE).save_pretrained(folder)
        return str(folder)


class Checkpoints:
    """The checkpoints of all families, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoints: dict[str, Checkpoint] = {}

    def __getitem__(self, name: str) -> Checkpoint:
        if name not in self._checkpoints:
            self._checkpoints[name] = Checkpoint(FAMILIES[name], self.folder)
        return self._checkpoints[name]


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are saved, of floating-point type; tied ones once."""
    seen = set()
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and weight.data_ptr() not in seen:
            seen.add(weight.data_ptr())
            yield name, weight


def randomise(model: PreTrainedModel) -> None:
    """Make matrices random, and move all else off what it was initialised with: norms, biases, sinks, corrections, scales.

    Embeddings and biases are small, and matrices are centred, so that activations of a mean other than 0 add up to nothing; else
    some models would repeat one token.
    """
    for name, weight in weights_of(model):
        std = SMALL_STD if SMALL.search(name) else STD
        if weight.ndim < 2 or "norm" in name:
            weight.add_(torch.randn_like(weight), alpha=std)
        else:
            weight.normal_(0.0, std)
            for dim in (-1, -2):
                if weight.shape[dim] > 1:
                    weight.sub_(weight.mean(dim, keepdim=True))
