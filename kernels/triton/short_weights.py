"""Linear layers whose weights can be read in 8 bits each: few rows are then multiplied in less time than cuBLAS takes in bfloat16.

A number is one of e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022) times a power of two of its row, with which the
row's largest number is from 128 to 256. So those within a factor of 2 ** 13 of it keep 3 bits of mantissa. A packed row holds its
numbers twice, in bfloat16, for many rows of activations, and in codes; then follows the exponent of the power of two.

Legend: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.tools import EMULATED, dot, narrow, require, require_launchable

STEP = 16
"""Bytes; a row has as many codes as its inputs, and zeros up to a multiple of it."""
ALIGNMENT = 128
"""Bytes; the length of a row is a multiple of it."""

LARGEST_EXPONENT, LEAST_SCALE = 8, -100
"""Of the largest code of a row, at most 2 ** 8; and of a row's scale, so that bfloat16 holds the least number of codes times it."""

LARGEST = 1.875 * 2.0**127
"""Largest number of bfloat16 with 3 bits of mantissa, to which larger ones are rounded."""

NUM_PACKED = 2**24
"""Numbers that are packed together, about, lest the packing of a large weight take much memory."""


class Tiling(NamedTuple):
    """What one program multiplies at a time, and how it is compiled."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


TILINGS = {8: Tiling(32, 256, 2, 4), 16: Tiling(64, 256, 2, 3)}
"""By rows of activations, padded. Products took 0.76 and 0.84 of the time of cuBLAS in bfloat16 on an H200, those of 32 rows as
long (`bench/results/gpu-h200-short-weights.md`)."""

NUM_PROGRAMS = 264
"""Programs that keep the memory busy: two for each multiprocessor of an H100 or H200. Where a weight has fewer tiles of outputs,
its inputs are split."""


def is_short(weight: Tensor) -> bool:
    """Whether `pack_short` made it."""
    return weight.dtype == torch.int8


def packed_size(num_inputs: int) -> int:
    """Return how many bytes a packed row takes."""
    return -(-(3 * _depth(num_inputs) + 1) // ALIGNMENT) * ALIGNMENT


def pack_short(weight: Tensor) -> Tensor:
    """Round a weight to 8 bits each: [N, K], any dtype of a model -> int8 [N, `packed_size`]. Its first rows are a weight, too."""
    num_inputs = weight.shape[1]
    packed = torch.zeros(len(weight), packed_size(num_inputs), dtype=torch.int8, device=weight.device)
    depth, num_rows = _depth(num_inputs), max(1, NUM_PACKED // num_inputs)
    for rows, places in zip(weight.split(num_rows), packed.split(num_rows), strict=True):
        wide = rows.float().clamp(-LARGEST, LARGEST)
        _, exponents = torch.frexp(wide.abs().amax(1))
        exponents = (exponents - LARGEST_EXPONENT).clamp_min(LEAST_SCALE)
        codes = torch.ldexp(wide, -exponents[:, None]).to(torch.float8_e4m3fn)
        numbers(places, num_inputs).copy_(torch.ldexp(codes.float(), exponents[:, None]))
        places[:, 2 * depth : 2 * depth + num_inputs] = codes.view(torch.int8)
        places[:, 3 * depth] = exponents
    return packed


def numbers(packed: Tensor, num_inputs: int) -> Tensor:
    """Return the numbers of a packed weight, which they share memory with: bfloat16 [N, K]."""
    return packed[:, : 2 * num_inputs].view(torch.bfloat16)


def _depth(num_inputs: int) -> int:
    """Return how many codes a packed row has."""
    return -(-num_inputs // STEP) * STEP


@triton.jit
def _decode(codes):
    """Return codes of e4m3, int8, as bfloat16; in the interpreter as float32.

    Sign, exponent and mantissa are those of a bfloat16 number that is too small by a factor of 2 ** 120, subnormal ones included.
    """
    if EMULATED:
        code = codes.to(tl.int32)
        values = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        values = tl.inline_asm_elementwise(  # four at a time; Triton converts them one by one, by way of float32
            """{
            .reg .b32 pair<2>, sign<2>, scale, nothing;
            mov.b32 scale, 0x7B807B80;
            mov.b32 nothing, 0x80008000;
            prmt.b32 pair0, $2, 0, 0x1404;
            prmt.b32 pair1, $2, 0, 0x3424;
            and.b32 sign0, pair0, 0x80008000;
            and.b32 sign1, pair1, 0x80008000;
            shr.b32 pair0, pair0, 4;
            shr.b32 pair1, pair1, 4;
            lop3.b32 pair0, pair0, 0x07F007F0, sign0, 0xEA;
            lop3.b32 pair1, pair1, 0x07F007F0, sign1, 0xEA;
            fma.rn.bf16x2 $0, pair0, scale, nothing;
            fma.rn.bf16x2 $1, pair1, scale, nothing;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return values


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _short_linear_kernel(
    output_ptr,  # [T, N]
    x_ptr,  # [T, K]
    packed_ptr,  # int8 [N, stride_packed]
    bias_ptr,  # [N], or None
    sums_ptr,  # float32 [tiles, parts, OUTPUTS, ROWS]; None: inputs are not split
    arrivals_ptr,  # int32 [tiles], zero before and after
    num_rows,
    num_outputs,
    num_inputs,
    depth,  # codes of a row
    num_steps,  # tiles of inputs of each part
    stride_x,
    stride_packed,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # whether tiles cover the weight exactly
):
    """One program per tile of outputs and part of the inputs; the last of a tile's parts to arrive adds them up in order."""
    tile, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    outputs, rows = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    inputs = part * num_steps * INPUTS + tl.arange(0, INPUTS)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    packed_rows = packed_ptr + outputs.to(tl.int64) * stride_packed
    code_places = packed_rows[:, None] + 2 * depth + inputs[None, :]
    x_places = x_ptr + rows.to(tl.int64)[None, :] * stride_x + inputs[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in range(num_steps):
        first = step * INPUTS
        if IS_WHOLE:
            codes = tl.load(code_places + first)
            x = tl.load(x_places + first, mask=is_row[None, :], other=0.0)
        else:
            here = inputs + first
            codes = tl.load(code_places + first, mask=is_output[:, None] & (here < depth)[None, :], other=0)
            x = tl.load(x_places + first, mask=is_row[None, :] & (here < num_inputs)[:, None], other=0.0)
        sums += dot(_decode(codes), x)

    is_last = True
    if sums_ptr is not None:
        parts = sums_ptr + tile * num_parts * OUTPUTS * ROWS + (tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :])
        tl.store(parts + part * OUTPUTS * ROWS, sums)
        tl.debug_barrier()  # all of the part is written before it counts as there
        is_last = tl.atomic_add(arrivals_ptr + tile, 1) == num_parts - 1
        if is_last:
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for each in range(num_parts):
                sums += tl.load(parts + each * OUTPUTS * ROWS)
            tl.store(arrivals_ptr + tile, 0)
    if is_last:
        exponents = tl.load(packed_rows + 3 * depth, mask=is_output, other=0).to(tl.int32)
        sums *= ((exponents + 127) << 23).to(tl.float32, bitcast=True)[:, None]
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        places = output_ptr + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        tl.store(places, narrow(sums, output_ptr.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def short_linear(x: Tensor, packed: Tensor, bias: Tensor | None, arrivals: Tensor) -> Tensor:
    """Compute ``x @ weight.T + bias``, summed in float32, and round once.

    Args:
        x: [T, K], bfloat16; rows may be strided.
        packed: the weight, of `pack_short`: int8 [N, ``packed_size(K)``].
        bias: [N], bfloat16.
        arrivals: int32 [NUM_PROGRAMS], zero before and after; no two products at once may have the same.

    Returns:
        [T, N], bfloat16.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device.
    """
    device = x.device
    require_launchable("x", device)
    require("x", x, shape=(None, None), dtypes=(torch.bfloat16,), device=device, contiguous=False)
    (num_rows, num_inputs), num_outputs = x.shape, len(packed)
    require("packed", packed, shape=(None, packed_size(num_inputs)), dtypes=(torch.int8,), device=device)
    if bias is not None:
        require("bias", bias, shape=(num_outputs,), dtypes=(torch.bfloat16,), device=device)
    require("arrivals", arrivals, shape=(NUM_PROGRAMS,), dtypes=(torch.int32,), device=device, is_written=True)
    if num_rows > max(TILINGS) or not num_rows:
        return F.linear(x, numbers(packed, num_inputs), bias)

    rows = min(each for each in TILINGS if each >= num_rows)
    tiling = TILINGS[rows]
    num_tiles, num_steps = triton.cdiv(num_outputs, tiling.outputs), triton.cdiv(num_inputs, tiling.inputs)
    num_steps = triton.cdiv(num_steps, max(NUM_PROGRAMS // num_tiles, 1))
    num_parts = triton.cdiv(num_inputs, num_steps * tiling.inputs)
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=device)
    sums = output.new_empty(num_tiles, num_parts, tiling.outputs, rows, dtype=torch.float32) if num_parts > 1 else None
    _short_linear_kernel[(num_tiles, num_parts)](
        output,
        x,
        packed,
        bias,
        sums,
        arrivals,
        num_rows,
        num_outputs,
        num_inputs,
        _depth(num_inputs),
        num_steps,
        x.stride(0),
        packed.stride(0),
        OUTPUTS=tiling.outputs,
        INPUTS=tiling.inputs,
        ROWS=rows,
        IS_WHOLE=not num_outputs % tiling.outputs and not num_inputs % (num_parts * num_steps * tiling.inputs),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return output
