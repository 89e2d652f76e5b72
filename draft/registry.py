"""Creates drafters from a user's argument: ``None``, a registered name, a model's folder or hub id, or a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from operator import attrgetter
from typing import Any

import torch

from titan.core.checks import check_integer, missing_members, shown
from titan.core.dtypes import dtype_name
from titan.draft.base import CachingDrafter, DraftContext, Drafter, NoDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.vocabulary import VocabularyMap
from titan.kernels.interfaces import Backend
from titan.models.config import DecoderConfig, ModelConfig
from titan.models.files import DEMO, ModelFiles, resolve_model
from titan.models.loader import load_model, open_model, run_dtype
from titan.models.tokenizer import load_tokenizer

DrafterFactory = Callable[[DraftContext], Drafter]
DraftSpec = str | Drafter | None

MIN_SHARE = 0.05
"""Least share of the target's tokens that a draft model must be able to propose.

Of the sizes in use, a vocabulary of 32,000 can have at most 12.5 % of one of 256,000, with the frequent words among them; the 256
bytes, of which text in a larger vocabulary hardly consists, are 0.8 % of the former.
"""


def _make_ngram(context: DraftContext) -> Drafter:
    _check_deterministic(NgramDrafter.name, context)
    return NgramDrafter(context.max_draft_tokens)


_FACTORIES: dict[str, DrafterFactory] = {NgramDrafter.name: _make_ngram}
OWN_NAMES = (DEMO, *_FACTORIES)
"""Names that mean the same to everybody."""


def register(name: str, factory: DrafterFactory) -> None:
    """Make a name stand for what a factory returns, wherever a draft model is given; a later factory replaces an earlier one.

    Raises:
        ValueError: the name is one of Titan's own, or the factory cannot be called with a `DraftContext`.
    """
    try:
        with suppress(ValueError):  # some callables have no signature
            signature(factory).bind(None)
    except TypeError as error:
        raise ValueError(
            f"factory={shown(factory)} is not allowed: it must be a function of a DraftContext, such as lambda context: MyDrafter()"
        ) from error
    if name in OWN_NAMES:
        raise ValueError(f"name={name!r} is taken, as each of these is: {', '.join(OWN_NAMES)}")
    _FACTORIES[name] = factory


def is_registered(name: str) -> bool:
    """Return whether a name stands for a factory; any other name is a model's."""
    return name in _FACTORIES


def is_made_when_opened(spec: DraftSpec) -> bool:
    """Return whether `open_drafter` calls a factory that `register` was given, which may load a model."""
    return isinstance(spec, str) and is_registered(spec) and spec not in OWN_NAMES


def open_drafter(spec: DraftSpec, context: DraftContext) -> Callable[[], Drafter]:
    """Check what ``spec`` stands for, and return a function that creates the drafter.

    Of a draft model, only config and tokenizer are read here; the function loads the weights, and raises a `ValueError` if they do
    not fit.

    Raises:
        ValueError: it is neither a drafter nor a model that can be run, it has KV but lacks members of `CachingDrafter`, it shares
            too little of the target's vocabulary, or it cannot do what the options ask for.
    """
    if spec is None:
        return NoDrafter
    if isinstance(spec, str) and not is_registered(spec):
        return open_draft_model(spec, context)
    drafter = _FACTORIES[spec](context) if isinstance(spec, str) else spec
    _check_drafter(drafter, spec)
    if isinstance(drafter, DraftModelDrafter):
        _check_made_for(drafter, context)
    elif drafter is spec:
        _check_deterministic(drafter.name, context, besides="; a factory that register() is given may take it")
    check_integer(f"{drafter.name!r}.max_draft_tokens", drafter.max_draft_tokens, 1)
    return lambda: drafter


def open_draft_model(
    spec: str, context: DraftContext, drafter_class: type[DraftModelDrafter] = DraftModelDrafter
) -> Callable[[], DraftModelDrafter]:
    """Check a draft model, and return a function that loads it as the engine's options say, with a map between vocabularies.

    Args:
        spec: "demo", a model's folder or hub id, or ``ID@REVISION``; also the drafter's name.
        context: of the engine.
        drafter_class: drafts with the model; it is called with the arguments of `DraftModelDrafter`.

    Raises:
        ValueError: the model cannot be run, or shares too little of the target's vocabulary; the function raises it if the
            weights do not fit.
    """
    options, trust = context.model_options, context.model_options.trust_remote_code
    with _naming_the_draft(spec):
        files = ModelFiles(resolve_model(spec, "draft"), download_dir=options.download_dir)
        checkpoint = open_model(files, options.model_impl, trust_remote_code=trust)
        dtype = run_dtype(context.dtype, checkpoint, context.backend)
        tokenizer = load_tokenizer(files, trust_remote_code=trust)
    weight_bits = choose_weight_bits(options.draft_weight_bits, checkpoint.config, dtype, context.backend)
    vocabulary = _map_vocabulary(spec, checkpoint.config, tokenizer, context)

    def load() -> DraftModelDrafter:
        order = None if vocabulary is None else vocabulary.order
        with _naming_the_draft(spec):
            model = load_model(
                checkpoint,
                dtype=dtype,
                backend=context.backend,
                order=order,
                weight_bits=weight_bits,
                max_positions=context.max_model_len,
            )
        is_same = vocabulary is None and None not in (tokenizer, context.tokenizer)
        return drafter_class(spec, model, context, vocabulary, is_same_vocabulary=is_same)

    return load


