"""Random numbers of the kernels are those of `titan.core.random`, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from titan.core.random import Purpose
from titan.core.random import philox_uniform as host_uniform
from titan.kernels.triton.philox import philox_uniform
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZE = 1024


@triton.jit
def store_uniform(uniform_ptr, seeds_ptr, positions_ptr, sibling, PURPOSE: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    uniform = philox_uniform(tl.load(seeds_ptr + places), tl.load(positions_ptr + places), PURPOSE, sibling)
    tl.store(uniform_ptr + places, uniform)


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("sibling", [0, 1, 62])
def test_uniform_numbers_are_those_of_the_host_bit_for_bit(purpose: Purpose, sibling: int) -> None:
    rng = np.random.default_rng(sibling)
    seeds = rng.integers(0, 2**64, SIZE, np.uint64)
    seeds[:4] = 0, 2**64 - 1, 2**63, 2**32 - 1
    positions = rng.integers(0, 2**32, SIZE)
    positions[4:7] = 0, 2**31, 2**32 - 1
    uniform = torch.empty(SIZE, dtype=torch.float64, device=DEVICE)
    arguments = (uniform, torch.from_numpy(seeds.view(np.int64)).to(DEVICE), torch.from_numpy(positions).to(DEVICE), sibling)
    store_uniform[(1,)](*arguments, PURPOSE=int(purpose), SIZE=SIZE)
    assert np.array_equal(uniform.cpu().numpy(), host_uniform(seeds, positions, purpose, sibling=sibling))
