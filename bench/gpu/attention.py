"""Verification attention against the memory's bandwidth and against others, at the shape of Llama 3 8B.

The KV of a row is read from so many layers in turn that little of it is in the device's cache when its turn comes again. A time is
that of one layer, out of a CUDA graph of them all; planning, once per step, is a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.bench.gpu.attention_batches import Case, Shape, make_case, uniform_shape
from titan.bench.gpu.sections import Figures, Section, Setting, Task, WrongNumbersError
from titan.bench.gpu.timing import median_seconds
from titan.bench.samples import with_ratio
from titan.core.attention import AttentionSpec
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.tree_attention import tree_attention

LLAMA_3_8B = AttentionGeometry(32, 8, 128, 16, torch.bfloat16)
TINY = AttentionGeometry(4, 1, 32, 16, torch.bfloat16)
CHAIN = (-1, 0, 1, 2, 3, 4)

UNIFORM = [(32, 4096), *((requests, context) for requests in (1, 8, 32, 128, 40, 72) for context in (1024, 8192, 32768))]
"""Batches that have goals."""
COMPARED = [(8, 8192), (32, 8192), (1, 32768), (32, 1024), (8, 1024), (128, 1024)]
"""Those with other kernels, the most telling first."""
UNEQUAL = [
    Shape("1024 to 16384", LLAMA_3_8B, tuple(1024 + (15 * 1024 * i) // 31 for i in range(32))),
    Shape("65536 and 15 of 2048", LLAMA_3_8B, (65536, *(2048,) * 15)),
    Shape("8192, chain", LLAMA_3_8B, (8192,) * 8, CHAIN),
]

SHARE_BY_FLOOR = ((120, 0.85), (50, 0.75), (20, 0.65))
"""From so many microseconds at the speed of a copy on, so much of that speed must be reached."""
MAX_DISAGREEMENT = 2e-2
"""Of a kernel that rounds to bfloat16, as the norm of the difference over the norm."""
FLASHINFER_WORKSPACE = 256 * 2**20
"""Bytes; what its examples take is half of it."""

Attend = Callable[[int], Tensor]
"""Layer -> [T, num_heads * D]."""


def titan(case: Case) -> Attend:
    """Titan's kernel as the engine calls it."""
    plan = case.plan()
    return lambda layer: tree_attention(case.q[layer], case.kv[layer], plan, AttentionSpec(case.scale))


def split(case: Case, layer: int) -> Tensor:
    """Queries of a layer by request, [R, num_heads, Q, D]."""
    q = case.q[layer]
    return q.view(-1, case.shape.query_len, *q.shape[1:]).transpose(1, 2)


def join(output: Tensor) -> Tensor:
    """[R, num_heads, Q, D] -> [R * Q, num_heads * D]."""
    return output.transpose(1, 2).flatten(2).flatten(0, 1)


def gather_and_sdpa(case: Case) -> Attend:
    """Gather the blocks of each request to a padded tensor, then PyTorch's attention with a mask."""
    geometry, table = case.shape.geometry, case.layout.block_table
    num_slots, block_ids = table.shape[1] * geometry.block_size, table.flatten().long()
    masks = [case.shape.visible(context, table.device) for context in case.shape.contexts]
    mask = torch.stack([F.pad(each, (0, num_slots - each.shape[1])) for each in masks])[:, None]

    def attend(layer: int) -> Tensor:
        gathered = case.kv[layer].index_select(2, block_ids)
        keys, values = gathered.view(2, geometry.num_kv_heads, len(table), num_slots, geometry.head_dim).transpose(1, 2)
        return join(F.scaled_dot_product_attention(split(case, layer), keys, values, mask, scale=case.scale, enable_gqa=True))

    return attend


