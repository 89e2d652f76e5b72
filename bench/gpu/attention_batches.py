"""Verification steps at any size, laid out by the engine's own code, with random numbers in them.

Legend: R requests of Q query tokens each, K KV heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from titan.bench.gpu.sections import Setting
from titan.bench.samples import Label
from titan.core.batch import QueryRow, build_batch
from titan.core.proposals import TreeLimits, checked_trees
from titan.core.trees import DraftTree
from titan.kernels.triton.attention_plan import AttentionGeometry, DeviceLayout
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.pass_inputs import upload_inputs
from titan.kernels.triton.upload import upload

TREE = (-1, 0, 1, -1, 3, 0)
"""The nodes after the root: with it, seven tokens."""
DISTINCT_BYTES = 2**30
"""KV of a case, at least: twenty times the second-level cache of an H200."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Contexts of the requests, and what each of them asks: committed tokens, the last of which is the root of a tree."""

    name: Label  # of the contexts
    geometry: AttentionGeometry
    contexts: tuple[int, ...]
    parents: tuple[int, ...] = TREE  # none: no tree
    num_tokens: int = 1  # committed ones of a query: the root, or a prefill chunk

    @property
    def labels(self) -> Mapping[str, Label]:
        return {"requests": len(self.contexts), "context": self.name}

    @property
    def query_len(self) -> int:
        return self.num_tokens + len(self.parents)

    @property
    def num_bytes(self) -> int:
        """Keys, values, queries and output of one layer; each is moved once."""
        geometry = self.geometry
        kv = sum(context + self.query_len for context in self.contexts) * 2 * geometry.num_kv_heads
        return (kv + len(self.contexts) * self.query_len * 2 * geometry.num_heads) * geometry.head_dim * geometry.dtype.itemsize

    def visible(self, context: int, device: torch.device) -> Tensor:
        """Which slots each token sees, bool [Q, slots]: a node what its parent sees, and itself."""
        first, num_slots = self.num_tokens, context + self.query_len
        visible = torch.ones(self.query_len, num_slots, dtype=torch.bool, device=device).tril(context)
        for node, parent in enumerate(self.parents):
            visible[first + node] = visible[first + parent]  # -1 is the root, the last committed token
            visible[first + node, context + first + node] = True
        return visible


def uniform_shape(geometry: AttentionGeometry, num_requests: int, context: int, parents: tuple[int, ...] = TREE) -> Shape:
    """All contexts of one length."""
    return Shape(context, geometry, (context,) * num_requests, parents)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A shape with numbers in it."""

    shape: Shape
    layout: DeviceLayout
    q: Tensor  # [num_layers, R * Q, num_heads, D]
    kv: Tensor  # [num_layers, 2, K, num_blocks, block_size, D], in memory as `KVTensor` has it

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.shape.geometry.head_dim)

    def plan(self) -> TreeAttentionPlan:
        """Plan as the engine does once per step, when the first layer attends."""
        plan = TreeAttentionPlan(self.layout)
        plan.launches(self.shape.geometry, None)
        return plan


def make_case(shape: Shape, setting: Setting) -> Case:
    """Layout, queries and KV, over blocks in random order."""
    geometry, device = shape.geometry, setting.device
    num_blocks = -(-(np.array(shape.contexts) + shape.query_len) // geometry.block_size)
    blocks = np.random.default_rng(setting.seed).permutation(num_blocks.sum())
    layer_shape = (blocks.size, 2, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
    num_layers = 2 if setting.is_tiny else -(-DISTINCT_BYTES // (math.prod(layer_shape) * geometry.dtype.itemsize))
    layout = _make_layout(shape, [each.tolist() for each in np.split(blocks, num_blocks.cumsum()[:-1])], device)
    generator = torch.Generator(device).manual_seed(setting.seed)

    def random(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=geometry.dtype, device=device).normal_(generator=generator)

    q = random(num_layers, len(layout.positions), geometry.num_heads, geometry.head_dim)
    return Case(shape, layout, q, random(num_layers, *layer_shape).movedim(1, 3))


def _make_layout(shape: Shape, tables: list[list[int]], device: torch.device) -> DeviceLayout:
    num_nodes, num_requests = len(shape.parents), len(shape.contexts)
    committed = [0] * shape.num_tokens
    rows = [QueryRow(table, start, committed) for table, start in zip(tables, shape.contexts, strict=True)]
    tree = DraftTree(np.zeros(num_nodes, np.int64), np.array(shape.parents, np.int32))
    limits = TreeLimits([num_nodes] * num_requests, [False] * num_requests, [num_nodes] * num_requests)
    bring = partial(upload, device=device)
    trees = checked_trees([tree] * num_requests, limits, drafter="bench", vocab_size=1, upload=bring, device=device)
    batch = build_batch(rows, trees, block_size=shape.geometry.block_size)
    layout: DeviceLayout = upload_inputs(batch, device, max_short_query=1 + num_nodes).attention
    return layout
