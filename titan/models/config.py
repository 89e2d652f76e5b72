"""The config of a decoder, read from a transformers config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from titan.core.batch import Window
from titan.core.kv_tensor import KVGroup, KVLayout
from titan.models.registry import ARCHITECTURES
from titan.models.rope import Rope, read_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The config of a decoder; made by `ModelConfig.read`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_windows: tuple[Window, ...]  # sliding window of each layer; None = full attention
    rope: Rope
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # of the checkpoint
    # features of the model: "rms_norm", "silu", "rope", "sliding_window", "attention_bias" (of the q, k and v projections),
    # "output_bias" (of the attention's output projection), "mlp_bias", "qk_norm" (RMSNorm over each head of q and k),
    # "tied_embedding"; a back end lists those that its fast paths support, and a model with any other runs on the general path
    traits: frozenset[str]

    @classmethod
    def read(cls, config: PretrainedConfig, architecture: str, eos_token_ids: tuple[int, ...] | None = None) -> ModelConfig:
        """Read a transformers config.

        Args:
            config: the config, with transformers' defaults filled in.
            architecture: one of `registry.ARCHITECTURES`.
            eos_token_ids: those of the generation config, which override the model's.

        Raises:
            ValueError: the sizes are inconsistent, or a feature is not supported.
        """
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd: rotary embeddings need an even one")
        family = ARCHITECTURES[architecture](config)
        max_position_embeddings = config.max_position_embeddings
        # A window as long as the model's positions is no window.
        windows = tuple(None if w is None or w >= max_position_embeddings else w for w in family.layer_windows)
        traits = {"rms_norm", "silu", "rope", *family.traits}
        if any(window is not None for window in windows):
            traits.add("sliding_window")
        if config.tie_word_embeddings:
            traits.add("tied_embedding")
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=max_position_embeddings,
            layer_windows=windows,
            rope=read_rope(config, head_dim),
            eos_token_ids=as_token_ids(config.eos_token_id) if eos_token_ids is None else eos_token_ids,
            dtype=config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32,
            traits=frozenset(traits),
        )

    @property
    def windows(self) -> tuple[Window, ...]:
        """The distinct sliding windows of the layers, in order of first use."""
        return tuple(dict.fromkeys(self.layer_windows))

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Return the layout of the model's KV in this dtype."""
        return KVLayout((KVGroup(self.num_layers, self.num_kv_heads, self.head_dim),), dtype)


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the token ids of a config entry, which may be one id, a list or ``None``."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
