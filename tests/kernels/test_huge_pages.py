"""Large pages change where memory lies, and nothing that is in it."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest
import torch

from titan.kernels.cpu import weights
from titan.kernels.cpu.weights import HUGE_PAGE_BYTES, use_huge_pages


@pytest.mark.parametrize("offset", [0, 1, 4096])
@pytest.mark.parametrize("num_bytes", [100, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17])
def test_what_lies_there_stays(num_bytes: int, offset: int) -> None:
    tensor = torch.randint(256, (4 * HUGE_PAGE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = tensor.clone()
    use_huge_pages(tensor.data_ptr() + offset, num_bytes)
    assert torch.equal(tensor, before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")
@pytest.mark.parametrize("offset", [0, 1, mmap.PAGESIZE - 1])
def test_whole_pages_inside_the_area_are_asked_for(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []

    class Library:
        """Records what is asked of the system, which says yes."""

        def __init__(self, _: Any) -> None:
            def madvise(start: int, length: int, advice: int) -> int:
                calls.append((start, length, advice))
                return 0

            self.madvise = madvise

    monkeypatch.setattr("ctypes.CDLL", Library)
    address, num_bytes = 100 * HUGE_PAGE_BYTES + offset, HUGE_PAGE_BYTES + 5
    use_huge_pages(address, HUGE_PAGE_BYTES - 1)
    assert not calls  # too little for a large page
    use_huge_pages(address, num_bytes)
    assert [advice for *_, advice in calls] == [weights.MADV_HUGEPAGE, weights.MADV_COLLAPSE]
    for start, length, _ in calls:
        assert address <= start < address + mmap.PAGESIZE and start % mmap.PAGESIZE == 0
        assert length % mmap.PAGESIZE == 0 and 0 <= address + num_bytes - (start + length) < mmap.PAGESIZE
