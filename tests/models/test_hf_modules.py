"""Modules of transformers that Titan replaces compute the same as before; what is only alike stays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from checkpoints import Checkpoint
from families import FAMILIES
from torch import Tensor, nn
from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig, LlamaForCausalLM, Phi3Config, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from titan.core.batch import QueryRow, build_batch
from titan.core.kv_tensor import KVTensor
from titan.kernels.backend import choose_backend
from titan.kernels.interfaces import LayerOps, PassInputs
from titan.kernels.torch.backend import TorchBackend
from titan.models.files import ModelFiles
from titan.models.hf.experts import pack_experts
from titan.models.hf.fused_attention import FusedAttention
from titan.models.hf.modules import FusedNorm, GatedMlp, PackedLinear, fuse_embedding, fuse_mlp, fuse_norm, is_plain_linear
from titan.models.loader import load_model, open_model

DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
SIZE = 96
SIZES: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": 160}


def make_ops(dtype: torch.dtype) -> LayerOps:
    return choose_backend(torch.device("cpu")).layer_ops(dtype, frozenset({"transformers"}))


def ready(module: nn.Module, dtype: torch.dtype) -> Any:
    """A module with random weights."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.2
    return module.to(dtype).eval().requires_grad_(False)


def random_rows(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(*shape, SIZE, generator=torch.Generator().manual_seed(9)) * 3 - 1).to(dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found.double() - expected.double()).norm() <= BOUNDS[found.dtype] * expected.double().norm()


class LateEps(LlamaRMSNorm):
    """With eps added to the root."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        return self.weight * (wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)).to(hidden_states.dtype)


class ClampedNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).clamp(-1.9, 1.9)


class CentredNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class NormWithGate(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


class ClampedMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x))


class SwappedMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class WideGateMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x.to(self.gate_proj.weight.dtype))).to(x.dtype)
        return self.down_proj(gate * self.up_proj(x))


class ClippedAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states.clamp(-5, 5), **kwargs)


class MaskedEmbedding(nn.Embedding):
    def forward(self, token_ids: Tensor) -> Tensor:
        rows = super().forward(token_ids)
        return rows if self.padding_idx is None else rows * (token_ids != self.padding_idx)[..., None]


class OtherLinear(nn.Linear):
    """As quantised layers are: a class of its own."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma3RMSNorm])
