"""Large pages for weights, under Linux: with small ones a part of the time of reading them goes into finding the pages."""

from __future__ import annotations

import ctypes
import mmap
import sys

HUGE_PAGE_BYTES = 2**21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of <linux/mman.h>; the latter since Linux 6.1


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Move what lies there into large pages, as far as the system has them; nothing but speed depends on it.

    Args:
        address: of memory that is in use.
        num_bytes: its length.
    """
    if not sys.platform.startswith("linux") or num_bytes < HUGE_PAGE_BYTES:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(start, length, MADV_HUGEPAGE) == 0:
        madvise(start, length, MADV_COLLAPSE)
