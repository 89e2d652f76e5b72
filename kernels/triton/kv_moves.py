"""Moves, copies and clearing of paged KV over all layers, each in one launch.

A cache is one tensor ``[num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim]``, of which only the last dimension must
be contiguous. A plane is what one layer holds of the keys, or of the values, of one head: every program works in one plane.
Bits are copied, so that NaN and infinities arrive as they left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.limits import MAX_NODES
from titan.kernels.triton.tools import FLOAT_DTYPES, require, require_launchable

MAX_PATH = MAX_NODES + 1
"""One program holds a whole path in its registers."""

TILE_ELEMENTS = 2048
"""What one program copies or clears at a time."""


@triton.jit
def _find_plane(kv_ptr, plane, stride_layer, stride_kv, stride_head, NUM_KV_HEADS: tl.constexpr):
    """Where a plane begins; the heads' planes come first, then those of keys and values, then those of the layers."""
    plane = plane.to(tl.int64)
    layer, kv, head = plane // (2 * NUM_KV_HEADS), plane // NUM_KV_HEADS % 2, plane % NUM_KV_HEADS
    return kv_ptr + layer * stride_layer + kv * stride_kv + head * stride_head


@triton.jit(do_not_specialize=["stride_block_table", "stride_paths"])
def _move_paths_kernel(
    kv_ptr,  # [num_layers, 2, NUM_KV_HEADS, num_blocks, BLOCK_SIZE, HEAD_DIM]
    block_table_ptr,  # [S, max_blocks]
    first_slots_ptr,  # [S]
    paths_ptr,  # [S, max_path]
    num_accepted_ptr,  # [S]
    stride_layer,
    stride_kv,
    stride_head,
    stride_block,
    stride_offset,
    stride_block_table,
    stride_paths,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PATH: tl.constexpr,  # max_path, padded to a power of two
    COLUMNS: tl.constexpr,  # HEAD_DIM, padded to a power of two
):
    """One program per request and plane."""
    request = tl.program_id(0).to(tl.int64)
    plane_ptr = _find_plane(kv_ptr, tl.program_id(1), stride_layer, stride_kv, stride_head, NUM_KV_HEADS)
    targets = tl.arange(0, PATH)
    is_accepted = targets < tl.load(num_accepted_ptr + request)
    sources = tl.load(paths_ptr + request * stride_paths + targets, mask=is_accepted, other=0)
    is_moved = is_accepted & (sources != targets)

    first_slot = tl.load(first_slots_ptr + request).to(tl.int64)
    blocks_ptr = block_table_ptr + request * stride_block_table
    source_slots, target_slots = first_slot + sources, first_slot + targets
    source_blocks = tl.load(blocks_ptr + source_slots // BLOCK_SIZE, mask=is_moved, other=0).to(tl.int64)
    target_blocks = tl.load(blocks_ptr + target_slots // BLOCK_SIZE, mask=is_moved, other=0).to(tl.int64)
    source_places = source_blocks * stride_block + source_slots % BLOCK_SIZE * stride_offset
    target_places = target_blocks * stride_block + target_slots % BLOCK_SIZE * stride_offset

    columns = tl.arange(0, COLUMNS)[None, :]
    inside = is_moved[:, None] & (columns < HEAD_DIM)
    moved = tl.load(plane_ptr + source_places[:, None] + columns, mask=inside)
    tl.debug_barrier()  # a row's target may be another row's source: all threads have read before one writes
    tl.store(plane_ptr + target_places[:, None] + columns, moved, mask=inside)


@triton.jit
def _copy_blocks_kernel(
    kv_ptr,  # [num_layers, 2, NUM_KV_HEADS, num_blocks, BLOCK_SIZE, HEAD_DIM]
    pairs_ptr,  # [n, 2]
    stride_layer,
    stride_kv,
    stride_head,
    stride_block,
    stride_offset,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per pair of blocks and plane, a tile [ROWS, COLUMNS] at a time."""
    pair_ptr = pairs_ptr + tl.program_id(0) * 2
    plane_ptr = _find_plane(kv_ptr, tl.program_id(1), stride_layer, stride_kv, stride_head, NUM_KV_HEADS)
    source_ptr = plane_ptr + tl.load(pair_ptr) * stride_block
    target_ptr = plane_ptr + tl.load(pair_ptr + 1) * stride_block
    columns = tl.arange(0, COLUMNS)[None, :]
    for start in range(0, BLOCK_SIZE, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (rows < BLOCK_SIZE) & (columns < HEAD_DIM)
        places = rows * stride_offset + columns
        tl.store(target_ptr + places, tl.load(source_ptr + places, mask=inside), mask=inside)


@triton.jit
def _clear_blocks_kernel(
    kv_ptr,  # [num_layers, 2, NUM_KV_HEADS, num_blocks, BLOCK_SIZE, HEAD_DIM]
    block_ids_ptr,  # [n]
    stride_layer,
    stride_kv,
    stride_head,
    stride_block,
    stride_offset,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per block and plane, a tile [ROWS, COLUMNS] at a time."""
    plane_ptr = _find_plane(kv_ptr, tl.program_id(1), stride_layer, stride_kv, stride_head, NUM_KV_HEADS)
    block_ptr = plane_ptr + tl.load(block_ids_ptr + tl.program_id(0)) * stride_block
    columns = tl.arange(0, COLUMNS)[None, :]
    zeros = tl.zeros([ROWS, COLUMNS], kv_ptr.dtype.element_ty)
    for start in range(0, BLOCK_SIZE, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        tl.store(block_ptr + rows * stride_offset + columns, zeros, mask=(rows < BLOCK_SIZE) & (columns < HEAD_DIM))


def move_paths(kv: Tensor, block_table: Tensor, first_slots: Tensor, paths: Tensor, num_accepted: Tensor) -> None:
    """Move the KV of accepted paths to consecutive slots, in place, in all layers.

    Node ``paths[s, j]`` of request s goes from the request's slot ``first_slots[s] + paths[s, j]`` to its slot
    ``first_slots[s] + j``, for j below ``num_accepted[s]``; a node that is there already is left alone. All of a path is read
    before any of it is written, so its order does not matter. Slots are not checked: they are on the device. The blocks that
    hold these slots belong to one request alone.

    Args:
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim], bfloat16, float16 or float32.
        block_table: physical blocks, int32 [S, max_blocks]; rows may be strided.
        first_slots: slot of node 0 in its request, int32 or int64 [S].
        paths: node indices, int32 [S, max_path], with max_path 1 to 64; rows may be strided. What follows the accepted nodes is
            not read.
        num_accepted: int32 [S], each at most max_path; 0 = nothing moves.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device.
    """
    device = kv.device
    _require_cache(kv)
    require("first_slots", first_slots, shape=(None,), dtypes=(torch.int32, torch.int64), device=device)
    num_requests = len(first_slots)
    require("block_table", block_table, shape=(num_requests, None), dtypes=(torch.int32,), device=device, contiguous=False)
    require("paths", paths, shape=(num_requests, None), dtypes=(torch.int32,), device=device, contiguous=False)
    require("num_accepted", num_accepted, shape=(num_requests,), dtypes=(torch.int32,), device=device)
    num_layers, _, num_kv_heads, _, block_size, head_dim = kv.shape
    max_path = paths.shape[1]
    if not 0 < max_path <= MAX_PATH:
        raise ValueError(f"paths has shape {list(paths.shape)}: its rows must have 1 to {MAX_PATH} nodes")

    path, columns = triton.next_power_of_2(max_path), triton.next_power_of_2(head_dim)
    _move_paths_kernel[(num_requests, num_layers * 2 * num_kv_heads)](
        kv,
        block_table,
        first_slots,
        paths,
        num_accepted,
        *kv.stride()[:5],
        block_table.stride(0),
        paths.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PATH=path,
        COLUMNS=columns,
        num_warps=min(max(path * columns // 1024, 1), 8),
    )


def copy_blocks(kv: Tensor, pairs: Tensor) -> None:
    """Copy blocks in all layers, in place.

    Args:
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim], bfloat16, float16 or float32.
        pairs: source and target block, int64 [n, 2]; no target twice, and none is also a source. They are not checked: they are
            on the device.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device.
    """
    _require_cache(kv)
    require("pairs", pairs, shape=(None, 2), dtypes=(torch.int64,), device=kv.device)
    _launch_over_blocks(_copy_blocks_kernel, kv, pairs)


def clear_blocks(kv: Tensor, block_ids: Tensor) -> None:
    """Zero blocks in all layers, in place.

    Args:
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim], bfloat16, float16 or float32.
        block_ids: int64 [n]; they are not checked: they are on the device.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device.
    """
    _require_cache(kv)
    require("block_ids", block_ids, shape=(None,), dtypes=(torch.int64,), device=kv.device)
    _launch_over_blocks(_clear_blocks_kernel, kv, block_ids)


def _require_cache(kv: Tensor) -> None:
    require_launchable("kv", kv.device)
    shape = (None, 2, None, None, None, None)
    require("kv", kv, shape=shape, dtypes=FLOAT_DTYPES, device=kv.device, contiguous=False, is_written=True)
    if not kv.numel():
        raise ValueError(f"kv has shape {list(kv.shape)}: none of its dimensions may be 0")


def _launch_over_blocks(kernel: triton.JITFunction, kv: Tensor, blocks: Tensor) -> None:
    num_layers, _, num_kv_heads, _, block_size, head_dim = kv.shape
    columns = triton.next_power_of_2(head_dim)
    kernel[(len(blocks), num_layers * 2 * num_kv_heads)](
        kv,
        blocks,
        *kv.stride()[:5],
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        ROWS=min(triton.next_power_of_2(block_size), max(TILE_ELEMENTS // columns, 1)),
        COLUMNS=columns,
        num_warps=4,
    )
