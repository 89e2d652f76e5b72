"""What is known of a model from its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from titan.core.arrays import Ints
from titan.core.attention import AttentionSpec, LayerSpec, kv_groups, window_length
from titan.core.checks import check_choice, check_integer, check_number, shown
from titan.core.dtypes import RUN_DTYPES
from titan.core.kv_tensor import KVLayout
from titan.models.registry import ARCHITECTURES, WHOLE_ROPE, Family, NotNativeError, activation_trait
from titan.models.rope import NO_ROPE, Rope, read_rope, rope_entries

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "sliding_window")
MAX_SIZE = 2**24
"""Above all sizes that models have, and low enough that nothing made of one size alone exceeds memory."""
ROPE_LAYERS = "no_rope_layers"
"""Entry of configs of SmolLM3, Llama 4 and Mistral Large 4: for each layer, whether it rotates queries and keys."""
TEXT_CONFIG = "text_config"
"""Entry of a composite model's config: its language model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine needs to know of a model."""

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]  # those with a cache of their own
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype | None  # of the checkpoint; None: its config does not say
    # features of the model: those of `LayerSpec.traits`, and "rms_norm", "pre_norm" and "post_norm" (of what attention and
    # feed-forward part read, and of what they add), "silu" or "gelu_tanh", "rope", "rope_per_layer", "attention_bias" (of the q, k
    # and v projections), "output_bias" (of the attention's output projection), "mlp_bias", "qk_norm" (RMSNorm over each head of q
    # and k), "row_norm" (over all heads of q, and over those of k), "tied_embedding"; or "transformers": the layers are that
    # library's modules. A back end lists those that its fast paths support, and a model with any other runs on the general path
    traits: frozenset[str]

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Return the layout of the model's KV in this dtype."""
        return KVLayout(kv_groups(self.layers), dtype)

    def check_positions(self, positions: Ints) -> None:
        """Check that the model has these positions.

        Raises:
            IndexError: it was not trained for one of them.
        """
        lowest, highest, limit = positions.min(), positions.max(), self.max_position_embeddings
        if lowest < 0 or highest >= limit:
            raise IndexError(f"positions {lowest} to {highest} are not allowed: there are {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The config of a `titan.models.decoder.Decoder`; made by `DecoderConfig.read`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    ropes: tuple[Rope, ...]  # of each layer
    embedding_scale: float  # multiplies the rows of the embedding, where the scale of the residual stream is divided out
    family: Family

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def read(cls, config: PretrainedConfig, architecture: str, eos_token_ids: tuple[int, ...] | None = None) -> DecoderConfig:
        """Read a config of transformers, defaults filled in; the end tokens of a generation config override its own.

        Raises:
            ValueError: the sizes are inconsistent, or a feature is not supported.
        """
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        check_heads(num_heads, num_kv_heads)
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd: rotary embeddings need an even one")
        if not 0 <= config.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps={config.rms_norm_eps} is not allowed: it must be a number in [0, 1)")
        if not getattr(config, "is_causal", True):
            raise NotNativeError("is_causal=False is not supported: it must be true")
        family = ARCHITECTURES[architecture](config)
        for window in {*family.layer_windows} - {None}:
            check_integer("sliding_window", window, 1, MAX_SIZE)
        entries = (WHOLE_ROPE,) * len(family.layer_windows) if family.layer_ropes is None else family.layer_ropes
        read = partial(read_rope, config, head_dim, may_rotate_part=family.may_rotate_part)
        rope_of = {each: NO_ROPE if each is None else read(each) for each in dict.fromkeys(entries)}
        ropes = tuple(rope_of[each] for each in entries)
        max_position_embeddings = num_positions(config, config.max_position_embeddings)
        scale = head_dim**-0.5 if family.attention_scale is None else family.attention_scale
        specs = (AttentionSpec(scale, window) for window in family.layer_windows)
        layers = tuple(within(LayerSpec(num_heads, num_kv_heads, head_dim, spec), max_position_embeddings) for spec in specs)
        traits = {
            "rms_norm",
            "rope",
            activation_trait(config),
            *family.traits,
            *(trait for layer in layers for trait in layer.traits),
        }
        if config.tie_word_embeddings:
            traits.add("tied_embedding")
        if len(set(ropes)) > 1:
            traits.add("rope_per_layer")
        traits |= {trait for trait, name in (("pre_norm", "input_norm"), ("post_norm", "output_norm")) if name in family.norms}
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            # The whole residual stream is divided by the scale of what is added to it. Norms see no scale but for their eps.
            rms_norm_eps=config.rms_norm_eps / family.residual_scale**2,
            embedding_scale=family.embedding_scale / family.residual_scale,
            family=family,
            max_position_embeddings=max_position_embeddings,
            ropes=ropes,
            eos_token_ids=end_tokens(config.eos_token_id, eos_token_ids, config.vocab_size),
            dtype=named_dtype(config),
            traits=frozenset(traits),
        )


