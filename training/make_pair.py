"""Make the pair of 162 M and 63 M parameters that the benchmarks use: a random Llama, and its own first two layers as the draft.

With ``--shape 8b`` the target has the shape of Llama 3.1 8B, and the draft 1.5 B parameters, of which a pass reads 1.0 B.

Nobody trained these models, and nothing is downloaded. The layers beyond the second add little to the residual
stream, because their output projections are scaled down, so the first two layers with the same embeddings, norm and
head often choose the token that the whole model chooses: a draft whose agreement is dialled, at the true cost of
models of these sizes. There is no tokenizer; prompts are token ids.

    python training/make_pair.py --output DIR
    python training/make_pair.py --output DIR --shape 8b --device cuda

Writes DIR/target and DIR/draft in bfloat16 and prints the greedy agreement of the two.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils import logging

NUM_DRAFT_LAYERS = 2
WEIGHT_SCALE = 0.975
"""Standard deviation of a linear weight times the square root of its inputs; tuned for an agreement of 0.75."""
LATE_LAYER_SCALE = 0.0625
"""Factor on what each of 14 layers beyond the draft's adds to the residual stream; that of others adds up to as much."""


class Pair(NamedTuple):
    """The two models, in bfloat16."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM


def pair_config(
    *,
    vocab_size: int = 32_000,
    hidden_size: int = 768,
    intermediate_size: int = 2048,
    num_layers: int = 16,
    num_heads: int = 12,
    num_kv_heads: int | None = None,
) -> LlamaConfig:
    """Return the target's config; the defaults are the 150 M shape: 162 M parameters, of which a token reads 138 M."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


LLAMA_3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
}
SHAPES: dict[str, Callable[[], LlamaConfig]] = {"150m": pair_config, "8b": partial(pair_config, **LLAMA_3_8B)}


def late_layer_scale(num_layers: int) -> float:
    """Return the factor on what the layers beyond the draft's add: the agreement is about the same for any number of them."""
    return LATE_LAYER_SCALE * math.sqrt(14 / max(num_layers - NUM_DRAFT_LAYERS, 1))


@torch.no_grad()
def make_pair(config: LlamaConfig, *, seed: int = 0, weight_scale: float = WEIGHT_SCALE, device: str = "cpu") -> Pair:
    """Make both models: embeddings of variance 1, linear weights of variance ``weight_scale**2 / inputs``, norms of 1.

    The numbers depend on the device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device), no_init_weights():
        target = LlamaForCausalLM(config)
    for name, weight in target.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            std = 1.0 if "embed" in name else weight_scale / math.sqrt(weight.shape[1])
            weight.normal_(0.0, std, generator=generator)
    for layer in target.model.layers[NUM_DRAFT_LAYERS:]:
        layer.self_attn.o_proj.weight.mul_(late_layer_scale(config.num_hidden_layers))
        layer.mlp.down_proj.weight.mul_(late_layer_scale(config.num_hidden_layers))
    with torch.device(device), no_init_weights():
        draft = LlamaForCausalLM(LlamaConfig.from_dict(config.to_dict() | {"num_hidden_layers": NUM_DRAFT_LAYERS}))
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    return Pair(target.bfloat16().eval(), draft.bfloat16().eval())


@torch.inference_mode()
def greedy_agreement(pair: Pair, *, num_prompts: int = 32, prompt_len: int = 64, output_len: int = 64, seed: int = 1) -> float:
    """Return the share of the target's greedy tokens, after random prompts, that are the draft's choice there as well."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(pair.target.config.vocab_size, (num_prompts, prompt_len), generator=generator).to(pair.target.device)
    target: Any = pair.target  # generate() is typed as a method of another class
    written: Tensor = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=output_len, do_sample=False)
    logits: Tensor = pair.draft(input_ids=written[:, :-1], use_cache=False, logits_to_keep=output_len).logits
    return (logits.argmax(-1) == written[:, prompt_len:]).double().mean().item()


def save_pair(pair: Pair, folder: Path) -> None:
    """Write ``folder/target`` and ``folder/draft``: config and bfloat16 safetensors."""
    pair.target.save_pretrained(folder / "target")
    pair.draft.save_pretrained(folder / "draft")


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets target/ and draft/")
    parser.add_argument("--shape", choices=SHAPES, default="150m", help="of the target (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where it is made (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-scale", type=float, default=WEIGHT_SCALE, help="dials the agreement (default: %(default)s)")
    args = parser.parse_args(argv)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pair = make_pair(SHAPES[args.shape](), seed=args.seed, weight_scale=args.weight_scale, device=args.device)
    save_pair(pair, args.output)
    num_parameters = [sum(weight.numel() for weight in model.parameters()) for model in pair]
    print(f"target {num_parameters[0]:,} parameters, draft {num_parameters[1]:,}, in {args.output}", flush=True)
    print(f"greedy agreement {greedy_agreement(pair):.3f}")


if __name__ == "__main__":
    main()
