"""Models of real shapes, made on the device in seconds, with nothing to download: random weights that write a known text.

The output head is the embedding, moved on by one token, and the layers add less to the residual stream than a token's embedding.
So whatever the layers compute, and however it is rounded, the most likely token after ``t`` is ``t + 1``: a long greedy
continuation is known without running the target, and a recording of it can be replayed as drafts. A token costs what it costs in a
trained model of the shape.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig

from titan.kernels.interfaces import Backend
from titan.models.config import DecoderConfig
from titan.models.decoder import Decoder

LAYER_SCALE = 0.25
"""Factor on what a layer adds to the residual stream."""
MAX_POSITIONS = 4096


def llama(
    hidden_size: int, ffn_size: int, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int = 128_256
) -> LlamaConfig:
    """The config of a Llama, whose head is not tied."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
    )


LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128)
"""Llama 3.1 8B."""
LLAMA_1B = llama(2048, 8192, 16, 32, 8, 64)
"""Llama 3.2 1B: a pass reads 1.24 B parameters, a sixth of what a pass of the 8 B reads."""
DRAFT_OF_8B = llama(512, 2048, 8, 8, 4, 64)
"""0.1 B: a pass reads 66 M parameters of the head, which must have the 8 B's vocabulary, and 31 M of layers."""


def make_decoder(config: LlamaConfig, *, backend: Backend, seed: int, weight_bits: int | None = None) -> Decoder:
    """A model in bfloat16, whose matrices may be rounded to 8 bits, ready to run on a back end."""
    decoder = Decoder(DecoderConfig.read(config, "LlamaForCausalLM"), dtype=torch.bfloat16, backend=backend)
    decoder.to_empty(device=backend.device)
    generator = torch.Generator(backend.device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            elif name == "embedding":
                weight.normal_(generator=generator)
            elif name != "lm_head":
                is_last = name.endswith(("output_weight", "down_weight"))
                weight.normal_(std=(LAYER_SCALE if is_last else 1.0) / math.sqrt(weight.shape[1]), generator=generator)
        decoder.get_parameter("lm_head").copy_(decoder.embedding.roll(1, 0))
    decoder.prepare(weight_bits=weight_bits)
    return decoder


def known_text(token_id: int, num_tokens: int, vocab_size: int) -> NDArray[np.int64]:
    """So many tokens that such a model writes after this one."""
    return (token_id + 1 + np.arange(num_tokens)) % vocab_size


def weight_bytes_per_step(decoder: Decoder) -> int:
    """Bytes of weights that every step reads: all but the embedding, of which it reads a row per token."""
    return sum(weight.nbytes for name, weight in decoder.named_parameters() if name != "embedding")
