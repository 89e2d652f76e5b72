"""The C++ kernels on processors that this machine is not: built by cross compilers, run in an emulator, held to loops in double."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from titan.kernels.cpu.kinds import X86_64_V4
from titan.kernels.cpu.library import FLAGS

FOLDER = Path(__file__).parent
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PROCESSORS = {
    "arm": (CROSS_COMPILER, "-static", "-march=armv8-a"),
    "arm with products of bfloat16": (CROSS_COMPILER, "-static", "-march=armv8.2-a+bf16"),
    "x86-64 without AVX": ("c++", "-march=x86-64"),
    "amx": ("c++", *X86_64_V4, "-mavx512bf16", "-include", str(FOLDER / "emulated_amx.h")),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_agree_with_loops_in_double(name: str, tmp_path: Path) -> None:
    compiler, *flags = PROCESSORS[name]
    run = [EMULATOR, "-cpu", "max"] if compiler == CROSS_COMPILER else []
    if missing := [tool for tool in (compiler, *run[:1]) if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    program, general = tmp_path / "check", [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    subprocess.run([compiler, *general, *flags, str(FOLDER / "check_kernels.cpp"), "-o", str(program)], check=True)
    result = subprocess.run([*run, str(program)], capture_output=True, text=True, check=False)
    if result.returncode == -4:  # SIGILL: this processor has no AVX-512
        pytest.skip("the processor lacks instructions that are not emulated")
    assert result.returncode == 0, result.stdout
    assert len(result.stdout.splitlines()) == 24