def expected_output(case: Case) -> Tensor:
    """What the first layer's output is: PyTorch's attention in float32 over each request's own blocks, one request at a time."""
    outputs, block_size = list[Tensor](), case.shape.geometry.block_size
    for queries, context, table in zip(split(case, 0), case.shape.contexts, case.layout.block_table, strict=True):
        visible = case.shape.visible(context, table.device)
        num_slots = visible.shape[1]
        blocks = case.kv[0].index_select(2, table[: -(-num_slots // block_size)].long())
        keys, values = blocks.flatten(2, 3)[:, None, :, :num_slots].float()
        output = F.scaled_dot_product_attention(queries[None].float(), keys, values, visible, scale=case.scale, enable_gqa=True)
        outputs.append(join(output))
    return torch.cat(outputs)


def flashinfer(case: Case) -> Attend:
    """FlashInfer's paged prefill kernel, fa2, with the tree as a custom mask; planned beforehand, over KV in its own layout.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    wrapper_class = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper

    layout, geometry, device = case.layout, case.shape.geometry, case.q.device
    num_blocks = -(-layout.seq_lens // geometry.block_size)
    masks = [case.shape.visible(context, device).flatten() for context in case.shape.contexts]
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = wrapper_class(workspace, "HND", backend="fa2")
    wrapper.plan(
        layout.query_start_loc,
        F.pad(num_blocks.cumsum(0), (1, 0)).int(),
        torch.cat([blocks[:count] for blocks, count in zip(layout.block_table, num_blocks.tolist(), strict=True)]),
        ((layout.seq_lens - 1) % geometry.block_size + 1).int(),
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.block_size,
        custom_mask=torch.cat(masks),
        sm_scale=case.scale,
        q_data_type=geometry.dtype,
        kv_data_type=geometry.dtype,
    )
    kv = [layer.transpose(1, 2).contiguous() for layer in case.kv]  # [2, num_blocks, K, block_size, D]

    def attend(layer: int) -> Tensor:
        output: Tensor = wrapper.run(case.q[layer], (kv[layer][0], kv[layer][1]))
        return output.flatten(1)

    return attend


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to attend."""

    prepare: Callable[[Case], Attend]
    seconds: float = 4.0  # of a row, about; most of it is compiling
    goal: float | None = None  # how many times Titan's time it must take
    min_requests: int = 1  # from which on the goal holds
    is_peer: bool = True


TITAN = "titan"
KERNELS = {
    TITAN: Kernel(titan, is_peer=False),
    "gather + SDPA": Kernel(gather_and_sdpa, goal=4.0),
    "FlashInfer, fa2": Kernel(flashinfer, seconds=20, goal=1.0, min_requests=8),
}
"""Ways to verify draft trees over paged KV that are compared, on the same tensors; what one prepares once per step is not timed."""


def measure(shape: Shape, kernel: Kernel, setting: Setting) -> Figures:
    """Time a kernel.

    Raises:
        WrongNumbersError: its output is not that of PyTorch's attention.
    """
    case = make_case(shape, setting)
    attend = kernel.prepare(case)
    disagreement = check_agreement(attend(0), expected_output(case))
    seconds = seconds_per_layer(case, attend)
    figures = {"us": seconds * 1e6, "disagreement": disagreement}
    if not kernel.is_peer:
        figures["plan, us"] = median_seconds(case.plan, setting.device) * 1e6
    if setting.copy_bandwidth is not None:
        floor = shape.num_bytes / setting.copy_bandwidth
        figures |= {"floor, us": floor * 1e6, "of bandwidth": floor / seconds}
    return figures


def seconds_per_layer(case: Case, attend: Attend) -> float:
    """Time attention over all layers in turn."""
    num_layers = len(case.kv)

    def all_layers() -> None:
        for layer in range(num_layers):
            attend(layer)

    return median_seconds(all_layers, case.q.device) / num_layers


def check_agreement(output: Tensor, expected: Tensor) -> float:
    """By how much an output disagrees with the one expected.

    Raises:
        WrongNumbersError: rounding cannot explain it.
    """
    exact = expected.double()
    disagreement = float((output.double() - exact).norm() / exact.norm())
    if not disagreement <= MAX_DISAGREEMENT:
        raise WrongNumbersError(f"disagrees by {disagreement:.1e}: at most {MAX_DISAGREEMENT:.0e} is rounding")
    return disagreement


def make_tasks(setting: Setting) -> Sequence[Task]:
    """Titan at all shapes, then the other kernels where they are compared."""
    if setting.is_tiny:
        uniform, others = [uniform_shape(TINY, 1, 40), uniform_shape(TINY, 2, 150)], [Shape("30 and 90", TINY, (30, 90), CHAIN)]
        compared = uniform[1:]
    else:
        uniform, others = [uniform_shape(LLAMA_3_8B, *each) for each in UNIFORM], UNEQUAL
        compared = [uniform_shape(LLAMA_3_8B, *each) for each in COMPARED]

    def task(shape: Shape, name: str) -> Task:
        kernel = KERNELS[name]
        goals = {} if setting.is_tiny or shape in others else goals_of(shape, kernel, setting)
        return Task(
            {**shape.labels, "kernel": name}, partial(measure, shape, kernel, setting), kernel.seconds, kernel.is_peer, goals
        )

    return [
        *(task(shape, TITAN) for shape in (*uniform, *others)),
        *(task(shape, name) for shape in compared for name in KERNELS if name != TITAN),
    ]


def goals_of(shape: Shape, kernel: Kernel, setting: Setting) -> Figures:
    """What Titan must reach of the bandwidth, and how many times Titan's time others must take."""
    if kernel is not KERNELS[TITAN]:
        return {"x titan": kernel.goal} if kernel.goal is not None and len(shape.contexts) >= kernel.min_requests else {}
    floor = 1e6 * shape.num_bytes / (setting.copy_bandwidth or math.inf)
    return next(({"of bandwidth": share} for least, share in SHARE_BY_FLOOR if floor >= least), {})


SECTION = Section(
    "attention",
    "Verification attention, one layer, 32 query heads, 8 KV heads of 128, trees of 7 tokens, bfloat16",
    "Attention: us is the median of one layer, floor what its bytes take at the speed of a copy, x titan how many times titan's "
    "time it is, disagreement the norm of the difference to PyTorch's attention of each request, in float32, over the norm. Plans "
    "and masks are made beforehand; plan is that of titan, for all layers of a step.",
    seconds=100,
    columns={"us": ".1f", "floor, us": ".1f", "of bandwidth": ".0%", "x titan": ".2f", "disagreement": ".1e", "plan, us": ".1f"},
    make_tasks=make_tasks,
    compare=partial(with_ratio, name="x titan", figure="us", kernel=TITAN),
)
