"""Names of vLLM's for options of `titan.LLM`: one table says what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from titan.core.checks import check_choice, check_integer, check_path, shown, unknown_names
from titan.core.limits import MAX_NODES
from titan.core.options import EngineConfig, EngineOptions
from titan.draft.ngram import NgramDrafter
from titan.draft.registry import DraftSpec


class LLMOptions(EngineOptions, total=False):
    """The options of an engine under Titan's names and vLLM's, for type checkers."""

    max_num_seqs: int
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    tensor_parallel_size: Literal[1]
    pipeline_parallel_size: Literal[1]
    data_parallel_size: Literal[1]
    enable_chunked_prefill: Literal[True, None]
    long_prefill_token_threshold: int
    speculative_config: Mapping[str, Any] | None
    enforce_eager: Literal[False]
    compilation_config: None
    quantization: None
    load_format: Literal["auto", "safetensors"]
    cpu_offload_gb: Literal[0]
    enable_lora: Literal[False]
    tokenizer_mode: Literal["auto", "hf"]
    tokenizer_revision: None
    skip_tokenizer_init: Literal[False]
    hf_token: None
    limit_mm_per_prompt: None
    structured_outputs_config: None
    disable_log_stats: Literal[True]


Translation = Callable[[str, Any], dict[str, Any]]
"""Returns what an option becomes: values by Titan's names, "draft_model" among them."""


def _renamed(ours: str) -> Translation:
    return lambda _, value: {ours: value}


def _only(*allowed: Any, since: str) -> Translation:
    """An option of which Titan does what these values ask for, and nothing else; ``since`` says why."""

    def check(name: str, value: Any) -> dict[str, Any]:
        try:
            check_choice(name, value, allowed)
        except ValueError as error:
            raise ValueError(f"{error}, since {since}") from None
        return {}

    return check


