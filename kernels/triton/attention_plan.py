"""Plans of tree attention: made by `attention_planner` once per step, read by the kernels of `tree_attention`.

Legend: T query tokens, padded ones included; R requests; G query heads per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.attention import Chunk, LayerSpec, Window
from titan.kernels.triton.tools import FLOAT_DTYPES
from titan.kernels.triton.tuning import TileConfig, tile_config

MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 512

MAX_LATENT_REST = 64
"""Most numbers of a latent key that are not in its value: those that are rotated."""

MIN_VALUE_COLUMNS = 64
"""Least columns of a tile of values: with 16, what Triton 3.6 compiles for products of a warp group reads beyond the tile."""

BLOCK_SIZES = (16, 32)
"""Slots per KV block that tree attention has tiles for."""

MAX_REQUESTS = 1024
"""Most requests in a batch: one program plans the attention of them all."""

TILE_FIELDS, MERGE_FIELDS = tl.constexpr(8), tl.constexpr(4)
"""Int32 numbers per record of a tile, two of which only keep records aligned, and per record of a merge."""


@triton.jit
def store_tiles(tiles_ptr, tiles, request, first_row, num_rows, first_slot, end_slot, part, mask):
    """Write the records of ``tiles``; the arguments after these indices are what `load_tile` returns."""
    record = tiles_ptr + tiles * TILE_FIELDS
    tl.store(record, request, mask=mask)
    tl.store(record + 1, first_row, mask=mask)
    tl.store(record + 2, num_rows, mask=mask)
    tl.store(record + 3, first_slot, mask=mask)
    tl.store(record + 4, end_slot, mask=mask)
    tl.store(record + 5, part, mask=mask)


@triton.jit
def load_tile(tiles_ptr, tile):
    """Return request, first row (first token * G + head within the group), number of rows, first slot, end slot and part.

    The part is the index at which a split tile's result is stored; -1: the tile is whole.
    """
    record = tiles_ptr + tile * TILE_FIELDS
    request, first_row, num_rows = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    return request, first_row, num_rows, tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)


@triton.jit
def store_merges(merges_ptr, merges, first_row, num_rows, first_part, num_parts, mask):
    """Write records of merges: the rows of split tiles, and their parts."""
    record = merges_ptr + merges * MERGE_FIELDS
    tl.store(record, first_row, mask=mask)
    tl.store(record + 1, num_rows, mask=mask)
    tl.store(record + 2, first_part, mask=mask)
    tl.store(record + 3, num_parts, mask=mask)


def window_number(window: Window) -> int | None:
    """Return what kernels take for a window: its size, that of a chunk as a number below 0."""
    return -window.size if isinstance(window, Chunk) else window


@triton.jit
def window_sizes(positions, window):
    """Return how many positions tokens attend to, their own included; ``window`` is a `window_number`."""
    sizes = tl.zeros_like(positions) + window
    if window < 0:
        sizes = positions % -window + 1
    return sizes


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The shapes of a layer's heads.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # slots of a KV block
    dtype: torch.dtype  # of queries, keys, values and output
    value_dim: int | None = None  # None: head_dim
    is_latent: bool = False  # values are the first numbers of keys

    @classmethod
    def of(cls, layer: LayerSpec, block_size: int, dtype: torch.dtype) -> AttentionGeometry:
        """Return the geometry of a layer."""
        value_dim = layer.attention.value_dim
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim, block_size, dtype, value_dim, layer.is_latent)

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}: it must be a multiple of num_kv_heads, {self.num_kv_heads}")
        most = MAX_HEAD_DIM + (MAX_LATENT_REST if self.is_latent else 0)
        if not MIN_HEAD_DIM <= self.head_dim <= most:
            raise ValueError(f"head_dim is {self.head_dim}: it must be from {MIN_HEAD_DIM} to {most}")
        least, most = max(1, self.head_dim - MAX_LATENT_REST) if self.is_latent else 1, min(self.head_dim, MAX_HEAD_DIM)
        if not least <= self.num_values <= most:
            raise ValueError(f"value_dim is {self.num_values}: it must be from {least} to {most}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}: it must be one of {BLOCK_SIZES}")
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype is {self.dtype}: it must be one of {', '.join(map(str, FLOAT_DTYPES))}")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_values(self) -> int:
        """Numbers of a value, and of a head of the output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def num_rest(self) -> int:
        """Numbers at the end of a key that have a tile of their own: of a latent key, those after its value."""
        return self.head_dim - self.num_values if self.is_latent else 0

    @property
    def padded_key_dims(self) -> tuple[int, int]:
        """Sizes of the tile dimensions that hold the first part of a key and its rest, 0 if there is none."""
        return padded_dim(self.head_dim - self.num_rest), padded_dim(self.num_rest) if self.num_rest else 0

    @property
    def padded_value_dim(self) -> int:
        """Size of the tile dimension that holds a value: at least `MIN_VALUE_COLUMNS`, or that of the key that it is part of."""
        return self.padded_key_dims[0] if self.is_latent else max(padded_dim(self.num_values), MIN_VALUE_COLUMNS)

    def tiles(self, max_query_len: int | None, device: torch.device) -> TileConfig:
        """Return the tiles of queries up to this length; ``None``: of any."""
        max_rows = None if max_query_len is None else max_query_len * self.group
        return tile_config(max_rows, head_dim=sum(self.padded_key_dims), dtype=self.dtype, device=device)


