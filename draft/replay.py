"""Replay: propose a recorded continuation, corrupted with a given probability.

For benchmarks of the engine at a known acceptance: each draft token is accepted with probability ``acceptance`` wherever the target
itself would continue as recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from titan.core.batch import prefix_sums
from titan.core.checks import check_integer, check_number
from titan.core.random import Purpose, philox_uniform
from titan.core.request import Request
from titan.core.step import StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.draft.base import CachelessDrafter


class ReplayDrafter(CachelessDrafter):
    """Proposes chains from recordings.

    Args:
        recordings: by prompt token ids, the token ids that followed.
        acceptance: probability in [0, 1] that a draft token is the recorded one.
        vocab_size: of the target; a corrupted token is the recorded one plus 1, modulo this.
        max_draft_tokens: maximum nodes per request.
    """

    name = "replay"

    def __init__(
        self, recordings: Mapping[tuple[int, ...], Sequence[int]], *, acceptance: float, vocab_size: int, max_draft_tokens: int
    ) -> None:
        self.recordings = recordings
        self.acceptance = check_number("acceptance", acceptance, low=0, high=1)
        self.vocab_size = check_integer("vocab_size", vocab_size, 2)
        self.max_draft_tokens = max_draft_tokens

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        recorded = [self._recorded(request, budget) for request, budget in zip(plan.requests, plan.draft_budgets, strict=True)]
        counts = [len(tokens) for tokens in recorded]
        if not any(counts):
            return [EMPTY_TREE] * len(recorded)
        tokens = np.array([token for tokens in recorded for token in tokens], np.int64)
        first = prefix_sums(counts)
        seeds = np.repeat(np.array([request.seed for request in plan.requests], np.uint64), counts)
        lengths = np.array([request.num_tokens for request in plan.requests])
        positions = np.repeat(lengths - first[:-1], counts) + np.arange(len(tokens))
        uniform = philox_uniform(seeds, positions, Purpose.CORRUPT)
        drafted = np.where(uniform < self.acceptance, tokens, (tokens + 1) % self.vocab_size)
        return [DraftTree.chain(each) if len(each) else EMPTY_TREE for each in np.split(drafted, first[1:-1])]

    def _recorded(self, request: Request, budget: int) -> Sequence[int]:
        """Return the next tokens of the request's recording, as many as it may draft."""
        first = request.num_output_tokens
        return self.recordings.get(tuple(request.prompt_token_ids), ())[first : first + budget]
