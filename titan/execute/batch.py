"""The target's pass of a step: prefill chunks, decodes and root+tree queries side by side."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.step import StepPlan
from titan.core.trees import DraftTrees, Upload


def target_batch(plan: StepPlan, trees: DraftTrees, *, block_size: int) -> RaggedBatch:
    """Build the target's batch of a step.

    Args:
        plan: the requests of the step, and their numbers of tokens.
        trees: one per row of the plan.
        block_size: tokens per KV block.
    """
    rows = []
    for request, num_tokens in zip(plan.requests, plan.num_tokens, strict=True):
        start = request.num_computed_tokens
        end = start + num_tokens
        positions = request.prompt_logits(num_tokens)
        prompt_logits = range(positions.start - start, positions.stop - start) if positions else positions
        rows.append(QueryRow(request.block_ids, start, request.token_ids[start:end], end == request.num_tokens, prompt_logits))
    return build_batch(rows, trees, block_size=block_size)


def split_logits(batch: RaggedBatch, logits: Tensor, upload: Upload) -> tuple[Tensor, Tensor | None]:
    """Return the logits of roots and nodes, and those that are only for the logprobs of prompts, if there are any.

    Args:
        batch: of the pass.
        logits: [L, vocab], of that pass.
        upload: uploads arrays to the device of the logits.
    """
    if batch.prompt_logits is None:
        return logits, None
    others = np.delete(np.arange(len(logits)), batch.prompt_logits)
    rows, of_prompts = upload([others, batch.prompt_logits])
    return logits.index_select(0, rows), logits.index_select(0, of_prompts)