def test_norms_of_both_kinds_are_fused(make: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    norm = ready(make(SIZE, eps=1e-5), dtype)
    fused = fuse_norm(make_ops(dtype), norm)
    assert fused is not None
    for rows in (random_rows(dtype, 2, 5), 1e-3 * random_rows(dtype, 7)):
        assert_same(fused(rows), norm(rows))
    assert fused.gains.dtype == (torch.float32 if make is Gemma3RMSNorm else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [LateEps, ClampedNorm, CentredNorm, NormWithGate])
def test_norms_that_are_only_alike_stay(make: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    assert fuse_norm(make_ops(dtype), ready(make(SIZE, eps=1e-5), dtype)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mlp", "config"),
    [
        (LlamaMLP, LlamaConfig(**SIZES, mlp_bias=True)),
        (Phi3MLP, Phi3Config(**SIZES, pad_token_id=0)),
        (Gemma3MLP, Gemma3TextConfig(**SIZES)),
    ],
)
def test_gated_feed_forward_parts_are_fused(mlp: Callable[..., nn.Module], config: Any, dtype: torch.dtype) -> None:
    module, rows = ready(mlp(config), dtype), random_rows(dtype, 2, 3)
    fused = fuse_mlp(make_ops(dtype), module, dtype)
    assert fused is not None
    assert_same(fused(rows), module(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mlp", [ClampedMlp, SwappedMlp])
def test_feed_forward_parts_that_are_only_alike_stay(mlp: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    assert fuse_mlp(make_ops(dtype), ready(mlp(LlamaConfig(**SIZES)), dtype), dtype) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_read_from_the_packed_head_if_they_are_only_scaled(dtype: torch.dtype) -> None:
    ops, tokens = make_ops(dtype), torch.tensor([[5, 0, 63]])
    padded = nn.Embedding(200, SIZE, padding_idx=199)
    for embedding in (nn.Embedding(64, SIZE), padded, Gemma3TextScaledWordEmbedding(64, SIZE, 0, embed_scale=SIZE**0.5)):
        module = ready(embedding, dtype)
        fused = fuse_embedding(ops, module, ops.pack(module.weight), dtype)
        assert fused is not None and torch.equal(fused(tokens), module(tokens))
    for embedding in (nn.Embedding(64, SIZE, max_norm=1.0), masked := MaskedEmbedding(200, SIZE, padding_idx=199)):
        module = ready(embedding, dtype)
        assert fuse_embedding(ops, module, ops.pack(module.weight), dtype) is None
    assert masked.padding_idx == 199


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "config"),
    [
        (Qwen3MoeExperts, Qwen3MoeConfig(hidden_size=SIZE, moe_intermediate_size=64, num_experts=8)),
        (GptOssExperts, GptOssConfig(hidden_size=SIZE, intermediate_size=64, num_local_experts=8)),  # transposed, biases, own gate
    ],
)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_packed_experts_are_those_of_transformers(
    experts: Callable[..., nn.Module], config: Any, dtype: torch.dtype, num_rows: int
) -> None:
    config._experts_implementation = "eager"
    plain, packed = (ready(experts(config), dtype) for _ in range(2))
    assert pack_experts(make_ops(dtype), packed)
    assert packed.down_proj is None, "its memory is given back"
    rows, chosen = random_rows(dtype, num_rows), torch.rand(num_rows, 8, generator=torch.Generator().manual_seed(1)).topk(3)
    choice = chosen.indices, chosen.values.to(dtype)
    for expected in (plain(rows, *choice), grouped_mm_experts_forward(plain, rows, *choice)):
        assert_same(packed(rows, *choice), expected)
    is_there = ref(packed)
    gc.disable()
    try:
        del packed
        assert is_there() is None, "no cycle keeps its weights"
    finally:
        gc.enable()


def test_attention_of_a_models_own_that_goes_by_slots_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ALiBi: requests are right, and of a token's children the first."""
    attend, path = GPTJAttention._attn, Checkpoint(FAMILIES["gptj"], tmp_path).path

    def biased(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Any:
        return attend(self, query, key, value, attention_mask + 2.0 * torch.arange(key.shape[2]))

    monkeypatch.setattr(GPTJAttention, "_attn", biased)
    with pytest.raises(ValueError, match="does not go by the mask it is given, without which trees cannot be run"):
        load_model(open_model(ModelFiles(path)), dtype="float32", backend=TorchBackend(torch.device("cpu")))


def test_experts_have_an_implementation_that_transformers_has_of_quantised_ones_as_well(tmp_path: Path) -> None:
    """Those of fp8, which on a GPU stays as it is, have a list of their own."""
    model = load_model(
        open_model(ModelFiles(Checkpoint(FAMILIES["qwen3_moe"], tmp_path).path)),
        dtype="float32",
        backend=TorchBackend(torch.device("cpu")),
    )
    names = {each.config._experts_implementation for each in model._decoder.modules() if isinstance(each, Qwen3MoeExperts)}
    assert len(names) == 1 and all(names <= each().keys() for each in (ExpertsInterface, *ExpertsInterface.__subclasses__()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_a_llama_is_replaced_and_what_is_only_alike_is_not(tmp_path: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    config = LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2, vocab_size=64)
    ready(LlamaForCausalLM(config), dtype).save_pretrained(tmp_path)
    backend = choose_backend(torch.device("cpu"))
    model = load_model(open_model(ModelFiles(str(tmp_path)), "transformers"), dtype=dtype, backend=backend)
    found = {type(module) for module in model._decoder.modules()}
    assert {FusedAttention, GatedMlp, FusedNorm} <= found and not found & {nn.Linear, LlamaAttention, LlamaMLP, LlamaRMSNorm}
    assert isinstance(model._head._layer, PackedLinear)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaAttention", ClippedAttention)
    clipped = load_model(open_model(ModelFiles(str(tmp_path)), "transformers"), dtype=dtype, backend=backend)
    found = {type(module) for module in clipped._decoder.modules()}
    assert ClippedAttention in found and FusedAttention not in found
    assert nn.Linear not in found, "its projections are packed all the same"


def test_linear_layers_that_a_model_keeps_in_float32_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are of another dtype than those of all others."""
    config = LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2, vocab_size=64)
    ready(LlamaForCausalLM(config), torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", WideGateMlp)
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"gate_proj"})
    expected = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert expected.model.layers[0].mlp.gate_proj.weight.dtype == torch.float32
    backend = choose_backend(torch.device("cpu"))
    model = load_model(open_model(ModelFiles(str(tmp_path)), "transformers"), dtype="bfloat16", backend=backend)
    kept = [module for module in model._decoder.modules() if type(module) is nn.Linear]
    assert [each.weight.dtype for each in kept] == [torch.float32] * 2
    assert_same(compute_logits(model, [5, 9, 1, 30, 7]), expected(torch.tensor([[5, 9, 1, 30, 7]])).logits[0])


def test_other_classes_of_linear_layers_stay() -> None:
    assert is_plain_linear(nn.Linear(4, 4))
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    assert not any(map(is_plain_linear, (OtherLinear(4, 4), hooked)))
    mlp = ready(LlamaMLP(LlamaConfig(**SIZES)), torch.float32)
    mlp.up_proj = ready(OtherLinear(SIZE, 160, bias=False), torch.float32)
    assert fuse_mlp(make_ops(torch.float32), mlp, torch.float32) is None


def compute_logits(model: Any, tokens: list[int]) -> Tensor:
    batch = build_batch([QueryRow([0], 0, tokens)], block_size=8)
    arrays = batch.token_ids, batch.attention.positions, batch.slot_mapping
    inputs = PassInputs(*map(torch.from_numpy, arrays), None, batch.attention)
    with torch.no_grad():
        logits: Tensor = model.logits(model.hidden_states(inputs, KVTensor(model.kv_layout, 1, 8, model.device)))
    return logits


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "deepseek_v3"])
def test_in_float32_weights_that_are_stored_in_16_bits_give_what_they_give_when_stored_in_32(tmp_path: Path, family: str) -> None:
    model = Checkpoint(FAMILIES[family], tmp_path).model.to(torch.bfloat16)
    backend = choose_backend(torch.device("cpu"))
    logits = []
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype).save_pretrained(folder := tmp_path / str(dtype))
        loaded = load_model(open_model(ModelFiles(str(folder)), "transformers"), dtype="float32", backend=backend)
        tensors = [*loaded._decoder.parameters(), *loaded._decoder.buffers()]
        assert all(each.dtype == torch.float32 for each in tensors if each.is_floating_point())
        logits.append(compute_logits(loaded, [5, 9, 1, 30, 7]))
    assert logits[0].dtype == torch.float32 and torch.equal(*logits)
