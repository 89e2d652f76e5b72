"""Packed linear layers against plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titan.kernels.cpu.linear import can_pack, linear, pack_weight


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_gives_the_plain_product(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 70, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 70, generator=generator).to(dtype)
    packed = pack_weight(weight) if can_pack(weight) else weight
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for result in (linear(x, packed, bias), linear(x, weight, bias)):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=dtype))


def test_a_row_of_nan_stays_in_its_row() -> None:
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    x = torch.ones(9, 16)
    x[4] = torch.nan
    result = linear(x, pack_weight(weight) if can_pack(weight) else weight, None)
    assert result.isnan().all(1).nonzero()[:, 0].tolist() == [4]
