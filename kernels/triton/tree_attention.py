"""Ragged tree attention over paged KV blocks in Triton: prefill chunks, decodes and verifications of all requests at once.

It is planned by `attention_planner`, which states what is visible. A program processes one tile of rows, which the query heads of
one KV head share, over one range of slots, with the softmax of Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018, in base 2. A tile whose slots are split yields parts, each normalised, with the logarithm of its sum; a second
kernel merges them in the order of their slots, and zeroes the padded rows.

Quantised keys and values are the integers of their blocks, which are exact in the dtype of the model; the scales of keys multiply
scores, those of values the weights. Latent keys are loaded once, in two parts, the first of which is the value.

A sink is a score that no value belongs to: it is what the softmax of a whole tile, and the merge of a split one, begin with.

Products of bfloat16 or float16 are summed in float32, and everything between them is computed in float32; float32 is multiplied in
float32. Slots are in memory at ``block * block_size + offset`` of a KV head; block offsets are 64-bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.attention import AttentionSpec
from titan.kernels.triton.attention_plan import MERGE_FIELDS, AttentionGeometry, load_tile, window_number, window_sizes
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.tools import FLOAT_DTYPES, dot, kv_arguments, narrow, require, require_launchable

MERGED_PARTS = tl.constexpr(16)
"""Parts that are read at a time."""
ZEROED_NUMBERS = tl.constexpr(1024)
"""Elements of padded rows that are zeroed at a time."""
MERGE_PROGRAMS_PER_RUNNING_PROGRAM = 4

LOG2_E = tl.constexpr(math.log2(math.e))
"""Scores are computed in powers of two."""


@triton.jit(do_not_specialize=["stride_block_table", "window"])
def _attention_kernel(
    output_ptr,  # [T, NUM_KV_HEADS * GROUP * VALUE_DIM]
    part_outputs_ptr,  # [parts, NUM_KV_HEADS, BLOCK_M, VALUE_DIM]
    part_log_sums_ptr,  # [parts, NUM_KV_HEADS, BLOCK_M]
    q_ptr,  # [T, NUM_KV_HEADS * GROUP, HEAD_DIM]
    sinks_ptr,  # [NUM_KV_HEADS * GROUP], or None
    kv_ptr,  # [planes, NUM_KV_HEADS, blocks, BLOCK_SIZE, HEAD_DIM]; one plane: values are the first numbers of keys
    scales_ptr,  # [planes, NUM_KV_HEADS, blocks, BLOCK_SIZE], or None if keys and values are not quantised
    tiles_ptr,
    counts_ptr,
    block_table_ptr,  # [R, blocks]
    positions_ptr,  # [T]
    visible_lens_ptr,  # [T]
    ancestor_bits_ptr,  # [T]
    tree_starts_ptr,  # [R]
    stride_q_token,
    stride_q_head,
    stride_kv,
    stride_kv_head,
    stride_kv_block,
    stride_kv_slot,
    stride_scales,
    stride_scales_head,
    stride_scales_block,
    stride_block_table,
    scale,
    softcap,  # None: scores stay
    window,  # see `window_number`
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LATENT: tl.constexpr,  # whether there is one plane
    TREE: tl.constexpr,
):
    """One program per tile and KV head, heads innermost, since they share block ids; programs beyond the tiles do nothing."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # the record, for which there is room, is read beside the number of tiles, not after it; no part is below -1, but else the
    # compiler moves all of its loads after the return
    request, first_row, num_rows, first_slot, end_slot, part = load_tile(tiles_ptr, tile)
    if (tile >= tl.load(counts_ptr)) | (part < -1):
        return

    tile_rows = tl.arange(0, BLOCK_M)
    is_row = tile_rows < num_rows
    rows = first_row + tile_rows
    tokens = (rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    REST_DIM: tl.constexpr = HEAD_DIM - VALUE_DIM if LATENT else 0  # numbers at the end of a key that are no part of its value
    KEY_DIM: tl.constexpr = HEAD_DIM - REST_DIM
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    is_number = is_row[:, None]
    if KEY_DIM != BLOCK_D:
        is_number = is_number & (dims[None, :] < KEY_DIM)
    q_places = (tokens * stride_q_token + heads * stride_q_head)[:, None]
    q = tl.load(q_ptr + q_places + dims[None, :], mask=is_number, other=0.0)
    q_rest = q
    if REST_DIM > 0:
        rest_dims = tl.arange(0, BLOCK_REST)
        is_number_of_rest = is_row[:, None] & (rest_dims[None, :] < REST_DIM)
        q_rest = tl.load(q_ptr + q_places + KEY_DIM + rest_dims[None, :], mask=is_number_of_rest, other=0.0)

    visible_lens = tl.load(visible_lens_ptr + tokens, mask=is_row, other=0)
    hidden_slots = visible_lens  # the last slots before the window
    if window is not None:
        positions = tl.load(positions_ptr + tokens, mask=is_row, other=0).to(tl.int32)
        hidden_slots = positions - window_sizes(positions, window)
    ancestor_bits = visible_lens
    tree_start = 0
    if TREE:
        ancestor_bits = tl.load(ancestor_bits_ptr + tokens, mask=is_row, other=0)
        tree_start = tl.load(tree_starts_ptr + request)

    kv_ptr += kv_head.to(tl.int64) * stride_kv_head
    values_ptr = kv_ptr + stride_kv
    if scales_ptr is not None:
        scales_ptr += kv_head.to(tl.int64) * stride_scales_head
        value_scales_ptr = scales_ptr + stride_scales
    block_ids_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    # of integers, whose scales make the weights so small that float16 would lose them
    VALUE_DTYPE: tl.constexpr = tl.bfloat16 if q_ptr.dtype.element_ty == tl.float16 else q_ptr.dtype.element_ty
    output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)  # the weighted values of the slots so far
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)  # their largest scores
    total = tl.zeros([BLOCK_M], tl.float32)  # the sums of their weights
    if sinks_ptr is not None:
        if part < 0:
            largest = tl.load(sinks_ptr + heads, mask=is_row, other=0.0) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    # between the window of the last row and the first row's own slot, all rows see all slots
    num_hidden = 0
    if window is not None:
        num_hidden = tl.maximum(tl.max(hidden_slots, axis=0) + 1 - first_slot, 0)
    seen_slot = first_slot + tl.cdiv(num_hidden, BLOCK_N) * BLOCK_N
    in_sight = tl.minimum(tl.load(visible_lens_ptr + first_row // GROUP), end_slot) - seen_slot
    num_seen = tl.maximum(in_sight, 0) // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(2):  # first those slots, in whole iterations, then the slots before and after them
        first, end = seen_slot, seen_slot + num_seen
        if MASKED:
            first, end = first_slot, end_slot - num_seen
        for step in range(first, end, BLOCK_N):
            start = step
            if MASKED:
                start = step + tl.where(step < seen_slot, 0, num_seen)
            slots = start + tl.arange(0, BLOCK_N)
            is_slot = (slots < end_slot) | (not MASKED)
            block_ids = tl.load(block_ids_ptr + slots // BLOCK_SIZE, mask=is_slot, other=0).to(tl.int64)
            places = (block_ids * stride_kv_block + slots % BLOCK_SIZE * stride_kv_slot)[:, None]
            is_loaded = is_slot[:, None]
            if KEY_DIM != BLOCK_D:
                is_loaded = is_loaded & (dims[None, :] < KEY_DIM)
            keys = tl.load(kv_ptr + places + dims[None, :], mask=is_loaded, other=0)
            if scales_ptr is not None:
                keys = narrow(keys.to(tl.float32), q.dtype)
            scores = dot(q, tl.trans(keys))
            if REST_DIM > 0:
                is_rest = is_slot[:, None]
                if REST_DIM != BLOCK_REST:
                    is_rest = is_rest & (rest_dims[None, :] < REST_DIM)
                rest = tl.load(kv_ptr + places + KEY_DIM + rest_dims[None, :], mask=is_rest, other=0)
                if scales_ptr is not None:
                    rest = narrow(rest.to(tl.float32), q.dtype)
                scores += dot(q_rest, tl.trans(rest))
            scores = scores * scale
            if scales_ptr is not None:
                scale_places = block_ids * stride_scales_block + slots % BLOCK_SIZE
                key_scales = tl.load(scales_ptr + scale_places, mask=is_slot, other=0.0)
                scores = scores * key_scales[None, :]
            if softcap is not None:
                scores = softcap * (1 - 2 / (1 + tl.exp2(scores)))
            if MASKED:
                is_visible = slots[None, :] < visible_lens[:, None]
                if window is not None:
                    is_visible = is_visible & (slots[None, :] > hidden_slots[:, None])
                if TREE:
                    nodes = slots - tree_start
                    shifts = tl.minimum(tl.maximum(nodes, 0), 63).to(tl.int64)  # other shifts are undefined
                    is_ancestor = (ancestor_bits[:, None] >> shifts[None, :]) & 1 == 1
                    is_visible = is_visible | (is_ancestor & ((nodes >= 0) & (nodes < 64))[None, :])
                scores = tl.where(is_visible & is_slot[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            reference = new_largest
            if MASKED:
                reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet
            weights = tl.exp2(scores - reference[:, None])
            decay = tl.exp2(largest - reference)
            total = total * decay + tl.sum(weights, axis=1)
            if not LATENT:
                is_value = is_slot[:, None]
                if VALUE_DIM != BLOCK_V:
                    is_value = is_value & (value_dims[None, :] < VALUE_DIM)
                values = tl.load(values_ptr + places + value_dims[None, :], mask=is_value, other=0)
                if scales_ptr is not None:
                    values = narrow(values.to(tl.float32), VALUE_DTYPE)
                    weights = weights * tl.load(value_scales_ptr + scale_places, mask=is_slot, other=0.0)[None, :]
            else:
                values = keys
                if scales_ptr is not None:
                    values = narrow(keys.to(tl.float32), VALUE_DTYPE)
                    weights = weights * key_scales[None, :]
            output = output * decay[:, None] + dot(narrow(weights, values.dtype), values)
            largest = new_largest

    has_seen = total > 0
    output = output / tl.where(has_seen, total, 1.0)[:, None]
    is_stored = is_row[:, None]
    if VALUE_DIM != BLOCK_V:
        is_stored = is_stored & (value_dims[None, :] < VALUE_DIM)
    if part < 0:
        places = tokens * (NUM_KV_HEADS * GROUP * VALUE_DIM) + heads * VALUE_DIM
        numbers = narrow(output, output_ptr.dtype.element_ty)
        tl.store(output_ptr + places[:, None] + value_dims[None, :], numbers, mask=is_stored)
    else:
        places = (part.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + tile_rows
        tl.store(part_outputs_ptr + places[:, None] * VALUE_DIM + value_dims[None, :], output, mask=is_stored)
        log_sums = tl.where(has_seen, largest + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
        tl.store(part_log_sums_ptr + places, log_sums, mask=is_row)


@triton.jit(do_not_specialize=["num_requests", "num_numbers"])
def _merge_kernel(
    output_ptr,  # [T, NUM_KV_HEADS * GROUP * VALUE_DIM]
    part_outputs_ptr,  # [parts, NUM_KV_HEADS, BLOCK_M, VALUE_DIM]
    part_log_sums_ptr,  # [parts, NUM_KV_HEADS, BLOCK_M]
    sinks_ptr,  # [NUM_KV_HEADS * GROUP], or None
    merges_ptr,
    counts_ptr,
    query_start_loc_ptr,  # [num_requests + 1]; None: this launch does not zero the padded rows
    num_requests,
    num_numbers,  # of the output
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A fixed number of programs shares the rows of all merges, so that a step without merges costs next to nothing."""
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    TOKEN: tl.constexpr = NUM_KV_HEADS * GROUP * VALUE_DIM
    dims = tl.arange(0, BLOCK_V)
    num_units = tl.load(counts_ptr + 1) * (NUM_KV_HEADS * BLOCK_M)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        tile_row = unit % BLOCK_M
        kv_head = unit // BLOCK_M % NUM_KV_HEADS
        record = merges_ptr + unit // (BLOCK_M * NUM_KV_HEADS) * MERGE_FIELDS
        if tile_row < tl.load(record + 1):  # see `store_merges`
            row, first_part, num_parts = tl.load(record) + tile_row, tl.load(record + 2), tl.load(record + 3)
            output = tl.zeros([BLOCK_V], tl.float32)
            largest = tl.full([], float("-inf"), tl.float32)
            total = tl.zeros([], tl.float32)
            head = kv_head * GROUP + row % GROUP
            if sinks_ptr is not None:
                largest = tl.load(sinks_ptr + head) * LOG2_E
                total = tl.full([], 1.0, tl.float32)
            for first in range(0, num_parts, MERGED_PARTS):
                parts = first + tl.arange(0, MERGED_PARTS)
                is_part = parts < num_parts
                places = ((first_part + parts).to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + tile_row
                log_sums = tl.load(part_log_sums_ptr + places, mask=is_part, other=float("-inf"))
                is_loaded = is_part[:, None] & (dims[None, :] < VALUE_DIM)
                outputs = tl.load(part_outputs_ptr + places[:, None] * VALUE_DIM + dims[None, :], mask=is_loaded, other=0.0)
                new_largest = tl.maximum(largest, tl.max(log_sums, axis=0))
                reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
                weights = tl.exp2(log_sums - reference)
                decay = tl.exp2(largest - reference)
                total = total * decay + tl.sum(weights, axis=0)
                output = output * decay + tl.sum(outputs * weights[:, None], axis=0)
                largest = new_largest
            output = output / tl.where(total > 0, total, 1.0)
            place = (row // GROUP).to(tl.int64) * TOKEN + head * VALUE_DIM
            tl.store(output_ptr + place + dims, narrow(output, DTYPE), mask=dims < VALUE_DIM)
    if query_start_loc_ptr is not None:
        first_number = tl.load(query_start_loc_ptr + num_requests).to(tl.int64) * TOKEN
        first_number += tl.program_id(0) * ZEROED_NUMBERS
        for first in range(first_number, num_numbers, tl.num_programs(0) * ZEROED_NUMBERS):
            numbers = first + tl.arange(0, ZEROED_NUMBERS)
            tl.store(output_ptr + numbers, tl.zeros([ZEROED_NUMBERS], DTYPE), mask=numbers < num_numbers)


def tree_attention(
    q: Tensor,
    kv_layer: Tensor,
    plan: TreeAttentionPlan,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from every query row to the slots it sees; padded rows are exactly 0. See `titan.kernels.interfaces.LayerOps`.

    Raises:
        ValueError: names the argument, its value and what is expected.
    """
    layout, scale, softcap = plan.layout, spec.scale, spec.softcap
    num_tokens, device = len(layout.positions), layout.positions.device
    require_launchable("plan", device)
    require("q", q, shape=(num_tokens, None, None), dtypes=FLOAT_DTYPES, device=device, contiguous=False)
    num_heads, head_dim = q.shape[1:]
    numbers, scales, kv_strides = kv_arguments(kv_layer, head_dim)
    shape = (None, None, None, layout.block_size, head_dim)
    require("kv_layer", numbers, shape=shape, dtypes=(q.dtype, torch.int8), device=device, contiguous=False)
    num_planes, num_kv_heads = numbers.shape[:2]
    if num_planes not in (1, 2):
        raise ValueError(f"kv_layer has {num_planes} planes: it must have 2, keys and values, or 1, keys")
    if sinks is not None:
        require("sinks", sinks, shape=(num_heads,), dtypes=(torch.float32,), device=device)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}: it must be positive")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap}: it must be positive, or None")

    geometry = AttentionGeometry(
        num_heads, num_kv_heads, head_dim, layout.block_size, q.dtype, spec.value_dim, is_latent=num_planes == 1
    )
    output = q.new_empty(num_tokens, num_heads * geometry.num_values)
    for launch in plan.launches(geometry, spec.window):
        config, has_nodes, (block_d, block_rest) = launch.config, launch.ancestor_bits is not None, geometry.padded_key_dims
        results = output, launch.part_outputs, launch.part_log_sums
        sizes = {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": geometry.group,
            "VALUE_DIM": geometry.num_values,
            "BLOCK_M": config.block_m,
            "BLOCK_V": geometry.padded_value_dim,
        }
        # with a cap, scores are twice the argument of tanh, in powers of two: tanh(x) = 1 - 2 / (1 + e ** 2x)
        _attention_kernel[(len(launch.tiles) * num_kv_heads,)](
            *results,
            q,
            sinks,
            numbers,
            scales,
            launch.tiles,
            launch.counts,
            layout.block_table,
            layout.positions,
            layout.visible_lens,
            launch.ancestor_bits,
            layout.tree_starts,
            q.stride(0),
            q.stride(1),
            *kv_strides,
            layout.block_table.stride(0),
            scale * LOG2_E.value if softcap is None else 2 * scale / softcap * LOG2_E.value,
            None if softcap is None else softcap * LOG2_E.value,
            window_number(spec.window),
            **sizes,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=layout.block_size,
            BLOCK_N=config.block_n,
            BLOCK_D=block_d,
            BLOCK_REST=block_rest,
            LATENT=num_planes == 1,
            TREE=has_nodes,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        num_merged = len(launch.merges) * num_kv_heads * config.block_m  # rows
        num_useful = max(num_merged, triton.cdiv(output.numel(), ZEROED_NUMBERS))
        _merge_kernel[(min(num_useful, MERGE_PROGRAMS_PER_RUNNING_PROGRAM * launch.num_running),)](
            *results,
            sinks,
            launch.merges,
            launch.counts,
            layout.query_start_loc if has_nodes else None,
            len(layout.tree_starts),
            output.numel(),
            **sizes,
            num_warps=1 if geometry.padded_value_dim <= 128 else 4,  # one warp holds so many parts of a row of 128
        )
    return output
