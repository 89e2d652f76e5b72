"""The memory of the host, within the limit of a container."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Of this process, as a container sees it; see "Control Group v2" of the kernel's documentation."""


class HostMemory(NamedTuple):
    """Bytes."""

    available: int  # without swapping; what can be given back at once counts
    total: int


def host_memory() -> HostMemory:
    """Return the memory that this process may use: the system's, or its container's where that has less."""
    memory = psutil.virtual_memory()
    try:
        limit, used = (int((CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        free = limit - used + int(stat["inactive_file"])  # pages of files that nobody has looked at lately
    except (OSError, ValueError, KeyError):  # no such files, or no limit, which reads "max"
        return HostMemory(memory.available, memory.total)
    return HostMemory(max(min(memory.available, free), 0), min(memory.total, limit))
