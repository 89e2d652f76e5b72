"""Ways to verify draft trees over paged KV, on the same tensors: Titan's kernel, gather + SDPA, FlashInfer.

Each is a function from a `Case` to its attention over one layer, ready to be captured in a CUDA graph; what it can prepare once
per step is done beforehand and not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.bench.gpu.attention_batches import Case
from titan.core.attention import AttentionSpec
from titan.kernels.triton.tree_attention import tree_attention

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
"""What is compared, by name."""
