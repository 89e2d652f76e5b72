"""The memory of the host, within the limits of control groups, which containers are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import psutil

from titan.core.control_groups import control_groups


class HostMemory(NamedTuple):
    """Memory in bytes."""

    available: int  # without swapping, caches that can be dropped at once included
    total: int


def host_memory() -> HostMemory:
    """Return the memory that this process may use: the system's, or that of one of its control groups, where it has less."""
    memory = psutil.virtual_memory()
    limits = [HostMemory(memory.available, memory.total), *_limits()]
    return HostMemory(max(min(each.available for each in limits), 0), min(each.total for each in limits))


def _limits() -> Iterator[HostMemory]:
    for group in control_groups():
        try:
            limit, used = (int((group / file).read_text(encoding="ascii")) for file in ("memory.max", "memory.current"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            # inactive pages of files can be dropped at once
            yield HostMemory(limit - used + int(stat["inactive_file"]), limit)
        except (OSError, ValueError, KeyError):  # no such files, or no limit, which reads "max"
            continue
