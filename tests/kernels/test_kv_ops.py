"""Writing, moving and clearing slots, each against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_kernels import choose_cpu_kernels

from titan.kernels.torch.cache import clear_blocks, move_kv, write_kv

NUM_LAYERS, NUM_KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 3, 2, 5, 8, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_cache(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_LAYERS, 2, NUM_KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_puts_each_token_into_its_slot_of_its_layer_and_nothing_elsewhere(dtype: torch.dtype) -> None:
    kv = random_cache(dtype)
    expected = kv.clone()
    slots = [3, 8, 39, 17, 16]
    new_kv = torch.randn(5, 2, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    for token, slot in enumerate(slots):
        expected[1, :, :, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = new_kv[token]
    write_kv(kv[1], new_kv, torch.tensor(slots))
    assert torch.equal(kv, expected)


@pytest.fixture(params=["auto", "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by the compiled library and by PyTorch."""
    choose_cpu_kernels(monkeypatch, request.param)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_move_reads_every_source_before_it_writes(dtype: torch.dtype) -> None:
    kv = random_cache(dtype)
    before, expected = kv.clone(), kv.clone()
    sources, targets = [4, 5, 17, 30, 9, 39], [3, 4, 5, 17, 39, 9]  # each overwrites another's source
    for source, target in zip(sources, targets, strict=True):
        expected[:, :, :, target // BLOCK_SIZE, target % BLOCK_SIZE] = before[:, :, :, source // BLOCK_SIZE, source % BLOCK_SIZE]
    move_kv(kv, np.array(sources), np.array(targets))
    assert torch.equal(kv, expected)
    assert not torch.equal(kv, before)


@pytest.mark.usefixtures("_kernels")
def test_clear_zeroes_whole_blocks_of_every_layer_even_of_nan() -> None:
    kv = random_cache(torch.float32)
    kv[:, :, :, 2] = torch.nan
    before = kv.clone()
    clear_blocks(kv, np.array([4, 2]))
    assert (kv[:, :, :, [2, 4]] == 0).all()
    assert torch.equal(kv[:, :, :, [0, 1, 3]], before[:, :, :, [0, 1, 3]])
