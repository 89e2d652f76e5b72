"""What the attention of a layer computes, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from titan.core.arrays import Ints
from titan.core.kv_tensor import KVGroup


@dataclass(frozen=True, slots=True)
class Chunk:
    """The window of a layer whose tokens look back to the start of their chunk of so many positions (Llama 4)."""

    size: int


Window = int | Chunk | None
"""Number of positions that a token attends to in a layer, its own included; ``None`` = all."""


def window_sizes(window: int | Chunk, positions: Ints) -> Ints:
    """Return how many positions tokens at these positions attend to, their own included: [T] -> int64 [T]."""
    return positions % window.size + 1 if isinstance(window, Chunk) else np.full_like(positions, window)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How the attention of a layer turns queries, keys and values into its output."""

    scale: float  # multiplies the scores
    window: Window = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap); None: they stay
    value_dim: int | None = None  # numbers of a value, the first of what its slot holds; None: as many as a key has


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of a layer with the shapes of its heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys; values take as much room in the cache
    attention: AttentionSpec
    has_sinks: bool = False  # one more score per head, of a value of zeros
    is_latent: bool = False  # the cache holds keys only: a value is the first numbers of its key

    @property
    def traits(self) -> frozenset[str]:
        """What its attention has beyond queries that see all keys before them, by name; see `ModelConfig.traits`."""
        spec = self.attention
        found = {
            "sliding_window": isinstance(spec.window, int),
            "chunked_window": isinstance(spec.window, Chunk),
            "soft_cap": spec.softcap is not None,
            "sinks": self.has_sinks,
            "latent_kv": self.is_latent,
            "narrow_values": spec.value_dim is not None,
        }
        return frozenset(name for name, is_there in found.items() if is_there)


def kv_groups(layers: Sequence[LayerSpec]) -> tuple[KVGroup, ...]:
    """Return the groups of consecutive layers whose KV has equal shapes."""
    shapes = ((each.num_kv_heads, each.head_dim, 1 if each.is_latent else 2) for each in layers)
    return tuple(KVGroup(len(list(same)), *shape) for shape, same in groupby(shapes))
