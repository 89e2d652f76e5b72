"""The supported architectures, and how each reads its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.core.attention import Window
from titan.core.checks import check_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class NotNativeError(ValueError):
    """A model, or a feature of it, for which Titan has no decoder of its own; transformers may have it."""


WHOLE_ROPE = ""
"""Name that stands for ``rope_parameters`` as a whole, where they are those of one rotation."""


PRE_NORMS = {"input_norm": "input_layernorm", "gate_up_norm": "post_attention_layernorm"}
"""Norms of a layer that has one before each of its parts: names in `titan.models.layers.LayerWeights`, and in checkpoints."""
POST_NORMS = {"output_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
"""Those of a layer that has one after each of its parts."""


SANDWICH_NORMS = POST_NORMS | {"input_norm": "input_layernorm", "gate_up_norm": "pre_feedforward_layernorm"}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Traits of the gated feed-forward part, by their names in configs."""


class Family(NamedTuple):
    """The properties in which the families' decoders differ."""

    layer_windows: tuple[Window, ...]  # sliding window of each layer; None = full attention
    traits: frozenset[str]  # see `titan.models.config.ModelConfig.traits`
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the dtype in which the model runs
    residual_scale: float = 1.0  # of what attention and feed-forward part add to the residual stream
    logits_scale: float = 1.0  # is folded into the final norm when it is loaded
    is_fused: bool = False  # q, k and v are one tensor of the checkpoint, gate and up another
    may_rotate_part: bool = False  # of each head: partial_rotary_factor
    norms: Mapping[str, str] = PRE_NORMS  # names in `titan.models.layers.LayerWeights`, and in the checkpoint
    norm_offset: float = 0.0  # norms multiply by their weights and this, which is added to them when they are loaded
    has_wide_norms: bool = False  # they multiply in float32, as which their weights are kept, and round what comes out
    layer_ropes: tuple[str | None, ...] | None = None  # entries of rope_parameters, None = no rotation; None: all have the whole


def _llama(config: PretrainedConfig) -> Family:
    traits = _biases(config.attention_bias) | ({"mlp_bias"} if config.mlp_bias else set())
    return Family((None,) * config.num_hidden_layers, frozenset(traits))


def _mistral(config: PretrainedConfig) -> Family:
    has_types = hasattr(config, "layer_types")  # transformers reads a config of Mistral with them as one of Ministral
    windows = _windows_by_layer_type(config) if has_types else (config.sliding_window,) * config.num_hidden_layers
    return Family(windows, frozenset())


def _qwen2(config: PretrainedConfig) -> Family:
    return Family(_windows_by_layer_type(config), frozenset({"attention_bias"}))


def _qwen3(config: PretrainedConfig) -> Family:
    return Family(_windows_by_layer_type(config), frozenset({"qk_norm", *_biases(config.attention_bias)}))


def _granite(config: PretrainedConfig) -> Family:
    for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
        check_number(name, getattr(config, name), low=0, open_low=True)
    return _llama(config)._replace(
        attention_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


def _phi3(config: PretrainedConfig) -> Family:
    return Family((config.sliding_window,) * config.num_hidden_layers, frozenset(), is_fused=True, may_rotate_part=True)


def _smollm3(config: PretrainedConfig) -> Family:
    ropes = tuple(WHOLE_ROPE if has_rope else None for has_rope in config.no_rope_layers[: config.num_hidden_layers])
    return _llama(config)._replace(layer_windows=_windows_by_layer_type(config), layer_ropes=ropes)


def _olmo2(config: PretrainedConfig) -> Family:
    traits = frozenset({"row_norm", *_biases(config.attention_bias)})
    return Family((None,) * config.num_hidden_layers, traits, norms=POST_NORMS, has_wide_norms=True)


def _olmo3(config: PretrainedConfig) -> Family:
    return _olmo2(config)._replace(layer_windows=_windows_by_layer_type(config), layer_ropes=tuple(config.layer_types))


def _gemma(config: PretrainedConfig) -> Family:
    if config.use_bidirectional_attention:
        raise NotNativeError("use_bidirectional_attention=True is not supported: it must be false")
    family = Family((None,) * config.num_hidden_layers, frozenset(_biases(config.attention_bias)))
    scale = config.hidden_size**0.5
    return family._replace(embedding_scale=scale, rounds_embedding_scale=True, norm_offset=1.0, has_wide_norms=True)


def _gemma3(config: PretrainedConfig) -> Family:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := getattr(config, name)) is not None:
            raise NotNativeError(f"{name}={cap} is not supported: it must be null")
    family = _gemma(config)
    return family._replace(
        layer_windows=_windows_by_layer_type(config),
        layer_ropes=tuple(config.layer_types),
        traits=family.traits | {"qk_norm"},
        attention_scale=check_number("query_pre_attn_scalar", config.query_pre_attn_scalar, low=0, open_low=True) ** -0.5,
        norms=SANDWICH_NORMS,
    )


def _biases(attention_bias: bool) -> set[str]:
    return {"attention_bias", "output_bias"} if attention_bias else set()


def _windows_by_layer_type(config: PretrainedConfig) -> tuple[Window, ...]:
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    for layer_type in config.layer_types:
        if layer_type not in windows:
            raise NotNativeError(f"layer type {layer_type!r} is not supported: it must be one of {', '.join(windows)}")
    if config.sliding_window is None and "sliding_attention" in config.layer_types:
        raise ValueError(
            "layer_types has 'sliding_attention', which is not allowed without a window: sliding_window is null, or "
            "use_sliding_window false"
        )
    return tuple(windows[layer_type] for layer_type in config.layer_types)


ARCHITECTURES: dict[str, Callable[[PretrainedConfig], Family]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MinistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GraniteForCausalLM": _granite,
    "Phi3ForCausalLM": _phi3,
    "SmolLM3ForCausalLM": _smollm3,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "GemmaForCausalLM": _gemma,
    "Gemma3ForCausalLM": _gemma3,
}
MODEL_TYPES = {name: name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURES} | {"Gemma3ForCausalLM": "gemma3_text"}


def check_supported(content: Mapping[str, Any]) -> str:
    """Return the architecture named by the content of a config.json whose entries have been checked.

    Raises:
        NotNativeError: the architecture or a feature is not supported.
        ValueError: an entry is not allowed.
    """
    architectures: list[str] = content.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise ValueError(f"architectures={architectures!r} is not allowed: it must be a list of names")
    architecture = next((each for each in architectures if each in ARCHITECTURES), None)
    if architecture is None:
        found = ", ".join(architectures) or "no architecture"
        raise NotNativeError(f"architectures names {found}; supported are {', '.join(ARCHITECTURES)}")
    model_type, expected = content.get("model_type"), MODEL_TYPES[architecture]
    if model_type != expected:
        raise NotNativeError(f"model_type={model_type!r} does not fit {architecture}: it must be {expected!r}")
    if quantization := content.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise NotNativeError(
            f"quantization_config says that the weights are quantized ({method}), which is not supported: use float32, bfloat16 or "
            "float16 weights"
        )
    return architecture


def activation_trait(config: PretrainedConfig) -> str:
    """Return the trait of the activation that a config names.

    Raises:
        NotNativeError: it is not supported.
    """
    name = "hidden_activation" if config.model_type == "gemma3_text" else "hidden_act"
    activation = getattr(config, name)
    if activation not in ACTIVATIONS:
        raise NotNativeError(f"{name}={activation!r} is not supported: it must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]