def padded_dim(size: int) -> int:
    """Return the size of the tile dimension that holds this many numbers."""
    return max(16, int(triton.next_power_of_2(size)))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayout:
    """The contents of `titan.core.batch.AttentionLayout`, on the device.

    A query row sees slot ``n`` of its request if ``n < visible_len``, or if bit ``n - tree_start`` of its ancestor bits is
    set. A window hides slots at or below ``position - window`` that are visible by the first rule, and all but the nearest
    ``window`` ancestors; that of a `titan.core.attention.Chunk` is ``position % size + 1``.

    From row to row of a request ``visible_lens`` must grow by 0 or 1, and no position may be less than ``visible_len - 1``. Below
    ``seq_len``, all slots that are within the window of the first row or a later one must hold finite numbers, visible or not.
    """

    block_size: int  # slots of a KV block
    query_start_loc: Tensor  # int32 [R + 1], prefix sums of query lengths, which may be 0; rows from the last on are padding
    seq_lens: Tensor  # int32 [R], slots that the queries of a request may read, their own included
    block_table: Tensor  # int32 [R, blocks], physical block ids
    positions: Tensor  # int32 or int64 [T], rope positions
    visible_lens: Tensor  # int32 [T]
    tree_starts: Tensor  # int32 [R], slot of node 0
    ancestor_bits: Tensor  # int64 [T]
    # queries up to this length get small tiles, and may have ancestor bits: 1 + nodes of a tree, or 1; longer ones are prefill
    # chunks, and their bits are taken to be 0
    short_query_len: int
    max_query_len: int  # no query may be longer: buffers are allocated for queries up to this length


@dataclass(frozen=True, slots=True, eq=False)
class TileLaunch:
    """One launch of the attention kernel and its merge."""

    config: TileConfig
    num_running: int  # programs at a time
    tiles: Tensor  # int32 [at most, TILE_FIELDS]
    merges: Tensor  # int32 [at most, MERGE_FIELDS]
    counts: Tensor  # int32 [2], actual numbers of tiles and merges
    part_outputs: Tensor  # float32 [parts, num_kv_heads, block_m, num_values], each normalised by itself
    part_log_sums: Tensor  # float32 [parts, num_kv_heads, block_m], base 2
    ancestor_bits: Tensor | None  # int64 [T], cut to the window; None: prefill chunks, without tree nodes
