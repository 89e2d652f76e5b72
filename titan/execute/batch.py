"""The target's pass of a step: prefill chunks, decodes and root+tree queries side by side."""

from __future__ import annotations

from titan.core.batch import RaggedBatch, join_rows
from titan.core.step import StepPlan
from titan.core.trees import DraftTrees


def target_batch(plan: StepPlan, trees: DraftTrees, *, block_size: int) -> RaggedBatch:
    """Build the target's batch of a step, with a tree for each row of the plan."""
    starts = [request.num_computed_tokens for request in plan.requests]
    row_tokens, needs_logits, prompt_logits = list[list[int]](), list[bool](), list[range]()
    for i, (request, start, num_tokens) in enumerate(zip(plan.requests, starts, plan.num_tokens, strict=True)):
        row_tokens.append(request.token_ids[start : start + num_tokens])
        needs_logits.append(plan.reaches_root(i))
        positions = request.prompt_logits(num_tokens)
        prompt_logits.append(range(positions.start - start, positions.stop - start) if positions else positions)
    return join_rows(plan.block_table, starts, row_tokens, needs_logits, prompt_logits, trees=trees, block_size=block_size)
