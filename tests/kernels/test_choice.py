"""Which back end a device gets, what kernels it gives a model, and what it refuses; generation on Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import choose_cpu_kernels, make_back_end
from interpreted import triton_backend
from stepping import greedy, make_engine, run_all
from tiny_models import make_model
from zoo import Zoo

from titan.kernels.backend import choose_backend
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.torch.layers import TorchOps
from titan.kernels.triton.backend import TRAITS, TritonBackend
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.runner import TritonRunner

CPU = torch.device("cpu")


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
    backend.check_limits(block_size=32, max_batch_size=1024)
    limits = {"block_size": 64, "max_batch_size": 1025}
    for name, allowed in (("block_size", "16 or 32"), ("max_batch_size", "at most 1024")):
        arguments = {"block_size": 16, "max_batch_size": 4, name: limits[name]}
        if not isinstance(backend, TritonBackend):
            backend.check_limits(**arguments)
            continue
        message = f"^{name}={limits[name]} is not supported on {backend.device}: it must be {allowed}$"
        with pytest.raises(ValueError, match=message):
            backend.check_limits(**arguments)


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


def test_greedy_generation_on_triton_is_that_of_transformers(zoo: Zoo) -> None:
    options = {"max_batch_size": 4, "prefill_chunk_size": 16, "num_kv_blocks": 40, "max_draft_tokens": 3}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), backend=triton_backend(), draft_tree=[-1, -1, 0], **options)
    assert isinstance(engine.runner, TritonRunner)
    prompts = [np.random.default_rng(length).integers(3, 131, length).tolist() for length in (20, 3)]
    outputs = run_all(engine, prompts, [greedy(6, ignore_eos=True)] * len(prompts))
    assert outputs == [zoo.greedy("llama", prompt, 6, ignore_eos=True) for prompt in prompts]
    metrics = engine.metrics()
    assert metrics.acceptance_rate > 0.3
    assert metrics.graph_hit_rate is not None and 0 < metrics.graph_hit_rate < 1
