"""Weights of 8 bits on a GPU: what they are rounded to, and products with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from titan.kernels.triton import short_weights
from titan.kernels.triton.short_weights import is_short, numbers, pack_short, packed_size, short_linear

EPS = torch.finfo(torch.bfloat16).eps


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def arrivals() -> Tensor:
    return torch.zeros(short_weights.NUM_PROGRAMS, dtype=torch.int32, device=DEVICE)


def nearest(weight: Tensor) -> Tensor:
    """Rounded to 3 bits of mantissa in 14 binades below each row's largest number, and there to multiples of the least step."""
    wide = weight.double().cpu().numpy()
    _, exponents = np.frexp(np.abs(wide).max(1, keepdims=True))
    steps = np.ldexp(1.0, np.maximum(np.frexp(wide)[1], exponents - 13) - 4)
    return torch.from_numpy(np.round(wide / steps) * steps)  # numpy rounds half to even, as e4m3 is rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_rounded_to_the_nearest_of_their_row(dtype: torch.dtype) -> None:
    columns, rows = torch.logspace(-8, 3, 70, device=DEVICE), torch.logspace(-20, 20, 90, device=DEVICE)
    weight = (random(90, 70) * columns * rows[:, None]).to(dtype)
    weight[0], weight[1, :3] = 0.0, torch.tensor([1 + 2**-4, 1 + 3 * 2**-4, -0.0])
    weight[2, :2] = torch.finfo(torch.bfloat16).max
    before = weight.clone()
    packed = pack_short(weight)
    assert is_short(packed) and packed.shape == (90, packed_size(70)) == (90, 256)
    assert torch.equal(weight, before) and not is_short(weight)
    expected = nearest(weight)
    expected[2, :2] = 1.875 * 2.0**127  # the largest there is
    assert torch.equal(numbers(packed, 70).double().cpu(), expected.float().double())
    largest = packed[1:, 160:230].view(torch.float8_e4m3fn).float().abs().amax(1)
    assert largest.min() >= 128 and largest.max() <= 256


def test_every_code_is_read_as_the_number_that_it_is_for_pytorch() -> None:
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float().nan_to_num(0.0).view(2, 128)
    one = torch.eye(128, device=DEVICE).bfloat16()
    for exponent in (0, -7, 80):
        packed = pack_short(torch.ldexp(values.where(values.abs() <= 240, 0), torch.tensor(exponent)))
        products = torch.cat([short_linear(rows, packed, None, arrivals()) for rows in one.split(16)])
        assert torch.equal(products.T, numbers(packed, 128)) and packed[:, 256:384].unique().numel() > 200


@pytest.mark.parametrize("num_rows", [0, 1, 7, 9, 16, 17])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "has_bias"), [(40, 33, True), (64, 256, False), (130, 520, False), (300, 1600, True)]
)
def test_products_are_those_of_the_rounded_weight(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    """Rows may be strided; weights are split or not, and covered by tiles exactly or not."""
    weight, counts = random(num_outputs, num_inputs).bfloat16(), arrivals()
    x = random(num_rows, num_inputs + 8, seed=1).bfloat16()[:, 8:]
    bias = 10 * random(num_outputs, seed=2).bfloat16() if has_bias else None
    packed = pack_short(weight)
    exact = x.double() @ numbers(packed, num_inputs).double().T + (0 if bias is None else bias.double())
    output = short_linear(x, packed, bias, counts)
    assert output.dtype == torch.bfloat16 and output.shape == exact.shape and not counts.any()
    assert (output.double() - exact).norm() <= 0.6 * EPS * exact.norm()
    assert torch.equal(short_linear(x, packed[: num_outputs // 2], None if bias is None else bias[: num_outputs // 2], counts),
                       output[:, : num_outputs // 2])  # fmt: skip


@pytest.mark.parametrize("num_rows", [3, 12])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_programs"), [(96, 1600, 6), (64, 1024, 2), (64, 1024, 6), (64, 2048, 4), (64, 2048, 264)]
)
def test_parts_of_several_tiles_add_up(
    num_rows: int, num_outputs: int, num_inputs: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_weights, "NUM_PROGRAMS", num_programs)
    packed, x = pack_short(random(num_outputs, num_inputs)), random(num_rows, num_inputs, seed=1).bfloat16()
    exact = x.double() @ numbers(packed, num_inputs).double().T
    assert (short_linear(x, packed, None, arrivals()).double() - exact).norm() <= 0.6 * EPS * exact.norm()


def test_a_row_with_nan_spoils_no_other() -> None:
    x = random(9, 600).bfloat16()
    x[4, 5], x[6, 7] = torch.nan, torch.inf
    output = short_linear(x, pack_short(random(64, 600, seed=1)), None, arrivals())
    assert (~output.isfinite()).any(1).nonzero()[:, 0].tolist() == [4, 6]


@pytest.mark.parametrize(
    ("x", "packed", "bias", "counts", "message"),
    [
        (random(2, 32), random(8, 32).to(torch.int8), None, arrivals(), "x has dtype torch.float32"),
        (random(2, 32).bfloat16(), pack_short(random(8, 32))[:, :96], None, arrivals(), r"packed has shape .* \[any, 128\]"),
        (random(2, 32).bfloat16(), pack_short(random(8, 32)).short(), None, arrivals(), "packed has dtype torch.int16"),
        (random(2, 32).bfloat16(), pack_short(random(8, 32)), random(7).bfloat16(), arrivals(), r"bias has shape \[7\]"),
        (random(2, 32).bfloat16(), pack_short(random(8, 32)), None, arrivals()[:5], r"arrivals has shape \[5\]"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(x: Tensor, packed: Tensor, bias: Tensor | None, counts: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        short_linear(x, packed, bias, counts)
