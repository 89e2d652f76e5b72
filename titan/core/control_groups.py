"""The control groups of this process, whose limits are those of a container."""

from __future__ import annotations

from pathlib import Path

CGROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""See "Control Group v2" of the kernel's documentation; of version 1 nothing is read."""


def control_groups() -> list[Path]:
    """Return the folders of this process's control group and of those around it, some of which may have no file of a limit."""
    try:
        own = next(line for line in OWN_GROUP.read_text(encoding="ascii").splitlines() if line.startswith("0::/"))
    except (OSError, ValueError, StopIteration):  # another system, or version 1
        return []
    path = CGROUPS / own.removeprefix("0::/")
    return [path, *(group for group in path.parents if group.is_relative_to(CGROUPS))]
