"""Ragged batches of all that a step can hold, with the slots that each query must see, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from interpreted import DEVICE
from stepping import trees_on
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, LayerSpec, Window
from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor, kv_planes
from titan.core.limits import MAX_NODES
from titan.core.trees import DraftTree
from titan.kernels.interfaces import Backend, LayerOps
from titan.kernels.torch.runner import place_nodes
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.pass_inputs import upload_inputs

SCALE = 0.3
SHORT_QUERY_LEN = 8
"""Triton attends longer queries by tiles of prefill chunks, unless they end in a branching tree."""


@dataclass
class Request:
    """Committed tokens in slots ``context, ...``, then the nodes, from ``first_node`` on, of the tree that hangs at the last."""

    context: int
    num_tokens: int = 1
    parents: Sequence[int] = ()
    first_node: int = 0  # those before it were fed by an earlier pass
    block_ids: list[int] = field(default_factory=list)

    @property
    def tree(self) -> DraftTree:
        return DraftTree(np.zeros(len(self.parents), np.int64), np.array(self.parents, np.int32))

    @property
    def tree_start(self) -> int:
        return self.context + self.num_tokens

    @property
    def seq_len(self) -> int:
        return self.tree_start + len(self.parents)

    @property
    def visible_lens(self) -> list[int]:
        return [*range(self.context + 1, self.tree_start + 1), *[self.tree_start] * len(self.nodes)]

    @property
    def nodes(self) -> range:
        return range(self.first_node, len(self.parents))

    @property
    def query_len(self) -> int:
        return self.num_tokens + len(self.nodes)

    def path(self, node: int) -> list[int]:
        return [*self.path(self.parents[node]), node] if node >= 0 else []

    def must_see(self, window: Window) -> Tensor:
        """Which slots the query tokens must see, bool [query_len, seq_len]: said without bits or lengths; not to be changed."""
        return _must_see(self.context, self.num_tokens, tuple(self.parents), self.first_node, window)


@cache  # for the next back end
def _must_see(context: int, num_tokens: int, parents: tuple[int, ...], first_node: int, window: Window) -> Tensor:
    request = Request(context, num_tokens, parents, first_node)
    lines = [list(range(slot + 1)) for slot in range(context, request.tree_start)]
    lines += [[*range(request.tree_start), *(request.tree_start + each for each in request.path(node))] for node in request.nodes]
    visible = np.zeros((request.query_len, request.seq_len), dtype=bool)
    for row, line in zip(visible, lines, strict=True):  # the slots on the way to this token, itself last
        row[line[first_position(window, len(line) - 1) :]] = True
    return torch.from_numpy(visible)


def first_position(window: Window, position: int) -> int:
    """The first position that a token at this one sees."""
    if isinstance(window, Chunk):
        return position // window.size * window.size
    return 0 if window is None else max(position - window + 1, 0)


def chain(num_nodes: int) -> list[int]:
    return list(range(-1, num_nodes - 1))


def star(num_nodes: int) -> list[int]:
    return [-1] * num_nodes


def random_parents(rng: np.random.Generator, num_nodes: int, reach: int | None = None) -> list[int]:
    """A small reach makes a deep tree; without one, every second tree is deeper than the shortest window."""
    if reach is None:
        reach = 3 if rng.random() < 0.5 else num_nodes
    return [int(rng.integers(max(-1, node - reach), node)) for node in range(num_nodes)]


def random_request(rng: np.random.Generator, kind: str) -> Request:
    context, few, many = int(rng.integers(0, 70)), int(rng.integers(1, 7)), int(rng.integers(2, 60))
    return {
        "decode": Request(context),
        "chain": Request(context, 1 + few % 2, chain(few)),
        "tree": Request(context, 1 + few % 3, random_parents(rng, int(rng.integers(2, MAX_NODES + 1)))),
        "chunk": Request(context, 1 + many // 3),
        "prompt": Request(0, many),
        "long_chunk": Request(context, 64 + few * 4),
        "long_prompt": Request(0, 64 + few * 4),
    }[kind]


@dataclass(eq=False)
class Case:
    requests: list[Request]
    num_blocks: int
    block_size: int
    window: Window = None

    @property
    def query_start_loc(self) -> list[int]:
        return [0, *np.cumsum([request.query_len for request in self.requests]).tolist()]

    def batch(self, backend: Backend) -> RaggedBatch:
        rows = [QueryRow(each.block_ids, each.context, [0] * each.num_tokens) for each in self.requests]
        trees = trees_on(backend, [each.tree for each in self.requests])
        return build_batch(rows, trees, block_size=self.block_size)

    def expected(
        self,
        q: Tensor,
        kv: Tensor,
        scale: float = SCALE,
        softcap: float | None = None,
        value_dim: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        seen = [(each.block_ids, each.must_see(self.window)) for each in self.requests]
        return reference_attention(q, kv, seen, scale, softcap, value_dim, sinks)


def reference_attention(
    q: Tensor,
    kv_layer: Tensor,
    seen: Sequence[tuple[Sequence[int], Tensor]],
    scale: float,
    softcap: float | None = None,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over a mask, one dense product per request: float64 [T, num_heads * value_dim].

    Of each request ``seen`` has its physical block ids and the slots that its queries see, bool [query_len, slots]; what is in
    others may be NaN. Behind the queries of all there may be padding, which gives 0.
    """
    outputs = []
    for block_ids, visible in seen:
        mask, block_size, start = visible.to(q.device), kv_layer.shape[3], sum(map(len, outputs))
        slots = mask.any(0).nonzero()[:, 0]
        blocks = torch.tensor(block_ids, device=q.device)[slots // block_size]
        kv = kv_layer[:, :, blocks, slots % block_size].double()
        kv = kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)  # [planes, num_heads, slots, head_dim]
        keys, values = kv[0], kv[-1, ..., :value_dim]
        scores = torch.einsum("thd,hnd->htn", q[start : start + len(mask)].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~mask[:, slots], float("-inf")).exp()
        totals = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().to(q.device).exp()[:, None, None])
        outputs.append(torch.einsum("htn,hnd->thd", weights / totals, values))
    width = kv_layer.shape[-1] if value_dim is None else value_dim
    padding = torch.zeros(len(q) - sum(map(len, outputs)), q.shape[1], width, dtype=torch.float64, device=q.device)
    return torch.cat([*outputs, padding]).flatten(1)


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
            request.block_ids[:num_shared] = requests[0].block_ids[:num_shared]
    return Case(requests, num_blocks, block_size, window)


