"""Moves of accepted paths, copies and clearing of blocks: every back end against a loop, whole caches compared bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import Request, random_parents
from torch import Tensor

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor, kv_planes
from titan.kernels.interfaces import Backend, PathMove

NUM_BLOCKS, BLOCK_SIZE = 14, 16
GROUPS = (KVGroup(num_layers=2, num_kv_heads=2, head_dim=20), KVGroup(num_layers=1, num_kv_heads=3, head_dim=8))
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.int8: torch.int8}


def random_kv(backend: Backend, dtype: torch.dtype) -> KVTensor:
    """Random bits: NaN, infinities and subnormal numbers are among them."""
    layout, generator = KVLayout(GROUPS, dtype), torch.Generator().manual_seed(0)
    kv = KVTensor(layout, NUM_BLOCKS, BLOCK_SIZE, backend.device, backend.cache.zeros)
    assert not any(bits.any() for bits in bits_of(kv))
    for group in kv.groups:
        bits = torch.randint(-(2**31), 2**31, group.shape, generator=generator).to(BITS[dtype])
        group.copy_(bits.view(dtype))
    return kv


def bits_of(kv: KVTensor) -> list[Tensor]:
    return [group.cpu().view(BITS[kv.layout.dtype]).clone() for group in kv.groups]


def slots_of(bits: Tensor, group: KVGroup) -> tuple[Tensor, ...]:
    """Views [num_layers, num_blocks, 2, num_kv_heads, block_size, ...] of all that a group keeps."""
    return kv_planes(bits, group.head_dim) if bits.dtype == torch.int8 else (bits,)


def assert_bits(kv: KVTensor, expected: list[Tensor]) -> None:
    assert all(torch.equal(actual, each) for actual, each in zip(bits_of(kv), expected, strict=True))


def check_moves(backend: Backend, moves: list[PathMove], dtype: torch.dtype = torch.float32) -> None:
    kv = random_kv(backend, dtype)
    before, expected = bits_of(kv), bits_of(kv)
    for move in moves:
        for j, node in enumerate(move.path):
            (target, to), (source, at) = (divmod(move.first_slot + each, BLOCK_SIZE) for each in (j, node))
            for olds, news in zip(map(slots_of, before, GROUPS), map(slots_of, expected, GROUPS), strict=True):
                for old, new in zip(olds, news, strict=True):
                    new[:, move.block_ids[target], :, :, to] = old[:, move.block_ids[source], :, :, at]
    backend.cache.move_paths(kv, moves)
    assert_bits(kv, expected)


@pytest.mark.parametrize("dtype", BITS)
def test_accepted_paths_of_random_trees_move(backend: Backend, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    tables = [blocks[:6], blocks[6:10], blocks[10:12], blocks[12:]]
    paths = [Request(0, 1, random_parents(rng, number)).path(int(rng.integers(number))) for number in (63, 40, 12)]
    starts = [int(rng.integers(20)), 9, 14, 3]
    check_moves(backend, [PathMove(*each) for each in zip(tables, starts, [*paths, []], strict=True)], dtype)


@pytest.mark.parametrize("first_slot", [0, 9, 14, 15, 16])
def test_paths_move_across_block_edges_onto_the_sources_of_later_nodes(backend: Backend, first_slot: int) -> None:
    """In any order, each path is read before it is written; one that is in place moves nothing."""
    later = PathMove([4, 1, 3], first_slot, [1, 2, 3, 5, 6, 20])
    check_moves(backend, [later, PathMove([2, 0], 14, [2, 0, 3, 1]), PathMove([7, 5], 3, [0, 1, 2, 3])])


@pytest.mark.parametrize("dtype", BITS)
def test_copies_and_clearing_touch_whole_blocks_and_nothing_else(backend: Backend, dtype: torch.dtype) -> None:
    kv = random_kv(backend, dtype)
    for group in kv.groups:
        group[:, 11] = torch.nan if dtype.is_floating_point else -1  # all bits of a scale: NaN
    expected = bits_of(kv)
    pairs = [(3, 0), (3, 6), (1, 4), (11, 12)]
    backend.cache.copy_blocks(kv, *np.array(pairs).T.copy())
    for group in expected:
        for source, target in pairs:
            group[:, target] = group[:, source]
    assert_bits(kv, expected)
    backend.cache.clear_blocks(kv, np.array([6, 11, 3]))
    for group in expected:
        group[:, [3, 6, 11]] = 0
    assert_bits(kv, expected)
    host = backend.cache.host_blocks(kv, 9)
    assert all(not blocks.any() for blocks in host)
    sources, away, back = np.array([4, 11, 0, 1, 2]), np.array([8, 1, 2, 3, 5]), np.array([0, 5, 11, 12, 13])
    backend.cache.copy_out(kv, host, sources, away)
    backend.cache.copy_in(kv, host, away, back)
    backend.cache.await_copies()
    for group in expected:
        group[:, back] = group[:, sources]
    assert_bits(kv, expected)
    assert [blocks.flatten(1).any(1).nonzero().flatten().tolist() for blocks in host] == [[2, 3, 5, 8]] * 2, "11 was cleared"
    for num_blocks in (12, 17, None):
        other = kv if num_blocks is None else KVTensor(kv.layout, num_blocks, BLOCK_SIZE, backend.device, backend.cache.empty)
        backend.cache.gather_blocks(kv, other, np.array([5, 0, 13, 1]))
        for actual, each in zip(bits_of(other), expected, strict=True):
            assert torch.equal(actual[:, :4], each[:, [5, 0, 13, 1]])
        kv = random_kv(backend, dtype)
        expected = bits_of(kv)
    none = np.zeros(0, np.int64)
    backend.cache.copy_blocks(kv, none, none)
    backend.cache.clear_blocks(kv, none)
    assert_bits(kv, expected)
