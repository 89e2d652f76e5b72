"""Compiling and caching the CPU kernels, and what happens where that cannot be done."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from titan.core.sampling_rows import OPTIONS
from titan.kernels.cpu import library as cpu_library
from titan.kernels.cpu import structs
from titan.kernels.cpu.kinds import KINDS, Kind
from titan.kernels.cpu.library import LoadedLibrary, load_library

*_, AVX512, AVX2, NATIVE = KINDS
COMPILER = next(filter(shutil.which, cpu_library.COMPILERS), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "short.cpp"  # the whole library takes seconds to compile
    source.write_text('extern "C" int one() { return 1; }\n', encoding="utf-8")
    monkeypatch.setattr(cpu_library, "SOURCE", source)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def load_again(kind: Kind = NATIVE) -> LoadedLibrary:
    load_library.cache_clear()
    loaded = load_library(kind)
    assert loaded.library is not None, loaded.description
    return loaded


def test_it_is_compiled_once_for_a_source_and_again_where_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_again()
    (built,) = (tmp_path / "titan").iterdir()
    assert loaded.path == built
    cut_off = tmp_path / "other" / "titan" / built.name  # of a path that this process has loaded, the system reads no file
    cut_off.parent.mkdir(parents=True)
    cut_off.write_bytes(built.read_bytes()[:-1])  # it could be loaded
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    load_again()
    assert cut_off.read_bytes() == built.read_bytes()
    assert caplog.text.count("compiling the kernels of this CPU, which takes half a minute to a minute") == 2
    assert "every start" not in caplog.text
    monkeypatch.setattr(cpu_library, "_compile", None)
    load_again()
    cpu_library.SOURCE.write_text(cpu_library.SOURCE.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    load_library.cache_clear()
    with pytest.raises(TypeError):  # there is no library of this source
        load_library(NATIVE)


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        (None, "error: "),
        ("false", "non-zero exit status"),
        ("no-such-compiler", "no-such-compiler: "),
        ("'unbalanced", "not compiled: 'unbalanced: No closing quotation"),
    ],
)
def test_a_compiler_that_fails_is_told_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, compiler: str | None, message: str
) -> None:
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    cpu_library.SOURCE.write_text("int main( {", encoding="utf-8")
    loaded = load_library(NATIVE)
    assert loaded.library is None
    assert message in loaded.description and "\n" not in loaded.description
    assert loaded.description in caplog.text
    assert list(tmp_path.glob("titan/*")) == []


@pytest.mark.parametrize("interruption", [None, KeyboardInterrupt])
def test_a_compiler_that_takes_too_long_or_is_interrupted_ends_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interruption: type[BaseException] | None
) -> None:
    (compiler := tmp_path / "slow").write_text('#!/bin/sh\n[ "$1" = --version ] || sleep 100 &\necho slow\nwait\n', "utf-8")
    compiler.chmod(0o700)
    communicate, pipes = subprocess.Popen.communicate, []

    def communicate_once_it_runs(process: Any, *args: Any, **options: Any) -> Any:
        pipes.append(os.dup(process.stdout.fileno()))  # of which all its processes have the other end
        assert os.read(pipes[-1], 5) == b"slow\n"
        if interruption is not None and len(pipes) == 2:  # after it has told its version
            raise interruption
        return communicate(process, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_once_it_runs)
    monkeypatch.setattr(cpu_library, "COMPILE_SECONDS", 0.01)
    monkeypatch.setenv("CXX", str(compiler))
    if interruption is None:
        assert "timed out" in load_library(NATIVE).description
    else:
        with pytest.raises(interruption):
            load_library(NATIVE)
    for pipe in pipes:
        assert select.select([pipe], [], [], 10)[0] and os.read(pipe, 1) == b"", "a process runs"
        os.close(pipe)
    assert len(pipes) == 2


def test_without_a_compiler_what_it_costs_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert load_library(NATIVE).library is load_library(NATIVE).library is None
    assert caplog.messages == [
        "the kernels of this CPU are PyTorch's, which are several times slower; not compiled: no C++ compiler was found (c++, g++, "
        "clang++, or the variable CXX); with TITAN_CPU_KERNELS=torch nothing is compiled, and this is not said"
    ]


def test_a_linker_is_told_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_library.SOURCE.write_text("int missing();\nint present() { return missing(); }\n", encoding="utf-8")
    monkeypatch.setenv("CXX", f"{COMPILER} -Wl,--no-undefined")
    assert "undefined reference to" in (description := load_library(NATIVE).description) and "collect2" not in description


@pytest.mark.parametrize("cache", ["a file", "no home", "full"])
def test_without_a_cache_folder_nothing_is_left_behind_and_a_compiler_may_have_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: str
) -> None:
    monkeypatch.setenv("CXX", f"{COMPILER} -DNOTHING")
    if cache == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(cpu_library.SOURCE))
    elif cache == "full":
        monkeypatch.setattr(shutil, "copy", MagicMock(side_effect=OSError(ENOSPC, "No space left on device")))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", MagicMock(side_effect=RuntimeError("Could not determine home directory.")))
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    loaded = load_again()
    assert loaded.description.endswith(f"compiled by {COMPILER} -DNOTHING") and loaded.path is None
    assert loaded.library.one() == 1  # type: ignore[union-attr]
    assert list(temporary.iterdir()) == list(tmp_path.glob("titan/*")) == []
    assert "this is done at every start, because the cache folder cannot be written, or what is in it not be run" in caplog.text


def test_what_is_kept_but_cannot_be_loaded_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As from a folder of which nothing is run, or where it is another user's."""
    load_again()
    load = ctypes.CDLL

    def load_elsewhere(path: str) -> ctypes.CDLL:
        if path.startswith(str(tmp_path / "titan")):
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", load_elsewhere)
    loaded = load_again()
    assert loaded.path is None and loaded.library.one() == 1  # type: ignore[union-attr]
    assert "this is done at every start" in caplog.text


