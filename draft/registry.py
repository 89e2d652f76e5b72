"""Creation of drafters from a user's argument: ``None``, a registered name, a model's folder or hub id, or a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from titan.core.checks import check_integer
from titan.core.dtypes import dtype_name
from titan.draft.base import CachingDrafter, DraftContext, Drafter, NoDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.vocabulary import VocabularyMap
from titan.kernels.interfaces import Backend
from titan.models.config import DecoderConfig, ModelConfig
from titan.models.files import ModelFiles
from titan.models.loader import DEMO, load_model, load_tokenizer, open_model, resolve_model, run_dtype

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


_MEMBERS = [name for name in vars(Drafter) | Drafter.__annotations__ if not name.startswith("_")]
"""Of a `Drafter`; from Python 3.12 on, `isinstance` does not find those that `__getattr__` provides."""

_FACTORIES: dict[str, DrafterFactory] = {NgramDrafter.name: _make_ngram}
OWN_NAMES = (DEMO, *_FACTORIES)
"""Names that mean the same to everybody."""


def register(name: str, factory: DrafterFactory) -> None:
    """Register a drafter's factory under a name that can be given wherever a draft model can; the last one of a name counts.

    Raises:
        ValueError: the name is one of Titan's own.
    """
    if name in OWN_NAMES:
        raise ValueError(f"name={name!r} is taken, as each of these is: {', '.join(OWN_NAMES)}")
    _FACTORIES[name] = factory


def is_registered(name: str) -> bool:
    """Return whether a name stands for a factory, which decides on all of its drafter, and not for a model."""
    return name in _FACTORIES


def open_drafter(spec: DraftSpec, context: DraftContext) -> Callable[[], Drafter]:
    """Return what creates the drafter that ``spec`` stands for; of a draft model, config and tokenizer are read so far, no weights.

    What is returned raises a `ValueError` if a model's weights do not fit.

    Raises:
        ValueError: it is neither a drafter nor a model that can be run, has KV but accepts no cache, shares too little of the
            target's vocabulary, or options ask for what it cannot do.
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
        _check_deterministic(drafter.name, context)
    check_integer(f"{drafter.name!r}.max_draft_tokens", drafter.max_draft_tokens, 0)
    return lambda: drafter


def open_draft_model(
    spec: str, context: DraftContext, drafter_class: type[DraftModelDrafter] = DraftModelDrafter
) -> Callable[[], DraftModelDrafter]:
    """Return what loads a draft model as the engine's options say, in the order of the tokens that it shares with the target.

    Args:
        spec: "demo", a model's folder or hub id; also the drafter's name.
        context: of the engine.
        drafter_class: what drafts with the model, made with the arguments of `DraftModelDrafter`.

    Raises:
        ValueError: the model cannot be run, or shares too little of the target's vocabulary; what is returned raises it if its
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
        drafter = drafter_class(spec, model, context, vocabulary)
        if vocabulary is None and None not in (tokenizer, context.tokenizer):  # they were compared
            drafter.shared_vocabulary = 1.0
        return drafter

    return load


def _check_drafter(drafter: Drafter, spec: object) -> None:
    """Refuse what is no drafter, or could not use its KV; ``spec`` is the drafter itself, or the name of what made it."""
    named = f"draft_model={spec!r}" if drafter is spec else f"draft_model={spec!r}, whose factory returned {drafter!r},"
    if isinstance(drafter, type):  # which has the methods of its instances
        raise ValueError(f"{named} is not a drafter: allowed is an instance, not the class")
    if lacking := ", ".join(name for name in _MEMBERS if not hasattr(drafter, name)):
        raise ValueError(
            f"{named} is not a drafter: allowed are None, a name, a folder, a hub id, or a Drafter, of which it lacks {lacking}"
        )
    if drafter.kv is not None and not isinstance(drafter, CachingDrafter):
        raise ValueError(f"{named} has kv, but is not a CachingDrafter: allowed with attach() and lookahead()")


def _check_made_for(drafter: DraftModelDrafter, context: DraftContext) -> None:
    """Refuse a draft model that goes by the vocabulary, the options and the threads or the device of another engine."""
    of_engine = attrgetter("backend", "tokenizer", "target_vocab_size", "max_num_batched_tokens")
    if of_engine(drafter.context) != of_engine(context):
        raise ValueError(
            f"draft_model={drafter!r} ({drafter.name}) was made for another LLM, whose vocabulary and options it goes by: allowed "
            f"is a folder or hub id, or one that was made with the draft_context() of this engine"
        )


def choose_weight_bits(bits: int | str | None, config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int | None:
    """Return to how many bits the matrices of a draft model are rounded; ``None`` = they stay as they are.

    Args:
        bits: `titan.core.options.ModelOptions.draft_weight_bits`; "auto" = 8 where the kernels read them in less time.
        config: of the draft model.
        dtype: that it runs in.
        backend: that runs it.

    Raises:
        ValueError: 8 bits are asked for by number, and nothing would read them in less time.
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


def _check_deterministic(name: str, context: DraftContext) -> None:
    """Refuse options that only a draft model can follow."""
    if context.draft_tree not in ("auto", "chain"):
        raise ValueError(
            f"draft_tree={context.draft_tree!r} needs a draft model: the drafter {name!r} shapes its own trees; allowed with it "
            f"are 'auto' and 'chain'"
        )
    if context.draft_sampling == "sampled":
        raise ValueError(
            f"draft_sampling='sampled' needs a draft model: the drafter {name!r} decides itself how it proposes; allowed with it "
            f"are 'auto' and 'greedy'"
        )


@contextmanager
def _naming_the_draft(spec: str) -> Iterator[None]:
    """Add to the loader's errors which argument is meant, and what else it could have been."""
    try:
        yield
    except ValueError as error:
        names = ", ".join(map(repr, sorted(_FACTORIES)))
        raise ValueError(
            f"draft_model={spec!r} cannot be used; besides models, {names}, and None for no draft are allowed: {error}"
        ) from error


def _map_vocabulary(spec: str, config: ModelConfig, tokenizer: Any | None, context: DraftContext) -> VocabularyMap | None:
    """Return the map between the ids of draft and target; ``None`` if they mean the same, whatever the sizes are padded to.

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
