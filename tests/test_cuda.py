"""What only a CUDA device can show; everything else on the way there is tested without one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import DEVICE, ON_CUDA, eager_capture, triton_backend
from stepping import drain, greedy, make_engine, run_all, submit
from tiny_models import make_model
from torch import Tensor
from zoo import Zoo, random_prompts

from titan.core.attention import AttentionSpec
from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor
from titan.core.sampling_params import SamplingParams
from titan.kernels.interfaces import PathMove, TokenPlaces
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.cuda_graphs import cuda_graph_capture
from titan.kernels.triton.draft_chain import DraftChains
from titan.kernels.triton.kv_writes import write_kv
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.kernels.triton.tree_attention import tree_attention

pytestmark = ON_CUDA

PROMPTS = random_prompts(6, max_len=40)


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """PyTorch raises where it waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("draft_tree", ["chain", "dynamic"])
def test_greedy_generation_is_that_of_transformers_and_mostly_replayed(zoo: Zoo, draft_tree: str) -> None:
    options = {"draft_tree": draft_tree, "num_kv_blocks": 400, "warm_up": True}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), device="cuda", **options)
    for _ in range(2):
        outputs = run_all(engine, PROMPTS, [greedy(40, ignore_eos=True)] * len(PROMPTS))
        assert outputs == [zoo.greedy("llama", prompt, 40, ignore_eos=True) for prompt in PROMPTS]
    hit_rate = engine.metrics().graph_hit_rate
    assert hit_rate is not None and hit_rate > 0.5


@pytest.mark.parametrize("draft_tree", ["chain", "dynamic"])
def test_swapped_requests_go_on_with_the_same_tokens(zoo: Zoo, draft_tree: str) -> None:
    options = {"draft_tree": draft_tree, "preemption_mode": "swap", "swap_space": 2**22, "num_kv_blocks": 8}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), device="cuda", **options)
    outputs = run_all(engine, PROMPTS, [greedy(40, ignore_eos=True)] * len(PROMPTS))
    assert outputs == [zoo.greedy("llama", prompt, 40, ignore_eos=True) for prompt in PROMPTS]
    assert engine.counters.num_swapped_in > 0


def test_bfloat16_with_a_profiled_pool_runs_all_options(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("qwen3"), zoo.path("useless"), device="cuda", dtype="bfloat16", draft_sampling="sampled")
    params = [SamplingParams(temperature=0.9, top_p=0.9, top_k=30, min_p=0.01, max_tokens=20, seed=i) for i in range(3)]
    params += [greedy(20), SamplingParams(repetition_penalty=1.2, logprobs=2, max_tokens=20, seed=9), greedy(20)]
    assert all(run_all(engine, PROMPTS, params))


