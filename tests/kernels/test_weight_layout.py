"""The product of few rows with a weight, plain or as oneDNN packed it, against the same product in float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from titan.kernels.cpu import linear
from titan.kernels.cpu.library import usable_library
from titan.kernels.cpu.linear import find_weight, max_rows, multiply_rows
from titan.kernels.cpu.weights import WeightStruct, can_pack, pack_weight

DTYPES = [torch.float32, torch.bfloat16]
FEW = 8  # so many rows everywhere; more with AMX
SIZES = [(64, 32), (50, 70), (17, 16), (131, 33), (768, 256), (33, 2050)]


@pytest.fixture
def library() -> ctypes.CDLL:
    library = usable_library()
    if library is None:
        pytest.skip("no C++ compiler")
    return library


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight: Tensor) -> Tensor:
    if not can_pack(weight.dtype):
        pytest.skip(f"oneDNN packs no {weight.dtype} on this processor")
    return pack_weight(weight)


def find(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None) -> WeightStruct:
    found = find_weight(library, weight, bias)
    if found is None:
        small = find_weight(library, packed(random(64, 32, dtype=weight.dtype)), None)
        assert small is None or weight.dtype == torch.float32 or max_rows(library, weight.dtype, small) == FEW, (
            "all layouts for AMX can be read"
        )
        pytest.skip("a layout of this processor that the library does not read")
    return found


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_product(
    library: ctypes.CDLL, dtype: torch.dtype, size: tuple[int, int], has_bias: bool, is_packed: bool
) -> None:
    weight, bias = random(*size, dtype=dtype), random(size[0], dtype=dtype, seed=1) if has_bias else None
    kept = packed(weight) if is_packed else weight
    found = find(library, kept, bias)
    for num_rows in (*range(1, 10), 15, 16, 17, 31, 32, 33, 48, 64, 65):
        x = random(num_rows, size[1], dtype=dtype, seed=2)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        tolerance = 1e-6 * size[1] ** 0.5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(
            multiply_rows(library, found, x).double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(library: ctypes.CDLL, dtype: torch.dtype, is_packed: bool) -> None:
    weight = random(200, 130, dtype=dtype)
    kept = packed(weight) if is_packed else weight
    found = find(library, kept)
    x = random(max_rows(library, dtype, found), 130, dtype=dtype, seed=1)
    alone = torch.cat([multiply_rows(library, found, row[None]) for row in x])
    for num_rows in range(2, len(x) + 1):
        assert torch.equal(multiply_rows(library, found, x[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layout_that_is_not_the_weights_is_not_taken(
    library: ctypes.CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = packed(random(192, 64, dtype=dtype))
    block = find(library, kept).block
    monkeypatch.setattr(linear, "BLOCKS", [each for each in linear.BLOCKS if each != block])
    assert find_weight(library, kept, None) is None


def test_other_dtypes_and_strides_are_not_read(library: ctypes.CDLL) -> None:
    assert find_weight(library, random(64, 32, dtype=torch.float16), None) is None
    assert find_weight(library, random(64, 32, dtype=torch.float32).T, None) is None


def test_a_row_of_nan_stays_in_its_row(library: ctypes.CDLL) -> None:
    kept = packed(random(40, 24, dtype=torch.float32))
    x = torch.ones(5, 24)
    x[3] = torch.nan
    assert multiply_rows(library, find(library, kept), x).isnan().all(1).nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    assert not can_pack(dtype)
