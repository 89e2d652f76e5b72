"""Large pages change where memory lies, and nothing that is in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from titan.kernels.huge_pages import HUGE_PAGE_BYTES, use_huge_pages


@pytest.mark.parametrize("offset", [0, 1, 4096])
@pytest.mark.parametrize("num_bytes", [100, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17])
def test_what_lies_there_stays(num_bytes: int, offset: int) -> None:
    tensor = torch.randint(256, (4 * HUGE_PAGE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = tensor.clone()
    use_huge_pages(tensor.data_ptr() + offset, num_bytes)
    assert torch.equal(tensor, before)


def test_pages_become_large() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not sys.platform.startswith("linux") or not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no large pages")
    memory = torch.ones(8 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    before = huge_kilobytes()
    use_huge_pages(memory.data_ptr(), memory.nbytes)
    if huge_kilobytes() == before:
        pytest.skip("none was free, or the kernel is too old to move what is in use")
    assert huge_kilobytes() - before >= 7 * HUGE_PAGE_BYTES // 1024


def huge_kilobytes() -> int:
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
