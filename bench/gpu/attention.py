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

from titan.bench.gpu.attention_batches import Case, Shape, make_layout, relative_error
from titan.bench.gpu.attention_peers import PEERS, Attend
from titan.bench.gpu.sections import Goal, Row, Section, Setting, Task
from titan.bench.gpu.timing import median_seconds
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.attention_planner import CHUNK_MULTIPLE

LLAMA_3_8B = AttentionGeometry(32, 8, 128, 16, torch.bfloat16)
TINY = AttentionGeometry(4, 1, 32, 16, torch.bfloat16)
CHAIN = (-1, 0, 1, 2, 3, 4)

CACHE_BYTES = 180 * 2**20
"""Distinct KV of a row, at least: three times the second-level cache of an H200."""
MIN_LAYERS = 4
MEMORY_SHARE = 0.4
"""Of the free memory, for the KV of one row; peers copy it."""

SHAPES = [(batch, context) for batch in (1, 8, 32, 128) for context in (1024, 8192, 32768)]
COMPARED = [(8, 8192), (32, 8192), (1, 32768), (32, 1024), (8, 1024), (128, 1024)]
"""Rows with peers, the most telling first."""

SHARE_BY_FLOOR = ((200e-6, 0.85), (50e-6, 0.75), (20e-6, 0.65))
"""From so many seconds at the speed of a copy on, so much of that speed must be reached."""
MAX_DISAGREEMENT = 2e-2
"""Between two kernels that each round to bfloat16, as the norm of the difference over the norm."""

COLUMNS = {"us": ".1f", "floor us": ".1f", "of bandwidth": ".0%", "x titan": ".2f", "disagreement": ".1e"}


def uniform_shape(geometry: AttentionGeometry, batch: int, context: int) -> Shape:
    """All contexts of one length."""
    return Shape(f"{batch} x {context}", geometry, (context,) * batch)


class AttentionBench:
    """The tasks share one pool of random numbers, which every row reads as its KV."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.titan: dict[str, float] = {}  # seconds by shape

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

    def measure_titan(self, shape: Shape) -> Row:
        """The kernel as the engine calls it, against the bandwidth."""
        case = self.make_case(shape)
        seconds = self.titan[shape.name] = self.time_layer(case, titan_attention(case))
        figures = self._figures(shape, seconds)
        share = figures.get("of bandwidth", 0.0)
        goals = [Goal("share of copy bandwidth", goal, share) for start, goal in SHARE_BY_FLOOR if share * seconds >= start]
        return Row(figures, goals[:1] if shape.has_goal else ())

    def measure_unsplit(self, shape: Shape) -> Row:
        """The kernel with one program per tile, whatever the context: what split contexts are worth."""
        case = self.make_case(shape)
        longest = max(shape.contexts) + shape.query_len
        attend = titan_attention(case, fixed_chunk=-(-longest // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
        return self._compare(shape, case, attend, None)

    def measure_plan(self, shape: Shape) -> Row:
        """Planning, once per step for all layers."""
        case = self.make_case(shape)
        return Row({"us": median_seconds(case.plan, self.setting.device) * 1e6})

    def measure_peer(self, shape: Shape, name: str) -> Row:
        """Another kernel on the same numbers."""
        peer = PEERS[name]
        case = self.make_case(shape, blocks_per_page=max(peer.page // shape.geometry.block_size, 1))
        return self._compare(shape, case, peer.prepare(case), peer.goal if len(shape.contexts) >= peer.min_batch else None)

    def _compare(self, shape: Shape, case: Case, attend: Attend, goal: float | None) -> Row:
        disagreement = relative_error(attend(0), titan_attention(case)(0))
        seconds = self.time_layer(case, attend)
        figures, goals, problem = self._figures(shape, seconds) | {"disagreement": disagreement}, [], None
        if shape.name in self.titan:
            figures["x titan"] = seconds / self.titan[shape.name]
            goals = [] if goal is None else [Goal("time over titan's", goal, figures["x titan"])]
        if not disagreement <= MAX_DISAGREEMENT:
            problem = f"disagrees with titan by {disagreement:.1e}: at most {MAX_DISAGREEMENT:.0e} is rounding"
        return Row(figures, goals, problem)

    def _figures(self, shape: Shape, seconds: float) -> dict[str, float]:
        figures, bandwidth = {"us": seconds * 1e6}, self.setting.copy_bandwidth
        if bandwidth is not None:
            floor = shape.num_bytes / bandwidth
            figures |= {"floor us": floor * 1e6, "of bandwidth": floor / seconds}
        return figures

    def time_layer(self, case: Case, attend: Attend) -> float:
        """Seconds per layer, of all layers in turn."""
        num_layers = len(case.kv)

        def all_layers() -> None:
            for layer in range(num_layers):
                attend(layer)

        return median_seconds(all_layers, self.setting.device) / num_layers


def titan_attention(case: Case, fixed_chunk: int | None = None) -> Attend:
    """Titan's kernel over one layer of a case, planned."""
    plan = case.plan(fixed_chunk)
    return lambda layer: case.attend(layer, plan)


def make_tasks(setting: Setting) -> Sequence[Task]:
    """Titan at all shapes and its plan, then unsplit and peers where they are compared."""
    bench = AttentionBench(setting)
    geometry = TINY if setting.is_tiny else LLAMA_3_8B
    keys, compared = ([(1, 40), (2, 150)], [(2, 150)]) if setting.is_tiny else (SHAPES, COMPARED)
    shapes = [uniform_shape(geometry, *key) for key in keys]
    tasks = [
        Task(f"{shape.name}, titan", partial(bench.measure_titan, shape), 4)
        for shape in (*shapes, *_extra_shapes(geometry, setting.is_tiny))
    ]
    largest = max(shapes, key=lambda shape: len(shape.contexts))
    tasks.append(Task(f"{largest.name}, plan of a step", partial(bench.measure_plan, largest), 4))
    for key in compared:
        shape = uniform_shape(geometry, *key)
        tasks.append(Task(f"{shape.name}, titan, unsplit", partial(bench.measure_unsplit, shape), 4))
        for name, peer in PEERS.items():
            tasks.append(Task(f"{shape.name}, {name}", partial(bench.measure_peer, shape, name), peer.seconds, is_peer=True))
    return tasks


def _extra_shapes(geometry: AttentionGeometry, is_tiny: bool) -> list[Shape]:
    """Unequal contexts, and a chain."""
    if is_tiny:
        return [Shape("30 and 90", geometry, (30, 90), CHAIN, has_goal=False)]
    spread = tuple(1024 + (15 * 1024 * i) // 31 for i in range(32))
    return [
        Shape("32 x 1024 to 16384", geometry, spread, has_goal=False),
        Shape("1 x 65536 + 15 x 2048", geometry, (65536, *(2048,) * 15), has_goal=False),
        Shape("8 x 8192, chain", geometry, (8192,) * 8, CHAIN, has_goal=False),
    ]


SECTION = Section(
    "attention",
    "Verification attention, one layer, 32 query heads, 8 KV heads of 128, trees of 7 tokens, bfloat16",
    "Attention: requests x context; us is the median of one layer, floor us what its bytes take at the speed of a copy, x titan "
    "how many times titan's time it is, disagreement the norm of the difference to titan over the norm. Planning and masks are "
    "made beforehand.",
    seconds=100,
    columns=COLUMNS,
    make_tasks=make_tasks,
)