def _check_drafter(drafter: Drafter, spec: object) -> None:
    """Refuse an object that lacks members of a drafter; ``spec`` is the drafter itself, or the name of its factory."""
    named = f"draft_model={spec!r}" if drafter is spec else f"draft_model={spec!r}, whose factory returned {drafter!r},"
    if isinstance(drafter, type):  # it has the methods of its instances
        raise ValueError(f"{named} is not a drafter: allowed is an instance, not the class")
    if lacking := ", ".join(missing_members(drafter, Drafter)):
        raise ValueError(
            f"{named} is not a drafter: allowed are None, a name, a folder, a hub id, or a Drafter, of which it lacks {lacking}"
        )
    if drafter.kv is not None and (lacking := ", ".join(missing_members(drafter, CachingDrafter))):
        raise ValueError(f"{named} has kv: allowed is None, or a CachingDrafter, of which it lacks {lacking}")


def _check_made_for(drafter: DraftModelDrafter, context: DraftContext) -> None:
    """Refuse a draft model that was made for the vocabulary, the options or the back end of another engine."""
    of_engine = attrgetter("backend", "tokenizer", "target_vocab_size", "max_num_batched_tokens")
    if of_engine(drafter.context) != of_engine(context):
        raise ValueError(
            f"draft_model={drafter!r} ({drafter.name}) was made for another LLM, with its vocabulary and options: allowed is "
            f"a folder or hub id, or one that was made with the draft_context() of this engine"
        )


def choose_weight_bits(bits: int | str | None, config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int | None:
    """Return the number of bits to which the matrices of a draft model are rounded; ``None`` = they are not rounded.

    Args:
        bits: `titan.core.options.ModelOptions.draft_weight_bits`; "auto" = 8 where the kernels read them faster.
        config: of the draft model.
        dtype: of its activations.
        backend: runs it.

    Raises:
        ValueError: ``bits`` is 8, and no kernel would read such weights faster.
    """
    allowed = "allowed are 'auto', None, and 8 on a GPU in bfloat16, or on a CPU with AVX2 or AVX-512 in float32 and bfloat16"
    if bits is None:
        return None
    if not isinstance(config, DecoderConfig):
        reason = (
            f"for {config.architecture} in transformers' layers: allowed are 'auto', None, and 8 for a model of Titan's own decoder"
        )
    elif not (ops := backend.layer_ops(dtype, config.traits)).packs_8_bits:
        reason = f"in {dtype_name(dtype)} by these kernels ({ops.name}): {allowed}"
    else:
        return 8
    if bits == "auto":
        return None
    raise ValueError(f"draft_weight_bits={bits} is not supported {reason}")


def _check_deterministic(name: str, context: DraftContext, *, besides: str = "") -> None:
    """Refuse options that only a draft model can follow; ``besides`` says what else there is."""
    if context.draft_tree not in ("auto", "chain"):
        raise ValueError(
            f"draft_tree={context.draft_tree!r} needs a draft model: the drafter {name!r} shapes its own trees; allowed with it "
            f"are 'auto' and 'chain'{besides}"
        )
    if context.draft_sampling == "sampled":
        raise ValueError(
            f"draft_sampling='sampled' needs a draft model: the drafter {name!r} decides itself how it proposes; allowed with it "
            f"are 'auto' and 'greedy'{besides}"
        )


@contextmanager
def _naming_the_draft(spec: str) -> Iterator[None]:
    """Name the argument in the loader's errors, and what else is allowed."""
    try:
        yield
    except ValueError as error:
        names = ", ".join(map(repr, sorted(_FACTORIES)))
        raise ValueError(
            f"draft_model={spec!r} cannot be used; allowed are causal language models, but no heads on the target's hidden states "
            f"such as EAGLE's, Medusa's or MTP; {names}; and None for no draft: {error}"
        ) from error


def _map_vocabulary(spec: str, config: ModelConfig, tokenizer: Any | None, context: DraftContext) -> VocabularyMap | None:
    """Return the map between the ids of draft and target; ``None`` if these are the same, apart from padding.

    Raises:
        ValueError: the draft shares less than `MIN_SHARE` of the target's tokens, or sizes differ and a tokenizer is missing.
    """
    if tokenizer is None or context.tokenizer is None:
        if config.vocab_size == context.target_vocab_size:
            return None
        missing = " and ".join(name for name, each in (("the draft", tokenizer), ("the target", context.tokenizer)) if each is None)
        raise ValueError(
            f"draft_model={spec!r} has another vocabulary: it has {config.vocab_size} tokens, the target "
            f"{context.target_vocab_size}; allowed if both have tokenizers, by which tokens are matched, but {missing} has none"
        )
    if tokenizer.get_vocab() == context.tokenizer.get_vocab():
        return None
    vocabulary = VocabularyMap.of(
        context.tokenizer, tokenizer, context.target_vocab_size, config.vocab_size, context.backend.device
    )
    if vocabulary.share < MIN_SHARE:
        draft, target = (f"{each.name_or_path}, {len(each)} tokens" for each in (tokenizer, context.tokenizer))
        raise ValueError(
            f"draft_model={spec!r} has another vocabulary, with {vocabulary.num_shared} of the target's tokens, "
            f"{vocabulary.share:.1%}: allowed is at least {MIN_SHARE:.0%} (tokenizers: of the draft "
            f"{draft}, of the target {target})"
        )
    return vocabulary
