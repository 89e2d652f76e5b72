"""Writing of new keys and values to their slots, and how rows of them are quantised.

Legend: T = tokens, K = num_kv_heads, D = head_dim, V = numbers of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.tools import FLOAT_DTYPES, kv_arguments, require, require_launchable

NUMBERS_PER_PROGRAM = 1024
"""Numbers of several heads of a token that one program writes."""


@triton.jit
def row_sizes(x):
    """Return the largest size of a number in each row, at least 1e-30, and whether all of them are finite: [ROWS, 1] each."""
    sizes = tl.max(tl.abs(x), axis=1)
    poison = tl.sum(x * 0.0, axis=1)  # a maximum leaves NaN out
    return tl.maximum(sizes, 1e-30)[:, None], (poison == 0.0)[:, None]


@triton.jit
def round_to_int8(x):
    """Round to integers, to nearest, ties to even: the sum holds no fraction. What is not finite becomes a bound."""
    bounded = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return ((bounded + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _write_kv_kernel(
    kv_ptr,  # [planes, K, num_blocks, BLOCK_SIZE, KEY_DIM]
    scales_ptr,  # [planes, K, num_blocks, BLOCK_SIZE], or None if keys and values are not quantised
    slots_ptr,  # [T]
    keys_ptr,  # [T, K, KEY_DIM]
    values_ptr,  # [T, K, VALUE_DIM], or None if there is one plane
    stride_keys_token,
    stride_keys_head,
    stride_values_token,
    stride_values_head,
    stride_kv,
    stride_kv_head,
    stride_kv_block,
    stride_kv_offset,
    stride_scales,
    stride_scales_head,
    stride_scales_block,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    BLOCK_D: tl.constexpr,
):
    """One program per token, group of heads and plane."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    plane = tl.program_id(2)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_head = heads < NUM_KV_HEADS
    is_written = is_head & (dims < KEY_DIM)
    is_loaded = is_written
    places = keys_ptr + token * stride_keys_token + heads * stride_keys_head + dims
    if values_ptr is not None:
        if plane == 1:
            is_loaded = is_head & (dims < VALUE_DIM)
            places = values_ptr + token * stride_values_token + heads * stride_values_head + dims
    numbers = tl.load(places, mask=is_loaded, other=0.0)

    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    places = kv_ptr + plane.to(tl.int64) * stride_kv + heads * stride_kv_head + block * stride_kv_block + offset * stride_kv_offset
    if scales_ptr is not None:
        wide = numbers.to(tl.float32)
        sizes, are_finite = row_sizes(wide)
        tl.store(places + dims, round_to_int8(wide * (127.0 / sizes)), mask=is_written)
        places = scales_ptr + plane.to(tl.int64) * stride_scales + heads * stride_scales_head + block * stride_scales_block + offset
        tl.store(places, tl.where(are_finite, sizes / 127.0, float("nan")), mask=is_head)
    else:
        tl.store(places + dims, numbers, mask=is_written)


def write_kv(kv_layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    """Write keys and values to their slots, but for those of slot -1; see `titan.kernels.interfaces.LayerOps`.

    Of the layer only D, or the bytes of a quantised block, must be contiguous; what a value leaves of its slot becomes 0. Slots are
    not checked: they are on the device. Quantisation is that of `titan.kernels.torch.quantised_kv`.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device.
    """
    device, floats = keys.device, FLOAT_DTYPES
    require_launchable("keys", device)
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    values = values if values is None or values.stride(-1) == 1 else values.contiguous()
    require("keys", keys, shape=(None, None, None), dtypes=floats, device=device, contiguous=False)
    num_tokens, num_kv_heads, head_dim = keys.shape
    numbers, scales, kv_strides = kv_arguments(kv_layer, head_dim)
    num_planes = 1 if values is None else 2
    layer_shape, dtypes = (num_planes, num_kv_heads, None, None, head_dim), (keys.dtype, torch.int8)
    require("kv_layer", numbers, shape=layer_shape, dtypes=dtypes, device=device, contiguous=False, is_written=True)
    require("slots", slots, shape=(num_tokens,), dtypes=(torch.int64,), device=device)
    if values is not None:
        shape = (num_tokens, num_kv_heads, None)
        require("values", values, shape=shape, dtypes=(keys.dtype,), device=device, contiguous=False)
        if not 1 <= values.shape[2] <= head_dim:
            raise ValueError(f"values has shape {list(values.shape)}: a value must have 1 to {head_dim} numbers")

    block_d = triton.next_power_of_2(head_dim)
    heads = min(max(NUMBERS_PER_PROGRAM // block_d, 1), triton.next_power_of_2(num_kv_heads))
    _write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, heads), num_planes)](
        numbers,
        scales,
        slots,
        keys,
        values,
        *keys.stride()[:2],
        *((0, 0) if values is None else values.stride()[:2]),
        *kv_strides,
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=head_dim,
        VALUE_DIM=0 if values is None else values.shape[2],
        BLOCK_SIZE=numbers.shape[3],
        HEADS=heads,
        BLOCK_D=block_d,
        num_warps=4,
    )
