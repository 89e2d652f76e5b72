"""What this device can do at most, in the same run: a copy of memory and a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from titan.bench.gpu.sections import Row, Section, Setting, Task
from titan.bench.gpu.timing import median_seconds

COPY = "copy, read and written"
MATMUL = "matrix product, bfloat16"
RATE = "per second"
"""The column of the rates, of bytes or of floating-point operations."""


def make_tasks(setting: Setting) -> Sequence[Task]:
    """The two ceilings."""
    return [
        Task(COPY, partial(measure_copy, setting), seconds=3),
        Task(MATMUL, partial(measure_matmul, setting), seconds=3),
    ]


def measure_copy(setting: Setting) -> Row:
    """Bytes per second of a copy within the device's memory, counted twice."""
    num_bytes = 2**20 if setting.is_tiny else 2**32
    source = torch.ones(num_bytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    rate = 2 * num_bytes / median_seconds(lambda: target.copy_(source), setting.device, seconds=0.3)
    return Row({RATE: rate, "size": f"{num_bytes / 2**20:.0f} MiB"})


def measure_matmul(setting: Setting) -> Row:
    """Floating-point operations per second of a square product of random numbers."""
    size = 64 if setting.is_tiny else 8192
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    a, b = torch.randn(2, size, size, generator=generator, device=setting.device).bfloat16()
    rate = 2 * size**3 / median_seconds(lambda: a @ b, setting.device, seconds=0.3)
    return Row({RATE: rate, "size": f"{size} x {size} x {size}"})


SECTION = Section(
    "ceilings",
    "Ceilings",
    "Ceilings: bytes per second of a copy, read and written, and operations per second of a matrix product. Shares elsewhere are "
    "of these.",
    seconds=30,
    columns={RATE: ".3e", "size": ""},
    make_tasks=make_tasks,
)
