"""Memory for weights: nothing that is handed out overlaps, and chunks are freed."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from titan.kernels.cpu import huge_pages, weight_memory
from titan.kernels.cpu.weight_memory import WeightMemory


def test_each_tensor_keeps_its_bytes_while_others_come_and_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(weight_memory, "map_pages", mapped := Mock(wraps=weight_memory.map_pages))
    rng, memory, held = np.random.default_rng(0), WeightMemory(), list[torch.Tensor]()
    for number in range(300):
        taken = memory.take(int(rng.choice([1, 64, 100, 1000, 4096, 9000])))
        taken.fill_(0)  # as a weight is written before it is found to be too long
        if number % 3 == 0:
            taken = memory.cut(taken, int(rng.integers(len(taken) + 1)))
        held.append(taken.fill_(number % 251))
        assert taken.data_ptr() % 64 == 0 or not len(taken)
        if number % 7 == 0:
            held[int(rng.integers(len(held)))] = torch.empty(0)
    assert all((each == number % 251).all() for number, each in enumerate(held))
    assert mapped.call_count < len(held) / 3, "several share a chunk"


def test_a_chunk_is_freed_with_the_last_tensor_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    maps, make = list[weakref.ref[object]](), huge_pages.mmap.mmap

    class Map(make):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: int) -> Map:
            maps.append(weakref.ref(new := super().__new__(cls, *args)))
            return new

    monkeypatch.setattr(huge_pages.mmap, "mmap", Map)
    memory = WeightMemory()
    first, second, third = (memory.take(weight_memory.CHUNK_BYTES // 2) for _ in range(3))
    del first
    gc.collect()
    assert maps[0]() is not None
    del second
    gc.collect()
    assert maps[0]() is None and maps[1]() is not None
    del third
    gc.collect()
    assert maps[1]() is None, "nothing else keeps the one that is not full"
    assert memory.take(1).fill_(1).item() == 1


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(MemoryError, match=f"{2**60} bytes"):
        WeightMemory().take(2**60)
