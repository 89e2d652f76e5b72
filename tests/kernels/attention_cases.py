"""Ragged batches of all that a step can hold, with the slots that each query must see, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan.core.batch import QueryRow, RaggedBatch, Window, build_batch
from titan.core.limits import MAX_NODES
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees, TreeLimits
from titan.kernels.interfaces import Backend, LayerOps
from titan.kernels.torch.runner import place_nodes
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.pass_inputs import upload_inputs

SCALE = 0.3
SHORT_QUERY_LEN = 8
"""Triton attends longer queries by tiles of prefill chunks, unless they end in a branching tree."""


@dataclass
class Request:
    """Committed tokens in slots ``context, ...``, and the tree that hangs at the last of them."""

    context: int
    num_tokens: int = 1
    tree: DraftTree = EMPTY_TREE
    block_ids: list[int] | None = None

    @property
    def root(self) -> int:
        return self.context + self.num_tokens - 1

    @property
    def seq_len(self) -> int:
        return self.root + 1 + self.tree.num_nodes

    @property
    def query_len(self) -> int:
        return self.num_tokens + self.tree.num_nodes


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The node and its ancestors, itself last."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def must_see(request: Request, window: Window) -> Tensor:
    """Which slots the query tokens must see, bool [query_len, seq_len]: said without bits or lengths."""
    lines = [list(range(slot + 1)) for slot in range(request.context, request.root + 1)]
    start = request.root + 1
    lines += [[*range(start), *(start + each for each in path_to(request.tree, node))] for node in range(request.tree.num_nodes)]
    visible = torch.zeros(request.query_len, request.seq_len, dtype=torch.bool)
    for row, line in zip(visible, lines, strict=True):  # the slots on the way to this token, itself last
        row[line if window is None else line[-window:]] = True
    return visible


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    """Every second tree is deep, deeper than the shortest window."""
    is_deep = rng.random() < 0.5
    parents = [int(rng.integers(max(-1, node - 3) if is_deep else -1, node)) for node in range(num_nodes)]
    return DraftTree(np.zeros(num_nodes, np.int64), np.array(parents, np.int32))


def random_request(rng: np.random.Generator, kind: str) -> Request:
    context = int(rng.integers(0, 70))
    match kind:
        case "chain":
            return Request(context, int(rng.integers(1, 3)), DraftTree.chain([0] * int(rng.integers(1, 7))))
        case "tree":
            return Request(context, int(rng.integers(1, 4)), random_tree(rng, int(rng.integers(2, MAX_NODES + 1))))
        case "chunk":
            return Request(context, int(rng.integers(2, 20)))
        case "prompt":
            return Request(0, int(rng.integers(1, 60)))
        case "long_chunk":
            return Request(context, int(rng.integers(65, 90)))
        case "long_prompt":
            return Request(0, int(rng.integers(65, 90)))
    return Request(context)


@dataclass
class Case:
    """Requests with their blocks."""

    requests: list[Request]
    num_blocks: int
    block_size: int
    window: Window = None

    @property
    def block_table(self) -> list[list[int]]:
        return [request.block_ids or [] for request in self.requests]

    @property
    def query_start_loc(self) -> list[int]:
        return [0, *np.cumsum([request.query_len for request in self.requests]).tolist()]

    @property
    def visible(self) -> list[Tensor]:
        return [must_see(request, self.window) for request in self.requests]

    def batch(self, backend: Backend) -> RaggedBatch:
        rows = [QueryRow(each.block_ids or [], each.context, [0] * each.num_tokens) for each in self.requests]
        limits = [TreeLimits(MAX_NODES, may_sample=False)] * len(rows)
        proposal = [each.tree for each in self.requests]
        trees = DraftTrees.of(proposal, limits, drafter="test", vocab_size=1, upload=backend.upload, device=backend.device)
        return build_batch(rows, trees, block_size=self.block_size)


def make_case(
    requests: list[Request], block_size: int = 16, window: Window = None, layout: str = "scattered", seed: int = 0
) -> Case:
    """Give the requests blocks in order, in disorder with free ones between them, or with a common prefix."""
    sizes = [-(-request.seq_len // block_size) for request in requests]
    num_blocks = sum(sizes) + (7 if layout == "scattered" else 0)
    order = np.random.default_rng(seed).permutation(num_blocks) if layout == "scattered" else np.arange(num_blocks)
    for request, block_ids in zip(requests, np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]), strict=True):
        request.block_ids = block_ids.tolist()
        if layout == "shared":  # the full blocks that neither of the two writes
            num_shared = min(request.context, requests[0].context) // block_size
            request.block_ids[:num_shared] = (requests[0].block_ids or [])[:num_shared]
    return Case(requests, num_blocks, block_size, window)


def random_case(seed: int, kinds: list[str], block_size: int = 16, window: Window = None, layout: str = "scattered") -> Case:
    rng = np.random.default_rng(seed)
    return make_case([random_request(rng, kind) for kind in kinds], block_size, window, layout, seed)


def random_kv(case: Case, num_kv_heads: int, dtype: torch.dtype, head_dim: int) -> Tensor:
    """NaN in blocks that nobody owns, and large values in slots that are owned, but that nobody may see."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, num_kv_heads, case.num_blocks, case.block_size, head_dim, generator=generator).to(dtype)
    is_seen = torch.zeros(case.num_blocks, case.block_size, dtype=torch.bool)
    for visible, blocks in zip(case.visible, case.block_table, strict=True):
        slots = visible.any(0).nonzero()[:, 0]
        is_seen[torch.tensor(blocks)[slots // case.block_size], slots % case.block_size] = True
    kv[:, :, ~is_seen] = 300.0
    free = sorted(set(range(case.num_blocks)) - {block for table in case.block_table for block in table})
    kv[:, :, free] = torch.nan
    return kv


def make_ops(backend: Backend, dtype: torch.dtype) -> LayerOps:
    return backend.layer_ops(dtype, frozenset())


def attend(backend: Backend, batch: RaggedBatch, q: Tensor, kv: Tensor, window: Window = None, scale: float = SCALE) -> Tensor:
    """Attend on the device of the back end, by a batch as its runner lays it out."""
    ops, layout, windows = make_ops(backend, q.dtype), batch.attention, (None,) if window is None else (None, window)
    plan: Any
    if isinstance(backend, TritonBackend):
        geometry = AttentionGeometry(q.shape[1], kv.shape[1], q.shape[2], kv.shape[3], q.dtype)
        plan = ops.plan_attention(upload_inputs(batch, geometry, backend.device, SHORT_QUERY_LEN).attention, windows)
    else:
        place_nodes(batch)
        plan = ops.plan_attention(layout, windows)
    return ops.tree_attention(q.to(backend.device), kv.to(backend.device), plan, scale=scale, window=window).cpu()


def queries(num_tokens: int, num_heads: int, dtype: torch.dtype, head_dim: int) -> Tensor:
    """As a model hands them over: in one tensor with keys and values."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, num_heads + 2, head_dim, generator=generator).to(dtype)[:, :num_heads]
