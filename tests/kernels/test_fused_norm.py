"""RMSNorm, alone and after the addition to the residual stream, against its definition in float64."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from titan.bench.gpu.layer_reference import reference_add_rms_norm, reference_rms_norm
from titan.kernels.triton.norm import add_rms_norm, rms_norm
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALF_ULP = {torch.float32: 1e-6, torch.float16: 2**-11 + 1e-6, torch.bfloat16: 2**-8 + 1e-6}


def rows(shape: tuple[int, int], dtype: torch.dtype, *, seed: int, scale: float = 1.0) -> Tensor:
    """Rows of a wider tensor, with NaN beside them and a mean that a layer norm would take away."""
    wide = torch.full((shape[0], shape[1] + 16), torch.nan, dtype=dtype, device=DEVICE)
    inner = wide[:, 8:-8]
    inner.copy_((torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5) * scale)
    return inner


def assert_rounded_once(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within half a unit in the last place, up to the float32 arithmetic."""
    assert actual.dtype == dtype and actual.is_contiguous()
    torch.testing.assert_close(actual.double(), exact, rtol=HALF_ULP[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 48), (4, 768), (2, 4096), (2, 16384)])
def test_norm_is_its_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = rows(shape, dtype, seed=1)
    weight = rows((1, shape[1]), dtype, seed=2)[0]
    assert_rounded_once(rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 48), (2, 4096)])
def test_norm_of_a_sum_sees_the_rounded_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = rows(shape, dtype, seed=1), rows(shape, dtype, seed=3, scale=300.0)
    weight = rows((1, shape[1]), dtype, seed=2)[0]
    given, expected_residual = x.clone(), residual.clone()
    exact = reference_add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_rounded_once(add_rms_norm(x, residual, weight, 1e-5), exact, dtype)
    assert torch.equal(residual, expected_residual) and torch.equal(x, given)
    whole = residual.as_strided((shape[0] * (shape[1] + 16),), (1,), 0)
    assert int(whole.isnan().sum()) == 16 * shape[0]  # what lies beside the rows


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_eps_counts_where_rows_are_small(scale: float) -> None:
    x, weight = rows((2, 64), torch.float32, seed=1, scale=scale), torch.ones(64, device=DEVICE)
    assert_rounded_once(rms_norm(x, weight, 1e-6), reference_rms_norm(x, weight, 1e-6), torch.float32)


def test_a_row_with_nan_spoils_no_other() -> None:
    x, weight = rows((3, 64), torch.bfloat16, seed=1), torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    x[1, 5] = torch.nan
    assert rms_norm(x, weight, 1e-6).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("far", ["x", "residual"])
def test_offsets_beyond_32_bits_are_right(far: str) -> None:
    """Only a few pages of the storage are touched; an offset that wraps around is 2048 elements before its base."""
    storage = torch.empty(2**32 + 4096, dtype=torch.float16, device=DEVICE)
    tensors = {"x": rows((3, 64), torch.float16, seed=1), "residual": rows((3, 64), torch.float16, seed=2)}
    tensors[far] = storage.as_strided((3, 64), (2**31 - 1024, 1), 2048).copy_(tensors[far])
    weight = torch.ones(64, dtype=torch.float16, device=DEVICE)
    expected_residual = tensors["residual"].clone(memory_format=torch.contiguous_format)
    exact = reference_add_rms_norm(tensors["x"], expected_residual, weight, 1e-5)
    assert_rounded_once(add_rms_norm(**tensors, weight=weight, eps=1e-5), exact, torch.float16)
    assert torch.equal(tensors["residual"], expected_residual)


def test_no_rows_are_no_work() -> None:
    assert rms_norm(torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", torch.zeros(8), "x has shape [8]: it must be [any, any]"),
        ("x", torch.zeros(2, 8, dtype=torch.float64), "x has dtype torch.float64: it must be torch.bfloat16 or torch.float16 or"),
        ("x", torch.zeros(8, 2).T, "x has strides (1, 2): its last dimension must be contiguous"),
        ("x", torch.zeros(2, 16385), "x has shape [2, 16385]: hidden_size must be 1 to 16384"),
        ("x", torch.zeros(2, 0), "x has shape [2, 0]: hidden_size must be 1 to 16384"),
        ("residual", torch.zeros(3, 8), "residual has shape [3, 8]: it must be [2, 8]"),
        ("residual", torch.zeros(2, 8).half(), "residual has dtype torch.float16: it must be torch.float32"),
        ("weight", torch.zeros(2, 8), "weight has shape [2, 8]: it must be [8]"),
        ("weight", torch.zeros(8).bfloat16(), "weight has dtype torch.bfloat16: it must be torch.float32"),
        ("weight", torch.zeros(8, device="meta"), "weight is on meta: it must be on"),
        ("x", torch.zeros(2, 8, device="meta"), "is on meta"),
    ],
)
def test_wrong_arguments_are_refused_by_name(argument: str, value: Tensor, message: str) -> None:
    arguments = {"x": torch.zeros(2, 8), "residual": torch.zeros(2, 8), "weight": torch.zeros(8)} | {argument: value}
    arguments = {name: tensor if tensor.is_meta else tensor.to(DEVICE) for name, tensor in arguments.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        add_rms_norm(**arguments, eps=1e-5)
