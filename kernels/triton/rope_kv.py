"""Rotary embedding and KV write of one layer in one launch, with the RMSNorm of each query and key head if the model has it.

Legend: T = query tokens, H = num_heads, K = num_kv_heads, D = head_dim. The output of the projection, ``[T, (H + 2K) * D]`` with
the query heads first, then keys, then values, is read once: queries go to a tensor of their own, keys and values to their slots.
The rotation is that of Su et al., "RoFormer", 2021, with the pairs ``(x[i], x[i + D / 2])``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.interfaces import TokenPlaces
from titan.kernels.triton.kv_writes import round_to_int8, row_sizes
from titan.kernels.triton.tools import FLOAT_DTYPES, kv_arguments, narrow, require, require_launchable

PAIRS_PER_PROGRAM = 512
"""Rotated pairs of one program, over several heads of a token; with four warps, eight bytes of bfloat16 per thread and load."""


@triton.jit
def _rope_and_write_kv_kernel(
    q_ptr,  # [T, H, D]
    qkv_ptr,  # [T, (H + 2K) * D]
    rope_table_ptr,  # [max_positions, 2, D]
    positions_ptr,  # [T]
    slot_mapping_ptr,  # [T]
    kv_ptr,  # [2, K, num_blocks, BLOCK_SIZE, D]
    scales_ptr,  # [2, K, num_blocks, BLOCK_SIZE], or None if keys and values are not quantised
    qk_norm_ptr,  # [H + K, D], or None
    eps,
    stride_qkv_token,
    stride_kv,
    stride_kv_head,
    stride_kv_block,
    stride_kv_offset,
    stride_scales,
    stride_scales_head,
    stride_scales_block,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    PAIRS: tl.constexpr,  # D / 2, padded to a power of two
):
    """One program per token and group of heads, with a tile [HEADS, PAIRS] for each half of the heads' dimensions."""
    HALF: tl.constexpr = HEAD_DIM // 2
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pairs = tl.arange(0, PAIRS)[None, :]
    is_pair = pairs < HALF
    is_rotated = heads < NUM_HEADS + NUM_KV_HEADS
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & is_pair

    places = qkv_ptr + token * stride_qkv_token + heads * HEAD_DIM + pairs
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)

    a, b = first, second
    if qk_norm_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        weights = qk_norm_ptr + heads * HEAD_DIM + pairs
        a = a * scale * tl.load(weights, mask=is_rotated & is_pair, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weights + HALF, mask=is_rotated & is_pair, other=0.0).to(tl.float32)

    cos = rope_table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HEAD_DIM) + pairs
    sin = cos + HEAD_DIM
    rotated_first = a * tl.load(cos, mask=is_pair).to(tl.float32) + b * tl.load(sin, mask=is_pair).to(tl.float32)
    rotated_second = b * tl.load(cos + HALF, mask=is_pair).to(tl.float32) + a * tl.load(sin + HALF, mask=is_pair).to(tl.float32)
    wide_first = tl.where(is_rotated, rotated_first, first)
    wide_second = tl.where(is_rotated, rotated_second, second)
    first = narrow(wide_first, DTYPE)
    second = narrow(wide_second, DTYPE)

    is_query = inside & (heads < NUM_HEADS)
    places = q_ptr + (token * NUM_HEADS + heads) * HEAD_DIM + pairs
    tl.store(places, first, mask=is_query)
    tl.store(places + HALF, second, mask=is_query)

    slot = tl.load(slot_mapping_ptr + token)
    is_written = inside & (heads >= NUM_HEADS) & (slot >= 0)
    kv_heads = (heads - NUM_HEADS).to(tl.int64)  # keys, then values
    slot_place = slot // BLOCK_SIZE * stride_kv_block + slot % BLOCK_SIZE * stride_kv_offset
    head_places = kv_heads // NUM_KV_HEADS * stride_kv + kv_heads % NUM_KV_HEADS * stride_kv_head
    places = kv_ptr + slot_place + head_places + pairs
    if scales_ptr is not None:
        first_sizes, first_finite = row_sizes(tl.where(is_pair, wide_first, 0.0))
        second_sizes, second_finite = row_sizes(tl.where(is_pair, wide_second, 0.0))
        sizes, are_finite = tl.maximum(first_sizes, second_sizes), first_finite & second_finite
        factors = 127.0 / sizes
        tl.store(places, round_to_int8(wide_first * factors), mask=is_written)
        tl.store(places + HALF, round_to_int8(wide_second * factors), mask=is_written)
        head_places = kv_heads // NUM_KV_HEADS * stride_scales + kv_heads % NUM_KV_HEADS * stride_scales_head
        places = scales_ptr + slot // BLOCK_SIZE * stride_scales_block + slot % BLOCK_SIZE + head_places
        is_scaled = (heads >= NUM_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (slot >= 0)
        tl.store(places, tl.where(are_finite, sizes / 127.0, float("nan")), mask=is_scaled)
    else:
        tl.store(places, first, mask=is_written)
        tl.store(places + HALF, second, mask=is_written)


def rope_and_write_kv(
    qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, qk_norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Normalise and rotate queries and keys, and write keys and values to their slots; see `titan.kernels.interfaces.LayerOps`.

    Computation is in float32, rounded once. Rows of ``qkv`` may be strided; the rope table has its dtype. Of the layer only D, or
    the bytes of a quantised block, must be contiguous. Keys and values of slot -1 are not written. Positions and slots are not
    checked: they are on the device. Quantisation is that of `titan.kernels.torch.quantised_kv`.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device, or D is odd.
    """
    device, dtype = qkv.device, qkv.dtype
    require_launchable("qkv", device)
    require("qkv", qkv, shape=(None, None), dtypes=FLOAT_DTYPES, device=device, contiguous=False)
    numbers, scales, kv_strides = kv_arguments(kv_layer, places.rope_table.shape[-1])
    shape, dtypes = (2, None, None, None, None), (dtype, torch.int8)
    require("kv_layer", numbers, shape=shape, dtypes=dtypes, device=device, contiguous=False, is_written=True)
    num_kv_heads, _, block_size, head_dim = numbers.shape[1:]
    if head_dim % 2 or not kv_layer.numel():
        raise ValueError(f"kv_layer has shape {list(kv_layer.shape)}: head_dim must be even, and no dimension may be 0")
    num_tokens, num_all_heads = len(qkv), qkv.shape[1] // head_dim
    num_heads = num_all_heads - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] % head_dim:
        raise ValueError(
            f"qkv has shape {list(qkv.shape)}: it must be [T, (H + {2 * num_kv_heads}) * {head_dim}] with one query head or more"
        )
    require("rope_table", places.rope_table, shape=(None, 2, head_dim), dtypes=(dtype,), device=device)
    require("positions", places.positions, shape=(num_tokens,), dtypes=(torch.int64,), device=device)
    require("slots", places.slots, shape=(num_tokens,), dtypes=(torch.int64,), device=device)
    if qk_norm is not None:
        all_heads = num_heads + num_kv_heads, head_dim
        require("qk_norm", qk_norm, shape=all_heads, dtypes=(dtype, torch.float32), device=device)

    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device=device)
    pairs = triton.next_power_of_2(head_dim // 2)
    heads = min(max(PAIRS_PER_PROGRAM // pairs, 1), triton.next_power_of_2(num_all_heads))
    _rope_and_write_kv_kernel[(num_tokens, triton.cdiv(num_all_heads, heads))](
        q,
        qkv,
        *places,
        numbers,
        scales,
        qk_norm,
        eps,
        qkv.stride(0),
        *kv_strides,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        PAIRS=pairs,
        num_warps=4,
    )
    return q
