"""Tree attention at full shapes: verifications, prefill chunks and mixes of both, in a pool where all else is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from titan.bench.gpu.attention_batches import AttentionBatch, Query, make_batch, make_kv, num_blocks_of, relative_error
from titan.bench.gpu.checks import held_to
from titan.bench.gpu.sections import Measurement, Setting, Task
from titan.bench.gpu.timing import capture, synchronize
from titan.core.batch import Window
from titan.kernels.triton.attention_plan import AttentionGeometry

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 6e-3}
NUM_SPARE_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One batch; contexts are drawn up to ``max_context``."""

    name: str
    num_requests: int
    max_context: int
    num_nodes: int = 6
    num_chunks: int = 0  # prefill chunks of ``chunk_len`` beside the verifications
    chunk_len: int = 512
    head_dim: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: Window = None
    softcap: float | None = None

    @property
    def geometry(self) -> AttentionGeometry:
        return AttentionGeometry(self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype)

    @property
    def shape(self) -> str:
        """What was run, for the table."""
        dtype = str(self.dtype).removeprefix("torch.")
        chunks = f" + {self.num_chunks} chunks of {self.chunk_len}" if self.num_chunks else ""
        return (
            f"{self.num_requests} requests of up to {self.max_context} + {self.num_nodes} nodes{chunks}, {self.num_heads}/"
            f"{self.num_kv_heads} heads of {self.head_dim}, {dtype}"
        )


CASES = [
    Case("trees of 6 nodes", 16, 4096),
    Case("one long context", 1, 32768),
    Case("decodes", 64, 2048, num_nodes=0),
    Case("trees of 63 nodes", 8, 2048, num_nodes=63),
    Case("prefill chunks", 0, 2048, num_chunks=3),
    Case("mixed with prefill chunks", 12, 4096, num_chunks=2),
    Case("heads of 64", 16, 4096, head_dim=64),
    Case("float16", 16, 4096, num_chunks=1, dtype=torch.float16),
    Case("float32", 8, 2048, num_chunks=1, dtype=torch.float32),
    Case("blocks of 32", 16, 4096, block_size=32),
    Case("7 query heads per KV head", 8, 2048, num_heads=28, num_kv_heads=4),
    Case("sliding window", 12, 4096, num_chunks=1, window=1024),
    Case("window below the depth", 12, 512, num_nodes=32, window=3),
    Case("softcap", 12, 2048, num_chunks=1, softcap=30.0),
]


def make_tasks(setting: Setting) -> Sequence[Task]:
    """One task per case, and two for what must be equal."""
    cases = [_shrunk(case) for case in CASES] if setting.is_tiny else CASES
    return [
        *(
            Task(f"attention: {case.name}", partial(check_case, case, setting), seconds=4, rank=int(i > 0))
            for i, case in enumerate(cases)
        ),
        Task("attention: graph replayed with other lengths", partial(check_replay, cases[0], setting), seconds=4),
        Task("attention: fixed chunks do not see neighbours", partial(check_fixed_chunk, cases[0], setting), seconds=4),
    ]


def _shrunk(case: Case) -> Case:
    """The case at a size for Triton's interpreter."""
    return replace(
        case,
        num_requests=min(case.num_requests, 2),
        max_context=case.max_context // 128,
        num_nodes=min(case.num_nodes, 9),
        num_chunks=min(case.num_chunks, 1),
        chunk_len=20,
        num_heads=case.num_heads // case.num_kv_heads,
        num_kv_heads=1,
        window=None if case.window is None else min(case.window, 11),
    )


def random_queries(case: Case, seed: int) -> list[Query]:
    """Trees of random shapes after random contexts, and chunks between them."""
    rng = np.random.default_rng(seed)
    contexts = rng.integers(case.max_context // 2, case.max_context, case.num_requests, endpoint=True)
    queries = [Query(int(context), 1, tuple(int(rng.integers(-1, node)) for node in range(case.num_nodes))) for context in contexts]
    for i in range(case.num_chunks):
        queries.insert(i * 2, Query(int(rng.integers(case.max_context)), case.chunk_len))
    return queries


def check_case(case: Case, setting: Setting) -> Measurement:
    """The kernel's output against float64."""
    batch, q, kv = _make(case, random_queries(case, setting.seed), setting)
    batch.poison(kv)
    output = batch.attend(q, kv, batch.plan([case.window]), window=case.window, softcap=case.softcap)
    error = relative_error(output, batch.exact(q, kv, window=case.window, softcap=case.softcap))
    return held_to(error, TOLERANCE[case.dtype], case.shape)


def check_replay(case: Case, setting: Setting) -> Measurement:
    """A captured plan and pass, replayed after the contexts have grown and shrunk, against those run anew."""
    queries = random_queries(case, setting.seed)
    others = [replace(query, context=max(query.context + 37 * (-1) ** i, 0)) for i, query in enumerate(queries)]
    num_blocks = max(num_blocks_of(each, case.block_size) for each in (queries, others)) + NUM_SPARE_BLOCKS
    batch, q, kv = _make(case, queries, setting, num_blocks)
    other = make_batch(case.geometry, others, num_blocks, seed=setting.seed + 1, device=setting.device)
    width = max(batch.block_table.shape[1], other.block_table.shape[1])
    batch, other = _widen(batch, width), _widen(other, width)
    outputs: list[Tensor] = []

    def work() -> None:
        outputs.append(batch.attend(q, kv, batch.plan()))

    replay = capture(work, setting.device)
    for name in ("seq_lens", "block_table", "positions", "visible_lens", "tree_starts", "ancestor_bits"):
        getattr(batch, name).copy_(getattr(other, name))
    replay()
    synchronize(setting.device)
    anew = other.attend(q, kv, other.plan())
    return held_to(int((outputs[-1] != anew).sum()), 0, case.shape)


def _widen(batch: AttentionBatch, width: int) -> AttentionBatch:
    missing = width - batch.block_table.shape[1]
    return replace(batch, block_table=torch.nn.functional.pad(batch.block_table, (0, missing)))


def check_fixed_chunk(case: Case, setting: Setting) -> Measurement:
    """With fixed chunks, a request gives the same bits alone as in a batch."""
    chunk = 16 if setting.is_tiny else 1024
    queries = random_queries(case, setting.seed)
    batch, q, kv = _make(case, queries, setting)
    together = batch.attend(q, kv, batch.plan(fixed_chunk=chunk))
    num_last = queries[-1].query_len
    alone = make_batch(case.geometry, queries[-1:], num_blocks_of(queries, case.block_size), seed=0, device=setting.device)
    num_blocks = -(-queries[-1].seq_len // case.block_size)
    alone = replace(alone, block_table=batch.block_table[-1:, :num_blocks].contiguous())
    output = alone.attend(q[-num_last:], kv, alone.plan(fixed_chunk=chunk))
    return held_to(int((together[-num_last:] != output).sum()), 0, case.shape)


def _make(
    case: Case, queries: Sequence[Query], setting: Setting, num_blocks: int | None = None
) -> tuple[AttentionBatch, Tensor, Tensor]:
    """A batch, its queries [T, num_heads, head_dim] and one layer of KV."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    if num_blocks is None:
        num_blocks = num_blocks_of(queries, case.block_size) + NUM_SPARE_BLOCKS
    batch = make_batch(case.geometry, queries, num_blocks, seed=setting.seed, device=setting.device)
    return batch, batch.make_q(generator)[0], make_kv(case.geometry, num_blocks, generator, setting.device)[0]
