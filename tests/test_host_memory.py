"""The memory of the host, and the limits of containers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from titan.core import control_groups, host_memory

MIB = 2**20


@pytest.mark.parametrize(
    ("limits", "own", "expected"),
    [
        ({"": 100}, "/", (100 - 60 + 20, 100)),
        ({"": 10}, "/", (0, 10)),  # it was lowered
        ({"": 10_000}, "/", (500, 1000)),  # more than there is
        ({"": None}, "/", (500, 1000)),
        ({}, "/", (500, 1000)),
        ({"a.slice/b.scope": 200, "a.slice": 300}, "/a.slice/b.scope", (160, 200)),
        ({"a.slice/b.scope": None, "a.slice": 300}, "/a.slice/b.scope", (260, 300)),
        ({"a.slice": 300}, "/other", (500, 1000)),
        ({"": 100}, None, (500, 1000)),  # version 1
    ],
)
def test_a_control_group_may_have_less(
    limits: dict[str, int | None],
    own: str | None,
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = type("Memory", (), {"available": 500 * MIB, "total": 1000 * MIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "OWN_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text("4:memory:/a\n" + ("" if own is None else f"0::{own}\n"))
    for name, limit in limits.items():
        (group := tmp_path / "groups" / name).mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text("max\n" if limit is None else f"{limit * MIB}\n")
        (group / "memory.current").write_text(f"{60 * MIB}\n")
        (group / "memory.stat").write_text(f"anon {30 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\n")
    assert host_memory.host_memory() == tuple(MIB * each for each in expected)
