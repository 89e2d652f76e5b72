"""What this device can do at most, in the same run: a copy of memory and a matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan.bench.gpu.sections import Figures, Section, Setting, Task
from titan.bench.gpu.timing import median_seconds

COPY_RATE = "bytes/s"


def make_tasks(setting: Setting) -> Sequence[Task]:
    """A copy of memory within the device, and a product of two square matrices of random numbers."""
    device = setting.device
    num_bytes, size = (2**20, 64) if setting.is_tiny else (2**32, 8192)

    def copy() -> Figures:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return {COPY_RATE: 2 * num_bytes / median_seconds(lambda: target.copy_(source), device, seconds=0.3)}

    def multiply() -> Figures:
        generator = torch.Generator(device).manual_seed(setting.seed)
        a, b = torch.randn(2, size, size, generator=generator, device=device).bfloat16()
        return {"operations/s": 2 * size**3 / median_seconds(lambda: a @ b, device, seconds=0.3)}

    return [
        Task({"ceiling": "copy", "size": f"{num_bytes / 2**20:.0f} MiB"}, copy, 3),
        Task({"ceiling": "matrix product, bfloat16", "size": f"{size}^3"}, multiply, 3),
    ]


SECTION = Section(
    "ceilings",
    "Ceilings",
    "Ceilings: bytes of a copy, read and written, and floating-point operations of a product. Shares elsewhere are of these.",
    seconds=30,
    columns={COPY_RATE: ".3e", "operations/s": ".3e"},
    make_tasks=make_tasks,
)
