"""Kernels, at the shapes of the demo target: every implementation of a layer's operations, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from titan.bench.micro.stage import Stage, make_stage
from titan.core.trees import EMPTY_TREE
from titan.execute.batch import RaggedBatch, Segment, build_batch
from titan.kernels.cpu.linear import linear, linear_add
from titan.kernels.interfaces import LayerOps
from titan.kernels.torch.cache import clear_blocks, move_kv, write_kv
from titan.kernels.torch.layers import TorchOps
from titan.sample.distributions import SamplingRows, sample_rows
from titan.verify.accept import accept

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
    return TorchOps()


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
    plan = ops.plan_attention(batch.attention, config.windows)
    measure(ops.tree_attention, q, stage.kv[0], plan, scale=config.head_dim**-0.5, window=config.layer_windows[0])


def test_attention_verify(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """Verification: a root and a draft tree per request."""
    attend(measure, stage, ops, stage.batch)


def test_attention_decode(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """Decoding: one token per request."""
    attend(measure, stage, ops, stage.engine.build_batch(stage.plan, [EMPTY_TREE] * len(stage.plan.requests)))


def test_attention_prefill(measure: Measure, stage: Stage, ops: LayerOps, num_requests: int) -> None:
    """A prefill chunk beside no context."""
    if num_requests > 1:
        pytest.skip("a prefill chunk is one request's")
    engine = stage.engine
    block_size = engine.kv.block_size
    segment = Segment(list(range(-(-PREFILL_LEN // block_size))), 0, [0] * PREFILL_LEN)
    attend(measure, stage, ops, build_batch([segment], block_size=block_size))


def test_rms_norm(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """The norm of a verification's rows."""
    measure(ops.rms_norm, hidden(stage), stage.model.final_norm, stage.model.config.rms_norm_eps)


def test_rope_and_write_kv(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """Rotation and KV write of a verification's rows."""
    config, batch = stage.model.config, stage.batch
    qkv = heads(stage, len(batch.token_ids), config.num_heads + 2 * config.num_kv_heads)
    # the slots hold random values afterwards, which nobody reads: the batch's own tokens are attended to in shape only
    measure(
        ops.rope_and_write_kv,
        qkv,
        stage.model.rope_table,
        batch.positions,
        batch.slot_mapping,
        stage.kv[0],
        num_heads=config.num_heads,
        qk_norm=None,
        eps=config.rms_norm_eps,
    )


def test_silu_mul(measure: Measure, stage: Stage, ops: LayerOps) -> None:
    """The activation of a verification's rows."""
    model = stage.model
    size = 2 * model.config.intermediate_size
    measure(ops.silu_mul, torch.ones(len(stage.batch.token_ids), size, dtype=model.dtype, device=model.device))


def test_linear(measure: Measure, stage: Stage) -> None:
    """The gate and up projections of a verification's rows."""
    weights = stage.model.layer_weights[0]
    measure(linear, hidden(stage), weights.gate_up_weight, None)


def test_linear_add(measure: Measure, stage: Stage) -> None:
    """The attention's output projection with its residual."""
    config, weights = stage.model.config, stage.model.layer_weights[0]
    attended = heads(stage, len(stage.batch.token_ids), config.num_heads)
    measure(linear_add, attended, weights.output_weight, None, hidden(stage))


def test_linear_head(measure: Measure, stage: Stage) -> None:
    """The output head over the rows that need logits."""
    measure(linear, hidden(stage, len(stage.batch.logits_rows)), stage.model.head, None)


def test_write_kv(measure: Measure, stage: Stage) -> None:
    """The KV write alone, in PyTorch."""
    config, num_tokens = stage.model.config, len(stage.batch.token_ids)
    new_kv = heads(stage, num_tokens, 2 * config.num_kv_heads).view(num_tokens, 2, config.num_kv_heads, config.head_dim)
    measure(write_kv, stage.kv[0].clone(), new_kv, stage.batch.slot_mapping)


def test_move_kv(measure: Measure, stage: Stage) -> None:
    """An accepted path of two nodes per request moved by one slot."""
    slots = stage.batch.slot_mapping[: 2 * len(stage.plan.requests)].cpu().numpy()
    measure(move_kv, stage.kv.clone(), slots, slots[::-1].copy())


def test_clear_blocks(measure: Measure, stage: Stage) -> None:
    """One new block per request."""
    measure(clear_blocks, stage.kv.clone(), np.arange(len(stage.plan.requests)))


def rows_of(stage: Stage, temperature: float, top_p: float) -> SamplingRows:
    """Sampling options of the stage's logits."""
    num_rows = len(stage.logits)
    return SamplingRows(
        temperature=np.full(num_rows, temperature, np.float32),
        top_k=np.zeros(num_rows, np.int64),
        top_p=np.full(num_rows, top_p, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seeds=np.arange(num_rows, dtype=np.uint64),
        positions=np.arange(num_rows),
        forbidden=(),
    )


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.8, 1.0), (0.8, 0.95)], ids=["greedy", "T=0.8", "T=0.8 top-p"])
def test_sample(measure: Measure, stage: Stage, temperature: float, top_p: float) -> None:
    """A token for every row of a verification."""
    measure(sample_rows, stage.logits, rows_of(stage, temperature, top_p))


def test_accept_greedy(measure: Measure, stage: Stage) -> None:
    """Acceptance of greedy dynamic trees."""
    measure(accept, stage.plan, stage.trees, stage.batch, stage.logits)


def test_accept_sampled(measure: Measure, num_requests: int, seed: int) -> None:
    """Acceptance of sampled trees at temperature 0.8: rejection over siblings."""
    stage = make_stage(num_requests, seed, draft_tree="auto", temperature=0.8)
    measure(accept, stage.plan, stage.trees, stage.batch, stage.logits)
