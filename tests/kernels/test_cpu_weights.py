"""Packed weights, the products of rows with them on every kind of processor, and the large pages under them."""

from __future__ import annotations

import mmap
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, addressof, c_int64, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from resource import RLIMIT_AS, getrlimit, setrlimit
from threading import Barrier, Lock

import numpy as np
import pytest
import torch
from back_ends import KINDS, make_kernels
from torch import Tensor

from titan.core.sampling_rows import OPTIONS
from titan.kernels.cpu.compiled import CompiledKernels
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.weights import CODE_BITS, MAX_RARE, pack_weight, round_to_8_bits, weight_struct

SIZES = [(1, 1), (64, 32), (50, 70), (17, 16), (131, 33), (33, 2050), (100, 192)]
NUM_ROWS = (*range(20), 21, 24, 31, 32, 33, 37, 48, 63, 64, 65, 70, 90, 170, 260, 530)  # also of several parts and sets of groups
MODELS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32 of bfloat16": (torch.float32, torch.bfloat16),
    "bfloat16 with rare numbers": (torch.bfloat16, torch.bfloat16),
    "float32 of bfloat16 with rare numbers": (torch.float32, torch.bfloat16),
    "bfloat16 of 8 bits": (torch.bfloat16, torch.bfloat16),
    "float32 of 8 bits with rare numbers": (torch.float32, torch.bfloat16),
    "float32 of float16": (torch.float32, torch.float16),
    "float32": (torch.float32, torch.float32),
}
"""Dtypes of models, and of what their weights hold."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weight(model: str, num_outputs: int, num_inputs: int) -> Tensor:
    dtype, held = MODELS[model]
    weight = random(num_outputs, num_inputs).to(held)
    if model.endswith("rare numbers"):
        weight = with_rare_numbers(num_outputs, num_inputs, int(num_outputs * num_inputs * MAX_RARE))
    if "8 bits" in model:
        weight = (weight.view(torch.int16) & ~15).view(torch.bfloat16)
    return weight.to(dtype)


def with_rare_numbers(num_outputs: int, num_inputs: int, count: int) -> Tensor:
    """Return numbers with 15 different upper bytes, as many as a palette holds, but for some at random places."""
    generator = torch.Generator().manual_seed(1)
    high = torch.tensor([0x38, *range(0x39, 0x40), *range(0xB9, 0xC0)])[
        torch.randint(15, (num_outputs * num_inputs,), generator=generator)
    ]
    bits = high << 8 | torch.randint(256, high.shape, generator=generator)
    places = torch.randperm(len(bits), generator=generator)[:count]
    bits[places] = torch.tensor([0xB2C4, 0x429B, 0x8000, 0x8080, 0x2E17]).repeat(count // 5 + 1)[
        :count
    ]  # two are -0.0 and -(2**-126)
    return bits.to(torch.uint16).view(torch.bfloat16).view(num_outputs, num_inputs)


def stored(packed: Tensor) -> Tensor:
    """Return the bytes of a packed weight, with whatever lies behind it."""
    return torch.empty(0, dtype=torch.uint8).set_(packed.untyped_storage())[packed.storage_offset() * packed.itemsize :]  # type: ignore[call-overload]


def decoded(coded: Tensor, num_inputs: int) -> Tensor:
    """Return what a weight in codes holds, padding included, by the words of ``codes.h``."""
    storage = np.asarray(stored(coded))
    num_parts = 3 if coded.dtype == torch.uint8 else 2
    num_blocks, depth = -(-len(coded) // 16), -(-num_inputs // 32) * 32
    of_header = [("palette", "u1", 16), ("rare_offset", "<i8"), ("num_rare", "<i8"), ("padding", "V32")]
    blocks = np.frombuffer(storage, [("header", of_header), ("units", "u1", (depth // 8, num_parts, 64))], num_blocks)
    bits = np.zeros((num_blocks, 16, depth), np.uint16)
    palettes, units = blocks["header"]["palette"], blocks["units"]
    for output in range(16):
        for i in range(8):
            byte = output // 4 * 16 + i % 4 // 2 * 8 + output % 4 * 2 + i % 2
            high = np.take_along_axis(palettes, units[:, :, 0, byte] >> i // 4 * 4 & 15, 1)
            low = units[:, :, 1 + i // 4, byte] if num_parts == 3 else (units[:, :, 1, byte] >> i // 4 * 4 & 15) << 4
            bits[:, output, i::8] = high.astype(np.uint16) << 8 | low
    for number, (_, rare_offset, num_rare, _) in enumerate(blocks["header"]):
        of_rare, start = [("input", "<i4"), ("output", "<u2"), ("value", "<u2")], number * blocks.itemsize + int(rare_offset)
        rare = np.frombuffer(storage, of_rare, int(num_rare), start)
        assert not bits[number, rare["output"], rare["input"]].any(), "coded as 0.0"
        bits[number, rare["output"], rare["input"]] = rare["value"]
    return torch.from_numpy(bits.reshape(-1, depth)).view(torch.bfloat16)


@pytest.fixture(scope="module", params=KINDS)
def kernels(request: pytest.FixtureRequest) -> CompiledKernels:
    return make_kernels(KINDS[request.param])


# packing


@pytest.mark.parametrize("size", [*SIZES, (2050, 35)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_number_is_where_the_layout_says(kernels: CompiledKernels, model: str, size: tuple[int, int]) -> None:
    """In its block, at its input or pair of inputs, in its lane; zeros pad; and rows are found again."""
    weight, (_, held) = make_weight(model, *size), MODELS[model]
    packed, has_pairs = pack_weight(weight, kernels), held == torch.bfloat16
    assert packed.shape[0] == size[0] and CompiledOps(kernels, weight.dtype).pack(packed) is packed
    token_ids = torch.arange(size[0]).flip(0)
    rows = CompiledOps(kernels, weight.dtype).look_up(token_ids, packed, size[1])
    assert torch.equal(rows, weight[token_ids]) and torch.equal(rows.signbit(), weight[token_ids].signbit())
    kind_of_codes = torch.int8 if "8 bits" in model else torch.uint8
    assert (packed.dtype == kind_of_codes) == (has_pairs and kernels.has_codes)
    if packed.dtype in CODE_BITS:
        padded = decoded(packed, size[1])
        assert torch.equal(padded[: size[0], : size[1]].to(weight.dtype), weight)
        assert not padded[size[0] :].any() and not padded[:, size[1] :].any()
        return
    depth, num_rows = (-(-size[1] // 32) * 32, -(-size[0] // 32) * 32) if has_pairs else (size[1], -(-size[0] // 16) * 16)
    flat = stored(packed)[: num_rows * depth * held.itemsize].view(held).tolist()
    for output in (0, 1, 15, 16, 31, 32, 1024, size[0] - 1):
        for i in (0, 1, 2, 31, 32, size[1] - 2, size[1] - 1):
            if output < size[0] and 0 <= i < size[1]:
                (block, lane), (pair, half) = divmod(output, 16), divmod(i, 2)
                place = ((block * depth // 2 + pair) * 16 + lane) * 2 + half if has_pairs else (block * depth + i) * 16 + lane
                assert flat[place] == float(weight[output, i])
    assert sum(map(bool, flat)) == int(weight.count_nonzero())


def test_a_weight_may_begin_anywhere_in_its_storage(kernels: CompiledKernels) -> None:
    numbers = torch.randint(-(2**15), 2**15, (64 * 32 + 1,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    weight = numbers[1:].view(torch.bfloat16).view(64, 32)
    packed = pack_weight(weight, kernels)
    assert packed.dtype == torch.int32 and torch.equal(packed, pack_weight(weight.clone(), kernels))


def test_the_smallest_format_that_holds_a_weight_is_its_own(kernels: CompiledKernels) -> None:
    weight = random(2048, 64).bfloat16().float()
    for number, dtype in (
        (1.0, torch.uint8 if kernels.has_codes else torch.int32),
        (1 + 2**-8, torch.uint16),
        (1 + 2**-11, torch.uint32),
        (1e30, torch.uint32),
    ):
        if number != 1:
            weight = random(2048, 64).half().float()
        weight[-1, -1] = number
        assert pack_weight(weight, kernels).dtype == pack_weight(weight.T, kernels).dtype == dtype
    round_to_8_bits(weight[:-1])
    weight[-1] = 1 + 2**-3
    assert pack_weight(weight, kernels).dtype == (torch.int8 if kernels.has_codes else torch.int32)
    weight[-1, -1] = 1 + 2**-4
    assert pack_weight(weight, kernels).dtype == (torch.uint8 if kernels.has_codes else torch.int32)


def test_avx512_and_avx2_read_codes(kernels: CompiledKernels, request: pytest.FixtureRequest) -> None:
    assert kernels.has_codes or KINDS[request.node.callspec.params["kernels"]].name == "native"


@pytest.mark.parametrize("model", MODELS)
def test_the_first_rows_of_a_weight_are_one(kernels: CompiledKernels, model: str) -> None:
    """As the head of a draft of another vocabulary, whose first tokens both models have."""
    weight, (dtype, _) = make_weight(model, 200, 150), MODELS[model]
    ops, packed, x = CompiledOps(kernels, dtype), pack_weight(weight, kernels), random(9, 150, dtype=dtype, seed=1)
    whole = ops.linear(x, packed, None)
    for num_outputs in (1, 15, 16, 17, 100, 112, 199):
        assert torch.equal(ops.linear(x, packed[:num_outputs], None), whole[:, :num_outputs])
        token_ids = torch.arange(num_outputs)
        assert torch.equal(ops.look_up(token_ids, packed[:num_outputs], 150), weight[:num_outputs])


def test_a_weight_with_too_many_rare_numbers_stays_in_pairs(kernels: CompiledKernels) -> None:
    for num_rare, dtype in ((64, torch.int8), (65, torch.int32)):
        weight = (with_rare_numbers(128, 512, num_rare).view(torch.int16) & ~15).view(torch.bfloat16)
        assert pack_weight(weight, kernels).dtype == (dtype if kernels.has_codes else torch.int32)


# products


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_product(kernels: CompiledKernels, model: str, size: tuple[int, int]) -> None:
    """Up to one rounding of the result and float32's of sums, with and without a bias and a residual stream."""
    weight, (dtype, _) = make_weight(model, *size), MODELS[model]
    ops, packed = CompiledOps(kernels, dtype), pack_weight(weight, kernels)
    multiply = kernels.function("linear", dtype, *[c_void_p] * 2, c_int64, *[c_void_p] * 2)
    exact_weight = weight.double().T
    for num_rows in NUM_ROWS:
        bias = random(size[0], dtype=dtype, seed=1) if num_rows % 2 else None
        x = random(num_rows, size[1] + num_rows % 3, dtype=dtype, seed=2)[:, : size[1]]  # some have strides
        residual = random(num_rows, size[0], dtype=dtype, seed=3)
        exact, sizes = (each(x.double()) @ each(exact_weight) for each in (torch.positive, torch.abs))
        if bias is not None:
            exact, sizes = exact + bias.double(), sizes + bias.double().abs()
        output, struct = ops.linear(x, packed, bias), weight_struct(packed, bias, size[1])
        rows, added = x.contiguous(), residual.clone()
        multiply(addressof(struct), rows.data_ptr(), num_rows, added.data_ptr(), added.data_ptr())  # in place
        for actual, expected, of in ((output, exact, sizes), (added, exact + residual, sizes + residual.abs())):
            rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
            assert ((actual.double() - expected).abs() <= 1.01 * rounding + (size[1] + 3) * 2**-24 * of).all()


