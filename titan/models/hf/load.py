"""Loading of models of transformers: what their config says, and their weights."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan.core.attention import Chunk, LayerSpec
from titan.kernels.interfaces import Backend
from titan.models.config import ModelConfig, as_token_ids
from titan.models.files import CONFIG_FILES, ModelFiles, some
from titan.models.hf import interface, probe
from titan.models.hf.composite import composite_class, is_composite
from titan.models.hf.experts import run_experts
from titan.models.hf.gathered import GatheredAttention, ShapeCache, check_gathering
from titan.models.hf.model import TransformersModel
from titan.models.hf.paged import PagedAttention
from titan.models.hf.probe import LAYER_TYPES, ProbedLayer
from titan.models.hf.quantised import cast_unquantised, check_quantisation, mixes_rows, num_bytes, plain_tensors, quantisation
from titan.models.hf.split import find_decoder
from titan.models.token_order import TokenOrder
from titan.models.weights import fetch_weights

LOG = logging.getLogger(__name__)

DEFAULT_POSITIONS = 2048
"""Of models that do not say how many they have."""
CHANGING_ROPES = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the longest position of a batch: only positions before they change are run."""
MAX_GROWTH = 1.2
"""Of quantised weights in memory, relative to their files: those that take more are said to be dequantised."""


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of a model of transformers."""

    config: ModelConfig
    layers: tuple[ProbedLayer, ...]  # none of a model with attention of its own


def describe(config: Any, eos_token_ids: tuple[int, ...] | None = None, *, trust_remote_code: bool = False) -> ModelConfig:
    """Read a model's config by running it without weights, on the meta device.

    Args:
        config: of transformers.
        eos_token_ids: those of the generation config, which override the model's.
        trust_remote_code: as of `titan.core.options.ModelOptions`.

    Raises:
        ValueError: the model, or a feature of it, is not supported.
    """
    check_config(config)
    with _quiet():
        check_quantisation(config)
    register()
    model = empty_model(config, trust_remote_code=trust_remote_code)
    try:
        return describe_model(model, eos_token_ids).config
    except (RuntimeError, NotImplementedError):  # what it computes depends on numbers, which meta tensors do not have
        traits = {"transformers"} if model._can_set_attn_implementation() else {"transformers", "own_attention"}
        return _config(model, (), frozenset(traits), eos_token_ids)


def empty_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return a model without weights, on the meta device.

    Args:
        config: of transformers.
        trust_remote_code: as of `titan.core.options.ModelOptions`.
    """
    with torch.device("meta"), _quiet():
        if (model_class := _composite_class(config)) is not None:
            return model_class._from_config(config, dtype=torch.float32).eval()
        return _auto_model().from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()


def describe_model(model: Any, eos_token_ids: tuple[int, ...] | None = None) -> Description:
    """Read what a model asks for, by one pass of one token.

    Raises:
        ValueError: a feature is not supported.
    """
    check_model(model)
    text_config = model.config.get_text_config()
    decoder = find_decoder(model)
    device = next(model.parameters()).device
    token, seen = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, 1, dtype=torch.int64, device=device)
    probed: tuple[ProbedLayer, ...] = ()
    with torch.no_grad(), _quiet():
        if model._can_set_attn_implementation():
            model.set_attn_implementation(probe.PROBE)
            if model._can_set_experts_implementation():
                model.set_experts_implementation(interface.IMPLEMENTATION)
            with probe.recording() as calls:
                decoder(input_ids=token, attention_mask=seen, use_cache=False)
            model.set_attn_implementation(probe.UNMASKED_PROBE)
            with probe.recording() as unmasked:
                decoder(input_ids=token, attention_mask=seen, use_cache=False)
            probe.check_masks(unmasked)
            model.set_attn_implementation(interface.IMPLEMENTATION)
            probed = tuple(probe.read_layers(calls, text_config))
            layers = tuple(each.spec for each in probed)
            owners = tuple(each.spec for each in probed if each.source is None)
            traits = {"transformers", *(trait for layer in layers for trait in layer.traits)}
        else:
            for name in ("sliding_window", "window_size"):
                if (size := getattr(text_config, name, None)) is not None:
                    raise ValueError(
                        f"{name}={size} is not supported in {type(decoder).__name__}, which counts slots, not positions"
                    )
            for name in ("position_ids", "past_key_values"):
                if name not in inspect.signature(decoder.forward).parameters:
                    raise ValueError(f"{type(decoder).__name__} takes no {name}, without which trees cannot be run")
            cache, mask = ShapeCache(), torch.zeros(1, 1, 1, 1, device=device)
            decoder(input_ids=token, position_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True)
            owners, traits = tuple(cache.layers), {"transformers", "own_attention"}
            if len(owners) != text_config.num_hidden_layers:
                raise ValueError(f"{len(owners)} of {text_config.num_hidden_layers} layers store keys and values")
    limit = max_positions(text_config)
    config = _config(model, tuple(_within(layer, limit) for layer in owners), frozenset(traits), eos_token_ids)
    return Description(config, tuple(each._replace(spec=_within(each.spec, limit)) for each in probed))


