from __future__ import annotations

from pathlib import Path

import torch
from make_pair import SHAPES, greedy_agreement, late_layer_scale, make_pair, pair_config, save_pair
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from titan.bench.loading import load_decoder
from titan.kernels.torch.backend import TorchBackend


def small_config(num_layers: int = 4) -> LlamaConfig:
    return pair_config(vocab_size=131, hidden_size=32, intermediate_size=64, num_layers=num_layers, num_heads=2)


def test_the_draft_is_the_first_two_layers_and_the_later_ones_are_scaled_down() -> None:
    assert late_layer_scale(16) == 0.0625 and late_layer_scale(4) == 0.0625 * 7**0.5  # of 14 layers, and of 2
    target, draft = make_pair(small_config(), weight_scale=1.0)
    weights = target.state_dict()
    assert draft.config.num_hidden_layers == 2 and target.config.num_hidden_layers == 4
    assert all(torch.equal(weight, weights[name]) for name, weight in draft.state_dict().items())
    assert {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"} <= draft.state_dict().keys()
    for name, size in [("self_attn.o_proj", 32), ("mlp.down_proj", 64)]:
        early, late = (weights[f"model.layers.{layer}.{name}.weight"].float().std() * size**0.5 for layer in (1, 2))
        assert abs(early - 1.0) < 0.15
        assert abs(late / late_layer_scale(4) - 1.0) < 0.15


def test_agreement_is_total_without_late_layers_and_partial_with_them() -> None:
    sizes = {"num_prompts": 4, "prompt_len": 8, "output_len": 16}
    assert greedy_agreement(make_pair(small_config(num_layers=2)), **sizes) == 1.0
    assert 0.2 < greedy_agreement(make_pair(small_config(num_layers=16)), **sizes) < 1.0


def test_same_seed_makes_the_same_pair_and_titan_loads_it(tmp_path: Path) -> None:
    save_pair(make_pair(small_config(), seed=3), tmp_path)
    again = make_pair(small_config(), seed=3).target
    for role in ("target", "draft"):
        stored = load_file(tmp_path / role / "model.safetensors")
        assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
        model = load_decoder(str(tmp_path / role), dtype="bfloat16", backend=TorchBackend(torch.device("cpu")), pack=False)
        assert model.dtype == torch.bfloat16
        assert torch.equal(model.embedding, again.model.embed_tokens.weight)


def test_the_larger_shape_is_that_of_llama_3_1_8b() -> None:
    with torch.device("meta"):
        target = LlamaForCausalLM(SHAPES["8b"]())
    assert sum(weight.numel() for weight in target.parameters()) == 8_030_261_248
    assert target.model.layers[0].self_attn.k_proj.weight.shape == (8 * 128, 4096)
