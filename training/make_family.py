"""Make a model of about 30 M parameters of another family, with random weights, that runs through transformers' layers.

    python training/make_family.py gemma3 --output DIR
    python training/make_family.py qwen3-moe --output DIR

Nothing is downloaded. There is no tokenizer; prompts are token ids. Gemma 3 has sliding and full layers, Qwen3-MoE 16 experts of
which a token takes four. Gemma 3 has a decoder of Titan's own as well: `--model-impl transformers` runs it without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedConfig, Qwen3MoeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": lambda: Gemma3TextConfig(**SIZES, intermediate_size=1536, sliding_window=512),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4, tie_word_embeddings=True
    ),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[args.family]())
    print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.1f} M parameters")
    model.to(torch.bfloat16).save_pretrained(args.output)


if __name__ == "__main__":
    main()
