"""A model whose code comes with its checkpoint runs if that is trusted, and its code is not touched if not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from stepping import DEFAULTS, greedy
from tiny_models import edit_weights, make_model
from transformers import AutoModelForCausalLM, dynamic_module_utils
from zoo import random_prompts

from titan import LLM
from titan.bench.load import parse_arguments
from titan.bench.options import model_options
from titan.bench.prompts import prompt_stream
from titan.bench.workloads import Lengths

CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class TinyConfig(LlamaConfig):
    model_type = "tiny_remote"


class TinyEmbedding(nn.Embedding):
    def forward(self, token_ids):
        x = super().forward(token_ids)
        return 0.5 * x


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = TinyEmbedding(config.vocab_size, config.hidden_size)
"""
PLAIN_DECODER = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast


class TinyConfig(LlamaConfig):
    model_type = "tiny_remote"


class TinyDecoder(nn.Module):
    def __init__(self, llama):
        super().__init__()
        self.config, self.embed_tokens, self.layers = llama.config, llama.embed_tokens, llama.layers
        self.norm, self.rotary_emb = llama.norm, llama.rotary_emb

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **options):
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            num_past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(num_past, num_past + x.shape[1], device=x.device)[None]
        shared = {"attention_mask": attention_mask, "past_key_values": past_key_values, "position_ids": position_ids}
        shared["attention_mask"] = create_causal_mask(config=self.config, inputs_embeds=x, **shared)
        rotation = self.rotary_emb(x, position_ids=position_ids)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotation, **shared, **options)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyDecoder(self.model)
"""
CONFIG = {
    "model_type": "tiny_remote",
    "architectures": ["TinyForCausalLM"],
    "auto_map": {"AutoConfig": "tiny.TinyConfig", "AutoModelForCausalLM": "tiny.TinyForCausalLM"},
}


def make_remote(folder: Path, code: str = CODE) -> None:
    make_model(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | CONFIG))
    (folder / "tiny.py").write_text(code)


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let code be copied to the test's folder, instead of the user's."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules := str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(modules)
    for name in [each for each in sys.modules if each.startswith("transformers_modules")]:  # of another test
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("code", [CODE, PLAIN_DECODER], ids=["embedding", "decoder"])
def test_trusted_code_runs_to_greedy_parity_and_drafts(tmp_path: Path, code: str) -> None:
    make_remote(folder := tmp_path / "remote", code)
    with pytest.raises(
        ValueError, match=r"auto_map=.*TinyConfig.* names code of the checkpoint: allowed with trust_remote_code=True"
    ):
        LLM(str(folder), **DEFAULTS)
    assert not (tmp_path / "modules").exists()
    llm = LLM(str(folder), str(folder), trust_remote_code=True, **DEFAULTS, num_kv_blocks=64)
    prompts = random_prompts(3)
    outputs = llm.generate(prompts, greedy(16, ignore_eos=True), use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        written = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == written[0, len(prompt) :].tolist()
    assert llm.metrics().model_impl == "transformers" and llm.metrics().acceptance_rate == 1
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 8
    bench = parse_arguments(["--model", str(folder), "--trust-remote-code", "--scenario", "fair"])
    assert bench.model == str(folder)
    assert len(next(prompt_stream(bench.model, "auto", Lengths(4, 4), 0, **model_options(bench)))) == 4
    edit_weights(folder, model__layers__0__self_attn__q_proj__weight=None)
    with pytest.raises(ValueError, match=r"the weights do not fit TinyForCausalLM: missing model.layers.0.self_attn.q_proj.weight"):
        LLM(str(folder), trust_remote_code=True, **DEFAULTS)


@pytest.mark.parametrize("mixed", ["torch.roll(x, 1, 1)", "torch.roll(x, -1, 1)", "x.mean(1, keepdim=True)"])
def test_code_in_which_tokens_meet_outside_of_attention_is_refused(tmp_path: Path, mixed: str) -> None:
    make_remote(folder := tmp_path / "remote", CODE.replace("0.5 * x", f"x + 0.5 * {mixed}"))
    with pytest.raises(ValueError, match="tokens meet outside of attention in LlamaModel, which is not supported"):
        LLM(str(folder), trust_remote_code=True, **DEFAULTS)
