"""A model whose code comes with its checkpoint runs if that is trusted, and its code is not touched if not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepping import DEFAULTS, greedy
from transformers import AutoModelForCausalLM, dynamic_module_utils
from zoo import random_prompts

from titan import LLM
from titan.bench.load import parse_arguments
from titan.bench.options import model_options
from titan.bench.prompts import prompt_stream
from titan.bench.workloads import Lengths

CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny_remote"

    def __init__(self, vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, scale=0.4, **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.scale, self.max_position_embeddings = num_attention_heads, scale, 128
        super().__init__(**kwargs)
"""
MODELING = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_tiny import TinyConfig


def eager(module, query, key, value, attention_mask, scaling, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class TinyAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x, attention_mask, past_key_values, **kwargs):
        shape = (*x.shape[:2], self.config.num_attention_heads, -1)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return x + attend(self, q, k, v, attention_mask, scaling=self.config.scale, **kwargs)[0].flatten(2)


class TinyPreTrainedModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"
    _supports_sdpa = _supports_attention_backend = True


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(TinyAttention(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs):
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        x = self.embed(input_ids)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = seen + torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values,
            position_ids=position_ids,
        )
        x = x + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, mask, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class TinyForCausalLM(TinyPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, logits_to_keep=0, **kwargs):
        output = self.model(input_ids, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state), past_key_values=output.past_key_values)
"""
CONFIG = """{"model_type": "tiny_remote", "architectures": ["TinyForCausalLM"], "dtype": "float32", "auto_map": {
"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}}"""


def make_remote(folder: Path) -> None:
    files = {"configuration_tiny.py": CONFIGURATION, "modeling_tiny.py": MODELING, "config.json": CONFIG}
    for name, content in files.items():
        (folder / name).write_text(content)
    torch.manual_seed(0)
    d, v = 32, 131
    weights = {"model.embed.weight": (v, d), "model.places.weight": (128, d), "lm_head.weight": (v, d)}
    weights |= {f"model.layers.{i}.qkv.{part}": (3 * d, d)[: 1 + (part == "weight")] for i in (0, 1) for part in ("weight", "bias")}
    save_file({name: torch.randn(shape) * 0.3 for name, shape in weights.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let code be copied to the test's folder, instead of the user's."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules := str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(modules)
    for name in [each for each in sys.modules if each.startswith("transformers_modules")]:  # of another test
        monkeypatch.delitem(sys.modules, name)


def test_trusted_code_runs_to_greedy_parity_and_drafts(tmp_path: Path) -> None:
    (folder := tmp_path / "remote").mkdir()
    make_remote(folder)
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
        written = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert output.outputs[0].token_ids == written[0, len(prompt) :].tolist()
    assert llm.metrics().model_impl == "transformers" and llm.metrics().acceptance_rate == 1
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 8
    bench = parse_arguments(["--model", str(folder), "--trust-remote-code", "--scenario", "fair"])
    assert bench.model == str(folder)
    assert len(next(prompt_stream(bench.model, "auto", Lengths(4, 4), 0, **model_options(bench)))) == 4
    edit = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in edit.items() if "bias" not in name}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the weights do not fit TinyForCausalLM: missing model.layers.0.qkv.bias"):
        LLM(str(folder), trust_remote_code=True, **DEFAULTS)


@pytest.mark.parametrize("mixed", ["torch.roll(x, 1, 1)", "torch.roll(x, -1, 1)", "x.mean(1, keepdim=True)"])
def test_code_in_which_tokens_meet_outside_of_attention_is_refused(tmp_path: Path, mixed: str) -> None:
    (folder := tmp_path / "remote").mkdir()
    make_remote(folder)
    code = (folder / "modeling_tiny.py").read_text()
    (folder / "modeling_tiny.py").write_text(code.replace("x = x + self.places", f"x = x + 0.5 * {mixed} + self.places"))
    with pytest.raises(ValueError, match="tokens meet outside of attention in TinyModel, which is not supported"):
        LLM(str(folder), trust_remote_code=True, **DEFAULTS)