def _config(
    model: Any, layers: tuple[LayerSpec, ...], traits: frozenset[str], eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    text_config = model.config.get_text_config()
    return ModelConfig(
        architecture=type(model).__name__,
        vocab_size=text_config.vocab_size,
        max_position_embeddings=max_positions(text_config),
        layers=layers,
        eos_token_ids=as_token_ids(_end_tokens(model.config)) if eos_token_ids is None else eos_token_ids,
        dtype=_checkpoint_dtype(model.config),
        traits=traits,
    )


def load_weights(
    files: ModelFiles,
    eos_token_ids: tuple[int, ...] | None,
    *,
    dtype: torch.dtype,
    backend: Backend,
    max_positions: int | None = None,
    order: TokenOrder | None = None,
    trust_remote_code: bool = False,
) -> TransformersModel:
    """Load a model whose config has been described.

    Args:
        files: of the model.
        eos_token_ids: as of `describe`.
        dtype: to run in.
        backend: that runs the model.
        max_positions: positions that can be run; ``None``: all that the model has.
        order: of the tokens; ``None`` = the checkpoint's.
        trust_remote_code: as of `titan.core.options.ModelOptions`.

    Raises:
        ValueError: weights are missing, surplus, of other shapes than the config asks for, or not finite.
    """
    from transformers import AutoConfig

    paths = fetch_weights(files)
    folder = files.fetch(*CONFIG_FILES, *(path.name for path in paths), *(["*.py"] if trust_remote_code else []))
    register()
    with _quiet():
        whole_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model, report = (_composite_class(whole_config) or _auto_model()).from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            trust_remote_code=trust_remote_code,
            device_map=None if backend.is_host else {"": backend.device},
        )
    _check_report(report, type(model).__name__)
    model.eval().requires_grad_(False)
    for name, weight in plain_tensors(model):
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(
                f"weight {name!r} has numbers that are not finite in {str(weight.dtype).removeprefix('torch.')}: NaN and "
                "infinities are not allowed"
            )
    found = quantisation(whole_config)
    if found is not None:
        cast_unquantised(model, empty_model(whole_config, trust_remote_code=trust_remote_code), dtype)
        with _quiet(), torch.no_grad():  # compressed-tensors decompresses in the first pass of the whole model
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=backend.device), use_cache=False)
    in_memory, in_files = num_bytes(model), sum(path.stat().st_size for path in paths)
    description = describe_model(model, eos_token_ids)
    config, layers = description.config, description.layers
    paged = PagedAttention(layers, config.windows, model.config.get_text_config()) if layers else None
    loaded = TransformersModel(
        model,
        config,
        paged or GatheredAttention(dtype),
        dtype=dtype,
        backend=backend,
        max_positions=max_positions,
        order=order,
    )
    if paged is None:
        check_gathering(loaded, model)
    if is_composite(whole_config):
        LOG.warning("model %r runs text-only: of %s, only the language model is loaded", files.name, config.architecture)
    if found is not None and in_memory > MAX_GROWTH * in_files:
        method, sizes = found.get("quant_method"), (f"{size / 2**20:,.1f} MiB" for size in (in_memory, in_files))
        LOG.warning("model %r is dequantised at load (%s): its weights take %s, in files %s", files.name, method, *sizes)
    if found is not None and mixes_rows(found):
        LOG.warning(
            "model %r has load_in_8bit with llm_int8_threshold above 0: its rounding depends on all tokens of a pass, and so may "
            "its output, on drafts and on other requests; 0 ends that",
            files.name,
        )
    return loaded