def _speculation(name: str, config: Any) -> dict[str, Any]:
    """Translate vLLM's dict about speculation: with a draft model, or with "ngram", prompt lookup."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{name}={shown(config)} is not allowed: it must be a dict such as {{'model': ..., 'num_speculative_tokens': 4}}"
        )
    if unknown := config.keys() - SPECULATION_KEYS:
        raise ValueError(f"{name}: {unknown_names(sorted(map(str, unknown)), SPECULATION_KEYS)}")
    model, method = check_path(f"{name}['model']", config.get("model")), config.get("method")
    if method is None:
        method = "ngram" if model in PROMPT_LOOKUP else "draft_model"
    options: dict[str, Any] = {}
    if (num_tokens := config.get("num_speculative_tokens")) is not None:
        options["max_draft_tokens"] = check_integer(f"{name}['num_speculative_tokens']", num_tokens, 1, MAX_NODES)
    given = [key for key in ("prompt_lookup_min", "prompt_lookup_max") if config.get(key) is not None]
    check_choice(f"{name}['method']", method, ("draft_model", "ngram"))
    if model is not None and (model in PROMPT_LOOKUP) != (method == "ngram"):
        allowed = "None or 'ngram', as there is no model" if method == "ngram" else "a folder or hub id"
        raise ValueError(f"{name}['model']={model!r} contradicts method={method!r}: allowed with it is {allowed}")
    lengths = [check_integer(f"{name}[{key!r}]", config[key], 1) for key in given]
    match method:
        case "ngram" if lengths:  # vLLM takes one of them for both
            if lengths[0] > lengths[-1]:
                raise ValueError(
                    f"{name}['prompt_lookup_min']={lengths[0]} is more than {name}['prompt_lookup_max']={lengths[-1]}: "
                    f"prompt_lookup_min must be at most prompt_lookup_max"
                )
            return options | {"draft_model": NgramDrafter(MAX_NODES, min_ngram=lengths[0], max_ngram=lengths[-1])}
        case "ngram":
            return options | {"draft_model": "ngram"}
    if model is None or lengths:
        keys = "prompt_lookup_min and prompt_lookup_max are for 'ngram'" if lengths else "'model' is missing"
        raise ValueError(f"{name}={shown(dict(config))} is not allowed: {keys}")
    return options | {"draft_model": model}


PROMPT_LOOKUP = ("ngram", "[ngram]")
"""Names that vLLM gives the model of prompt lookup."""
ONE_DEVICE = "an engine runs on one device"
SPECULATION_KEYS = ("model", "method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")

TRANSLATIONS: Mapping[str, Translation] = {
    "max_num_seqs": _renamed("max_batch_size"),
    "gpu_memory_utilization": _renamed("memory_utilization"),
    "kv_cache_memory_bytes": _renamed("kv_cache_memory"),
    "tensor_parallel_size": _only(1, since=ONE_DEVICE),
    "pipeline_parallel_size": _only(1, since=ONE_DEVICE),
    "data_parallel_size": _only(1, since=ONE_DEVICE),
    "enable_chunked_prefill": _only(True, None, since="prompts are always computed in chunks, beside the decodes of a step"),
    "long_prefill_token_threshold": lambda name, value: {"prefill_chunk_size": check_integer(name, value, 0) or None},
    "speculative_config": _speculation,
    "enforce_eager": _only(False, since="CUDA graphs are always used; warm_up=False captures them when they are first needed"),
    "compilation_config": _only(None, since="CUDA graphs are always used; warm_up=False captures them when they are first needed"),
    "quantization": _only(
        None, since="the config of a checkpoint says how it is quantised, and others are not quantised when they are loaded"
    ),
    "load_format": _only("auto", "safetensors", since="weights are read from safetensors"),
    "cpu_offload_gb": _only(0, since="all weights are in the device's memory"),
    "enable_lora": _only(False, since="there are no LoRA adapters"),
    "tokenizer_mode": _only("auto", "hf", since="the tokenizer is the fast one of transformers"),
    "tokenizer_revision": _only(None, since="tokenizer='ID@REVISION' names it"),
    "skip_tokenizer_init": _only(False, since="prompts may be token ids, and with detokenize=False outputs have no text"),
    "hf_token": _only(None, since="the token is that of `hf auth login`, or of HF_TOKEN"),
    "limit_mm_per_prompt": _only(None, since="prompts are text"),
    "structured_outputs_config": _only(
        None, since="there are no structured outputs; logits_processors of SamplingParams change logits"
    ),
    "disable_log_stats": _only(True, since="nothing is logged, and outputs have their metrics in any case, as has LLM.metrics()"),
}

OWN_ARGUMENTS = ("model", "draft_model", "tokenizer")
"""Arguments of `titan.LLM` beside its options."""


class Translated(NamedTuple):
    """What the options of an LLM mean."""

    config: EngineConfig
    draft_model: DraftSpec


def translate(options: Mapping[str, Any], draft_model: DraftSpec) -> Translated:
    """Translate options under Titan's names and vLLM's.

    Args:
        options: as given.
        draft_model: as given.

    Raises:
        TypeError: there is no option of a name.
        ValueError: a value is not allowed, or an option is given twice, under two names.
    """
    names = (*EngineOptions.__annotations__, *TRANSLATIONS)
    if unknown := [name for name in options if name not in names]:
        raise TypeError(unknown_names(unknown, (*OWN_ARGUMENTS, *names)))
    ours: dict[str, Any] = {} if draft_model is None else {"draft_model": draft_model}
    sources: dict[str, str] = {}  # by Titan's name, where the user gave another
    ours |= {name: value for name, value in options.items() if name not in TRANSLATIONS}
    for name in options.keys() & TRANSLATIONS.keys():
        for own, value in TRANSLATIONS[name](name, options[name]).items():
            if own in ours:
                raise ValueError(f"{name} and {own} are the same option: give one of them")
            ours[own], sources[own] = value, name
    draft_model = ours.pop("draft_model", None)
    try:
        return Translated(EngineConfig.of(**ours), draft_model)
    except ValueError as error:
        given = ", ".join(f"{own} was given as {name}" for own, name in sources.items() if own in str(error))
        raise ValueError(f"{error} ({given})" if given else str(error)) from error
