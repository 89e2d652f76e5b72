"""What the Triton kernels share: products, rounding and random numbers, each in a kernel made for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted import DEVICE
from triton.runtime.errors import InterpreterError

from titan.core.random import Purpose
from titan.core.random import philox_uniform as host_uniform
from titan.kernels.triton.philox import philox_uniform
from titan.kernels.triton.tools import INTERPRETED, dot, narrow


@triton.jit
def multiply(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    product = dot(tl.load(a_ptr + places), tl.load(b_ptr + places))
    tl.store(c_ptr + places, narrow(product, c_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_exact_and_rounded_to_nearest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (32, 32), generator=generator).to(DEVICE, dtype) for _ in range(2))
    a[0, 0], b[0, 0] = 257 if dtype == torch.float32 else 256, 8  # products that need rounding in 8 bits
    c = torch.empty(32, 32, dtype=dtype, device=DEVICE)
    multiply[(1,)](a, b, c, SIZE=32)
    exact = a.double() @ b.double()
    assert torch.equal(c, exact.float().to(dtype))


@triton.jit
def store_uniform(uniform_ptr, seeds_ptr, positions_ptr, sibling, PURPOSE: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    uniform = philox_uniform(tl.load(seeds_ptr + places), tl.load(positions_ptr + places), PURPOSE, sibling)
    tl.store(uniform_ptr + places, uniform)


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("sibling", [0, 1, 62])
def test_uniform_numbers_are_those_of_the_host_bit_for_bit(purpose: Purpose, sibling: int) -> None:
    size, rng = 1024, np.random.default_rng(sibling)
    seeds = rng.integers(0, 2**64, size, np.uint64)
    seeds[:4] = 0, 2**64 - 1, 2**63, 2**32 - 1
    positions = rng.integers(0, 2**32, size)
    positions[4:7] = 0, 2**31, 2**32 - 1
    uniform = torch.empty(size, dtype=torch.float64, device=DEVICE)
    arguments = (uniform, torch.from_numpy(seeds.view(np.int64)).to(DEVICE), torch.from_numpy(positions).to(DEVICE), sibling)
    store_uniform[(1,)](*arguments, PURPOSE=int(purpose), SIZE=size)
    assert np.array_equal(uniform.cpu().numpy(), host_uniform(seeds, positions, purpose, sibling=sibling))


@triton.jit
def compute(a_ptr, b_ptr, OPERATION: tl.constexpr):
    a, b = tl.load(a_ptr), tl.load(b_ptr)
    if OPERATION == "+":
        c = a + b
    elif OPERATION == "-":
        c = a - b
    else:
        c = a * b
    tl.store(a_ptr, c)


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels have no such checks")
@pytest.mark.parametrize(("operation", "fitting", "too_large"), [("+", 1, 2), ("-", -1, -2), ("*", 1, 2)])
def test_the_interpreter_refuses_integers_that_overflow(operation: str, fitting: int, too_large: int) -> None:
    """So that an offset beyond 32 bits shows at the sizes of tests that have one."""
    numbers = torch.tensor([2**31 - 2, fitting, too_large, 0], dtype=torch.int32)
    compute[(1,)](numbers[:1], numbers[1:2], OPERATION=operation)
    assert numbers[0] == 2**31 - (2 if operation == "*" else 1)
    with pytest.raises(InterpreterError, match="int32 overflow detected"):
        compute[(1,)](numbers[:1], numbers[2:3], OPERATION=operation)