def random_case(seed: int, kinds: Sequence[str], window: Window = None, layout: str = "scattered", block_size: int = 16) -> Case:
    rng = np.random.default_rng(seed)
    return make_case([random_request(rng, kind) for kind in kinds], block_size, window, layout, seed)


def device_inputs(case: Case, num_padded: int = 0) -> dict[str, Tensor]:
    """The tensors of a `DeviceLayout`, said token by token; behind a request's blocks, its row names those of others."""
    requests, padding = case.requests, [0] * num_padded
    positions: list[int] = []
    bits: list[int] = []
    for each in requests:
        paths = list(map(each.path, each.nodes))
        positions += [*range(each.context, each.tree_start), *(each.tree_start - 1 + len(path) for path in paths)]
        bits += [*[0] * each.num_tokens, *(sum(1 << node for node in path) for path in paths)]
    width = 2 + max(len(each.block_ids) for each in requests)
    block_table = np.random.default_rng(0).integers(0, case.num_blocks, (len(requests), width))
    for row, each in zip(block_table, requests, strict=True):
        row[: len(each.block_ids)] = each.block_ids

    def int32(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return {
        "query_start_loc": int32(case.query_start_loc),
        "seq_lens": int32([each.seq_len for each in requests]),
        "block_table": int32(block_table),
        "positions": torch.tensor(positions + padding, device=DEVICE),
        "visible_lens": int32([length for each in requests for length in each.visible_lens] + padding),
        "tree_starts": int32([each.tree_start for each in requests]),
        "ancestor_bits": torch.from_numpy(np.array(bits + padding, np.uint64).view(np.int64)).to(DEVICE),
    }


def random_kv(
    case: Case, num_kv_heads: int, dtype: torch.dtype, head_dim: int, *, spares_owned: bool = True, num_planes: int = 2
) -> Tensor:
    """NaN where nobody may look; large values in slots that nobody sees, though their owner may load them.

    A request may load all slots of its blocks, or else, unless ``spares_owned``, those from the window of its first token on.
    """
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(num_planes, num_kv_heads, case.num_blocks, case.block_size, head_dim, generator=generator).to(dtype)
    is_seen = torch.zeros(case.num_blocks, case.block_size, dtype=torch.bool)
    is_loaded = is_seen.clone()
    for request in case.requests:
        first = first_position(case.window, request.context - (request.num_tokens == 0))
        slots, blocks = torch.arange(request.seq_len), torch.tensor(request.block_ids, dtype=torch.int64)
        places = blocks[slots // case.block_size], slots % case.block_size
        is_seen[places] |= request.must_see(case.window).any(0)
        is_loaded[places] |= slots >= first
        if spares_owned:
            is_loaded[blocks] = True
    kv[:, :, ~is_seen] = 300.0
    kv[:, :, ~is_loaded] = torch.nan
    return kv


def quantised(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of int8 and their scales, near these numbers, and what they stand for: float64, of the shape of ``kv``."""
    num_planes, num_kv_heads, num_blocks, block_size, head_dim = kv.shape
    layout = KVLayout((KVGroup(1, num_kv_heads, head_dim, num_planes),), torch.int8)
    [blocks] = KVTensor(layout, num_blocks, block_size, torch.device("cpu")).layers
    numbers, scales = kv_planes(blocks, head_dim)
    scales.copy_(kv.float().abs().amax(-1) / 127)
    numbers.copy_((kv.float() / scales[..., None]).nan_to_num().round())
    return blocks, numbers.double() * scales.double()[..., None]


def queries(num_tokens: int, num_heads: int, dtype: torch.dtype, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """As a model hands them over: in one tensor with keys and values."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, num_heads + 2, head_dim, generator=generator).to(device, dtype)[:, :num_heads]


def make_ops(backend: Backend, dtype: torch.dtype, traits: frozenset[str] = frozenset()) -> LayerOps:
    return backend.layer_ops(dtype, traits)


def supports(backend: Backend, dtype: torch.dtype, traits: frozenset[str]) -> bool:
    """Whether the back end has attention of its own for these traits; all fall back on the reference."""
    return isinstance(backend.layer_ops(dtype, traits), type(make_ops(backend, dtype)))


def attend(
    backend: Backend,
    batch: RaggedBatch,
    q: Tensor,
    kv: Tensor,
    window: Window = None,
    scale: float = SCALE,
    softcap: float | None = None,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    spec = AttentionSpec(scale, window, softcap, value_dim)
    layer = LayerSpec(q.shape[1], kv.shape[1], q.shape[2], spec, sinks is not None, kv.shape[0] == 1)
    ops, layout = make_ops(backend, q.dtype, layer.traits), batch.attention
    plan: Any
    if isinstance(ops, TritonOps):
        plan = ops.plan_attention(upload_inputs(batch, backend.device, SHORT_QUERY_LEN).attention)
    else:
        place_nodes(batch)
        plan = ops.plan_attention(layout)
    sinks = None if sinks is None else sinks.to(backend.device)
    return ops.tree_attention(q.to(backend.device), kv.to(backend.device), plan, spec, sinks).cpu()
