"""Threads of the C++ of this folder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from titan.core.control_groups import control_groups


def available_cores() -> int:
    """Return the number of physical cores that this process may use: those of its affinity mask, within containers' limits."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(min([len(cores), *_limits()]), 1)


def _siblings(cpu: int) -> str:
    """Return text that is the same for the logical processors of one core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _limits() -> Iterator[int]:
    for group in control_groups():
        try:
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            yield math.ceil(int(quota) / int(period))  # microseconds of processor time per period
        except (OSError, ValueError):  # no such file, or no limit, which reads "max"
            continue
