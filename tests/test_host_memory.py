"""The memory of the host, and the limits of containers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from titan.core import host_memory

MIB = 2**20


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (str(100 * MIB), (100 - 60 + 20, 100)),
        (str(10 * MIB), (0, 10)),  # it was lowered
        (str(10_000 * MIB), (500, 1000)),  # more than there is
        ("max", (500, 1000)),
        (None, (500, 1000)),  # no container
    ],
)
def test_a_container_may_have_less(
    limit: str | None, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = type("Memory", (), {"available": 500 * MIB, "total": 1000 * MIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{60 * MIB}\n")
        (tmp_path / "memory.stat").write_text(f"anon {30 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\n")
    assert host_memory.host_memory() == tuple(MIB * each for each in expected)
