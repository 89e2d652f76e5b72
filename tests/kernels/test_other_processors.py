"""The C++ kernels on processors that this machine is not: built by cross compilers, run in an emulator, held to loops in double."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from titan.kernels.cpu.kinds import kinds_here
from titan.kernels.cpu.library import FLAGS

FOLDER = Path(__file__).parent
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PROCESSORS = {
    "arm": (CROSS_COMPILER, "-static", "-march=armv8-a"),
    "arm with products of bfloat16": (CROSS_COMPILER, "-static", "-march=armv8.2-a+bf16"),
}
if platform.machine() == "x86_64":
    PROCESSORS["x86-64 without AVX, fast math by default"] = ("c++ -ffast-math", "-march=x86-64")
if "avx512" in (kind.name for kind in kinds_here()):
    PROCESSORS["the first AVX-512"] = ("c++", "-O1", "-march=x86-64-v3", "-mavx512f")  # in half the time


@pytest.mark.long
@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_agree_with_loops_in_double(name: str, tmp_path: Path) -> None:
    compiler, *flags = PROCESSORS[name]
    run = [EMULATOR, "-cpu", "max"] if compiler == CROSS_COMPILER else []
    if missing := [tool for tool in (compiler.split()[0], *run[:1]) if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    flags, program = [*(set(FLAGS) - {"-shared", "-fPIC"}), *flags], str(tmp_path / "check")
    subprocess.run([*compiler.split(), *flags, str(FOLDER / "check_kernels.cpp"), "-o", program], check=True)
    result = subprocess.run([*run, program], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 44 and "nan" not in result.stdout, result.stdout
