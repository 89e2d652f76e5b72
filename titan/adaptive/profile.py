"""The costs of a model's passes, measured on free blocks of its KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from titan.adaptive.cost import PassCost
from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.trees import DraftTree, DraftTrees, TreeLimits
from titan.kernels.interfaces import Backend, Runner

MAX_SECONDS = 1.2
"""Time after which no further size is measured; two are in any case."""

NUM_RUNS = 3
"""Runs of each size, the least of which counts."""

CONTEXT_LEN = 512
"""Tokens before those of the passes that show what context costs."""


def measure(
    runner: Runner,
    backend: Backend,
    block_ids: Sequence[int],
    *,
    block_size: int,
    num_nodes: int,
    num_requests: int,
    max_rows: int,
    max_len: int,
) -> PassCost:
    """Measure the passes of a model.

    Args:
        runner: of the model.
        backend: the one it runs on.
        block_ids: free blocks, at least one; if there are too few, requests share them.
        block_size: tokens per KV block.
        num_nodes: draft tokens of a request beside its root.
        num_requests: most requests of a pass.
        max_rows: most rows of a pass; fewer are measured if the requests cannot have as many.
        max_len: maximum tokens of a request, at least 1.

    Raises:
        ValueError: there is no block.
        torch.OutOfMemoryError: the device has too little memory.
    """
    if not block_ids:
        raise ValueError("block_ids=[] has no block to measure passes on")

    def seconds_of(num_rows: int, start: int) -> float:
        batch = _batch(backend, block_ids, block_size, num_rows, num_nodes, num_requests, start)
        return min(_run(runner, backend, batch) for _ in range(NUM_RUNS))

    num_nodes, max_rows = min(num_nodes, max_len - 1), min(max_rows, num_requests * max_len)
    sizes, seconds, begin = list[int](), list[float](), time.perf_counter()
    padded = [size for size in runner.padded_sizes if size <= max_rows]
    with torch.inference_mode():
        for size in padded or _sizes(max_rows):
            if len(sizes) >= 2 and time.perf_counter() - begin > MAX_SECONDS:
                break
            sizes.append(size)
            seconds.append(seconds_of(size, 0))
        at = min(len(sizes) - 1, max(0, (min(num_requests, 8)).bit_length() - 1))
        of_size = _num_requests(sizes[at], num_nodes, num_requests)
        start = min(CONTEXT_LEN, max_len - -(-sizes[at] // of_size))
        num_context = start * of_size
        per_token = (seconds_of(sizes[at], start) - seconds[at]) / num_context if num_context > 0 else 0.0
    return PassCost(sizes, seconds, max(per_token, 0.0), is_padded=bool(padded))


def _sizes(most: int) -> list[int]:
    """Return 1, 2, 4, 6, 8, 12, ... up to ``most``, which is the last."""
    powers = [2**i for i in range(most.bit_length())]
    return sorted({size for power in powers for size in (power, power * 3 // 2) if size < most} | {most})


def _num_requests(num_rows: int, num_nodes: int, num_requests: int) -> int:
    """Return how many requests a pass of so many rows is of: as few as are needed."""
    return min(num_requests, -(-num_rows // (1 + num_nodes)))


def _batch(
    backend: Backend, block_ids: Sequence[int], block_size: int, num_rows: int, num_nodes: int, num_requests: int, start: int
) -> RaggedBatch:
    n = _num_requests(num_rows, num_nodes, num_requests)
    counts = [num_rows // n + (i < num_rows % n) for i in range(n)]
    blocks_each = -(-(start + max(counts)) // block_size)
    nodes = [min(count - 1, num_nodes) for count in counts]
    rows = [
        QueryRow(
            [block_ids[(i * blocks_each + j) % len(block_ids)] for j in range(blocks_each)], start, [0] * (count - of_tree), True
        )
        for i, (count, of_tree) in enumerate(zip(counts, nodes, strict=True))
    ]
    trees = DraftTrees.of(
        [DraftTree.chain([0] * each) for each in nodes],
        [TreeLimits(each, may_sample=False) for each in nodes],
        drafter="profile",
        vocab_size=1,
        upload=backend.upload,
        device=backend.device,
    )
    return build_batch(rows, trees, block_size=block_size)


def _run(runner: Runner, backend: Backend, batch: RaggedBatch) -> float:
    begin = time.perf_counter()
    backend.download([runner.forward(batch)[:1, :1].float()])  # waits for the device
    return time.perf_counter() - begin
