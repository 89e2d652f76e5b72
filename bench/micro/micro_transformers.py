"""Models of transformers: a pass of a 30 M Llama beside Titan's own decoder, and a layer of experts beside transformers' own.

titan bench parts --select micro_transformers
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from titan.bench.loading import open_backend
from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import Backend, PassCounts, PassLimits, Runner
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model

Measure = Callable[..., Any]
pytestmark = [pytest.mark.benchmark(group="kernel"), pytest.mark.parametrize("dtype", ["float32", "bfloat16"])]
SIZES: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 6}
CONTEXT_LEN, NUM_NODES, BLOCK_SIZE, NUM_BLOCKS = 300, 6, 16, 20
NUM_EXPERTS, TOP_K = 32, 4


@cache
def backend() -> Backend:
    """The one that is chosen on this machine."""
    return open_backend()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, stored in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=32000, tie_word_embeddings=True)).bfloat16().save_pretrained(path)
    return path


@cache
def runner(folder: Path, model_impl: str, dtype: str) -> Runner:
    """The model's runner, with KV for 8 requests."""
    model = load_model(open_model(ModelFiles(str(folder)), model_impl), dtype=dtype, backend=backend())
    kv = KVTensor(model.kv_layout, 8 * NUM_BLOCKS, BLOCK_SIZE, backend().device)
    return backend().prepare(model, kv, PassLimits(8, 1 + NUM_NODES, NUM_BLOCKS, 8 * (1 + NUM_NODES)), PassCounts())


def make_batch(num_requests: int, num_nodes: int) -> RaggedBatch:
    """Requests of `CONTEXT_LEN` tokens with a chain of nodes each, all of whose logits are needed."""
    blocks = [list(range(i * NUM_BLOCKS, (i + 1) * NUM_BLOCKS)) for i in range(num_requests)]
    tokens = list(range(1 + num_nodes))
    return build_batch([QueryRow(each, CONTEXT_LEN, tokens, True, range(num_nodes)) for each in blocks], block_size=BLOCK_SIZE)


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_pass(measure: Measure, folder: Path, model_impl: str, dtype: str, num_requests: int) -> None:
    """One token of one request, or eight requests with six nodes each."""
    with backend().active():
        measure(runner(folder, model_impl, dtype).forward, make_batch(num_requests, NUM_NODES if num_requests > 1 else 0))


@pytest.mark.parametrize("num_rows", [7, 56])
@pytest.mark.parametrize("implementation", ["titan", "eager", "grouped_mm"])
def test_experts(measure: Measure, implementation: str, dtype: str, num_rows: int) -> None:
    """A layer of 32 experts, four per token: packed, and as transformers has it ("grouped_mm" by default)."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from titan.models.hf.experts import pack_experts

    config = Qwen3MoeConfig(hidden_size=1024, moe_intermediate_size=768, num_experts=NUM_EXPERTS)
    config._experts_implementation = "eager" if implementation == "eager" else "grouped_mm"
    module = Qwen3MoeExperts(config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.02)
    module = module.bfloat16().to(backend().device, getattr(torch, dtype))
    ops = backend().layer_ops(getattr(torch, dtype), frozenset({"transformers"}))
    if implementation == "titan" and (not ops.packs or not pack_experts(ops, module)):
        pytest.skip("experts are transformers' own here")
    hidden = torch.randn(num_rows, config.hidden_size).to(getattr(torch, dtype))
    chosen = torch.rand(num_rows, NUM_EXPERTS, device=backend().device).topk(TOP_K)
    with backend().active() if implementation == "titan" else nullcontext():  # the others have PyTorch's threads
        measure(module, hidden.to(backend().device), chosen.indices, chosen.values.to(hidden.dtype))
