"""Compiles what the wrappers of Triton kernels launch for an H100 or H200, on a machine without a GPU.

`compile_launches` runs a piece of code in a process of its own, where every launch is compiled for sm_90 by the compiler and
the assembler that the triton wheel carries, and not run. Tensors live on the CPU there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_BYTES_OF_SHARED_MEMORY = 227 * 1024
"""What one program of an H100 or H200 may use."""


@dataclass(frozen=True)
class Build:
    name: str
    constants: dict[str, str]
    num_warps: int
    num_stages: int
    registers: int  # per thread
    stack_bytes: int  # per thread; more than 0 where registers were spilled
    shared_bytes: int  # per program
    has_wgmma: bool  # warp-group matrix products
    has_mma: bool  # warp-level matrix products
    minus_infinities: list[int]  # written out in each loop: what masks put in


def compile_launches(code: str) -> list[Build]:
    """Run ``code`` and return what its launches were compiled to, each build once, in order.

    Raises:
        AssertionError: the code failed; carries its output.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], input=code, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [Build(**each) for each in json.loads(done.stdout.splitlines()[-1])]


def _describe(compiled: Any, constants: dict[str, str]) -> Build:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    loops = re.finditer(r"^(\$L__BB\w+):.*?\bbra(\.uni)?\s+\1;", ptx, re.MULTILINE | re.DOTALL)
    return Build(
        name=metadata.name,
        constants=constants,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=int(registers),
        stack_bytes=int(stack),
        shared_bytes=metadata.shared,
        has_wgmma="wgmma.mma_async" in ptx,
        has_mma="mma.sync" in ptx,
        minus_infinities=[loop[0].count("0fFF800000") for loop in loops],
    )


def _main() -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    import titan.kernels.triton.tools as triton_tools

    sm90 = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
    )  # as much of a driver as compiling asks for
    builds: dict[int, tuple[Any, dict[str, str]]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        names = [parameter.name for parameter in self.params]
        bound = dict(zip(names, args, strict=False)) | options
        constants = {p.name: str(bound[p.name]) for p in self.params if p.is_constexpr and p.name in bound}
        builds.setdefault(id(compiled), (compiled, constants))
        return compiled

    driver.set_active(sm90)
    JITFunction.run = compile_only
    triton_tools.is_launchable = lambda device: True
    exec(compile(sys.stdin.read(), "<launches>", "exec"), {})
    print(json.dumps([asdict(_describe(*each)) for each in builds.values()]))


if __name__ == "__main__":
    _main()