def test_sampled_chains_from_graphs_are_those_of_passes(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, beside greedy requests, accepted as often; batches shrink, so that rows have other options than before."""
    params = [
        SamplingParams(temperature=0.9 * (i % 3 > 0), top_k=20 * (i % 2), top_p=0.9, seed=i, max_tokens=9 + 7 * i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    outputs, accepted, num_grown, grow = [], [], list[object](), DraftChains.grow
    for can_grow in (DraftChains.can_grow, lambda *_: False):
        monkeypatch.setattr(DraftChains, "can_grow", can_grow)
        monkeypatch.setattr(DraftChains, "grow", lambda *args: (num_grown.append(args), grow(*args))[1])
        options = {"draft_tree": "chain", "draft_sampling": "sampled", "num_kv_blocks": 400}
        engine = make_engine(zoo.path("llama"), zoo.path("llama~"), backend=triton_backend(), **options)
        outputs.append([run_all(engine, PROMPTS, params) for _ in range(2)])
        accepted.append(engine.counters.accepted_per_depth)
        assert engine.passes.num_replayed > len(num_grown) > 20
    assert outputs[0] == outputs[1] and accepted[0] == accepted[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")  # PyTorch says so at its first use
@pytest.mark.parametrize(
    ("draft_tree", "draft_sampling"), [("auto", "greedy"), ("dynamic", "greedy"), ("auto", "sampled"), ("chain", "sampled")]
)
def test_a_step_waits_for_nothing_but_its_look_at_the_results(
    zoo: Zoo, draft_tree: str, draft_sampling: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    options = {"draft_tree": draft_tree, "draft_sampling": draft_sampling, "max_draft_tokens": 7}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), device="cuda", num_kv_blocks=400, **options)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=90, ignore_eos=True) for i in range(len(PROMPTS))]
    submit(engine, PROMPTS, params)
    for _ in range(6):  # compiled, captured, and every option used once
        engine.step()
    num_looks, num_replayed, download = 0, engine.passes.num_replayed, engine.backend.download

    def look(tensors: Sequence[Tensor]) -> list[Any]:
        nonlocal num_looks
        num_looks += 1
        torch.cuda.set_sync_debug_mode("default")
        arrays = download(tensors)
        torch.cuda.set_sync_debug_mode("error")
        return arrays

    monkeypatch.setattr(engine.backend, "download", look)
    request.getfixturevalue("_no_waiting")
    for _ in range(3):
        engine.step()
    assert num_looks == 3 and engine.passes.num_replayed > num_replayed


def test_the_device_tells_what_passes_take(zoo: Zoo) -> None:
    """A chunk of a prompt is not waited for."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), device="cuda", num_kv_blocks=400, prefill_chunk_size=16)
    submit(engine, [list(range(5, 45))], [greedy(20, ignore_eos=True)])
    engine.step()
    assert engine._timer.pending is not None
    drain(engine)
    split = engine.metrics().recent.split
    assert engine._timer.pending is None and split.draft > 0 and split.target > 0
    assert split.schedule + split.draft + split.target + split.verify + split.rest < 1.01


def test_replays_of_the_target_are_right_after_a_swap(tmp_path: Path) -> None:
    """The graphs of the old draft, and all that PyTorch held in reserve, are gone; the weights are as large as products split."""
    make_model(tmp_path, "llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=2)
    outputs, options = [], {"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 400}
    for make_capture in (cuda_graph_capture, eager_capture):
        engine = make_engine(str(tmp_path), str(tmp_path), backend=triton_backend(make_capture), **options)
        for _ in range(2):
            run_all(engine, PROMPTS, [greedy(20, ignore_eos=True)] * len(PROMPTS))
            engine.swap_draft(str(tmp_path))
        gc.collect()
        torch.cuda.empty_cache()
        overwritten = torch.full((2**28,), torch.nan, device=DEVICE)
        outputs.append(run_all(engine, PROMPTS, [greedy(20, ignore_eos=True)] * len(PROMPTS)))
        assert overwritten.isnan().all() and engine.passes.num_replayed > 20
    assert outputs[0] == outputs[1]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # it ends before anything is launched
def test_a_capture_without_memory_leaves_the_device_as_it_was() -> None:
    capture, x = cuda_graph_capture(), torch.ones(4, device="cuda")
    stream, doubled = torch.cuda.current_stream(), x * 2
    assert capture(lambda: torch.empty(2**45, dtype=torch.uint8, device="cuda")) is None
    assert torch.cuda.current_stream() == stream
    replay = capture(lambda: torch.mul(x, 2, out=doubled))
    assert replay is not None
    x.fill_(3)
    replay.run()
    assert replay.output.tolist() == [6.0] * 4


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_capture_that_the_device_ends_leaves_its_memory_to_others() -> None:
    """The host looks at a result, which invalidates the capture; then another one succeeds, and free memory can be given back."""
    capture, x = cuda_graph_capture(), torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        capture(lambda: torch.full((4,), x.sum().item(), device="cuda"))
    replay = capture(lambda: x * 2)
    assert replay is not None
    before, large = torch.cuda.memory_reserved(), torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    replay.run()
    assert replay.output.tolist() == [2.0] * 4


def test_the_pages_of_the_swap_space_are_locked(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), device="cuda", num_kv_blocks=8, swap_space=3 * 2**20)
    host = [tensor for tensors in engine.kv.swap_space._blocks.values() for tensor in tensors]
    assert host and all(tensor.is_pinned() for tensor in host)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_last_blocks_of_more_than_2_to_the_31_numbers_are_used_as_those_of_few(dtype: torch.dtype) -> None:
    large = use_blocks(33, 2100, [2097, 2098, 2090], dtype)
    assert all(map(torch.equal, large, use_blocks(2, 8, [5, 6, 2], dtype)))


def use_blocks(num_layers: int, num_blocks: int, block_ids: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Write, attend to, move, copy and clear three blocks of two layers; return outputs, and what the blocks hold."""
    backend, generator, length = triton_backend(), torch.Generator().manual_seed(0), 40
    device = backend.device
    kv = KVTensor(KVLayout((KVGroup(num_layers, 8, 128),), dtype), num_blocks, 16, device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions, table = torch.arange(length, device=device), random(64, 2, 128)
    slots = torch.tensor([block_ids[i // 16] * 16 + i % 16 for i in range(length)], device=device)
    found = []
    for layer in (0, num_layers - 1):
        places = TokenPlaces(table, positions, slots)
        queries = rope_and_write_kv(random(length, (32 + 16) * 128), places, kv.layers[layer], None, 1e-6)
        write_kv(kv.layers[layer], slots[-3:].clone(), random(3, 8, 128), random(3, 8, 128))
        lengths, no_nodes = (int32(0, length), int32(length)), torch.zeros_like(positions)
        layout = DeviceLayout(
            16, *lengths, int32(*block_ids).view(1, -1), positions, (positions + 1).int(), int32(0), no_nodes, 1, length
        )
        found.append(tree_attention(queries, kv.layers[layer], TreeAttentionPlan(layout), AttentionSpec(0.09)))
    backend.cache.move_paths(kv, [PathMove(block_ids, 20, [1, 3])])
    backend.cache.copy_blocks(kv, np.array(block_ids[:1]), np.array(block_ids[1:2]))
    backend.cache.clear_blocks(kv, np.array(block_ids[2:]))
    return found + [kv.groups[0][layer, block_id].clone() for layer in (0, num_layers - 1) for block_id in block_ids]
