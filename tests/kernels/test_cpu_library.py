"""Compiling and caching the CPU kernels, and what happens where that cannot be done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan.kernels import cpu_library
from titan.kernels.cpu_library import load_library

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, cpu_library.COMPILERS)), reason="there is no C++ compiler on this machine"
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@needs_compiler
def test_it_is_compiled_once_for_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = load_library()
    assert loaded.library is not None, loaded.description
    (built,) = (tmp_path / "titan").iterdir()
    assert str(built) in loaded.description
    monkeypatch.setattr(cpu_library, "_compile", None)
    load_library.cache_clear()
    assert load_library().library is not None

    other = tmp_path / "other.cpp"
    other.write_text(cpu_library.SOURCE.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr(cpu_library, "SOURCE", other)
    load_library.cache_clear()
    with pytest.raises(TypeError):  # there is no library of this source
        load_library()


def test_without_a_compiler_nothing_is_loaded_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    loaded = load_library()
    assert loaded.library is None
    assert loaded.description.startswith("not compiled: no C++ compiler was found")


@needs_compiler
def test_a_compiler_that_fails_is_told_with_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {", encoding="utf-8")
    monkeypatch.setattr(cpu_library, "SOURCE", broken)
    loaded = load_library()
    assert loaded.library is None
    assert "failed" in loaded.description and "\n" not in loaded.description
    assert list((tmp_path / "titan").iterdir()) == []


def test_a_compiler_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    loaded = load_library()
    assert loaded.library is None
    assert "no-such-compiler failed" in loaded.description


@needs_compiler
def test_a_second_openmp_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "_openmp_runtimes", lambda: {"/a/libgomp.so.1", "/b/libiomp5.so"})
    loaded = load_library()
    assert loaded.library is None
    assert "another OpenMP runtime" in loaded.description
