"""Threads of the C++ of this folder."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time per period of microseconds, of a container; "max" for no limit."""


def available_cores() -> int:
    """Return the number of physical cores that this process may use: those of its affinity mask, within its container's limit."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(min(len(cores), _container_limit()), 1)


def _siblings(cpu: int) -> str:
    """Return text that is the same for the logical processors of one core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _container_limit() -> int:
    try:
        quota, period = CGROUP_LIMIT.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return os.cpu_count() or 1 if quota == "max" else math.ceil(int(quota) / int(period))
