"""Attention split as the planner likes, and into other numbers of parts: what its estimates of costs are fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

from titan.bench.gpu.attention import LLAMA_3_8B, TINY, seconds_per_layer
from titan.bench.gpu.attention_batches import TREE, Case, Shape, make_case, uniform_shape
from titan.bench.gpu.sections import Figures, Section, Setting, Task
from titan.core.attention import AttentionSpec
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.attention_planner import CHUNK_MULTIPLE, MIN_CHUNK, TreeAttentionPlan
from titan.kernels.triton.tree_attention import tree_attention

LLAMA_3_1B = AttentionGeometry(32, 8, 64, 16, torch.bfloat16)

GEOMETRIES = ((LLAMA_3_8B, TREE), (LLAMA_3_8B, ()), (LLAMA_3_1B, ()))
"""Heads, and nodes of the trees: a verification, a decode, and one of a draft."""
BATCHES = (
    *((requests, context) for requests in (1, 8, 32) for context in (100, 250, 500, 1000, 4000)),
    *((40, 1000), (40, 4000), (72, 1000), (72, 4000), (128, 1000), (1, 32768), (32, 32768)),
)
LEAST_SLOTS = 1024
"""Room in the block tables, as an engine has it: with room for one part only, nothing could be split."""
MAX_PARTS = 32
"""Most parts that are tried."""


def measure(shape: Shape, setting: Setting) -> Figures:
    """Time the planner's choice and others."""
    case = make_case(shape, setting)
    table = case.layout.block_table
    room = max(LEAST_SLOTS // shape.geometry.block_size - table.shape[1], 0)
    case = replace(case, layout=replace(case.layout, block_table=pad(table, (0, room))))
    planned, parts = microseconds_and_parts(case, None)
    best, best_parts = min(microseconds_and_parts(case, chunk) for chunk in chunks(max(shape.contexts) + shape.query_len))
    return {"us": planned, "parts": parts, "fastest, us": best, "its parts": best_parts, "x fastest": planned / best}


def chunks(num_slots: int) -> Iterator[int]:
    """Lengths of parts to try, down from one of them all."""
    num_parts = 1
    while num_parts == 1 or (num_parts <= MAX_PARTS and num_slots / num_parts >= MIN_CHUNK.value / 2):
        yield -(-num_slots // (CHUNK_MULTIPLE * num_parts)) * CHUNK_MULTIPLE
        num_parts *= 2


def microseconds_and_parts(case: Case, chunk: int | None) -> tuple[float, float]:
    """Return the time of a layer, and the parts of each request, split into chunks of this length or as planned."""
    geometry, num_requests = case.shape.geometry, len(case.shape.contexts)
    plan = TreeAttentionPlan(case.layout, chunk)
    launch = plan.launches(geometry, None)[0]
    seconds = seconds_per_layer(case, lambda layer: tree_attention(case.q[layer], case.kv[layer], plan, AttentionSpec(case.scale)))
    return 1e6 * seconds, int(launch.counts[0]) / num_requests


def make_tasks(setting: Setting) -> Sequence[Task]:
    """Every batch with every geometry."""
    geometries, batches = (((TINY, TREE),), ((2, 150),)) if setting.is_tiny else (GEOMETRIES, BATCHES)
    shapes = [uniform_shape(geometry, *batch, parents) for geometry, parents in geometries for batch in batches]
    return [
        Task({**shape.labels, "heads of": shape.geometry.head_dim, "tokens": shape.query_len}, partial(measure, shape, setting), 2)
        for shape in shapes
    ]


SECTION = Section(
    "splits",
    "Contexts in parts",
    "Contexts in parts: us, a layer as the planner splits it; fastest, of contexts in 1, 2, 4 and so on parts.",
    seconds=60,
    columns={"us": ".1f", "parts": ".3g", "fastest, us": ".1f", "its parts": ".3g", "x fastest": ".2f"},
    make_tasks=make_tasks,
)
