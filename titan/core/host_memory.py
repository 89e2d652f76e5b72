"""The memory of the host, within the limits of control groups, which containers are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""See "Control Group v2" of the kernel's documentation; of version 1 nothing is read."""


class HostMemory(NamedTuple):
    """Bytes."""

    available: int  # without swapping; what can be given back at once counts
    total: int


def host_memory() -> HostMemory:
    """Return the memory that this process may use: the system's, or that of one of its control groups, where it has less."""
    memory = psutil.virtual_memory()
    limits = [HostMemory(memory.available, memory.total), *_limits()]
    return HostMemory(max(min(each.available for each in limits), 0), min(each.total for each in limits))


def _limits() -> Iterator[HostMemory]:
    """Yield the limits of this process's group, and of those around it."""
    try:
        own = next(line for line in OWN_GROUP.read_text(encoding="ascii").splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):  # another system, or version 1
        return
    path = CGROUPS / own.removeprefix("0::/")
    for group in (path, *path.parents):  # those above the root have no such files, either
        try:
            limit, used = (int((group / file).read_text(encoding="ascii")) for file in ("memory.max", "memory.current"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            # pages of files that nobody has looked at lately can be given back
            yield HostMemory(limit - used + int(stat["inactive_file"]), limit)
        except (OSError, ValueError, KeyError):  # no such files, or no limit, which reads "max"
            continue
