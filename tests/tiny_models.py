"""Small random models, saved to disk by transformers, and their logits as transformers computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

logging.disable_progress_bar()

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def make_model(
    folder: Path, model_type: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB", **config: Any
) -> PreTrainedModel:
    """Save a random model of one of the `MODEL_TYPES` to ``folder`` and return it; ``config`` differs from `SIZES`."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(SIZES | config)), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():  # biases and norms as well, lest their neutral values hide an error
        parameter.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def edit_weights(folder: Path, file: str = "model.safetensors", **changes: Tensor | None) -> None:
    """Replace or add weights in a file of a saved model, or take them away; "__" stands for a dot."""
    path = folder / file
    weights = load_file(path) | {name.replace("__", "."): weight for name, weight in changes.items()}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path, metadata={"format": "pt"})


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Logits of every position, as transformers computes them: float32 [len(token_ids), vocab_size]."""
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()
