"""Plans paged tree attention on the device: which program attends from which rows of which request to which slots.

The query rows of a request are its tokens times the query heads of one KV head: row ``token * group + g`` of KV head ``k`` is
query head ``k * group + g`` of that token. A tile is up to ``block_m`` consecutive rows. When few tiles would leave most of the
device idle, their slots are split into chunks of one length, and the parts are merged afterwards (flash decoding: Dao et al.,
2023). As all requests share the chunk length, a plan follows from a few sums over requests.

Nothing here synchronizes, and every size follows from shapes and from numbers that the host knows: planning can be captured in a
CUDA graph and replayed with other lengths. One plan serves all layers of a step that have equal shapes and windows.

Legend: T query tokens, padded ones included; R requests; G query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.attention import Window, window_length
from titan.core.limits import MAX_NODES
from titan.kernels.triton.attention_plan import (
    MERGE_FIELDS,
    TILE_FIELDS,
    AttentionGeometry,
    DeviceLayout,
    TileLaunch,
    store_merges,
    store_tiles,
    window_number,
    window_sizes,
)
from titan.kernels.triton.tools import require_launchable
from titan.kernels.triton.tuning import TileConfig, num_multiprocessors

PARTS_PER_RUNNING_PROGRAM = 8
"""Most parts of split tiles per program that runs at a time: the tiles of up to four rounds of programs can be halved, so that the
last round leaves less of the device idle. On 132 multiprocessors the parts of a launch take at most 66 MiB for values of 128
numbers, and 132 MiB for larger ones."""
PARTS_PER_TILE = 8
"""Most parts per tile, beside one per program that runs at a time: contexts of like lengths never need more, and each part
that there is room for is a program of each layer, if an empty one."""
SATURATING_PROGRAMS = 5 / 3
"""Programs per multiprocessor whose loads take all of the memory's bandwidth; fitted to an H200."""
MIN_CHUNK = tl.constexpr(128)
"""The shortest chunk that the planner chooses, in slots."""
CHUNK_MULTIPLE = 16
"""A fixed chunk is a multiple of this many slots."""
MAX_WINDOW = 2**30

NUM_CHOICES = tl.constexpr(32)  # chunk lengths to choose from
CHOICES_AT_A_TIME = tl.constexpr(8)
# fitted to an H200, for all devices; in slots: the time that a program alone takes for one more, 20 ns for heads of 128
PROGRAM_COST = tl.constexpr(400)  # of starting and ending a program
MERGED_ROWS = tl.constexpr(16)  # rows of split tiles, of all heads, that are merged in the time of a slot
SPLIT_COST = tl.constexpr(3)  # of a part to the merge that reads it
REFUSED_COST = tl.constexpr(2**40)


@triton.jit
def _first_slots(visible_lens, window):
    """Return the first slots that tokens may see; no position is below the last slot that is visible by length."""
    positions = tl.maximum(visible_lens - 1, 0)
    return tl.maximum(positions + 1 - window_sizes(positions, window), 0)


