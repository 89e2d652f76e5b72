"""What the attention of a layer computes, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from titan.core.arrays import Flags, Ints
from titan.core.batch import AttentionLayout
from titan.core.kv_tensor import KVGroup
from titan.core.limits import MAX_NODES


@dataclass(frozen=True, slots=True)
class Chunk:
    """The window of a layer whose tokens look back to the start of their chunk of so many positions (Llama 4)."""

    size: int


Window = int | Chunk | None
"""Number of positions that a token attends to in a layer, its own included; ``None`` = all."""


def window_length(window: Window) -> int:
    """Return the positions of a window, or of a chunk; 0: there is none."""
    return window.size if isinstance(window, Chunk) else window or 0


def window_sizes(window: int | Chunk, positions: Ints) -> Ints:
    """Return how many positions tokens at these positions attend to, their own included: [T] -> int64 [T]."""
    return positions % window.size + 1 if isinstance(window, Chunk) else np.full_like(positions, window)


def visible_slots(layout: AttentionLayout, request: int, window: Window) -> Flags:
    """Return which slots the query tokens of a request see in a layer with this window: bool [query, seq_len]."""
    rows = slice(int(layout.query_start_loc[request]), int(layout.query_start_loc[request + 1]))
    slots = np.arange(layout.seq_lens[request])
    visible: Flags = slots < layout.visible_lens[rows, None]
    bits = layout.ancestor_bits[rows]
    if window is not None:
        sizes = window_sizes(window, layout.positions[rows])
        visible &= slots > (layout.positions[rows] - sizes)[:, None]
        bits = np.array([nearest_ancestors(*each) for each in zip(bits.tolist(), sizes.tolist(), strict=True)], np.int64)
    if not bits.any():
        return visible
    nodes = slots - layout.tree_starts[request]
    is_ancestor = (bits[:, None] >> np.clip(nodes, 0, MAX_NODES - 1)) & 1 == 1
    visible |= is_ancestor & (nodes >= 0) & (nodes < MAX_NODES)
    return visible


def nearest_ancestors(ancestor_bits: int, window: int) -> int:
    """Keep the highest ``window`` bits set, which are the nearest ancestors, since parents come before children."""
    while ancestor_bits.bit_count() > window:
        ancestor_bits &= ancestor_bits - 1
    return ancestor_bits


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