def test_every_bit_of_a_number_counts(kernels: CompiledKernels) -> None:
    numbers = torch.cat([random(500), random(500) * 1e-20, random(500) * 1e30, torch.tensor([1 / 3, torch.finfo().max, 0.0, -0.0])])
    x = torch.zeros(len(numbers), 32)
    x[:, 5] = numbers
    products = CompiledOps(kernels, torch.float32).linear(x, pack_weight(torch.eye(32), kernels), None)
    assert torch.equal(products[:, 5], numbers)
    assert not products[:, torch.arange(32) != 5].any()


@pytest.mark.parametrize("size", [(96, 128), (200, 130), (35, 1000)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_row_does_not_depend_on_its_neighbours_nor_breaks_them(
    kernels: CompiledKernels, model: str, size: tuple[int, int]
) -> None:
    """Bit by bit, wherever it stands."""
    ops, packed, (dtype, _) = CompiledOps(kernels, MODELS[model][0]), pack_weight(make_weight(model, *size), kernels), MODELS[model]
    x, bias = random(150, size[1], dtype=dtype, seed=1), random(size[0], dtype=dtype, seed=2)
    alone = torch.cat([ops.linear(row[None], packed, bias) for row in x])
    for num_rows in (2, 3, 5, 7, 8, 9, 13, 16, 17, 25, 33, 64, 65, 150):
        for first in (0, 150 - num_rows):
            rows = slice(first, first + num_rows)
            assert torch.equal(ops.linear(x[rows], packed, bias), alone[rows])
    for broken in (torch.nan, torch.inf):
        x[3] = broken
        output = ops.linear(x, packed, bias)
        assert not output[3].isfinite().any()
        assert torch.equal(output[4:], alone[4:]) and torch.equal(output[:3], alone[:3])


# threads


def products(kernels: CompiledKernels) -> list[Tensor]:
    outputs = []
    for model, (dtype, _) in MODELS.items():
        ops, packed = CompiledOps(kernels, dtype), pack_weight(make_weight(model, 530, 270), kernels)
        outputs += [ops.linear(random(num_rows, 270, dtype=dtype), packed, None) for num_rows in (1, 2, 9, 40, 1, 70)]
    return outputs


@pytest.mark.long_where("1-2", "1-5")
@pytest.mark.parametrize(("num_teams", "num_threads"), [(1, 2), (1, 5), (3, 3)])
def test_results_do_not_depend_on_threads(num_teams: int, num_threads: int) -> None:
    """Bit by bit; Python's threads may share a team or have their own."""
    expected, teams = products(make_kernels(KINDS["cpu"])), [make_kernels(KINDS["cpu"], num_threads) for _ in range(num_teams)]
    with ThreadPoolExecutor(3) as pool:
        for outputs in pool.map(products, teams * (30 // num_teams)):
            assert all(map(torch.equal, outputs, expected))


def test_threads_live_as_long_as_the_operations_that_run_on_them() -> None:
    kernels = make_kernels(KINDS["cpu"], 2)
    ops, is_there = [CompiledOps(kernels, torch.float32)], weakref.ref(kernels)
    del kernels
    assert is_there()
    ops.clear()
    assert not is_there()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux, which counts what a process has mapped")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_too_little_memory_is_an_error_of_the_call_alone(num_threads: int) -> None:
    """Of threads that need it for their parts; the next call has results again."""
    size, options, tokens = 2**24, np.zeros(2, OPTIONS), torch.full((2, 2), -1)
    probs, num_children, places = torch.full((2, size), 2**-24), torch.tensor([2, 2]), torch.tensor([0, 1])
    function = make_kernels(KINDS["cpu"], num_threads).function("sample_children", None, *[c_void_p] * 5, *[c_int64] * 3)
    tensors = probs, num_children, places, tokens
    sample = partial(function, options.ctypes.data, *(tensor.data_ptr() for tensor in tensors), 2, size, 2)
    mapped, limits = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * mmap.PAGESIZE, getrlimit(RLIMIT_AS)
    allocator, free = CDLL(None), []
    allocator.malloc.argtypes, allocator.malloc.restype, allocator.free.argtypes = [c_size_t], c_void_p, [c_void_p]
    setrlimit(RLIMIT_AS, (mapped + 2 * size, limits[1]))  # each part takes 4 * size
    try:
        while block := allocator.malloc(4 * size):  # which tests before this one gave back to the allocator
            free.append(block)
        with pytest.raises(MemoryError, match="too little memory for the working memory"):
            sample()
    finally:
        setrlimit(RLIMIT_AS, limits)
        for block in free:
            allocator.free(block)
    sample()
    assert (tokens >= 0).all() and (tokens[:, 0] != tokens[:, 1]).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux, which counts the pages of a process")
def test_callers_have_working_memory_apart_and_leave_none_behind() -> None:
    """Threads that live on call one after another, then at the same time: a library of one thread holds none of them up."""
    ops = CompiledOps(make_kernels(KINDS["cpu"]), torch.bfloat16)
    weight, turn, gate = ops.pack(random(16, 250, dtype=torch.bfloat16)), Lock(), Barrier(9)
    xs = [random(12_000, 250, dtype=torch.bfloat16, seed=seed) for seed in range(2)]  # 12 MB as float32
    expected = [ops.linear(x, weight, None) for x in xs]

    def multiply(i: int) -> bool:
        with turn:
            ops.linear(xs[i], weight, None)
        gate.wait()
        gate.wait()
        return all(torch.equal(ops.linear(xs[i], weight, None), expected[i]) for _ in range(5))

    def num_bytes() -> int:
        return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * mmap.PAGESIZE

    before = num_bytes()
    with ThreadPoolExecutor(8) as pool:
        are_right = [pool.submit(multiply, i % 2) for i in range(8)]
        gate.wait()
        left = num_bytes() - before
        gate.wait()
    assert all(each.result() for each in are_right) and left < 40e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest_with_3_bits_of_mantissa(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 70, generator=generator) * torch.logspace(-30, 30, 70)
    weight[0, :4], weight[1, :3] = torch.tensor([0.0, -0.0, 1 + 2**-4, 1 + 3 * 2**-4]), torch.finfo(torch.bfloat16).max
    weight = weight.to(dtype)
    mantissas, exponents = np.frexp(weight.bfloat16().double().numpy())
    expected = torch.from_numpy(np.ldexp(np.round(mantissas * 16) / 16, exponents))  # which rounds half to even, as well
    expected[1, :3] = 1.875 * 2.0**127  # the largest there is
    rounded = weight.clone()
    round_to_8_bits(rounded)
    assert rounded.dtype == dtype and torch.equal(rounded.double(), expected)
    assert torch.equal(rounded.signbit(), weight.signbit())
    again = rounded.clone()
    round_to_8_bits(again)
    assert torch.equal(again, rounded)
