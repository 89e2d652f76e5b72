"""The target's pass of a step: prefill chunks, decodes and root+tree queries side by side."""

from __future__ import annotations

from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.step import StepPlan
from titan.core.trees import DraftTrees


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
        rows.append(QueryRow(request.block_ids, start, request.token_ids[start:end], end == request.num_tokens))
    return build_batch(rows, trees, block_size=block_size)
