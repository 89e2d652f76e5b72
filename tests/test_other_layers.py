"""Runners of models whose layers are another library's: several shapes of heads, kinds of attention, passes that no graph takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, eager_capture, triton_backend
from torch import Tensor
from twins import LIMITS, Twins

from titan.core.arrays import Ints
from titan.core.attention import AttentionSpec, Chunk, LayerSpec, kv_groups
from titan.core.batch import QueryRow
from titan.core.kv_tensor import KVLayout, KVTensor
from titan.core.trees import EMPTY_TREE
from titan.kernels.interfaces import Backend, PassCounts, PassInputs
from titan.kernels.triton.cuda_graphs import Replay, Replays
from titan.kernels.triton.runner import TritonRunner

LAYERS = (
    LayerSpec(4, 2, 16, AttentionSpec(0.3, Chunk(6))),
    LayerSpec(4, 2, 16, AttentionSpec(0.3, None), has_sinks=True),
    LayerSpec(2, 2, 32, AttentionSpec(0.2, 5, softcap=3.0, value_dim=20)),
    LayerSpec(4, 1, 40, AttentionSpec(0.2, None, value_dim=24), is_latent=True),
)
HIDDEN_SIZE, VOCAB_SIZE, NUM_POSITIONS = 32, 131, 100


def _check_positions(positions: Ints) -> None:
    assert positions.max() < NUM_POSITIONS


class OtherModel:
    """A model that calls attention as the modules of another library do."""

    dtype = torch.float32

    def __init__(self, backend: Backend) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(backend.device) / math.sqrt(shape[-1])

        traits = frozenset({"transformers"}).union(*(layer.traits for layer in LAYERS))
        self.config = SimpleNamespace(layers=LAYERS, traits=traits, vocab_size=VOCAB_SIZE, check_positions=_check_positions)
        self.kv_layout = KVLayout(kv_groups(LAYERS), torch.float32)
        self.device, self.ops = backend.device, backend.layer_ops(torch.float32, traits)
        self.embedding, self.places = random(VOCAB_SIZE, HIDDEN_SIZE), random(NUM_POSITIONS, HIDDEN_SIZE)
        self.weights = [
            {
                "q": random(each.num_heads * each.head_dim, HIDDEN_SIZE),
                "k": random(each.num_kv_heads * each.head_dim, HIDDEN_SIZE),
                "v": random(each.num_kv_heads * (each.attention.value_dim or each.head_dim), HIDDEN_SIZE),
                "o": random(HIDDEN_SIZE, each.num_heads * (each.attention.value_dim or each.head_dim)),
                "sinks": random(each.num_heads),
            }
            for each in LAYERS
        ]

    def hidden_states(self, inputs: PassInputs, kv: KVTensor) -> Tensor:
        plan = self.ops.plan_attention(inputs.attention)
        x = self.embedding[inputs.token_ids] + self.places[inputs.positions]
        for layer, weights, kv_layer in zip(LAYERS, self.weights, kv.layers, strict=True):
            normed = F.rms_norm(x, (HIDDEN_SIZE,))
            q, keys, values = (F.linear(normed, weights[name]) for name in "qkv")
            q, heads = q.view(len(x), layer.num_heads, -1), (len(x), layer.num_kv_heads, -1)
            self.ops.write_kv(kv_layer, inputs.slot_mapping, keys.view(heads), None if layer.is_latent else values.view(heads))
            sinks = weights["sinks"] if layer.has_sinks else None
            x = x + F.linear(self.ops.tree_attention(q, kv_layer, plan, layer.attention, sinks), weights["o"])
        return x if inputs.logits_rows is None else x[inputs.logits_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding)


def test_layers_of_several_shapes_are_planned_each_and_replayed_together() -> None:
    twins = Twins.of(OtherModel, triton_backend())
    assert type(twins.runner) is TritonRunner
    for query_lens in ([3, 1, 2], [3, 1, 2], [20, 3]):
        twins.run(twins.parts(query_lens, have_chunks=max(query_lens) > 3))
    assert twins.counts == PassCounts(num_replayed=1, num_eager=2)


def failing_capture(tried: list[Callable[[], Tensor]], num_good: int = 1) -> Callable[[Callable[[], Tensor]], Replay | None]:
    succeed = eager_capture()

    def capture(function: Callable[[], Tensor]) -> Replay | None:
        tried.append(function)
        if len(tried) > num_good:
            raise ValueError("a number was read on the host")
        return succeed(function)

    return capture


def test_what_was_captured_before_a_failure_is_replayed() -> None:
    """A chunk, which is not padded where it has no graph, and after it a pass that fails; another chunk is not tried."""
    tried: list[Callable[[], Tensor]] = []
    twins = Twins.of(OtherModel, triton_backend(lambda: failing_capture(tried)))
    for query_len in (20, 2, 20, 2, 40):
        is_chunk = query_len > LIMITS.query_len
        chunk = QueryRow(twins.tables()[0], 3, twins.tokens(query_len), True), EMPTY_TREE
        twins.run([chunk] if is_chunk else twins.parts([query_len]))
    assert len(tried) == 2 and twins.counts == PassCounts(num_replayed=1, num_eager=4)


def test_a_model_that_cannot_be_captured_runs_without_graphs_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first capture succeeds and is replayed; the second fails, for any reason; no other is tried, and all passes are right."""
    tried: list[Callable[[], Tensor]] = []
    twins = Twins.of(OtherModel, triton_backend(lambda: failing_capture(tried)))
    for _ in range(2):
        for query_lens in ([2], [1], [3, 3]):
            twins.run(twins.parts(query_lens))
    assert len(tried) == 2 and twins.counts == PassCounts(num_replayed=1, num_eager=5)
    [record] = caplog.records
    with pytest.raises(ValueError, match="a number was read on the host"):  # of Titan's own models
        Replays(failing_capture([], 0), PassCounts(), DEVICE).record(0, lambda: torch.zeros(1), "a pass")
    reason = "a pass of 1 tokens could not be captured: ValueError: a number was read on the host"
    assert record.levelname == "WARNING" and record.getMessage() == f"this model gets no further CUDA graphs, since {reason}"
