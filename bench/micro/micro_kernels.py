"""Kernels, at the shapes of the demo target: the operations of a pass as the pass calls them, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from titan import SamplingParams
from titan.bench.micro.stage import Stage, make_stage
from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.kv_tensor import KVTensor
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees
from titan.execute.batch import target_batch
from titan.kernels.interfaces import LayerOps, PathMove
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
    if type(chosen) is TorchOps:
        pytest.skip("they are the ones that are chosen")
    return TorchOps(stage.backend.device)


def batch_of(stage: Stage, kind: str) -> RaggedBatch:
    """A root and a draft tree per request, one token per request, or a prefill chunk beside no context."""
    block_size = stage.kv.block_size
    if kind == "verify":
        return stage.batch
    if kind == "decode":
        no_trees = DraftTrees.empty(len(stage.plan.requests), stage.backend.device)
        return target_batch(stage.plan, no_trees, block_size=block_size)
    if len(stage.plan.requests) > 1:
        pytest.skip("a prefill chunk is one request's")
    row = QueryRow(list(range(-(-PREFILL_LEN // block_size))), 0, [0] * PREFILL_LEN)
    return build_batch([row], block_size=block_size)


@pytest.mark.parametrize("kind", ["verify", "decode", "prefill"])
def test_attention(measure: Measure, stage: Stage, ops: LayerOps, kind: str) -> None:
    """Attention of one layer; slots of others are overwritten, whose values nobody reads afterwards."""
    measure(stage.call_of_pass("tree_attention", ops=ops, batch=batch_of(stage, kind)))


@pytest.mark.parametrize("kind", ["verify", "decode"])
def test_int8_attention(measure: Measure, num_requests: int, seed: int, kind: str) -> None:
    """Attention of one layer over KV in int8, by the operations that this device and dtype get."""
    stage = make_stage(num_requests, seed, kv_cache_dtype="int8")
    measure(stage.call_of_pass("tree_attention", batch=batch_of(stage, kind)))


@pytest.mark.parametrize("operation", ["rms_norm", "rope_and_write_kv", "silu_mul"])
def test_operation(measure: Measure, stage: Stage, ops: LayerOps, operation: str) -> None:
    """An operation on a verification's rows."""
    measure(stage.call_of_pass(operation, ops=ops))


@pytest.mark.parametrize(
    ("operation", "call"), [("linear", -2), ("linear", -1), ("linear_add_norm", -2)], ids=["gate and up", "head", "output"]
)
def test_linear(measure: Measure, stage: Stage, operation: str, call: int) -> None:
    """Matrix products of a verification: the last layer's gate and up projections, the head, attention's output with its norm."""
    measure(stage.call_of_pass(operation, call))


def test_move_paths(measure: Measure, stage: Stage) -> None:
    """An accepted path of two nodes per request moved by one slot."""
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


@pytest.mark.parametrize(("draft_tree", "temperature"), [("dynamic", 0.0), ("auto", 0.8)], ids=["greedy", "sampled"])
def test_accept(measure: Measure, num_requests: int, seed: int, draft_tree: str, temperature: float) -> None:
    """Acceptance of greedy dynamic trees, and rejection over siblings at temperature 0.8."""
    measure(make_stage(num_requests, seed, draft_tree=draft_tree, temperature=temperature).verify)
