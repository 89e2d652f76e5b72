"""Logits of a prompt from a checkpoint of `families`: those in bfloat16 and float16 beside those of transformers."""

from __future__ import annotations

import torch
from back_ends import cpu_backend
from checkpoints import Checkpoint, make_prompts
from torch import Tensor

from titan.core.batch import QueryRow, build_batch
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import PassInputs
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model

HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_RATIO = 4.0
"""Of the median error of log-probabilities to that of transformers.

Nearly all families have 0.6 to 1.25. Where rounding lets a token choose another expert, the tokens after it see the difference:
2.7 was seen.
"""


@torch.no_grad()
def check_half_precision(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Assert that a prompt's log-probabilities are about as close to those in float32 as transformers' in the same dtype are."""
    prompt = max(make_prompts(), key=len)
    token_ids = torch.tensor([prompt])
    half = type(checkpoint.model).from_pretrained(checkpoint.path, dtype=dtype)
    expected = checkpoint.model(token_ids, use_cache=False).logits[0].log_softmax(-1)
    theirs = _median_error(half(token_ids, use_cache=False).logits[0], expected)
    ours = _median_error(logits_of(checkpoint, prompt, dtype), expected)
    assert ours <= MAX_RATIO * theirs, f"log-probabilities in {dtype} differ by {ours:.1e}, those of transformers by {theirs:.1e}"


def _median_error(logits: Tensor, expected: Tensor) -> float:
    return (logits.float().log_softmax(-1) - expected).abs().median().item()


@torch.no_grad()
def logits_of(checkpoint: Checkpoint, prompt: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of a prompt that runs in two chunks: [len(prompt), vocab_size]."""
    model = load_model(open_model(ModelFiles(checkpoint.path)), dtype=dtype, backend=cpu_backend())
    kv, blocks, chunks = KVTensor(model.kv_layout, 8, 8, cpu_backend().device), [*range(1, 8)], []
    for start, tokens in ((0, prompt[:20]), (20, prompt[20:])):
        batch = build_batch([QueryRow(blocks, start, tokens)], block_size=8)
        arrays = (batch.token_ids, batch.attention.positions, batch.slot_mapping)
        token_ids, positions, slots = (torch.from_numpy(each) for each in arrays)
        with cpu_backend().active():
            inputs = PassInputs(token_ids, positions, slots, None, batch.attention)
            chunks.append(model.logits(model.hidden_states(inputs, kv)))
    return torch.cat(chunks)
