"""Batches for tree attention at any size: what a model would hand to the planner, and which slots each token must see.

Legend: T query tokens, R requests, K KV heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.trees import topology
from titan.kernels.triton.attention_plan import AttentionGeometry, DeviceLayout, TreeAttentionPlan
from titan.kernels.triton.attention_planner import plan_tree_attention
from titan.kernels.triton.tree_attention import tree_attention


@dataclass(frozen=True, slots=True)
class Query:
    """Committed tokens in slots ``context, ...``, of which the last is the root of a draft tree; no parents: no tree."""

    context: int
    num_tokens: int = 1
    parents: tuple[int, ...] = ()

    @property
    def tree_start(self) -> int:
        """Slot of node 0."""
        return self.context + self.num_tokens

    @property
    def query_len(self) -> int:
        return self.num_tokens + len(self.parents)

    @property
    def seq_len(self) -> int:
        return self.tree_start + len(self.parents)

    @property
    def depths(self) -> NDArray[np.int64]:
        return topology(np.array(self.parents, np.int32).tobytes()).depths

    @property
    def ancestor_bits(self) -> NDArray[np.int64]:
        return topology(np.array(self.parents, np.int32).tobytes()).ancestor_bits

    def visible(self, device: torch.device) -> Tensor:
        """Which slots each token sees, bool [query_len, seq_len], from the parents themselves."""
        slots = torch.arange(self.seq_len, device=device)
        rows = [slots <= torch.arange(self.context, self.tree_start, device=device)[:, None]]
        for node in range(len(self.parents)):
            row = slots < self.tree_start
            while node >= 0:
                row[self.tree_start + node] = True
                node = self.parents[node]
            rows.append(row[None])
        return torch.cat(rows)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Queries laid out one after another, and the blocks that hold their slots."""

    geometry: AttentionGeometry
    queries: Sequence[Query]
    query_start_loc: Tensor  # int32 [R + 1]
    seq_lens: Tensor  # int32 [R]
    block_table: Tensor  # int32 [R, blocks]
    positions: Tensor  # int64 [T]
    visible_lens: Tensor  # int32 [T]
    tree_starts: Tensor  # int32 [R]
    ancestor_bits: Tensor  # int64 [T]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    def plan(self, fixed_chunk: int | None = None) -> TreeAttentionPlan:
        """Plan as the engine would: queries with trees, and decodes, are short; longer ones are prefill chunks."""
        short = max((query.query_len for query in self.queries if query.parents), default=1)
        layout = DeviceLayout(
            self.geometry,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            positions=self.positions,
            visible_lens=self.visible_lens,
            tree_starts=self.tree_starts,
            ancestor_bits=self.ancestor_bits,
            short_query_len=short,
            max_query_len=max(query.query_len for query in self.queries),
        )
        return plan_tree_attention(layout, (None,), fixed_chunk)

    def make_q(self, generator: torch.Generator, num_layers: int = 1) -> Tensor:
        """Random queries, [num_layers, T, num_heads, D]."""
        geometry, device = self.geometry, self.positions.device
        shape = (num_layers, self.num_tokens, geometry.num_heads, geometry.head_dim)
        return torch.empty(shape, dtype=geometry.dtype, device=device).normal_(generator=generator)

    def attend(self, q: Tensor, kv_layer: Tensor, plan: TreeAttentionPlan) -> Tensor:
        """The output of the kernel, [T, num_heads * D]."""
        return tree_attention(q, kv_layer, plan, scale=scale_of(self.geometry))


def scale_of(geometry: AttentionGeometry) -> float:
    """What scores are multiplied by."""
    return 1 / math.sqrt(geometry.head_dim)


def num_blocks_of(queries: Sequence[Query], block_size: int) -> int:
    """Blocks that hold the queries' slots."""
    return sum(-(-query.seq_len // block_size) for query in queries)


def make_batch(
    geometry: AttentionGeometry,
    queries: Sequence[Query],
    num_blocks: int,
    *,
    seed: int,
    device: torch.device,
    blocks_per_page: int = 1,
) -> AttentionBatch:
    """Lay queries out, over blocks in random order.

    Args:
        geometry: of the model.
        queries: one per request.
        num_blocks: of the pool, at least `num_blocks_of` them, rounded up to whole pages for each.
        seed: of the order.
        device: where the kernel runs.
        blocks_per_page: so many blocks in sequence stay together.
    """
    pages = np.random.default_rng(seed).permutation(num_blocks // blocks_per_page)
    blocks = (pages[:, None] * blocks_per_page + np.arange(blocks_per_page)).reshape(-1)
    tables: list[NDArray[np.int64]] = []
    first = 0
    for query in queries:
        num_pages = -(-query.seq_len // (geometry.block_size * blocks_per_page))
        tables.append(blocks[first : first + num_pages * blocks_per_page])
        first += num_pages * blocks_per_page
    width = max(map(len, tables))
    table = np.stack([np.concatenate([each, blocks[: width - len(each)]]) for each in tables])  # tails name others' blocks
    positions: list[NDArray[np.int64]] = []
    visible_lens: list[NDArray[np.int64]] = []
    bits: list[NDArray[np.int64]] = []
    for query in queries:
        committed = np.arange(query.context, query.tree_start)
        positions += [committed, query.tree_start - 1 + query.depths.astype(np.int64)]
        visible_lens += [committed + 1, np.full(len(query.parents), query.tree_start)]
        bits += [np.zeros(query.num_tokens, np.int64), query.ancestor_bits]

    def on_device(values: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device, dtype)

    return AttentionBatch(
        geometry,
        queries,
        query_start_loc=on_device(np.cumsum([0, *(query.query_len for query in queries)]), torch.int32),
        seq_lens=on_device(np.array([query.seq_len for query in queries]), torch.int32),
        block_table=on_device(table, torch.int32),
        positions=on_device(np.concatenate(positions), torch.int64),
        visible_lens=on_device(np.concatenate(visible_lens), torch.int32),
        tree_starts=on_device(np.array([query.tree_start for query in queries]), torch.int32),
        ancestor_bits=on_device(np.concatenate(bits), torch.int64),
    )


def relative_error(output: Tensor, exact: Tensor) -> float:
    """``|output - exact| / |exact|``, in float64."""
    exact = exact.double()
    return float((output.double() - exact).norm() / exact.norm())
