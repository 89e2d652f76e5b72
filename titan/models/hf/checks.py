"""What the config of a model of transformers says that cannot be run, before any of its modules is made."""

from __future__ import annotations

from inspect import signature
from typing import Any

from titan.core.checks import check_choice
from titan.models.config import check_sizes
from titan.models.hf.composite import composite_class
from titan.models.hf.probe import LAYER_TYPES
from titan.models.rope import rope_entries

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation")
"""Names of a feed-forward part's activation in configs."""


def check_config(config: Any, *, runs_own_code: bool) -> None:
    """Refuse what paged tree attention cannot run, as far as the config says it.

    Args:
        config: of transformers.
        runs_own_code: the model's modules are code of the checkpoint, which may know more than transformers does.

    Raises:
        ValueError: names the feature, or the entry with its value and what is allowed.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text_config = config.get_text_config()
    if config.is_encoder_decoder or text_config.is_encoder_decoder:
        raise ValueError(f"model_type={config.model_type!r} is an encoder-decoder, which is not supported")
    has_class = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or composite_class(config) is not None
    if not has_class and not hasattr(config, "auto_map"):
        raise ValueError(
            f"model_type={config.model_type!r} is none of transformers' causal language models, nor of its models of images and "
            "text whose config has one of a language model within it: allowed are those of docs/models.md"
        )
    if getattr(text_config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(f"model_type={config.model_type!r} has ALiBi, which is not supported: it must take position ids")
    if config.model_type == "paligemma":  # only the model around the decoder knows, which is not asked
        raise ValueError("model_type='paligemma' has attention that is not causal within a prompt, which is not supported")
    for layer_type in getattr(text_config, "layer_types", None) or ():
        if layer_type not in LAYER_TYPES:
            raise ValueError(
                f"layer type {layer_type!r} keeps another state than keys and values, which is not supported: it must be one of "
                f"{', '.join(LAYER_TYPES)}"
            )
    check_sizes(vars(text_config), text_config.attribute_map)
    if not runs_own_code:
        _check_activation(text_config)
        _check_ropes(text_config)


def _check_activation(config: Any) -> None:
    from transformers.activations import ACT2FN

    for name in ACTIVATIONS:
        # what else a config has, such as "activation" of some Llamas, is of no effect
        is_read = hasattr(type(config), name) or name in signature(type(config)).parameters
        if is_read and isinstance(activation := vars(config).get(name), str):
            check_choice(name, activation, tuple(ACT2FN))


def _check_ropes(config: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for rope in rope_entries(config):
        if (rope_type := rope.get("rope_type")) is not None:
            check_choice("rope_type", rope_type, ("default", *ROPE_INIT_FUNCTIONS))