def register() -> None:
    """Register Titan's attention and experts with transformers; to do it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(interface.IMPLEMENTATION, interface.attend)  # without masks: transformers then makes none
    AttentionInterface.register(probe.PROBE, probe.attend)
    AttentionInterface.register(probe.UNMASKED_PROBE, probe.attend)
    AttentionMaskInterface.register(probe.PROBE, probe.make_mask)
    ALL_EXPERTS_FUNCTIONS.register(interface.IMPLEMENTATION, run_experts)


def check_config(config: Any) -> None:
    """Refuse what paged tree attention cannot run, as far as the config says it.

    Raises:
        ValueError: names the feature.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text_config = config.get_text_config()
    if config.is_encoder_decoder or text_config.is_encoder_decoder:
        raise ValueError(f"model_type={config.model_type!r} is an encoder-decoder, which is not supported")
    has_class = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or _composite_class(config) is not None
    if not has_class and not hasattr(config, "auto_map"):
        raise ValueError(
            f"model_type={config.model_type!r} is none of transformers' causal language models, and has none inside: allowed are "
            "those of docs/models.md"
        )
    if getattr(text_config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(f"model_type={config.model_type!r} has ALiBi, which is not supported: it must take position ids")
    for layer_type in getattr(text_config, "layer_types", None) or ():
        if layer_type not in LAYER_TYPES:
            raise ValueError(
                f"layer type {layer_type!r} keeps another state than keys and values, which is not supported: it must be one of "
                f"{', '.join(LAYER_TYPES)}"
            )


def check_model(model: Any) -> None:
    """Refuse a model that keeps a state that cannot be rolled back.

    Raises:
        ValueError: it does.
    """
    if getattr(type(model), "_is_stateful", False):
        raise ValueError(f"{type(model).__name__} keeps another state than keys and values, which is not supported")


def max_positions(text_config: Any) -> int:
    """Return how many positions a model has: of rope types whose frequencies change with the length, those before they do."""
    longest: int = getattr(text_config, "max_position_embeddings", None) or DEFAULT_POSITIONS
    parameters = getattr(text_config, "rope_parameters", None) or {}
    ropes = [each for each in (parameters, *parameters.values()) if isinstance(each, Mapping)]
    changing = [each for each in ropes if each.get("rope_type") in CHANGING_ROPES]
    return min([longest, *(each.get("original_max_position_embeddings") or longest for each in changing)])


def _within(layer: LayerSpec, limit: int) -> LayerSpec:
    """Return a layer without a window that no position can leave."""
    window = layer.attention.window
    size = window.size if isinstance(window, Chunk) else window
    return layer if size is None or size < limit else replace(layer, attention=replace(layer.attention, window=None))


def _checkpoint_dtype(config: Any) -> torch.dtype:
    for each in (config, config.get_text_config()):
        if isinstance(each.dtype, torch.dtype):
            return each.dtype
    return torch.float32


def _check_report(report: Mapping[str, Any], name: str) -> None:
    problems = {
        "missing": report["missing_keys"],
        "unexpected": report["unexpected_keys"],
        "of another shape": [f"{key} ({list(found)}, not {list(asked)})" for key, found, asked in report["mismatched_keys"]],
    }
    if any(problems.values()):
        found = "; ".join(f"{what} {some(sorted(keys))}" for what, keys in problems.items())
        raise ValueError(f"the weights do not fit {name}: {found}")


def _end_tokens(config: Any) -> Any:
    """Return those of a config's language model; in composite ones they may be beside it."""
    own, beside = (getattr(each, "eos_token_id", None) for each in (config.get_text_config(), config))
    return beside if own is None else own


def _composite_class(config: Any) -> Any | None:
    return composite_class(config) if is_composite(config) else None


def _auto_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing: what matters is said by errors."""
    from transformers.utils import logging

    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()
