"""The control groups of this process, whose limits are those of a container."""

from __future__ import annotations

from pathlib import Path

CGROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""See "Control Group v2" in the kernel's documentation; version 1 is not supported."""


def control_groups() -> list[Path]:
    """Return the folders of this process's control group and of those around it; some may have no files of limits."""
    try:
        own = next(line for line in OWN_GROUP.read_text(encoding="ascii").splitlines() if line.startswith("0::/"))
    except (OSError, ValueError, StopIteration):  # another system, or version 1
        return []
    path = CGROUPS / own.removeprefix("0::/")
    return [path, *(group for group in path.parents if group.is_relative_to(CGROUPS))]
