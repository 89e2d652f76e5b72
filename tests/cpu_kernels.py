"""Choosing the kernels of a CPU inside of a test; `conftest.py` ends the choice with it."""

from __future__ import annotations

import pytest

from titan.kernels.cpu.library import CPU_KERNELS, usable_library


def choose_cpu_kernels(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Let ``TITAN_CPU_KERNELS`` have this value, though the environment has been looked at before."""
    monkeypatch.setenv(CPU_KERNELS, choice)
    usable_library.cache_clear()
