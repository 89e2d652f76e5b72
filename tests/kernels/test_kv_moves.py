"""Moves of accepted paths, copies and clearing of blocks, each against a loop; whole caches are compared, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titan.bench.gpu.layer_reference import reference_clear_blocks, reference_copy_blocks, reference_move_paths
from titan.kernels.triton.kv_moves import clear_blocks, copy_blocks, move_paths
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
DTYPES = list(BITS)


def random_cache(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits: NaN, infinities and subnormal numbers are among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator).to(BITS[dtype])
    return bits.to(DEVICE).view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


def assert_does_the_same(kernel: Callable[..., None], reference: Callable[..., None], kv: Tensor, *arguments: Tensor) -> None:
    before, expected = kv.clone(), kv.clone()
    reference(expected, *arguments)
    kernel(kv, *arguments)
    assert same_bits(kv, expected) and not same_bits(kv, before)


def ids(*values: int | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_path(num_nodes: int, generator: torch.Generator) -> list[int]:
    """The nodes on the way to some node of a random tree, ascending."""
    parents = [int(torch.randint(-1, node, (), generator=generator)) for node in range(num_nodes)]
    path, node = [], int(torch.randint(0, num_nodes, (), generator=generator))
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_accepted_paths_of_random_trees_move_as_if_node_by_node(head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    num_requests, max_blocks, block_size = 6, 9, 16
    kv = random_cache((2, 2, 2, num_requests * max_blocks, block_size, head_dim), dtype)
    # each request owns blocks in scrambled order, in a table that is part of a wider one
    blocks = torch.randperm(num_requests * max_blocks, generator=generator).view(num_requests, max_blocks)
    block_table = torch.cat((blocks, blocks.flip(0)), 1).to(DEVICE, torch.int32)[:, :max_blocks]
    first_slots = torch.randint(0, 4 * block_size, (num_requests,), generator=generator).to(DEVICE)
    paths = torch.full((num_requests, 80), 62, dtype=torch.int32)  # what was not accepted must not move
    num_accepted = []
    for request, num_nodes in enumerate([63, 40, 20, 12, 6, 6]):
        path = random_path(num_nodes, generator)
        paths[request, : len(path)] = torch.tensor(path)
        num_accepted.append(len(path))
    num_accepted[-1] = 0
    assert_does_the_same(
        move_paths, reference_move_paths, kv, block_table, first_slots, paths.to(DEVICE)[:, :63], ids(*num_accepted)
    )


@pytest.mark.parametrize("first_slot", [0, 9, 14, 15, 16])
def test_paths_move_across_block_edges_onto_the_sources_of_later_nodes(first_slot: int) -> None:
    kv = random_cache((1, 2, 1, 6, 16, 8), torch.float32)
    arguments = (ids([4, 1, 3]), ids(first_slot), ids([1, 2, 3, 5, 6, 20]), ids(6))
    assert_does_the_same(move_paths, reference_move_paths, kv, *arguments)


def test_a_path_in_any_order_is_read_before_it_is_written() -> None:
    kv = random_cache((1, 2, 1, 3, 16, 8), torch.float32)
    before = kv.clone()
    move_paths(kv, ids([2, 0]), ids(14), ids([2, 0, 3, 1]), ids(4))
    slots = {14 + j: 14 + node for j, node in enumerate([2, 0, 3, 1])}
    for target, source in slots.items():
        places = [((2, 0)[slot // 16], slot % 16) for slot in (target, source)]
        assert same_bits(kv[:, :, :, places[0][0], places[0][1]], before[:, :, :, places[1][0], places[1][1]])


@pytest.mark.parametrize(("path", "num_accepted"), [([0, 1, 2, 3], 4), ([0, 1, 9, 11], 2), ([3, 4, 5, 6], 0)])
def test_a_path_that_is_in_place_or_not_accepted_moves_nothing(path: list[int], num_accepted: int) -> None:
    kv = random_cache((1, 2, 1, 2, 16, 8), torch.bfloat16)
    before = kv.clone()
    move_paths(kv, ids([1, 0]), ids(3), ids(path), ids(num_accepted))
    assert same_bits(kv, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (12, 20), (128, 64)])
def test_copy_and_clear_touch_whole_blocks_and_nothing_else(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    kv = random_cache((2, 2, 2, 7, block_size, head_dim), dtype)
    pairs = torch.tensor([[3, 0], [3, 6], [1, 4]], device=DEVICE)
    assert_does_the_same(copy_blocks, reference_copy_blocks, kv, pairs)
    assert_does_the_same(clear_blocks, reference_clear_blocks, kv, torch.tensor([6, 3], device=DEVICE))


def test_a_cache_may_be_laid_out_block_by_block() -> None:
    kv = random_cache((5, 3, 2, 16, 2, 8), torch.float16).permute(1, 2, 4, 0, 3, 5)
    assert_does_the_same(copy_blocks, reference_copy_blocks, kv, torch.tensor([[0, 4], [1, 2]], device=DEVICE))
    assert_does_the_same(clear_blocks, reference_clear_blocks, kv, torch.tensor([3], device=DEVICE))
    assert_does_the_same(move_paths, reference_move_paths, kv, ids([4, 0]), ids(12), ids([2, 4, 7]), ids(3))


@pytest.mark.parametrize("far", [0, 2, 3])
def test_offsets_beyond_32_bits_are_right(far: int) -> None:
    """Far layers, heads or blocks; few pages are touched, and an offset that wraps around is 16384 elements before its base."""
    storage = torch.empty(2**32 + 32768, dtype=torch.float16, device=DEVICE)
    shape, strides = [1, 2, 1, 3, 16, 8], [4096, 2048, 1024, 128, 8, 1]
    shape[far], strides[far] = 3, 2**31 - 8192
    kv = storage.as_strided(shape, strides, 16384)
    kv[:] = random_cache(tuple(shape), torch.float16)
    assert_does_the_same(copy_blocks, reference_copy_blocks, kv, torch.tensor([[2, 1]], device=DEVICE))
    assert_does_the_same(move_paths, reference_move_paths, kv, ids([0, 2]), ids(14), ids([3, 5]), ids(2))
    assert_does_the_same(clear_blocks, reference_clear_blocks, kv, torch.tensor([2], device=DEVICE))


def test_no_blocks_and_no_requests_are_no_work() -> None:
    kv = random_cache((1, 2, 1, 2, 16, 8), torch.float32)
    before, empty = kv.clone(), torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    copy_blocks(kv, empty)
    clear_blocks(kv, empty[:, 0].contiguous())
    move_paths(kv, ids()[None, :].expand(0, 0), ids(), torch.zeros(0, 4, dtype=torch.int32, device=DEVICE), ids())
    assert same_bits(kv, before)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("kv", torch.zeros(2, 2, 2, 4, 8), "kv has shape [2, 2, 2, 4, 8]: it must be [any, 2, any, any, any, any]"),
        ("kv", torch.zeros(2, 2, 2, 4, 8, 16).mT, "its last dimension must be contiguous"),
        ("kv", torch.zeros(2, 2, 2, 4, 16, 8, dtype=torch.int8), "kv has dtype torch.int8: it must be torch.bfloat16 or"),
        ("kv", torch.zeros(2, 2, 2, 4, 16, 8, device="meta"), "is on meta"),
        ("block_table", torch.zeros(2, 5, dtype=torch.int32), "block_table has shape [2, 5]: it must be [3, any]"),
        ("block_table", torch.zeros(3, 5, dtype=torch.int64), "block_table has dtype torch.int64: it must be torch.int32"),
        ("first_slots", torch.zeros(3), "first_slots has dtype torch.float32: it must be torch.int32 or torch.int64"),
        ("first_slots", torch.zeros(3, 1, dtype=torch.int32), "first_slots has shape [3, 1]: it must be [any]"),
        ("paths", torch.zeros(3, 65, dtype=torch.int32), "paths has shape [3, 65]: its rows must have 1 to 64 nodes"),
        ("paths", torch.zeros(3, 0, dtype=torch.int32), "paths has shape [3, 0]: its rows must have 1 to 64 nodes"),
        ("paths", torch.zeros(4, 3, dtype=torch.int32).T, "paths has strides (1, 3): its last dimension must be contiguous"),
        ("num_accepted", torch.zeros(2, dtype=torch.int32), "num_accepted has shape [2]: it must be [3]"),
        ("num_accepted", torch.zeros(3, dtype=torch.int64), "num_accepted has dtype torch.int64: it must be torch.int32"),
        ("num_accepted", torch.zeros(3, dtype=torch.int32, device="meta"), "num_accepted is on meta: it must be on"),
    ],
)
def test_wrong_arguments_are_refused_by_name(argument: str, value: Tensor, message: str) -> None:
    arguments = {
        "kv": torch.zeros(2, 2, 2, 4, 16, 8),
        "block_table": torch.zeros(3, 5, dtype=torch.int32),
        "first_slots": torch.zeros(3, dtype=torch.int32),
        "paths": torch.zeros(3, 4, dtype=torch.int32),
        "num_accepted": torch.zeros(3, dtype=torch.int32),
    } | {argument: value}
    arguments = {name: tensor if tensor.is_meta else tensor.to(DEVICE) for name, tensor in arguments.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        move_paths(**arguments)


def test_wrong_block_lists_are_refused_by_name() -> None:
    kv = torch.zeros(1, 2, 1, 2, 16, 8, device=DEVICE)
    with pytest.raises(ValueError, match=re.escape("pairs has shape [2, 3]: it must be [any, 2]")):
        copy_blocks(kv, torch.zeros(2, 3, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match=re.escape("pairs has strides (1, 2): it must be contiguous")):
        copy_blocks(kv, torch.zeros(2, 2, dtype=torch.int64, device=DEVICE).T)
    with pytest.raises(ValueError, match=r"block_ids has dtype torch\.int32: it must be torch\.int64"):
        clear_blocks(kv, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="is on meta"):
        clear_blocks(kv.to("meta"), torch.zeros(2, dtype=torch.int64, device=DEVICE))
