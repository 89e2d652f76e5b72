"""Which back end a device gets, what kernels it gives a model, and what it refuses; a model on Triton is that on PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from cpu_kernels import choose_cpu_kernels
from interpreted import triton_backend
from stepping import greedy, make_engine, run_all
from tiny_models import make_model
from torch import Tensor
from zoo import VOCAB_SIZE, Zoo

from titan.core.batch import QueryRow, build_batch
from titan.core.kv_tensor import KVTensor
from titan.core.limits import MAX_NODES
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees, TreeLimits
from titan.kernels.backend import choose_backend
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.interfaces import Backend, PassCounts, PassLimits
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.torch.layers import TorchOps
from titan.kernels.torch.runner import TorchRunner
from titan.kernels.triton.backend import TRAITS, TritonBackend
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.runner import TritonRunner
from titan.models.loader import load_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 24
LIMITS = PassLimits(num_requests=4, query_len=8, num_blocks=8)


def test_a_cpu_with_a_compiler_gets_cpp_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    make_back_end("cpu")  # or skip
    assert type(choose_backend(CPU)) is CpuBackend
    choose_cpu_kernels(monkeypatch, "torch")
    assert type(choose_backend(CPU)) is TorchBackend
    choose_cpu_kernels(monkeypatch, "fast")
    with pytest.raises(ValueError, match="TITAN_CPU_KERNELS=fast is not allowed: allowed are 'auto' and 'torch'"):
        choose_backend(CPU)


def test_fast_operations_are_given_to_models_whose_traits_they_know(backend: Backend) -> None:
    fast = {TorchBackend: TorchOps, CpuBackend: CompiledOps, TritonBackend: TritonOps}[type(backend)]  # type: ignore[index]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        is_known = dtype != torch.float16 or not isinstance(backend, CpuBackend)
        assert type(backend.layer_ops(dtype, TRAITS - {"tied_embedding"})) is (fast if is_known else TorchOps)
        assert type(backend.layer_ops(dtype, frozenset({"rms_norm", "moe"}))) is TorchOps


def test_a_card_that_triton_does_not_support_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = choose_backend(torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert type(backend) is TritonBackend and type(backend.layer_ops(torch.bfloat16, frozenset())) is TritonOps
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    message = r"'cuda:0' is a Tesla T4 of compute capability 7.5: the Triton kernels.* need 8.0 or more"
    with pytest.raises(ValueError, match=message):
        backend.layer_ops(torch.bfloat16, frozenset())


def test_block_and_batch_sizes_that_the_kernels_cannot_take_are_refused(backend: Backend) -> None:
    for block_size in (8, 16, 32, 64, 128):
        if not isinstance(backend, TritonBackend) or block_size in (16, 32):
            backend.check_limits(block_size=block_size, max_batch_size=1024)
            continue
        message = f"^block_size={block_size} is not supported on {backend.device}: it must be 16 or 32$"
        with pytest.raises(ValueError, match=message):
            backend.check_limits(block_size=block_size, max_batch_size=4)
    if isinstance(backend, TritonBackend):
        with pytest.raises(
            ValueError, match=f"^max_batch_size=1025 is not supported on {backend.device}: it must be at most 1024$"
        ):
            backend.check_limits(block_size=16, max_batch_size=1025)
    else:
        backend.check_limits(block_size=16, max_batch_size=1025)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"head_dim": 258}, {}, "head_dim is 258: it must be from 8 to 256"),
        ({}, {"block_size": 64}, "block_size.*64.* it must be .*16.*32"),
        ({}, {"max_batch_size": 1025}, "1025.* 1024"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_by_the_engine(
    config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_model(tmp_path, num_hidden_layers=1, **config)
    with pytest.raises(ValueError, match=message):
        make_engine(str(tmp_path), backend=triton_backend(), **({"num_kv_blocks": 40} | options))


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()  # type: ignore[no-any-return]


def mixed_parts() -> list[tuple[QueryRow, DraftTree]]:
    """A prefill chunk, one with a branching tree behind it, a verification, a chain, and a decode."""
    order = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    tables = [order[i::5] for i in range(5)]
    branching = DraftTree(np.array(tokens(7, 9)), np.array([-1, 0, -1, 0, 1, 2, 4], np.int32))
    return [
        (QueryRow(tables[0], 5, tokens(19, 1), needs_logits=False), EMPTY_TREE),
        (QueryRow(tables[1], 3, tokens(11, 2)), branching),
        (QueryRow(tables[2], 30, tokens(1, 3)), branching),
        (QueryRow(tables[3], 14, tokens(1, 4)), DraftTree.chain(tokens(3, 6))),
        (QueryRow(tables[4], 40, tokens(1, 5)), EMPTY_TREE),
    ]


def assert_near(actual: Tensor, expected: Tensor, bound: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual - expected).float().norm() <= bound * expected.float().norm()


WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "attention_bias": True}


@pytest.mark.parametrize(
    ("model_type", "config", "dtype", "bound"),
    [
        ("qwen3", WINDOW, "float32", 1e-5),
        ("qwen3", WINDOW, "bfloat16", 3e-2),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}, "float32", 1e-5),
    ],
)
def test_the_decoder_on_triton_is_the_decoder_on_pytorch(
    model_type: str, config: dict[str, Any], dtype: str, bound: float, tmp_path: Path
) -> None:
    make_model(tmp_path, model_type, num_hidden_layers=2, **config)
    rows, proposal = zip(*mixed_parts(), strict=True)
    limits = [TreeLimits(MAX_NODES, may_sample=False)] * len(rows)
    logits, caches = [], []
    for backend, runner_type in ((make_back_end("torch"), TorchRunner), (triton_backend(), TritonRunner)):
        model = load_model(str(tmp_path), dtype=dtype, backend=backend)
        kv = KVTensor(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE, backend.device)
        for group in kv.groups:
            group.copy_(torch.empty(group.shape).normal_(generator=torch.Generator().manual_seed(0)))
        runner = backend.prepare(model, kv, LIMITS, PassCounts())
        assert type(runner) is runner_type
        trees = DraftTrees.of(proposal, limits, drafter="test", vocab_size=VOCAB_SIZE, upload=backend.upload, device=backend.device)
        batch = build_batch(rows, trees, block_size=BLOCK_SIZE)
        with torch.inference_mode():
            logits.append(runner.forward(batch).cpu())
        caches.append(kv.groups[0].cpu())
    assert_near(logits[1], logits[0], bound)
    assert_near(caches[1], caches[0], bound)


def test_greedy_generation_on_triton_is_that_of_transformers(zoo: Zoo) -> None:
    options = {"max_batch_size": 4, "prefill_chunk_size": 16, "num_kv_blocks": 40, "max_draft_tokens": 3}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), backend=triton_backend(), draft_tree=[-1, -1, 0], **options)
    assert isinstance(engine.runner, TritonRunner)
    prompts = [tokens(20, 1), tokens(3, 2)]
    outputs = run_all(engine, prompts, [greedy(7, ignore_eos=True)] * len(prompts))
    assert outputs == [zoo.greedy("llama", prompt, 7, ignore_eos=True) for prompt in prompts]
    metrics = engine.metrics()
    assert metrics.acceptance_rate > 0.3
    assert metrics.graph_hit_rate is not None and 0 < metrics.graph_hit_rate < 1
