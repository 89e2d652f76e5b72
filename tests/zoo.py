"""Small random models for engine tests, each made once per session, and what transformers generates with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text_tools import make_tokenizer
from tiny_models import make_model
from transformers import PreTrainedModel

VOCAB_SIZE = 131
EOS_TOKEN_IDS = [2, 50, 90]  # several, so that random models end now and then
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1000.0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "useless": ("qwen3", {"seed": 5, "num_hidden_layers": 1}),
    "other": ("llama", {"seed": 7}),
    "small_vocab": ("llama", {"vocab_size": 120, "num_hidden_layers": 1}),
    "short": ("llama", {"max_position_embeddings": 40, "num_hidden_layers": 1}),
    "short_llama": ("llama", {"max_position_embeddings": 40}),
    "thin": ("llama", {"num_hidden_layers": 1}),
    "narrow_window": ("mistral", {"sliding_window": 3}),
    "bytes": ("llama", {"vocab_size": 340}),  # with room for `make_byte_tokenizer`
    "gathered": ("gptj", {"rotary_dim": 8}),  # attends by itself
    "eight_other": ("llama", {"vocab_size": 8, "num_hidden_layers": 1, "eos_token_id": 2, "seed": 11}),
    "eight": ("llama", {"vocab_size": 8, "num_hidden_layers": 1, "eos_token_id": 2}),
}


class Zoo:
    """Models by name: `FAMILIES`, `OTHERS`; a suffix "~" means slightly perturbed, "+text" with a tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, PreTrainedModel] = {}
        self._greedy: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def path(self, name: str) -> str:
        self.model(name)
        return str(self.folder / name)

    def model(self, name: str) -> PreTrainedModel:
        if name not in self._models:
            base = name.removesuffix("+text").removesuffix("~")
            model_type, config = (FAMILIES | OTHERS)[base]
            folder = self.folder / name
            model = make_model(folder, model_type, **({"eos_token_id": EOS_TOKEN_IDS} | config))
            if "~" in name:
                torch.manual_seed(99)
                for parameter in model.parameters():
                    parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
                model.save_pretrained(folder)
            if name.endswith("+text"):
                make_tokenizer(VOCAB_SIZE).save_pretrained(folder)
            model.generation_config.eos_token_id = None  # `greedy` says where it ends
            self._models[name] = model
        return self._models[name]

    def greedy(self, name: str, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """What transformers writes at temperature 0, and that no token of it was a near-tie."""
        key = (name, tuple(prompt))
        tokens = self._greedy.get(key, [])
        if len(tokens) < max_tokens:
            tokens = self._greedy[key] = _most_likely(self.model(name), prompt, max_tokens)
        tokens = tokens[:max_tokens]
        ends = [] if ignore_eos else [i for i, token in enumerate(tokens) if token in EOS_TOKEN_IDS]
        return tokens[: ends[0] + 1] if ends else tokens


@torch.inference_mode()
def _most_likely(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Token by token, in a loop of its own: that of `generate` takes as long again as the model."""
    cache, feed, tokens = None, list(prompt), list[int]()
    while len(tokens) < num_tokens:
        output = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
        best = output.logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-4, "a near-tie: rounding could decide"
        cache, feed = output.past_key_values, best.indices[:1].tolist()
        tokens += feed
    return tokens


def random_prompts(num_prompts: int, *, seed: int = 0, max_len: int = 60, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Prompts of mixed length: random, repetitive, and some with a common beginning."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab_size, max_len).tolist()
    prompts = []
    for i in range(num_prompts):
        prompt = rng.integers(3, vocab_size, 1 if i == 0 else max_len if i == 1 else rng.integers(1, max_len + 1)).tolist()
        if i % 4 == 2:
            prompt = (prompt[:5] * max_len)[: len(prompt)]
        if i % 4 == 3:
            prompt = (shared[: rng.integers(1, max_len)] + prompt)[:max_len]
        prompts.append(prompt)
    return prompts