def check_entries(content: Mapping[str, Any]) -> None:
    """Check what the config.json of any model says about its sizes, the layers that rotate, and how its weights are stored.

    Raises:
        ValueError: names the entry, its value and what is allowed.
    """
    inner = content.get(TEXT_CONFIG)
    for each in (content, inner) if isinstance(inner, dict) else (content,):
        check_sizes(each)
        _check_rope_layers(each)
        for name in ("dtype", "torch_dtype"):
            if each.get(name) is not None:
                check_choice(name, each[name], tuple(RUN_DTYPES))
        if not isinstance(found := each.get("quantization_config"), dict | None):
            raise ValueError(f"quantization_config={shown(found)} is not allowed: it must be an object with quant_method, or null")


def check_sizes(entries: Mapping[str, Any], own_names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check the sizes in a config on which others are based, but for lists of those of each layer, and what is missing or null.

    Args:
        entries: of the config.
        own_names: of those that it calls otherwise.

    Raises:
        ValueError: names the entry, its value and what is allowed.
    """
    for name in (*SIZES, *OPTIONAL_SIZES):
        if name == "sliding_window" and not entries.get("use_sliding_window", True):
            continue  # it is not read, and 0 in some configs
        own_name = own_names.get(name, name)
        if isinstance(size := entries.get(own_name), int | float | str):
            check_integer(own_name, size, 1, MAX_SIZE)


def _check_rope_layers(entries: Mapping[str, Any]) -> None:
    """Check that a list of which layers rotate is as long as there are layers; an empty one of Llama 4 counts as none."""
    given, num_layers = entries.get(ROPE_LAYERS), entries.get("num_hidden_layers")
    if given == [] and entries.get("model_type") == "llama4_text":
        return
    if isinstance(given, list) and isinstance(num_layers, int) and len(given) < num_layers:
        raise ValueError(
            f"{ROPE_LAYERS}={shown(given)} is not allowed: it has {len(given)} entries, and num_hidden_layers={num_layers}; it "
            "must have one for each layer, or be null"
        )


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Check that the heads of queries can share those of keys and values.

    Raises:
        ValueError: names both, as configs do.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")


def named_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype that a config of transformers names, or its language model's within it; ``None``: they name none."""
    dtypes = (each.dtype for each in (config, config.get_text_config()))
    return next((each for each in dtypes if isinstance(each, torch.dtype)), None)


def num_positions(config: Any, longest: int) -> int:
    """Return how many positions a language model of transformers can be run at, by its rotary embeddings.

    YaRN extends the trained length by a factor, which some configs leave to be multiplied. The frequencies of longrope change with
    the longest position of a batch after the length before it was extended, and those of dynamic after the one in the config:
    there, keys in the cache would be of other frequencies than new ones. The model was trained for positions up to ``longest``.

    Raises:
        ValueError: the extended length is out of all bounds.
    """
    extended, limits = longest, list[int]()
    for entry in rope_entries(config):
        rope_type, trained = entry.get("rope_type"), entry.get("original_max_position_embeddings") or longest
        if rope_type == "yarn":
            factor = check_number("factor", entry.get("factor") or 1, low=0, open_low=True)
            trained = check_number("original_max_position_embeddings", trained, low=1)
            extended = max(extended, int(trained * factor))
        elif rope_type in ("dynamic", "longrope"):
            limits.append(trained if rope_type == "longrope" else longest)
    return min([check_integer("factor * original_max_position_embeddings", extended, 1, MAX_SIZE), *limits])


def within(layer: LayerSpec, num_positions: int) -> LayerSpec:
    """Return a layer of a model with this many positions, without a window that none of them can leave."""
    window = layer.attention.window
    is_idle = window is not None and window_length(window) >= num_positions
    return replace(layer, attention=replace(layer.attention, window=None)) if is_idle else layer


def end_tokens(own: object, override: tuple[int, ...] | None, vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens of a model; some configs name ids outside the vocabulary, which no output has.

    Args:
        own: those of its config, as `as_token_ids` takes them.
        override: those of the generation config; ``None`` = it has none.
        vocab_size: of the model.

    Raises:
        ValueError: as `as_token_ids`.
    """
    token_ids = as_token_ids(own) if override is None else override
    return tuple(each for each in token_ids if 0 <= each < vocab_size)


def as_token_ids(value: object) -> tuple[int, ...]:
    """Return the end tokens of a config, which may be one id, a list or ``None``.

    Raises:
        ValueError: it is something else.
    """
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in token_ids):
        raise ValueError(f"eos_token_id={value!r} is not allowed: it must be a token id, a list of them, or null")
    return tuple(token_ids)
