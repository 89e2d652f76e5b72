"""Products of few rows with weights as they lie in memory - plain, packed by oneDNN, in tiles - and the large pages under them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from back_ends import choose_cpu_kernels
from torch import Tensor

from titan.kernels.cpu import linear as cpu_linear
from titan.kernels.cpu import weights as cpu_weights
from titan.kernels.cpu.library import usable_library
from titan.kernels.cpu.linear import find_weight, linear, linear_add, max_rows, multiply_by_tiles, multiply_rows
from titan.kernels.cpu.weights import HUGE_PAGE_BYTES, can_pack, can_tile, has_tiles, is_tiled, pack_weight, tile_weight

LAYOUTS = [*product(("plain", "packed"), (torch.float32, torch.bfloat16)), ("tiled", torch.float32)]
SIZES = [(64, 32), (50, 70), (17, 16), (131, 33), (768, 256), (33, 2050), (64, 2048)]
NUM_ROWS = (*range(1, 12), 15, 16, 17, 20, 21, 31, 32, 33, 40, 48, 63, 64, 65, 130, 327)

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="this processor has no matrix units for bfloat16")


@pytest.fixture
def library() -> ctypes.CDLL:
    return usable_library() or pytest.skip("no C++ compiler")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(*shape: int) -> Tensor:
    return random(*shape).bfloat16().float()


def laid_out(weight: Tensor, layout: str) -> Tensor:
    """The weight in a layout that this processor has; in tiles it is rounded, and `weight` too."""
    if layout == "tiled":
        weight.copy_(weight.bfloat16())
    if not {"plain": True, "tiled": can_tile(weight), "packed": can_pack(weight.dtype)}[layout]:
        pytest.skip(f"{layout} weights of {list(weight.shape)} in {weight.dtype} are none of this processor's")
    return weight if layout == "plain" else pack_weight(weight)


def find(library: ctypes.CDLL, kept: Tensor, bias: Tensor | None = None) -> cpu_weights.WeightStruct:
    found = find_weight(library, kept, bias)
    if found is None:
        small = find_weight(library, laid_out(random(64, 32, dtype=kept.dtype), "packed"), None)
        has_amx = small is not None and kept.dtype != torch.float32 and max_rows(library, kept.dtype, small) != 8
        assert not has_amx, "all layouts for AMX can be read"
        pytest.skip("a layout of this processor that the library does not read")
    return found


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=str)
def test_it_is_the_product(library: ctypes.CDLL, layout: str, dtype: torch.dtype, size: tuple[int, int], has_bias: bool) -> None:
    weight, bias = random(*size, dtype=dtype), random(size[0], dtype=dtype, seed=1) if has_bias else None
    kept = laid_out(weight, layout)
    found = find(library, kept, bias)
    tolerance = {"tiled": 1e-6}.get(layout, 1e-6 * size[1] ** 0.5 if dtype == torch.float32 else 2**-8)
    for num_rows in NUM_ROWS:
        x, residual = random(num_rows, size[1], dtype=dtype, seed=2), random(num_rows, size[0], dtype=dtype, seed=3)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        bound = {"rtol": 0 if layout == "tiled" else tolerance, "atol": tolerance * float(expected.abs().max())}
        output, added = multiply_rows(library, found, x), multiply_rows(library, found, x, residual)
        torch.testing.assert_close(output.double(), expected, **bound)
        torch.testing.assert_close(added.double(), residual.double() + expected, **bound)
        if layout == "tiled":
            assert torch.equal(linear(x, kept, bias), output) and torch.equal(linear_add(x, kept, bias, residual), added)


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours_nor_breaks_them(library: ctypes.CDLL, layout: str, dtype: torch.dtype) -> None:
    kept = laid_out(random(*((96, 128) if layout == "tiled" else (200, 130)), dtype=dtype), layout)
    found = find(library, kept)
    x = random(150 if layout == "tiled" else max_rows(library, dtype, found), found.num_inputs, dtype=dtype, seed=1)
    alone = torch.cat([multiply_rows(library, found, row[None]) for row in x])
    for num_rows in range(2, len(x) + 1):
        assert torch.equal(multiply_rows(library, found, x[:num_rows]), alone[:num_rows])
    for broken in (torch.nan, torch.inf):
        x[3] = broken
        is_broken = ~multiply_rows(library, found, x).isfinite()
        assert is_broken.all(1).nonzero()[:, 0].tolist() == is_broken.any(1).nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layout_that_is_not_the_weights_is_not_taken(
    library: ctypes.CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = laid_out(random(192, 64, dtype=dtype), "packed")
    block = find(library, kept).block
    monkeypatch.setattr(cpu_linear, "BLOCKS", [each for each in cpu_linear.BLOCKS if each != block])
    assert find_weight(library, kept, None) is None


def test_other_dtypes_and_strides_are_neither_read_nor_packed(library: ctypes.CDLL) -> None:
    assert find_weight(library, random(64, 32, dtype=torch.float16), None) is None
    assert find_weight(library, random(64, 32).T, None) is None
    assert not any(can_pack(dtype) for dtype in (torch.float16, torch.float64, torch.int64))


@needs_tiles
def test_every_bit_of_a_number_counts_in_products_with_tiles() -> None:
    numbers = torch.cat([random(500), random(500) * 1e-20, random(500) * 1e30, torch.tensor([1 / 3, torch.finfo().max, 0.0, -0.0])])
    x = torch.zeros(len(numbers), 32)
    x[:, 5] = numbers
    products = multiply_by_tiles(x, tile_weight(torch.eye(32)), None, None)
    assert torch.equal(products[:, 5], numbers)
    assert not products[:, torch.arange(32) != 5].any()


@needs_tiles
def test_rows_and_weights_of_tiles_may_have_strides_and_whole_passes_call_them(library: ctypes.CDLL) -> None:
    weight, x = exact(64, 32).T, random(6, 128)
    tiles = tile_weight(weight)
    torch.testing.assert_close(linear(x[:, 64:], tiles, None), x[:, 64:] @ weight.T)
    assert max_rows(library, torch.float32, find(library, tiles)) == 64


def test_what_bfloat16_cannot_hold_is_not_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = exact(64, 64)
    assert can_tile(weight) == has_tiles()
    one_bit_more = exact(2048, 64)
    one_bit_more[-1, -1] = 1 + 2**-8
    for other in (one_bit_more, random(64, 64), exact(64, 48), exact(48, 64), weight.bfloat16(), weight.to("meta")):
        assert not can_tile(other)
    assert not (can_pack(one_bit_more.dtype) and is_tiled(pack_weight(one_bit_more)))
    choose_cpu_kernels(monkeypatch, "torch")
    assert not can_tile(weight)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")
@pytest.mark.parametrize("offset", [0, 1, mmap.PAGESIZE - 1])
def test_whole_pages_inside_the_area_are_asked_for_and_keep_their_contents(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(4 * HUGE_PAGE_BYTES)
    cpu_weights.use_huge_pages(tensor.data_ptr() + 1 + offset, 3 * HUGE_PAGE_BYTES + 17)
    assert torch.equal(tensor, torch.arange(len(tensor)))  # nothing in them changes
    calls: list[tuple[int, int, int]] = []

    def madvise(*call: int) -> int:
        calls.append(call)  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(madvise=madvise))
    address, num_bytes = 100 * HUGE_PAGE_BYTES + offset, HUGE_PAGE_BYTES + 5
    cpu_weights.use_huge_pages(address, HUGE_PAGE_BYTES - 1)
    assert not calls  # too little for a large page
    cpu_weights.use_huge_pages(address, num_bytes)
    assert [advice for *_, advice in calls] == [cpu_weights.MADV_HUGEPAGE, cpu_weights.MADV_COLLAPSE]
    for start, length, _ in calls:
        assert address <= start < address + mmap.PAGESIZE and start % mmap.PAGESIZE == 0
        assert length % mmap.PAGESIZE == 0 and 0 <= address + num_bytes - (start + length) < mmap.PAGESIZE
