"""Kernels, at the shapes of the demo target: every implementation of a layer's operations, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from titan import SamplingParams
from titan.bench.micro.stage import Stage, make_stage
from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.kv_tensor import KVTensor
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees
from titan.execute.batch import target_batch
from titan.kernels.interfaces import LayerOps, PathMove, TokenPlaces
from titan.kernels.torch.layers import TorchOps

Measure = Callable[..., Any]
pytestmark = pytest.mark.benchmark(group="kernel")
PREFILL_LEN = 512


@pytest.fixture(params=["chosen", "PyTorch"])
def ops(request: pytest.FixtureRequest, stage: Stage) -> LayerOps:
    """The operations that this device and dtype get, and the plain ones beside them."""
    chosen = stage.model.ops
    if request.param == "chosen":
        return chosen
    if isinstance(chosen, TorchOps):
        pytest.skip("they are the ones that are chosen")
    return TorchOps(stage.backend.device)


def hidden(stage: Stage, num_rows: int | None = None) -> torch.Tensor:
    """Activations of the stage's query tokens, or of ``num_rows``: [rows, hidden_size]."""
    model = stage.model
    rows = len(stage.batch.token_ids) if num_rows is None else num_rows
    return torch.randn(rows, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)


def heads(stage: Stage, num_rows: int, num_heads: int) -> torch.Tensor:
    """Random heads: [rows, num_heads * head_dim]."""
    model = stage.model
    shape = (num_rows, num_heads * model.config.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)


def attend(measure: Measure, stage: Stage, ops: LayerOps, batch: RaggedBatch) -> None:
    """Benchmark the attention of the target's first layer over a batch."""
    config = stage.model.config
    q = heads(stage, len(batch.token_ids), config.num_heads).view(-1, config.num_heads, config.head_dim)
    plan = ops.plan_attention(stage.attention_layout(ops, batch), config.windows)
    measure(ops.tree_attention, q, stage.kv.layers[0], plan, scale=config.head_dim**-0.5, window=config.layer_windows[0])


def test_attention_verify(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """Verification: a root and a draft tree per request."""
    attend(measure, stage, ops, stage.batch)


def test_attention_decode(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """Decoding: one token per request."""
    no_trees = DraftTrees.empty(len(stage.plan.requests), stage.backend.device)
    attend(measure, stage, ops, target_batch(stage.plan, no_trees, block_size=stage.kv.block_size))


def test_attention_prefill(measure: Measure, stage: Stage, ops: LayerOps, num_requests: int) -> None:
    """A prefill chunk beside no context."""
    if num_requests > 1:
        pytest.skip("a prefill chunk is one request's")
    block_size = stage.kv.block_size
    row = QueryRow(list(range(-(-PREFILL_LEN // block_size))), 0, [0] * PREFILL_LEN)
    attend(measure, stage, ops, build_batch([row], block_size=block_size))


def test_rms_norm(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """The norm of a verification's rows."""
    measure(ops.rms_norm, hidden(stage), stage.model.final_norm, stage.model.config.rms_norm_eps)


def test_rope_and_write_kv(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """Rotation and KV write of a verification's rows."""
    config, batch = stage.model.config, stage.batch
    qkv = heads(stage, len(batch.token_ids), config.num_heads + 2 * config.num_kv_heads)
    # the slots hold random values afterwards, which nobody reads: the batch's own tokens are attended to in shape only
    places = TokenPlaces(stage.model.rope_table, *stage.backend.upload([batch.attention.positions, batch.slot_mapping]))
    measure(ops.rope_and_write_kv, qkv, places, stage.kv.layers[0], None, config.rms_norm_eps)


def test_silu_mul(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """The activation of a verification's rows."""
    model = stage.model
    size = 2 * model.config.intermediate_size
    measure(ops.silu_mul, torch.ones(len(stage.batch.token_ids), size, dtype=model.dtype, device=model.device))


def test_linear(measure: Measure, stage: Stage) -> None:
    """The gate and up projections of a verification's rows."""
    weights = stage.model.layer_weights[0]
    measure(stage.model.ops.linear, hidden(stage), weights.gate_up_weight, None)


def test_linear_add_norm(measure: Measure, stage: Stage) -> None:
    """The attention's output projection with its residual, and the norm of their sum."""
    config, weights = stage.model.config, stage.model.layer_weights[0]
    attended = heads(stage, len(stage.batch.token_ids), config.num_heads)
    norm = weights.post_norm, config.rms_norm_eps
    measure(stage.model.ops.linear_add_norm, attended, weights.output_weight, None, hidden(stage), *norm)


def test_linear_head(measure: Measure, stage: Stage) -> None:
    """The output head over the rows that need logits."""
    measure(stage.model.logits, hidden(stage, len(stage.batch.logits_rows)))


def test_move_paths(measure: Measure, stage: Stage) -> None:
    """An accepted path of two nodes per request moved by one slot."""
    # of the slots of the plan, whose values nobody reads afterwards
    moves = [PathMove(request.block_ids, request.num_tokens, [1, 2]) for request in stage.plan.requests]
    measure(stage.backend.cache.move_paths, stage.kv, moves)


def test_clear_blocks(measure: Measure, stage: Stage) -> None:
    """One new block per request."""
    kv = KVTensor(stage.kv.layout, len(stage.plan.requests), stage.kv.block_size, stage.backend.device)
    measure(stage.backend.cache.clear_blocks, kv, np.arange(kv.num_blocks))


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.8, 1.0), (0.8, 0.95)], ids=["greedy", "T=0.8", "T=0.8 top-p"])
def test_sample(measure: Measure, stage: Stage, temperature: float, top_p: float) -> None:
    """A token for every row of a verification, as where nothing is drafted."""
    num_rows, params = len(stage.logits), SamplingParams(temperature=temperature, top_p=top_p)
    no_trees = DraftTrees.empty(num_rows, stage.backend.device)
    options = SamplingRows.of((params, row, row) for row in range(num_rows))
    measure(stage.backend.trees.verify, stage.logits, no_trees, np.arange(num_rows), options)


def test_accept_greedy(measure: Measure, stage: Stage) -> None:
    """Acceptance of greedy dynamic trees."""
    measure(stage.verify)


def test_accept_sampled(measure: Measure, num_requests: int, seed: int) -> None:
    """Acceptance of sampled trees at temperature 0.8: rejection over siblings."""
    measure(make_stage(num_requests, seed, draft_tree="auto", temperature=0.8).verify)
