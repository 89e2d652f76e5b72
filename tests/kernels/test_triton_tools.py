"""Rounding and products in the interpreter, the checks of arguments, and the offline compiler, with a kernel made for it."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from sm90 import compile_launches

from titan.kernels.triton.tools import INTERPRETED, dot, narrow, require

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@triton.jit
def multiply(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr, EMU: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    product = dot(tl.load(a_ptr + places), tl.load(b_ptr + places), EMU)
    tl.store(c_ptr + places, narrow(product, c_ptr.dtype.element_ty, EMU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_exact_and_rounded_to_nearest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (32, 32), generator=generator).to(DEVICE, dtype) for _ in range(2))
    a[0, 0], b[0, 0] = 257 if dtype == torch.float32 else 256, 8  # products that need rounding in 8 bits
    c = torch.empty(32, 32, dtype=dtype, device=DEVICE)
    multiply[(1,)](a, b, c, SIZE=32, EMU=INTERPRETED)
    exact = a.double() @ b.double()
    assert torch.equal(c, exact.float().to(dtype))


@triton.jit
def copy_narrow(x_ptr, y_ptr, SIZE: tl.constexpr, EMU: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(y_ptr + places, narrow(tl.load(x_ptr + places), y_ptr.dtype.element_ty, EMU))


def test_not_finite_numbers_survive_rounding() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-45], device=DEVICE)
    y = torch.empty(4, dtype=torch.bfloat16, device=DEVICE)
    copy_narrow[(1,)](x, y, SIZE=4, EMU=INTERPRETED)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 4), "x has shape [2, 4]: it must be [3, any]"),
        (torch.zeros(3), "x has shape [3]: it must be [3, any]"),
        (torch.zeros(3, 4, dtype=torch.int32), "x has dtype torch.int32: it must be torch.float32 or torch.float16"),
        (torch.zeros(3, 4, device="meta"), "x is on meta: it must be on cpu"),
        (torch.zeros(4, 3).T, "x has strides (1, 3): it must be contiguous"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_by_name(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require("x", tensor, shape=(3, None), dtypes=(torch.float32, torch.float16), device=torch.device("cpu"))


def test_strided_rows_are_taken_where_allowed() -> None:
    rows = torch.zeros(3, 8)[:, :4]
    require("x", rows, shape=(3, 4), dtypes=(torch.float32,), device=torch.device("cpu"), contiguous=False)
    with pytest.raises(ValueError, match="its last dimension must be contiguous"):
        require("x", rows.T, shape=(4, 3), dtypes=(torch.float32,), device=torch.device("cpu"), contiguous=False)


CODE = """
import sys
sys.path.insert(0, {folder!r})
import torch
from test_triton_tools import multiply
x = torch.zeros(64, 64, dtype=torch.bfloat16)
multiply[(1,)](x, x, x, SIZE=32, EMU=False)
multiply[(1,)](x, x, x, SIZE=64, EMU=False)
multiply[(1,)](x, x, x, SIZE=64, EMU=False)
"""


def test_launches_are_compiled_for_sm_90_and_described() -> None:
    small, large = compile_launches(CODE.format(folder=__file__.rpartition("/")[0]))
    assert (small.name, small.constants, small.num_warps) == ("multiply", {"SIZE": "32", "EMU": "False"}, 4)
    assert small.has_mma and not small.has_wgmma and large.has_wgmma
    assert 0 < small.registers <= large.registers <= 255 and large.stack_bytes == 0 < large.shared_bytes
