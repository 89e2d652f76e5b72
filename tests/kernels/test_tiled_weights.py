"""Float32 products with weights in bfloat16 tiles, against float64 and against numbers that they must return bit for bit."""

from __future__ import annotations

import pytest
import torch
from cpu_kernels import choose_cpu_kernels
from torch import Tensor

from titan.kernels.cpu.library import load_library
from titan.kernels.cpu.linear import linear, linear_add, max_rows, multiply_by_tiles, multiply_rows
from titan.kernels.cpu.weights import can_pack, can_tile, has_tiles, is_tiled, pack_weight, tile_weight, tiled_struct

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="this processor has no matrix units for bfloat16")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(*shape: int, seed: int = 0) -> Tensor:
    """Float32 weights that bfloat16 holds."""
    return random(*shape, seed=seed).bfloat16().float()


@needs_tiles
def test_every_bit_of_a_number_counts() -> None:
    numbers = torch.cat([random(500), random(500) * 1e-20, random(500) * 1e30, torch.tensor([1 / 3, torch.finfo().max, 0.0, -0.0])])
    x = torch.zeros(len(numbers), 32)
    x[:, 5] = numbers
    products = multiply_by_tiles(x, tile_weight(torch.eye(32)), None, None)
    assert torch.equal(products[:, 5], numbers)
    assert not products[:, torch.arange(32) != 5].any()


@needs_tiles
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [(32, 32), (96, 64), (256, 768), (64, 2048)], ids=str)
def test_it_is_the_product_to_the_last_bits_of_float32(size: tuple[int, int], has_bias: bool) -> None:
    weight, bias = exact(*size), random(size[0], seed=1) if has_bias else None
    tiles = pack_weight(weight)
    assert is_tiled(tiles)
    for num_rows in (*range(1, 12), 20, 21, 40, 63, 64, 65, 130, 327):
        x, residual = random(num_rows, size[1], seed=2), random(num_rows, size[0], seed=3)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        bound = 1e-6 * float(expected.abs().max())
        torch.testing.assert_close(linear(x, tiles, bias).double(), expected, rtol=0, atol=bound)
        torch.testing.assert_close(linear_add(x, tiles, bias, residual).double(), residual.double() + expected, rtol=0, atol=bound)


@needs_tiles
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    tiles, x = tile_weight(exact(96, 128)), random(150, 128, seed=1)
    alone = torch.cat([linear(row[None], tiles, None) for row in x])
    for num_rows in (2, 5, 6, 10, 11, 64, 65, 150):
        assert torch.equal(linear(x[:num_rows], tiles, None), alone[:num_rows])


@needs_tiles
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_is_nan_and_stays_in_its_row(broken: float) -> None:
    x = torch.ones(7, 64)
    x[3] = broken
    assert linear(x, tile_weight(exact(32, 64)), None).isnan().all(1).nonzero()[:, 0].tolist() == [3]


@needs_tiles
def test_rows_and_weights_may_have_strides() -> None:
    weight, x = exact(64, 32).T, random(6, 128)
    torch.testing.assert_close(linear(x[:, 64:], tile_weight(weight), None), x[:, 64:] @ weight.T)


@needs_tiles
def test_the_library_calls_it_as_fast_as_onednn_for_whole_passes() -> None:
    library = load_library().library
    assert library is not None
    tiles, x = tile_weight(exact(64, 64)), random(3, 64)
    struct = tiled_struct(tiles, None)
    assert max_rows(library, torch.float32, struct) == 64
    assert torch.equal(multiply_rows(library, struct, x), linear(x, tiles, None))


def test_what_bfloat16_cannot_hold_is_packed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_tile(exact(64, 64)) == has_tiles()
    one_bit_more = exact(2048, 64)
    one_bit_more[-1, -1] = 1 + 2**-8
    for weight in (one_bit_more, random(64, 64), exact(64, 48), exact(48, 64), exact(64, 64).bfloat16(), exact(64, 64).to("meta")):
        assert not can_tile(weight)
    assert not (can_pack(one_bit_more.dtype) and is_tiled(pack_weight(one_bit_more)))
    choose_cpu_kernels(monkeypatch, "torch")
    assert not can_tile(exact(64, 64))
