"""Whole decoders and engines on the Triton kernels, in the interpreter, against those on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kernels import choose_cpu_kernels
from interpreted import DEVICE, take_triton
from stepping import greedy, make_engine, run_all
from tiny_models import make_model
from torch import Tensor
from zoo import Zoo

from titan.core.options import EngineConfig
from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree
from titan.execute.batch import Segment, build_batch
from titan.execute.model_runner import ModelRunner, Runner, make_runner
from titan.kernels.interfaces import choose_layer_ops
from titan.kernels.triton.cuda_graphs import PassCounts, PassLimits
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.runner import TritonRunner
from titan.memory.kv_cache import KVCache, Role, allocate_kv
from titan.models.loader import load_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 24
LIMITS = PassLimits(num_requests=4, query_len=8, num_blocks=8)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_window": ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "attention_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
}
DTYPES = {"float32": 1e-5, "bfloat16": 3e-2}


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()  # type: ignore[no-any-return]


def tree(parents: Sequence[int]) -> DraftTree:
    return DraftTree(np.array(tokens(len(parents), 9)), np.array(parents, np.int32))


BRANCHING = tree([-1, 0, -1, 0, 1, 2, 4])


def mixed_segments() -> list[Segment]:
    """A prefill chunk, one with a branching tree behind it, a verification, a chain, a decode, and nodes of a draft alone."""
    order = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    tables = [order[i::6] for i in range(6)]
    return [
        Segment(tables[0], 5, tokens(21, 1), needs_logits=False),
        Segment(tables[1], 3, tokens(17, 2), BRANCHING, root_position=19),
        Segment(tables[2], 30, tokens(1, 3), BRANCHING, root_position=30),
        Segment(tables[3], 14, tokens(1, 4), tree([-1, 0, 1]), root_position=14),
        Segment(tables[4], 40, tokens(1, 5)),
        Segment(tables[5], 0, [], BRANCHING, first_node=4, root_position=20),
    ]


def make_runners(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, Runner]:
    """The model on PyTorch and on Triton, each with the same KV of its own."""

    def runner(device: torch.device) -> Runner:
        model = load_model(str(folder), dtype=dtype, device=device)
        config = model.config
        kv = allocate_kv(config.num_layers, NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim, model.dtype, device=CPU)
        kv.normal_(generator=torch.Generator().manual_seed(0))
        return make_runner(model, kv.to(device), LIMITS, PassCounts())

    choose_cpu_kernels(monkeypatch, "torch")
    plain = runner(CPU)
    take_triton(monkeypatch)
    return plain, runner(DEVICE)


def assert_near(actual: Tensor, expected: Tensor, bound: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual - expected).float().norm() <= bound * expected.float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_decoder_on_triton_is_the_decoder_on_pytorch(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, config = MODELS[name]
    make_model(tmp_path, model_type, num_hidden_layers=2, **config)
    plain, triton = make_runners(tmp_path, dtype, monkeypatch)
    assert isinstance(plain, ModelRunner) and isinstance(triton, TritonRunner) and isinstance(triton.model.ops, TritonOps)
    batch = build_batch(mixed_segments(), block_size=BLOCK_SIZE)
    with torch.inference_mode():
        assert_near(triton.forward(batch).cpu(), plain.forward(batch), DTYPES[dtype])
    assert_near(triton.kv.cpu(), plain.kv, DTYPES[dtype])


SMALL: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk_size": 16, "num_kv_blocks": 40, "max_draft_tokens": 3}
ON_TRITON = {"device": str(DEVICE)}
PROMPTS = [tokens(20, 1), tokens(3, 2), tokens(9, 3)]


def test_greedy_generation_on_triton_is_that_of_transformers(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    take_triton(monkeypatch)
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), draft_tree=[-1, -1, 0], **SMALL, **ON_TRITON)
    assert isinstance(engine.runner, TritonRunner)
    outputs = run_all(engine, PROMPTS, [greedy(6, ignore_eos=True)] * len(PROMPTS))
    assert outputs == [zoo.greedy("llama", prompt, 6, ignore_eos=True) for prompt in PROMPTS]
    metrics = engine.metrics()
    assert metrics.acceptance_rate > 0.3
    assert metrics.graph_hit_rate is not None and 0 < metrics.graph_hit_rate < 1


def test_kv_is_cleared_and_moved_as_on_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    tree_slots = np.array([0, 2, 1, 3, 4, -1], np.int32)
    trees = [DraftTree(np.arange(6), np.array([-1, -1, 1, 0, 2, 4], np.int32), draft_slots=tree_slots)] * 3
    paths = [[1, 2, 4], [0, 3], []]

    def commit(device: torch.device) -> list[Tensor]:
        kv = KVCache(12, BLOCK_SIZE, enable_prefix_caching=False)
        roles: tuple[Role, ...] = ("target", "draft")
        for i, role in enumerate(roles):
            tensor = allocate_kv(2, 12, 2 - i, BLOCK_SIZE, 4, torch.float32, device=CPU)
            kv.attach(role, tensor.normal_(generator=torch.Generator().manual_seed(i)).to(device))
        requests = [
            Request(str(i), None, tokens(10 + i), SamplingParams(), 0, 9, frozenset(), RequestMetrics(0.0), detokenizer=None)
            for i in range(3)
        ]
        for request in requests:
            assert kv.reserve(request, request.num_tokens + 6)
        before = [tensor.cpu().clone() for tensor in kv.tensors.values()]
        kv.clear_new_blocks()
        for tensor, filled in zip(kv.tensors.values(), before, strict=True):
            reserved = [block for request in requests for block in request.block_ids]
            assert (tensor[:, :, :, reserved] == 0).all() and tensor.any()
            tensor.copy_(filled)
        plan = StepPlan(requests, [request.num_tokens for request in requests], [6] * 3)
        kv.commit(plan, Acceptance(trees, paths, [[*path, 9] for path in paths], [None] * 3))
        assert not any(torch.equal(tensor.cpu(), filled) for tensor, filled in zip(kv.tensors.values(), before, strict=True))
        return [tensor.cpu() for tensor in kv.tensors.values()]

    expected = commit(CPU)
    take_triton(monkeypatch)
    for tensor, wanted in zip(commit(DEVICE), expected, strict=True):
        assert torch.equal(tensor, wanted)


def test_choice_on_cuda_and_the_card_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert isinstance(choose_layer_ops(cuda, torch.bfloat16), TritonOps)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    with pytest.raises(
        ValueError, match=r"'cuda:0' is a Tesla T4 of compute capability 7.5: the Triton kernels.* need 8.0 or more"
    ):
        choose_layer_ops(cuda, torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"head_dim": 258}, {}, "head_dim is 258: it must be from 8 to 256"),
        ({}, {"block_size": 64}, "block_size.*64.* it must be .*16.*32"),
        ({}, {"max_batch_size": 1025}, "1025.* 1024"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_by_the_engine(
    config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, num_hidden_layers=1, **config)
    take_triton(monkeypatch)
    with pytest.raises(ValueError, match=message):
        make_engine(str(tmp_path), **({"num_kv_blocks": 40} | options | ON_TRITON))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_options_that_the_kernels_cannot_take_are_refused_by_name(device: str) -> None:
    for block_size in (8, 16, 32, 64, 128):
        config = EngineConfig.of(block_size=block_size)
        config.check_device(torch.device("cpu"))
        if block_size in (16, 32):
            config.check_device(torch.device(device))
        else:
            with pytest.raises(ValueError, match=f"^block_size={block_size} is not supported on {device}: it must be 16 or 32$"):
                config.check_device(torch.device(device))
    with pytest.raises(ValueError, match=f"^max_batch_size=1025 is not supported on {device}: it must be at most 1024$"):
        EngineConfig.of(max_batch_size=1025).check_device(torch.device(device))
