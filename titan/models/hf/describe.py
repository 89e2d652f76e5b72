"""What the config of a model of transformers says about running it: its features, and what its layers ask attention for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titan.core.attention import LayerSpec
from titan.models.config import ModelConfig, check_heads, end_tokens, named_dtype, num_positions, within
from titan.models.files import one_line
from titan.models.hf import probe
from titan.models.hf.calls import quiet
from titan.models.hf.checks import check_config
from titan.models.hf.composite import composite_class
from titan.models.hf.experts import set_experts
from titan.models.hf.gathered import ShapeCache
from titan.models.hf.head import Head, find_attending, find_decoder
from titan.models.hf.paged import IMPLEMENTATION, attend
from titan.models.hf.probe import ProbedModule
from titan.models.hf.quantised import check_quantisation

DEFAULT_POSITIONS = 2048
"""Positions of models that do not say how many they have."""
COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"
"""Method of modules that place a token by how many are no padding, and begin behind the padding token's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """The config of a `titan.models.hf.model.TransformersModel`; made by `describe`."""

    source: Any = field(repr=False)  # as transformers has it
    model_class: Any  # of transformers, or code of the checkpoint; of composite models text-only
    modules: tuple[ProbedModule, ...]  # that attend through transformers' interface; none of a model with attention of its own
    trust_remote_code: bool
    runs_own_code: bool  # whether the modules may be code of the checkpoint


def describe(source: Any, eos_token_ids: tuple[int, ...] | None = None, *, trust_remote_code: bool = False) -> TransformersConfig:
    """Read a model's config by running one token through its modules, without weights.

    Raises:
        ValueError: the model, or a feature of it, is not supported.
    """
    runs_own_code = trust_remote_code and hasattr(source, "auto_map")
    check_config(source, runs_own_code=runs_own_code)
    with quiet():
        check_quantisation(source)
    register()
    model = empty_model(source, trust_remote_code=trust_remote_code)
    text_config = model.config.get_text_config()
    if getattr(type(model), "_is_stateful", False) and not getattr(text_config, "layer_types", None):  # else these were checked
        raise ValueError(f"{type(model).__name__} keeps another state than keys and values, which is not supported")
    decoder, hidden = find_decoder(model), list[Tensor]()
    _check_takes(decoder, "position_ids")
    for module in decoder.modules():
        if hasattr(module, COUNTS_FROM_PADDING):
            raise ValueError(
                f"{type(module).__name__} counts positions from the padding token, which is not supported: they must begin at 0"
            )
    lengths = (getattr(text_config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    limit = num_positions(text_config, next(filter(None, lengths), DEFAULT_POSITIONS))
    modules: tuple[ProbedModule, ...] = ()
    decoder.register_forward_hook(lambda _module, _args, output: hidden.append(output.last_hidden_state[0]))
    with torch.no_grad(), quiet(), probe.without_weights(model):
        with _naming(f"the decoder of {type(model).__name__} does not turn a token into hidden states"):
            if find_attending(model)._can_set_attn_implementation():
                modules = tuple(each._replace(spec=within(each.spec, limit)) for each in _probe_modules(model, text_config))
                layers, traits = tuple(each.spec for each in modules if each.source is None), {"transformers"}
                for each in layers:
                    check_heads(each.num_heads, each.num_kv_heads)
            else:
                layers, traits = _probe_cache(decoder, text_config), {"transformers", "own_attention"}
        with _naming(f"the head of {type(model).__name__} does not run apart from its decoder"):
            Head(model, decoder, hidden[-1].device)(hidden[-1])
    return TransformersConfig(
        architecture=type(model).__name__,
        vocab_size=text_config.vocab_size,
        max_position_embeddings=limit,
        layers=layers,
        eos_token_ids=end_tokens(_end_tokens(source), eos_token_ids, text_config.vocab_size),
        dtype=named_dtype(source),
        traits=frozenset(traits.union(*(each.spec.traits for each in modules))),
        source=source,
        model_class=type(model),
        modules=modules,
        trust_remote_code=trust_remote_code,
        runs_own_code=runs_own_code,
    )


def empty_model(source: Any, *, trust_remote_code: bool) -> Any:
    """Return a model without weights, on the meta device; the config, which is transformers', is not changed."""
    from transformers import AutoModelForCausalLM

    config = deepcopy(source)  # transformers writes the dtype to it
    with torch.device("meta"), quiet():
        if (model_class := composite_class(source)) is not None:
            return model_class._from_config(config, dtype=torch.float32).eval()
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()


def _probe_modules(model: Any, text_config: Any) -> list[ProbedModule]:
    """Return what modules ask transformers' attention interface for."""
    decoder, calls = find_decoder(model), {}
    for name in (probe.UNMASKED_PROBE, probe.PROBE):
        find_attending(model).set_attn_implementation(name)
        set_experts(model, probe.PROBE)
        with probe.recording() as calls[name]:
            decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64), attention_mask=torch.ones(1, 1).long(), use_cache=False)
    probe.check_masks(calls[probe.UNMASKED_PROBE])
    return probe.read_modules(model, calls[probe.PROBE], text_config)


def _probe_cache(decoder: Any, text_config: Any) -> tuple[LayerSpec, ...]:
    """Return what a model with attention of its own writes to its cache."""
    for name in ("sliding_window", "window_size"):
        if (size := getattr(text_config, name, None)) is not None:
            raise ValueError(f"{name}={size} is not supported in {type(decoder).__name__}, which counts slots, not positions")
    _check_takes(decoder, "past_key_values")
    token, cache = torch.zeros(1, 1, dtype=torch.int64), ShapeCache()
    decoder(input_ids=token, position_ids=token, attention_mask=torch.zeros(1, 1, 1, 1), past_key_values=cache, use_cache=True)
    if len(cache.layers) != text_config.num_hidden_layers:
        raise ValueError(f"{len(cache.layers)} of {text_config.num_hidden_layers} layers store keys and values")
    return tuple(cache.layers)


def _check_takes(decoder: Any, name: str) -> None:
    if name not in inspect.signature(decoder.forward).parameters:
        raise ValueError(f"{type(decoder).__name__} takes no {name}, without which trees cannot be run")


def register() -> None:
    """Register Titan's attention and probes with transformers; to do it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, attend)  # without masks: transformers then makes none
    AttentionInterface.register(probe.PROBE, probe.attend)
    AttentionInterface.register(probe.UNMASKED_PROBE, probe.attend)
    AttentionMaskInterface.register(probe.PROBE, probe.make_mask)
    ALL_EXPERTS_FUNCTIONS.register(probe.PROBE, probe.run_experts)


def _end_tokens(config: Any) -> Any:
    """Return those of a config, or else of its language model's within it, as transformers' generation takes them."""
    own, inner = (getattr(each, "eos_token_id", None) for each in (config, config.get_text_config()))
    return inner if own is None else own


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say what does not run, if it is not for a known reason."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{what}, which is not supported: {one_line(error)}") from error
