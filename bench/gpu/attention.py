"""Verification attention against the memory's bandwidth and against others, at the shape of Llama 3 8B.

The KV of a row is read from so many layers in turn that little of it is in the device's cache when its turn comes again. A time is
that of one layer, out of a CUDA graph of them all; planning, once per step, is a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from titan.bench.gpu.attention_batches import Case, Shape, make_layout, relative_error, uniform_shape
from titan.bench.gpu.attention_kernels import KERNELS, TITAN, Attend, Kernel, titan
from titan.bench.gpu.sections import Figures, Goal, Row, Section, Setting, Task, WrongNumbersError
from titan.bench.gpu.timing import median_seconds
from titan.bench.samples import with_ratio
from titan.kernels.triton.attention_plan import AttentionGeometry

LLAMA_3_8B = AttentionGeometry(32, 8, 128, 16, torch.bfloat16)
TINY = AttentionGeometry(4, 1, 32, 16, torch.bfloat16)
CHAIN = (-1, 0, 1, 2, 3, 4)

CACHE_BYTES = 180 * 2**20
"""Distinct KV of a row, at least: three times the second-level cache of an H200."""
MIN_LAYERS = 4
MEMORY_SHARE = 0.4
"""Of the free memory, for the KV of one row; peers copy it."""

UNIFORM = [(requests, context) for requests in (1, 8, 32, 128) for context in (1024, 8192, 32768)]
"""Batches that have goals."""
COMPARED = [(8, 8192), (32, 8192), (1, 32768), (32, 1024), (8, 1024), (128, 1024)]
"""Those with peers, the most telling first."""

SHARE_BY_FLOOR = ((200, 0.85), (50, 0.75), (20, 0.65))
"""From so many microseconds at the speed of a copy on, so much of that speed must be reached."""
MAX_DISAGREEMENT = 2e-2
"""Between two kernels that each round to bfloat16, as the norm of the difference over the norm."""


class AttentionBench:
    """The tasks share one pool of random numbers, which every row reads as its KV."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @cached_property
    def pool(self) -> Tensor:
        """Random bfloat16 numbers, as many as the largest row needs and the memory allows."""
        device = self.setting.device
        num_bytes = 2**21 if self.setting.is_tiny else 20 * 2**30
        if device.type == "cuda":
            num_bytes = min(num_bytes, int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE))
        generator = torch.Generator(device).manual_seed(self.setting.seed)
        return torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def make_case(self, shape: Shape, *, blocks_per_page: int = 1) -> Case:
        """Layout, queries and KV of a row.

        Raises:
            ValueError: the row needs more memory than the pool has.
        """
        geometry, setting = shape.geometry, self.setting
        num_blocks = sum(shape.num_pages(blocks_per_page)) * blocks_per_page
        layer_shape = (2, geometry.num_kv_heads, num_blocks, geometry.block_size, geometry.head_dim)
        layer_numel = math.prod(layer_shape)
        num_layers = 2 if setting.is_tiny else max(MIN_LAYERS, -(-CACHE_BYTES // (layer_numel * 2)))
        num_layers = min(num_layers, self.pool.numel() // layer_numel)
        if num_layers == 0:
            raise ValueError(f"{layer_numel * 2 / 1e9:.1f} GB of KV are needed, and {self.pool.nbytes / 1e9:.1f} GB are there")
        kv = self.pool[: num_layers * layer_numel].view(num_layers, *layer_shape)
        layout = make_layout(shape, seed=setting.seed, device=setting.device, blocks_per_page=blocks_per_page)
        generator = torch.Generator(setting.device).manual_seed(setting.seed + 1)
        q_shape = (num_layers, len(layout.positions), geometry.num_heads, geometry.head_dim)
        q = torch.empty(q_shape, dtype=geometry.dtype, device=setting.device).normal_(generator=generator)
        return Case(shape, layout, q, kv)

    def measure(self, shape: Shape, kernel: Kernel) -> Figures:
        """Time a kernel.

        Raises:
            WrongNumbersError: its output is not that of Titan's.
        """
        case = self.make_case(shape, blocks_per_page=max(kernel.slots_per_page // shape.geometry.block_size, 1))
        attend, bandwidth = kernel.prepare(case), self.setting.copy_bandwidth
        disagreement = check_agreement(attend(0), titan(case)(0))
        seconds = self.time_layer(case, attend)
        figures = {"us": seconds * 1e6, "disagreement": disagreement}
        if bandwidth is not None:
            floor = shape.num_bytes / bandwidth
            figures |= {"floor, us": floor * 1e6, "of bandwidth": floor / seconds}
        return figures

    def measure_plan(self, shape: Shape) -> Figures:
        """Time planning, once per step for all layers."""
        return {"plan, us": median_seconds(self.make_case(shape).plan, self.setting.device) * 1e6}

    def time_layer(self, case: Case, attend: Attend) -> float:
        """Seconds per layer, of all layers in turn."""
        num_layers = len(case.kv)

        def all_layers() -> None:
            for layer in range(num_layers):
                attend(layer)

        return median_seconds(all_layers, self.setting.device) / num_layers


def check_agreement(output: Tensor, expected: Tensor) -> float:
    """By how much two kernels disagree.

    Raises:
        WrongNumbersError: rounding cannot explain it.
    """
    disagreement = relative_error(output, expected)
    if not disagreement <= MAX_DISAGREEMENT:
        raise WrongNumbersError(f"disagrees with titan by {disagreement:.1e}: at most {MAX_DISAGREEMENT:.0e} is rounding")
    return disagreement


def make_tasks(setting: Setting) -> Sequence[Task]:
    """Titan at all shapes and its plan, then the other kernels where they are compared."""
    bench = AttentionBench(setting)
    if setting.is_tiny:
        uniform, compared = [uniform_shape(TINY, 1, 40), uniform_shape(TINY, 2, 150)], [uniform_shape(TINY, 2, 150)]
        others = [Shape("30 and 90, chain", TINY, (30, 90), CHAIN)]
    else:
        uniform, compared = ([uniform_shape(LLAMA_3_8B, *each) for each in sizes] for sizes in (UNIFORM, COMPARED))
        others = [
            Shape("1024 to 16384", LLAMA_3_8B, tuple(1024 + (15 * 1024 * i) // 31 for i in range(32))),
            Shape("65536 and 15 of 2048", LLAMA_3_8B, (65536, *(2048,) * 15)),
            Shape("8192, chain", LLAMA_3_8B, (8192,) * 8, CHAIN),
        ]

    def task(shape: Shape, name: str) -> Task:
        kernel = KERNELS[name]
        return Task({**shape.labels, "kernel": name}, partial(bench.measure, shape, kernel), kernel.seconds, kernel.is_peer)

    largest = max(uniform, key=lambda shape: len(shape.contexts))
    return [
        *(task(shape, TITAN) for shape in (*uniform, *others)),
        Task({**largest.labels, "kernel": "plan of a step"}, partial(bench.measure_plan, largest), 4),
        *(task(shape, name) for shape in compared for name in KERNELS if name != TITAN),
    ]


def goals(row: Row) -> Sequence[Goal]:
    """What Titan must reach of the bandwidth, and how many times Titan's time others must take."""
    requests, context = int(row.labels["requests"]), row.labels["context"]
    kernel = KERNELS.get(str(row.labels["kernel"]))
    if kernel is None or (requests, context) not in UNIFORM:
        return ()
    if kernel is KERNELS[TITAN]:
        floor = row.figures.get("floor, us", 0.0)
        return [Goal("of bandwidth", share) for least, share in SHARE_BY_FLOOR if floor >= least][:1]
    return () if kernel.goal is None or requests < kernel.min_requests else [Goal("x titan", kernel.goal)]


SECTION = Section(
    "attention",
    "Verification attention, one layer, 32 query heads, 8 KV heads of 128, trees of 7 tokens, bfloat16",
    "Attention: us is the median of one layer, floor what its bytes take at the speed of a copy, x titan how many times titan's "
    "time it is, disagreement the norm of the difference to titan over the norm. Plans and masks are made beforehand.",
    seconds=100,
    columns={"us": ".1f", "floor, us": ".1f", "of bandwidth": ".0%", "x titan": ".2f", "disagreement": ".1e", "plan, us": ".1f"},
    make_tasks=make_tasks,
    compare=partial(with_ratio, name="x titan", figure="us", kernel=TITAN),
    goals=goals,
)
