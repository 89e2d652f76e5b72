"""Verification steps at any size: what a model would hand to the planner, and which slots each token must see.

Legend: T query tokens, R requests of Q query tokens each, K KV heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.trees import topology
from titan.kernels.triton.attention_plan import AttentionGeometry, DeviceLayout, TreeAttentionPlan
from titan.kernels.triton.attention_planner import plan_tree_attention
from titan.kernels.triton.tree_attention import tree_attention

TREE = (-1, 0, 1, -1, 3, 0)
"""The nodes after the root: with it, seven tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Contexts of the requests, and what each of them asks: committed tokens, the last of which is the root of a tree."""

    name: str
    geometry: AttentionGeometry
    contexts: tuple[int, ...]
    parents: tuple[int, ...] = TREE  # none: no tree
    num_tokens: int = 1  # committed ones of a query: the root, or a prefill chunk
    has_goal: bool = True

    @property
    def query_len(self) -> int:
        return self.num_tokens + len(self.parents)

    @property
    def num_bytes(self) -> int:
        """Keys, values, queries and output of one layer; each is moved once."""
        geometry = self.geometry
        kv = sum(context + self.query_len for context in self.contexts) * 2 * geometry.num_kv_heads
        return (kv + len(self.contexts) * self.query_len * 2 * geometry.num_heads) * geometry.head_dim * geometry.dtype.itemsize

    def num_pages(self, blocks_per_page: int) -> list[int]:
        """Of each request."""
        return [-(-(context + self.query_len) // (self.geometry.block_size * blocks_per_page)) for context in self.contexts]

    def visible(self, context: int, device: torch.device) -> Tensor:
        """Which slots each token sees, bool [Q, slots], from the parents themselves."""
        tree_start = context + self.num_tokens
        slots = torch.arange(context + self.query_len, device=device)
        rows = [slots <= torch.arange(context, tree_start, device=device)[:, None]]
        for node in range(len(self.parents)):
            row = slots < tree_start
            while node >= 0:
                row[tree_start + node] = True
                node = self.parents[node]
            rows.append(row[None])
        return torch.cat(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A shape with numbers in it."""

    shape: Shape
    layout: DeviceLayout
    q: Tensor  # [num_layers, R * Q, num_heads, D]
    kv: Tensor  # [num_layers, 2, K, num_blocks, block_size, D]

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.shape.geometry.head_dim)

    def plan(self, fixed_chunk: int | None = None) -> TreeAttentionPlan:
        """Plan as the engine would: queries with trees, and decodes, are short; longer ones are prefill chunks."""
        return plan_tree_attention(self.layout, (None,), fixed_chunk)

    def attend(self, layer: int, plan: TreeAttentionPlan) -> Tensor:
        """The output of the kernel, [T, num_heads * D]."""
        return tree_attention(self.q[layer], self.kv[layer], plan, scale=self.scale)


def make_layout(shape: Shape, *, seed: int, device: torch.device, blocks_per_page: int = 1) -> DeviceLayout:
    """Lay requests out, over blocks in random order.

    Args:
        shape: of the step.
        seed: of the order.
        device: where the kernel runs.
        blocks_per_page: so many blocks in sequence stay together.
    """
    num_pages, num_nodes, query_len = shape.num_pages(blocks_per_page), len(shape.parents), shape.query_len
    pages = np.random.default_rng(seed).permutation(sum(num_pages))
    blocks = (pages[:, None] * blocks_per_page + np.arange(blocks_per_page)).reshape(-1)
    width, ends = max(num_pages) * blocks_per_page, np.cumsum(num_pages) * blocks_per_page
    table = [blocks[end - count * blocks_per_page : end] for end, count in zip(ends, num_pages, strict=True)]
    rows = [np.concatenate([each, blocks[: width - len(each)]]) for each in table]  # tails name others' blocks
    tree = topology(np.array(shape.parents, np.int32).tobytes())
    contexts, own = np.array(shape.contexts), np.arange(shape.num_tokens)
    positions = np.concatenate([own, shape.num_tokens - 1 + tree.depths.astype(np.int64)])
    visible_lens = np.concatenate([own + 1, np.full(num_nodes, shape.num_tokens)])
    bits = np.concatenate([np.zeros(shape.num_tokens, np.int64), tree.ancestor_bits])

    def on_device(values: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device, dtype)

    return DeviceLayout(
        shape.geometry,
        query_start_loc=on_device(np.arange(len(contexts) + 1) * query_len, torch.int32),
        seq_lens=on_device(contexts + query_len, torch.int32),
        block_table=on_device(np.stack(rows), torch.int32),
        positions=on_device((contexts[:, None] + positions).reshape(-1), torch.int64),
        visible_lens=on_device((contexts[:, None] + visible_lens).reshape(-1), torch.int32),
        tree_starts=on_device(contexts + shape.num_tokens, torch.int32),
        ancestor_bits=on_device(np.tile(bits, len(contexts)), torch.int64),
        short_query_len=query_len if num_nodes else 1,
        max_query_len=query_len,
    )


def relative_error(output: Tensor, exact: Tensor) -> float:
    """``|output - exact| / |exact|``, in float64."""
    exact = exact.double()
    return float((output.double() - exact).norm() / exact.norm())