@triton.jit(do_not_specialize=["num_tokens", "window"])
def _nearest_ancestors_kernel(kept_bits_ptr, ancestor_bits_ptr, positions_ptr, num_tokens, window, BLOCK: tl.constexpr):
    """Keep as many of the highest bits set as the window has positions: the nearest ancestors, as parents come before children."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(ancestor_bits_ptr + tokens, mask=tokens < num_tokens, other=0)
    positions = tl.load(positions_ptr + tokens, mask=tokens < num_tokens, other=0)
    sizes = window_sizes(positions, window)
    kept = tl.zeros_like(bits)
    count = tl.zeros_like(bits)
    for i in range(64):
        bit = (bits >> (63 - i)) & 1
        kept |= tl.where(count < sizes, bit, 0) << (63 - i)
        count += bit
    tl.store(kept_bits_ptr + tokens, kept, mask=tokens < num_tokens)


@triton.jit
def _chunk_of(choice, most_slots, BLOCK_N: tl.constexpr):
    """Return the chunk length that cuts the most slots into 1, 1.25, 1.5, 1.75, 2, 2.5, ... parts, whole iterations long."""
    quarters = (4 + choice % 4) << (choice // 4)
    return tl.maximum(tl.cdiv(4 * most_slots, quarters * BLOCK_N) * BLOCK_N, MIN_CHUNK)


@triton.jit
def _choose_chunk(
    num_tiles,  # [BLOCK_R]
    num_slots,  # [BLOCK_R]
    num_running,
    num_saturating,
    max_parts,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the chunk length, int32, with the earliest estimated end.

    The last program ends no earlier than the memory, or the programs at a time, can do the work, or than the longest program;
    if not all run at once, it may start late. Results of parts are written and read in float32: each costs as much memory
    traffic as twice ``BLOCK_M`` slots in 16 bits.
    """
    most_slots = tl.max(tl.where(num_tiles > 0, num_slots, 0), axis=0)
    num_tiles, num_slots = num_tiles[:, None].to(tl.int64), num_slots[:, None]
    all_slots = tl.sum(num_tiles * num_slots, axis=0)
    best = tl.full([], REFUSED_COST * NUM_CHOICES, tl.int64)
    for first_choice in range(0, NUM_CHOICES, CHOICES_AT_A_TIME):
        choices = first_choice + tl.arange(0, CHOICES_AT_A_TIME)
        chunks = _chunk_of(choices, most_slots, BLOCK_N)
        splits = tl.maximum(tl.cdiv(num_slots, chunks[None, :]), 1)
        num_programs = tl.sum(num_tiles * splits, axis=0) * NUM_KV_HEADS
        parts = tl.sum(tl.where(splits > 1, num_tiles * splits, 0), axis=0)
        merges = tl.sum(tl.where(splits > 1, num_tiles, 0), axis=0)
        longest = tl.minimum(chunks, most_slots) + PROGRAM_COST
        traffic = (all_slots + 2 * BLOCK_M * parts) * NUM_KV_HEADS // num_saturating + PROGRAM_COST
        occupancy = (PROGRAM_COST * num_programs + all_slots * NUM_KV_HEADS) // num_running
        cost = tl.maximum(tl.maximum(traffic, occupancy), longest) + tl.where(num_programs > num_running, longest // 2, 0)
        most_splits = tl.max(tl.where((splits > 1) & (num_tiles > 0), splits, 0), axis=0)
        cost += merges * NUM_KV_HEADS * BLOCK_M // MERGED_ROWS + SPLIT_COST * most_splits
        cost = tl.where(parts <= max_parts, cost, REFUSED_COST)
        best = tl.minimum(best, tl.min(cost * NUM_CHOICES + choices, axis=0))  # ties go to the fewest parts
    return _chunk_of((best % NUM_CHOICES).to(tl.int32), most_slots, BLOCK_N)


@triton.jit(
    do_not_specialize=["num_requests", "short_query_len", "window", "fixed_chunk", "num_running", "num_saturating", "max_parts"]
)
def _plan_kernel(
    tiles_ptr,  # [at most, TILE_FIELDS]
    merges_ptr,  # [at most, MERGE_FIELDS]
    counts_ptr,  # [2]
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    visible_lens_ptr,  # [T]
    num_requests,
    short_query_len,
    window,  # see `window_number`
    fixed_chunk,  # None: it is chosen
    num_running,  # programs at a time
    num_saturating,  # programs that take all of the memory's bandwidth
    max_parts,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE: tl.constexpr,  # the launch of short queries
    BLOCK_R: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Write all records of a launch, in one program. Whole chunks come first, so that the last programs to start are short."""
    requests = tl.arange(0, BLOCK_R)
    exists = requests < num_requests
    first_tokens = tl.load(query_start_loc_ptr + requests, mask=exists, other=0)
    query_lens = tl.load(query_start_loc_ptr + requests + 1, mask=exists, other=0) - first_tokens
    if TREE:
        num_rows = tl.where(query_lens <= short_query_len, query_lens, 0) * GROUP
    else:
        num_rows = tl.where(query_lens > short_query_len, query_lens, 0) * GROUP
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    seq_lens = tl.load(seq_lens_ptr + requests, mask=num_rows > 0, other=0)

    num_slots = seq_lens  # the most that a tile reads
    if window is not None:
        if TREE:
            first_visible_lens = tl.load(visible_lens_ptr + first_tokens, mask=num_rows > 0, other=0)
            num_slots = seq_lens - _first_slots(first_visible_lens, window)
        else:
            num_slots = tl.minimum(seq_lens, tl.abs(window) + (BLOCK_M + GROUP - 2) // GROUP)
    chunk = fixed_chunk
    if fixed_chunk is None:
        chunk = _choose_chunk(num_tiles, num_slots, num_running, num_saturating, max_parts, NUM_KV_HEADS, BLOCK_M, BLOCK_N)

    splits = tl.maximum(tl.cdiv(num_slots, chunk), 1)
    full_splits = num_slots // chunk
    num_items = num_tiles * splits
    is_split = splits > 1
    num_full = num_tiles * full_splits
    num_rest = num_items - num_full
    full_places = tl.cumsum(num_full) - num_full
    rest_places = tl.sum(num_full, axis=0) + tl.cumsum(num_rest) - num_rest
    num_parts = tl.where(is_split, num_items, 0)
    part_places = tl.cumsum(num_parts) - num_parts
    num_merges = tl.where(is_split, num_tiles, 0)
    merge_places = tl.cumsum(num_merges) - num_merges
    tl.store(counts_ptr, tl.sum(num_items, axis=0))
    tl.store(counts_ptr + 1, tl.sum(num_merges, axis=0))

    for first_item in range(0, tl.max(num_items, axis=0), ITEMS):
        items = first_item + tl.arange(0, ITEMS)[None, :]
        is_item = items < num_items[:, None]
        tile = items // splits[:, None]
        split = items % splits[:, None]
        first_row = first_tokens[:, None] * GROUP + tile * BLOCK_M
        rows = tl.minimum(num_rows[:, None] - tile * BLOCK_M, BLOCK_M)
        first_slot = tl.zeros_like(items)
        end_slot = seq_lens[:, None]
        if window is not None:
            visible_lens = tl.load(visible_lens_ptr + first_row // GROUP, mask=is_item, other=0)
            first_slot = _first_slots(visible_lens, window)
        if not TREE:
            end_slot = tl.load(visible_lens_ptr + (first_row + rows - 1) // GROUP, mask=is_item, other=0)
        first_slot = tl.minimum(first_slot + split * chunk, end_slot)
        part = part_places[:, None] + items
        is_full = split < full_splits[:, None]
        full_place = full_places[:, None] + tile * full_splits[:, None] + split
        places, end = tl.where(is_full, full_place, rest_places[:, None] + tile), tl.minimum(first_slot + chunk, end_slot)
        part_place = tl.where(is_split[:, None], part, -1)
        store_tiles(tiles_ptr, places, requests[:, None], first_row, rows, first_slot, end, part_place, is_item)

        is_merge = is_item & is_split[:, None] & (split == 0)
        store_merges(merges_ptr, merge_places[:, None] + tile, first_row, rows, part, splits[:, None], is_merge)


class TreeAttentionPlan:
    """The attention of one ragged batch, planned on the device when the first layer of a kind asks for it.

    All shapes and numbers are static: they must be the same when a CUDA graph is replayed. The contents of the tensors may change.

    Args:
        layout: of the batch.
        fixed_chunk: split contexts into chunks of this many slots, a multiple of `CHUNK_MULTIPLE`, whatever the batch, so that a
            request's output does not depend on the others, bit for bit, for the same ``short_query_len``. Room for all parts is
            allocated in advance.

    Raises:
        ValueError: no device that Triton kernels run on now.
    """

    def __init__(self, layout: DeviceLayout, fixed_chunk: int | None = None) -> None:
        require_launchable("query_start_loc", layout.query_start_loc.device)
        self.layout = layout
        self._fixed_chunk = fixed_chunk
        self._launches: dict[tuple[AttentionGeometry, Window], list[TileLaunch]] = {}

    def launches(self, geometry: AttentionGeometry, window: Window) -> Sequence[TileLaunch]:
        """Return the launches of layers: verification tiles, then those of prefill chunks if there are any.

        Raises:
            ValueError: more query rows than can be counted, or a window that is not positive or too long.
        """
        if (geometry, window) not in self._launches:
            self._launches[geometry, window] = self._plan(geometry, window)
        return self._launches[geometry, window]

    def _plan(self, geometry: AttentionGeometry, window: Window) -> list[TileLaunch]:
        layout = self.layout
        num_tokens, num_requests = len(layout.positions), len(layout.seq_lens)
        if num_tokens * geometry.num_heads >= 2**31:
            raise ValueError(f"positions has {num_tokens} tokens: with {geometry.num_heads} heads there must be 1 to 2**31 rows")
        if window is not None and not 1 <= window_length(window) <= MAX_WINDOW:
            raise ValueError(f"window is {window}: it must be None or from 1 to {MAX_WINDOW}")
        short_query_len, max_query_len = layout.short_query_len, min(layout.max_query_len, num_tokens)
        config, bits = geometry.tiles(short_query_len, layout.positions.device), _within_window(layout, window)
        launches = [self._launch(geometry, window, config, num_requests, min(short_query_len, num_tokens), bits)]
        if max_query_len > short_query_len:
            config, num_long = geometry.tiles(None, layout.positions.device), min(num_requests, num_tokens // (short_query_len + 1))
            launches.append(self._launch(geometry, window, config, num_long, max_query_len, None))
        return launches

    def _launch(
        self,
        geometry: AttentionGeometry,
        window: Window,
        config: TileConfig,
        max_requests: int,
        max_query_len: int,
        ancestor_bits: Tensor | None,
    ) -> TileLaunch:
        """Allocate a launch with room for the most tiles and parts of so many requests, and write its records."""
        layout, fixed_chunk, device = self.layout, self._fixed_chunk, self.layout.positions.device
        num_requests, num_kv_heads, block_m = len(layout.seq_lens), geometry.num_kv_heads, config.block_m
        # with rows that requests leave empty in their last tiles
        num_rows = len(layout.positions) * geometry.group + max_requests * (block_m - 1)
        max_tiles = min(max_requests * -(-max_query_len * geometry.group // block_m), num_rows // block_m)
        num_running = config.programs_per_multiprocessor * num_multiprocessors(device)
        max_splits = triton.cdiv(layout.block_table.shape[1] * layout.block_size, fixed_chunk or MIN_CHUNK.value)
        max_parts = max_tiles * max_splits if max_splits > 1 else 0
        if fixed_chunk is None:
            few = triton.cdiv(num_running, num_kv_heads) + PARTS_PER_TILE * max_tiles
            max_parts = min(max_parts, few, triton.cdiv(PARTS_PER_RUNNING_PROGRAM * num_running, num_kv_heads))
        launch = TileLaunch(
            config=config,
            num_running=num_running,
            tiles=torch.empty(max_tiles + max_parts, TILE_FIELDS.value, dtype=torch.int32, device=device),
            merges=torch.empty(min(max_parts // 2, max_tiles), MERGE_FIELDS.value, dtype=torch.int32, device=device),
            counts=torch.empty(2, dtype=torch.int32, device=device),
            part_outputs=torch.empty(max_parts, num_kv_heads, block_m, geometry.num_values, dtype=torch.float32, device=device),
            part_log_sums=torch.empty(max_parts, num_kv_heads, block_m, dtype=torch.float32, device=device),
            ancestor_bits=ancestor_bits,
        )
        block_r = max(16, triton.next_power_of_2(num_requests))
        num_warps = min(16, max(4, block_r // 16))
        _plan_kernel[(1,)](
            launch.tiles,
            launch.merges,
            launch.counts,
            layout.query_start_loc,
            layout.seq_lens,
            layout.visible_lens,
            num_requests,
            layout.short_query_len,
            window_number(window),
            fixed_chunk,
            num_running,
            int(SATURATING_PROGRAMS * num_multiprocessors(device)),
            max_parts,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=geometry.group,
            BLOCK_M=block_m,
            BLOCK_N=config.block_n,
            TREE=ancestor_bits is not None,
            BLOCK_R=block_r,
            ITEMS=128 * num_warps // block_r,
            num_warps=num_warps,
        )
        return launch


def _within_window(layout: DeviceLayout, window: Window) -> Tensor:
    """Return ancestor bits without those that the window hides, int64 [T]."""
    bits = layout.ancestor_bits
    number = window_number(window)
    if number is None or number > MAX_NODES:
        return bits
    kept = torch.empty_like(bits)
    num_tokens, block = len(bits), 256
    _nearest_ancestors_kernel[(triton.cdiv(num_tokens, block),)](kept, bits, layout.positions, num_tokens, number, BLOCK=block)
    return kept