def test_a_compiler_behind_a_launcher_is_asked_for_its_own_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (launcher := tmp_path / "launch").write_text('#!/bin/sh\nexec "$@"\n', "utf-8")
    launcher.chmod(0o700)
    monkeypatch.setenv("CXX", f"{launcher} {COMPILER}")
    assert load_again()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kinds of other processors")
def test_each_kind_has_a_file_of_its_own_with_its_instructions(tmp_path: Path) -> None:
    source = 'extern "C" int number() {\n#ifdef __AVX512F__\nreturn 512;\n#else\nreturn 2 * __AVX2__;\n#endif\n}\n'
    cpu_library.SOURCE.write_text(source, encoding="utf-8")
    assert len({load_again(kind).path for kind in (AVX512, AVX2, AVX512)}) == len(list((tmp_path / "titan").iterdir())) == 2
    assert [load_library(kind).library.number() for kind in (AVX512, AVX2)] == [512, 2]  # type: ignore[union-attr]


def test_structs_are_in_python_as_in_the_c_plus_plus(tmp_path: Path) -> None:
    """Each field is where the library reads it, and none is missing."""
    lines = [f'#include "{Path(structs.__file__).with_name("growth.h")}"', "#include <cstddef>"]
    for name, struct in [*structs.STRUCTS.items(), ("Options", OPTIONS)]:
        layout = np.dtype(struct)
        lines.append(f"static_assert(sizeof({name}) == {layout.itemsize});")
        fields = (layout.fields or {}).items()
        lines += [f"static_assert(offsetof({name}, {field}) == {offset});" for field, (_, offset, *_) in fields]
    (tmp_path / "layouts.cpp").write_text("\n".join(lines), encoding="utf-8")
    assert COMPILER is not None
    command = [COMPILER, *cpu_library.FLAGS, "-fsyntax-only", str(tmp_path / "layouts.cpp")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
