"""What the largest passes leave for the KV cache, with CUDA memory that a test makes up."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from interpreted import triton_backend
from stepping import greedy, make_engine, run_all
from tiny_models import make_model
from torch import Tensor
from zoo import Zoo

from titan.core.batch import RaggedBatch
from titan.kernels.triton.attention_plan import TileLaunch
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.runner import TritonRunner

HELD, PEAK, FREE = 300_000, 1_000_000, 1_700_000
OPTIONS: dict[str, Any] = {"max_batch_size": 3, "max_num_batched_tokens": 40, "max_draft_tokens": 4}


class Device:
    """A CUDA device of which `FREE` bytes are free, once and for all, and whose passes take `PEAK` beyond what was `HELD`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = FREE
        self.passes: list[tuple[int, int, int]] = []  # (tokens, requests, logits rows) since the peak was reset
        forward = TritonRunner.forward

        def recorded(runner: TritonRunner, batch: RaggedBatch) -> Tensor:
            self.passes.append((len(batch.token_ids), len(batch.attention.seq_lens), len(batch.logits_rows)))
            return forward(runner, batch)

        monkeypatch.setattr(TritonRunner, "forward", recorded)
        fakes = {
            "empty_cache": lambda: None,
            "synchronize": lambda device: None,
            "memory_reserved": lambda device: HELD,
            "reset_peak_memory_stats": lambda device: self.passes.clear(),
            "max_memory_reserved": lambda device: HELD + PEAK * len(self.passes),
            "mem_get_info": lambda device: (self.free, 2 * FREE),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_pool_takes_its_share_of_what_the_largest_passes_leave(zoo: Zoo, device: Device) -> None:
    backend = triton_backend()
    backend.sampling.probs = probs = MagicMock(wraps=backend.sampling.probs)  # type: ignore[method-assign]
    engine = make_engine(zoo.path("llama"), zoo.path("other"), backend=backend, **OPTIONS)
    assert device.passes == [(39, 3, 15)], "the target's: a draft needs no more"
    assert len(probs.call_args.args[0]) == 15, "rows that may have to be sampled from at once"
    bytes_per_block = 16 * (2 + 2) * 2 * 2 * 16 * 4  # tokens, layers of both, K and V, heads, head_dim, float32
    useful = 3 * 16
    assert engine.kv.num_blocks == min(int((FREE - PEAK) * 0.9) // bytes_per_block, useful) < useful


def test_a_share_of_the_memory_leaves_the_rest_of_it_free(zoo: Zoo) -> None:
    """0.9 of 2 * `FREE` bytes, half of which others use."""
    engine = make_engine(zoo.path("llama"), backend=triton_backend(), memory_utilization=0.9, **OPTIONS)
    assert engine.kv.num_blocks == int(FREE - PEAK - 0.1 * 2 * FREE) // (16 * 2 * 2 * 2 * 16 * 4) < 3 * 16


def test_given_sizes_are_kept_and_nothing_is_profiled(zoo: Zoo, device: Device) -> None:
    for given in ({"num_kv_blocks": 9}, {"kv_cache_memory": 9 * 16 * 2 * 2 * 2 * 16 * 4}):
        assert make_engine(zoo.path("llama"), backend=triton_backend(), **given).kv.num_blocks == 9
    assert device.passes == []


def test_no_graph_is_captured_while_memory_is_measured(zoo: Zoo, device: Device) -> None:
    """Though the largest pass is as small as one that is replayed later."""
    make_engine(
        zoo.path("llama"),
        backend=triton_backend(lambda: MagicMock(side_effect=AssertionError)),
        **OPTIONS | {"max_num_batched_tokens": 15},
    )
    assert device.passes == [(15, 3, 15)]


def test_passes_stay_within_the_models_positions(zoo: Zoo, device: Device) -> None:
    options = {"max_batch_size": 2, "max_num_batched_tokens": 2048, "speculation": "off"}
    make_engine(zoo.path("short"), backend=triton_backend(), **options)
    assert device.passes == [(2 * 40, 2, 2)]


def test_the_parts_of_split_contexts_have_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of a long request takes more memory for parts than the largest pass took, but for graphs, which have their own."""
    monkeypatch.setattr("titan.kernels.triton.cuda_graphs.CHUNKED_TOKENS", ())
    taken: list[int] = []
    plan = TreeAttentionPlan._plan

    def recorded(*args: Any) -> list[TileLaunch]:
        launches = plan(*args)
        taken.append(sum(launch.part_outputs.nbytes for launch in launches))
        return launches

    monkeypatch.setattr(TreeAttentionPlan, "_plan", recorded)
    make_model(tmp_path, num_hidden_layers=1)
    engine = make_engine(str(tmp_path), backend=triton_backend(), **OPTIONS)
    profiled = max(taken)
    taken.clear()
    run_all(engine, [[5 + i % 90 for i in range(130)]], [greedy(1)])
    assert 0 < max(taken) <= profiled


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError("CUDA error: out of memory")])
def test_passes_that_do_not_fit_are_refused_by_what_makes_them_large(zoo: Zoo, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonRunner, "forward", MagicMock(side_effect=error))
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=40 and max_batch_size=3 need more memory than .*: lower them"):
        make_engine(zoo.path("llama"), backend=triton_backend(), **OPTIONS)


def test_a_warm_up_without_memory_is_refused_by_what_leaves_none(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonRunner, "warm_up", lambda *_: [MagicMock(side_effect=torch.OutOfMemoryError)])
    with pytest.raises(ValueError, match=r"max_batch_size=3 .* more memory than the KV cache leaves: .* by memory_utilization"):
        make_engine(zoo.path("llama"), backend=triton_backend(), **OPTIONS | {"warm_up": True})


@pytest.mark.parametrize(
    ("free", "parts"),
    [
        (PEAK - 5, f"would get 0 bytes, and one block takes 4096: .* {2 * FREE} bytes, 0 are free .*; a smaller model or dtype"),
        (PEAK + 4100, "would get 3690 bytes, .* 4100 are free .*; give kv_cache_memory, 4096 to 4100$"),
    ],
)
def test_no_room_is_refused(zoo: Zoo, device: Device, free: int, parts: str) -> None:
    device.free = free
    with pytest.raises(ValueError, match=parts):
        make_engine(zoo.path("short"), backend=triton_backend(), **OPTIONS)
