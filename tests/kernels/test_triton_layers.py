"""How tensors may lie where the Triton kernels of layers read and write them, and the sizes of a real model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted import DEVICE, ON_CUDA
from layer_reference import (
    HALF_ULP,
    assert_rounded_once,
    make_table,
    reference_add_rms_norm,
    reference_rms_norm,
    reference_rope_and_write_kv,
    reference_silu_mul,
)
from torch import Tensor

from titan.kernels.interfaces import TokenPlaces
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.norm import rms_norm
from titan.kernels.triton.rope_kv import rope_and_write_kv


def random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def in_a_wider_tensor(x: Tensor) -> Tensor:
    """The same rows with NaN beside them."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype, device=DEVICE)
    return wide[:, 8:-8].copy_(x)


def far_apart(x: Tensor) -> Tensor:
    """The same rows beyond 32 bits: few pages are touched, and an offset that wraps around is 2048 elements before its base."""
    storage = torch.empty(2**32 + 4096, dtype=x.dtype, device=DEVICE)
    return storage.as_strided(x.shape, (2**31 - 1024, 1), 2048).copy_(x)


@pytest.mark.parametrize(
    ("place", "num_tokens", "hidden_size", "dtype"),
    [
        (far_apart, 3, 64, torch.float16),
        *((in_a_wider_tensor, 3, 96, dtype) for dtype in HALF_ULP),
        *((torch.clone, 2, 16384, dtype) for dtype in HALF_ULP),
        *(pytest.param(torch.clone, 512, 4096, dtype, marks=ON_CUDA) for dtype in HALF_ULP),
    ],
)
def test_rows_of_norms_and_gates_may_lie_apart_and_be_as_large_as_a_models(
    place: Callable[[Tensor], Tensor], num_tokens: int, hidden_size: int, dtype: torch.dtype
) -> None:
    x, weight = place(random(num_tokens, hidden_size, dtype=dtype) + 0.5), random(hidden_size, dtype=dtype, seed=2)
    residual = place(random(num_tokens, hidden_size, dtype=dtype, seed=1) * 300)
    given, expected_residual = x.clone(), residual.clone()
    assert_rounded_once(rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5))
    exact = reference_add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_rounded_once(rms_norm(x, weight, 1e-5, residual), exact)  # of the rounded residual
    assert torch.equal(residual, expected_residual) and torch.equal(x, given)
    if place is in_a_wider_tensor:
        beside = residual.as_strided((num_tokens * (hidden_size + 16),), (1,), 0).isnan()
        assert int(beside.sum()) == num_tokens * 16
    gate_up = place(random(num_tokens, 7 * hidden_size, dtype=dtype))
    assert_rounded_once(silu_mul(gate_up), reference_silu_mul(gate_up))


@pytest.mark.parametrize("far", ["beside", "tokens", "heads", "blocks", "by_block"])
def test_queries_and_caches_may_lie_apart(far: str) -> None:
    num_kv_heads = 3 if far == "heads" else 1
    qkv, storage = random(3, (1 + 2 * num_kv_heads) * 8), torch.empty(2**32 + 4096, dtype=torch.float16, device=DEVICE)
    kv_layer = torch.empty(2, num_kv_heads, 3, 16, 8, dtype=torch.float16, device=DEVICE)
    match far:
        case "beside":
            qkv = in_a_wider_tensor(qkv)
        case "tokens":
            qkv = far_apart(qkv)
        case "by_block":
            kv_layer = torch.empty(3, 2, 16, 1, 8, dtype=torch.float16, device=DEVICE).permute(1, 3, 0, 2, 4)
        case _:
            head_and_block = (2**31 - 1024, 128) if far == "heads" else (128, 2**31 - 1024)
            kv_layer = storage.as_strided(kv_layer.shape, (512, *head_and_block, 8, 1), 2048)
    kv_layer[:, :, [0, 2], 0] = 0
    positions, slots = torch.arange(3, device=DEVICE), torch.tensor([-1, -1, 2 * 16], device=DEVICE)
    places = TokenPlaces(make_table(3, 8).to(DEVICE, torch.float16), positions, slots)
    exact_kv = torch.zeros(kv_layer.shape, dtype=torch.float64, device=DEVICE)
    exact_q = reference_rope_and_write_kv(qkv, *places, exact_kv, num_heads=1)
    assert_rounded_once(rope_and_write_kv(qkv, places, kv_layer), exact_q)
    assert_rounded_once(kv_layer[:, :, [0, 2], 0], exact_kv[:, :, [0, 2], 0])


def test_nothing_is_no_work() -> None:
    none, kv_layer = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(2, 1, 2, 16, 8, device=DEVICE)
    places = TokenPlaces(make_table(1, 8).to(DEVICE), none, none)
    assert rope_and_write_kv(torch.zeros(0, 24, device=DEVICE), places, kv_layer).shape == (0, 1, 8)
    assert rms_norm(torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)
    assert silu_mul(torch.zeros(0, 16, device=DEVICE)).shape == (0, 8) and not kv_layer.any()
