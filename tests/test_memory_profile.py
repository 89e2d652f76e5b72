"""What the largest passes leave for the KV cache, with memory that a test makes up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE, take_triton
from stepping import greedy, make_engine, run_all
from tiny_models import make_model
from torch import Tensor
from zoo import Zoo

from titan.kernels.triton import layers as triton_ops
from titan.kernels.triton.attention_plan import TreeAttentionPlan
from titan.kernels.triton.attention_planner import plan_tree_attention
from titan.models.decoder import Decoder

FREE, PEAK = 1_900_000, 1_000_000


class FakeMemory:
    """Free memory and a peak that a test chose; notes which passes ran meanwhile."""

    passes: list[tuple[int, int, int]]  # (tokens, requests, logits rows)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        return FREE

    def peak(self, function: Callable[[], None]) -> int:
        FakeMemory.passes = []
        hidden_states, logits = Decoder.hidden_states, Decoder.logits
        shapes: list[tuple[int, int]] = []

        def recorded(model: Decoder, inputs: Any, kv: Tensor) -> Tensor:
            shapes.append((len(inputs.token_ids), len(inputs.attention.seq_lens)))
            return hidden_states(model, inputs, kv)

        def recorded_logits(model: Decoder, hidden: Tensor) -> Tensor:
            FakeMemory.passes.append((*shapes[-1], len(hidden)))
            return logits(model, hidden)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "hidden_states", recorded)
            patch.setattr(Decoder, "logits", recorded_logits)
            function()
        return PEAK


@pytest.fixture(autouse=True)
def _fake_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    take_triton(monkeypatch)
    monkeypatch.setattr("titan.engine.CudaMemory", FakeMemory)


OPTIONS: dict[str, Any] = {"max_batch_size": 3, "max_num_batched_tokens": 70, "max_draft_tokens": 4}
ON_TRITON = {"device": str(DEVICE)}


def test_pool_takes_its_share_of_what_the_largest_passes_leave(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("other"), **OPTIONS, **ON_TRITON)
    assert FakeMemory.passes == [(69, 3, 15), (69, 3, 15)], "the target's and the draft's"
    bytes_per_block = 16 * (3 + 2) * 2 * 2 * 16 * 4  # tokens, layers of both, K and V, heads, head_dim, float32
    useful = 3 * 16
    assert engine.kv.num_blocks == min(int((FREE - PEAK) * 0.9) // bytes_per_block, useful) < useful
    assert run_all(engine, [[5, 6, 7]], [greedy(2)]) == [zoo.greedy("llama", [5, 6, 7], 2)]


def test_given_sizes_are_kept_and_nothing_is_profiled(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.engine.CudaMemory", None)
    assert make_engine(zoo.path("llama"), num_kv_blocks=17, **ON_TRITON).kv.num_blocks == 17
    assert make_engine(zoo.path("llama"), kv_cache_memory=16 * 3 * 2 * 2 * 16 * 4 * 9, **ON_TRITON).kv.num_blocks == 9


def test_passes_stay_within_the_models_positions(zoo: Zoo) -> None:
    make_engine(zoo.path("short"), max_batch_size=2, max_num_batched_tokens=2048, max_draft_tokens=0, **ON_TRITON)
    assert FakeMemory.passes == [(2 * 40, 2, 2)]


def test_the_parts_of_split_contexts_have_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of a long request takes more memory for parts than the largest pass took."""
    taken: list[int] = []

    def recorded(*args: Any, **options: Any) -> TreeAttentionPlan:
        plan = plan_tree_attention(*args, **options)
        taken.append(sum(launch.part_outputs.nbytes for launches in plan.launches.values() for launch in launches))
        return plan

    monkeypatch.setattr(triton_ops, "plan_tree_attention", recorded)
    make_model(tmp_path, num_hidden_layers=1)
    engine = make_engine(str(tmp_path), **OPTIONS, **ON_TRITON)
    profiled = max(taken)
    taken.clear()
    run_all(engine, [[5 + i % 90 for i in range(130)]], [greedy(1)])
    assert 0 < max(taken) <= profiled


def test_passes_that_do_not_fit_are_refused_by_what_makes_them_large(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(memory: FakeMemory, function: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(FakeMemory, "peak", fail)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=70 and max_batch_size=3 need more memory than .*: lower them"):
        make_engine(zoo.path("llama"), **OPTIONS, **ON_TRITON)


def test_no_room_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMemory, "free", lambda self: PEAK - 5)
    with pytest.raises(ValueError, match="0 bytes of KV cache memory are too few: one block takes 12288 bytes"):
        make_engine(zoo.path("llama"), **OPTIONS, **ON_TRITON)
