"""Creation of drafters from a user's argument: ``None``, a registered name, a model's folder or hub id, or a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from titan.core.options import ModelOptions
from titan.draft.base import CachingDrafter, DraftContext, Drafter, NoDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.models.config import ModelConfig
from titan.models.loader import load_config, load_model, load_tokenizer, resolve_model

DrafterFactory = Callable[[DraftContext], Drafter]
DraftSpec = str | Drafter | None


def _make_ngram(context: DraftContext) -> Drafter:
    _check_deterministic(NgramDrafter.name, context)
    return NgramDrafter(context.max_draft_tokens)


_FACTORIES: dict[str, DrafterFactory] = {"ngram": _make_ngram}


def register(name: str, factory: DrafterFactory) -> None:
    """Register a drafter's factory under a name that can be given wherever a draft model can.

    Raises:
        ValueError: the name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"name={name!r} is taken; registered drafters: {', '.join(sorted(_FACTORIES))}")
    _FACTORIES[name] = factory


def check_draft(spec: DraftSpec, options: ModelOptions) -> None:
    """Check that a draft's config, if it is a model, can be used; nothing else of it is downloaded.

    Raises:
        ValueError: it is not a model that can be loaded.
    """
    if isinstance(spec, str) and spec not in _FACTORIES:
        with _naming_the_draft(spec):
            load_config(resolve_model(spec, "draft"), **_loading(options))


def create_drafter(spec: DraftSpec, context: DraftContext) -> Drafter:
    """Create the drafter that ``spec`` stands for.

    Raises:
        ValueError: the draft has another vocabulary than the target, is not a model that can be loaded, or has KV but accepts
            no cache.
    """
    if spec is None:
        return NoDrafter()
    if not isinstance(spec, str):
        if not isinstance(spec, Drafter):
            raise ValueError(f"draft_model={spec!r} is not a drafter: allowed are None, a name, a folder, a hub id, or a Drafter")
        if spec.kv is not None and not isinstance(spec, CachingDrafter):
            raise ValueError(f"draft_model={spec!r} has kv, but is not a CachingDrafter: allowed with attach() and lookahead()")
        _check_deterministic(spec.name, context)
        return spec
    factory = _FACTORIES.get(spec)
    if factory is not None:
        return factory(context)
    folder, options = resolve_model(spec, "draft"), context.model_options
    with _naming_the_draft(spec):
        config = load_config(folder, **_loading(options))
        trust = options.trust_remote_code
        tokenizer = load_tokenizer(folder, download_dir=options.download_dir, trust_remote_code=trust)
    _check_vocabulary(spec, config, tokenizer, context)
    with _naming_the_draft(spec):
        model = load_model(folder, dtype=context.dtype, backend=context.backend, **_loading(options))
    return DraftModelDrafter(spec, model, context)


def _loading(options: ModelOptions) -> dict[str, Any]:
    names = ("download_dir", "model_impl", "trust_remote_code")
    return {name: getattr(options, name) for name in names}


def _check_deterministic(name: str, context: DraftContext) -> None:
    """Refuse options that only a draft model can follow."""
    if context.draft_tree not in ("auto", "chain"):
        raise ValueError(
            f"draft_tree={context.draft_tree!r} needs a draft model: the drafter {name!r} shapes its own trees; allowed with it "
            f"are 'auto' and 'chain'"
        )
    if context.draft_sampling == "sampled":
        raise ValueError(
            f"draft_sampling='sampled' needs a draft model: the proposals of the drafter {name!r} are deterministic; allowed "
            f"with it are 'auto' and 'greedy'"
        )


@contextmanager
def _naming_the_draft(spec: str) -> Iterator[None]:
    """Add to the loader's errors which argument is meant, and what else it could have been."""
    try:
        yield
    except ValueError as error:
        names = ", ".join(map(repr, sorted(_FACTORIES)))
        raise ValueError(f"draft_model={spec!r} cannot be used; besides models, {names} are allowed: {error}") from error


def _check_vocabulary(spec: str, config: ModelConfig, tokenizer: Any | None, context: DraftContext) -> None:
    """Refuse a draft whose token ids mean something else; differently padded sizes are allowed if the tokenizers agree."""
    if tokenizer is not None and context.tokenizer is not None:
        if tokenizer.get_vocab() == context.tokenizer.get_vocab():
            return
        detail = f"its tokenizer has {len(tokenizer)} tokens, the target's {len(context.tokenizer)}, and they differ"
    elif config.vocab_size == context.target_vocab_size:
        return
    else:
        detail = f"it has {config.vocab_size} tokens, the target {context.target_vocab_size}"
    raise ValueError(f"draft_model={spec!r} has another vocabulary: {detail}; a draft must share the target's vocabulary")
