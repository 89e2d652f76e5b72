"""What this device can do at most, in the same run, with memory and matrix products; and what it does with those of a model.

Weights lie in memory as often as is needed for few of them to be in the device's cache when their turn comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from titan.bench.gpu.attention_batches import DISTINCT_BYTES
from titan.bench.gpu.sections import Figures, Section, Setting, Task
from titan.bench.gpu.timing import median_seconds
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.short_weights import TILINGS

COPY_RATE, OPERATION_RATE = "bytes/s", "operations/s"
RATES = {"copy_bandwidth": COPY_RATE, "peak": OPERATION_RATE}
"""Figures that other sections compare theirs with, by their names in a `Setting`."""
WEIGHTS = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128_256, 4096)}
"""Outputs and inputs of the products of Llama 3 8B."""
NUM_ROWS = (1, 7, 56, 224, 896)
"""Tokens of a pass: of one request, and of 1, 8, 32 and 128 with six draft tokens."""


def make_tasks(setting: Setting) -> Sequence[Task]:
    """A copy of memory within the device, and a product of two square matrices of random numbers."""
    device = setting.device
    num_bytes, size = (2**20, 64) if setting.is_tiny else (2**32, 8192)

    def copy() -> Figures:
        source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        # by a kernel: an H200's engine for copies reaches two thirds of what its multiprocessors do
        return {COPY_RATE: 2 * num_bytes / median_seconds(lambda: torch.neg(source, out=target), device, seconds=0.3)}

    def multiply() -> Figures:
        generator = torch.Generator(device).manual_seed(setting.seed)
        a, b = torch.randn(2, size, size, generator=generator, device=device).bfloat16()
        return {OPERATION_RATE: 2 * size**3 / median_seconds(lambda: a @ b, device, seconds=0.3)}

    return [
        Task({"ceiling": "copy", "size": f"{num_bytes / 2**20:.0f} MiB"}, copy, 3),
        Task({"ceiling": "matrix product, bfloat16", "size": f"{size}^3"}, multiply, 3),
    ]


SECTION = Section(
    "ceilings",
    "Ceilings",
    "Ceilings: bytes of a copy, read and written, and floating-point operations of a product. Shares elsewhere are of these.",
    seconds=60,  # most of it is starting; what is left is the next section's
    columns={COPY_RATE: ".3e", OPERATION_RATE: ".3e"},
    make_tasks=make_tasks,
)


def measure_product(name: str, num_rows: int, bits: int, setting: Setting) -> Figures:
    """Time a product as a layer calls it, with weights of so many bits."""
    num_outputs, num_inputs = (size // 64 if setting.is_tiny else size for size in WEIGHTS[name])
    device, num_weights = setting.device, num_outputs * num_inputs
    num_bytes, num_operations = num_weights * bits // 8, 2 * num_weights * num_rows
    ops = TritonBackend(device).layer_ops(torch.bfloat16, frozenset())
    num_copies = 1 if setting.is_tiny else -(-DISTINCT_BYTES // num_bytes)
    random = (torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16, device=device) for _ in range(num_copies))
    weights = [ops.pack(weight, None if bits == 16 else bits) for weight in random]
    x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=device)
    seconds = median_seconds(lambda: [ops.linear(x, weight, None) for weight in weights], device) / num_copies
    figures = {"us": 1e6 * seconds, "TFLOP/s": 1e-12 * num_operations / seconds}
    if setting.copy_bandwidth and setting.peak:
        num_bytes += 2 * num_rows * (num_outputs + num_inputs)
        figures["of bandwidth"] = num_bytes / setting.copy_bandwidth / seconds
        figures["of peak"] = num_operations / setting.peak / seconds
    return figures


def make_product_tasks(setting: Setting) -> Sequence[Task]:
    """All weights with each number of rows in turn; with 8 bits, only as many rows as the kernels read codes for."""
    runs = [(name, rows, bits) for rows in NUM_ROWS for bits in (16, 8) for name in WEIGHTS if bits == 16 or rows <= max(TILINGS)]
    return [Task({"weight": run[0], "rows": run[1], "bits": run[2]}, partial(measure_product, *run, setting), 2) for run in runs]


PRODUCTS = Section(
    "products",
    "Matrix products of Llama 3 8B, bfloat16, some with weights of 8 bits",
    "Products: of bandwidth, of peak: its bytes at the speed of a copy, its operations at that of a large product, over its time.",
    seconds=60,
    columns={"us": ".1f", "TFLOP/s": ".1f", "of bandwidth": ".0%", "of peak": ".0%"},
    make_tasks=make_product_tasks,
)
