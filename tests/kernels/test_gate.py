"""The gate of the feed-forward part against its definition in float64."""

from __future__ import annotations

import re

import pytest
import torch

from titan.bench.gpu.layer_reference import reference_silu_mul
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF_ULP = {torch.float32: 1e-6, torch.float16: 2**-11 + 1e-6, torch.bfloat16: 2**-8 + 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 80), (3, 1024), (2, 2100)])
def test_gate_is_its_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_rows, size = shape
    wide = torch.full((num_rows, 2 * size + 16), torch.nan, dtype=dtype, device=DEVICE)
    gate_up = wide[:, 8:-8]
    gate_up.copy_(torch.randn(gate_up.shape, generator=torch.Generator().manual_seed(1)) * 3)
    output = silu_mul(gate_up)
    assert output.dtype == dtype and output.shape == shape
    torch.testing.assert_close(output.double(), reference_silu_mul(gate_up), rtol=HALF_ULP[dtype], atol=1e-7)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, as exp(1000) is infinite
def test_large_gates_are_closed_or_open() -> None:
    gate_up = torch.tensor([[-1000.0, 1000.0, -0.0, torch.nan, 3.0, 3.0, 3.0, 3.0]], device=DEVICE)
    expected = torch.tensor([[0.0, 3000.0, 0.0, torch.nan]], device=DEVICE)
    torch.testing.assert_close(silu_mul(gate_up), expected, rtol=0, atol=0, equal_nan=True)


def test_offsets_beyond_32_bits_are_right() -> None:
    """Only a few pages of the storage are touched; an offset that wraps around is 2048 elements before its base."""
    storage = torch.empty(2**32 + 4096, dtype=torch.float16, device=DEVICE)
    near = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    gate_up = storage.as_strided((3, 64), (2**31 - 1024, 1), 2048).copy_(near)
    assert torch.equal(silu_mul(gate_up), silu_mul(near))


def test_no_rows_are_no_work() -> None:
    assert silu_mul(torch.zeros(0, 16, device=DEVICE)).shape == (0, 8)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(8), "gate_up has shape [8]: it must be [any, any]"),
        (torch.zeros(2, 7), "gate_up has shape [2, 7]: its rows must have two halves"),
        (torch.zeros(2, 0), "gate_up has shape [2, 0]: its rows must have two halves"),
        (torch.zeros(2, 8, dtype=torch.int32), "gate_up has dtype torch.int32: it must be torch.bfloat16 or torch.float16 or"),
        (torch.zeros(8, 2).T, "gate_up has strides (1, 2): its last dimension must be contiguous"),
        (torch.zeros(2, 8, device="meta"), "is on meta"),
    ],
)
def test_wrong_arguments_are_refused_by_name(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        silu_mul(gate_up if gate_up.is_meta else gate_up.to(DEVICE))
