"""Prompt lookup: propose the tokens that followed the most recent earlier occurrence of the last few tokens.

Saxena, "Prompt lookup decoding", 2023. Costs no model pass; pays off if the output repeats the prompt or itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from titan.core.checks import check_integer
from titan.core.limits import MAX_NODES
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree


class NgramDrafter:
    """Looks up the longest suffix of ``min_ngram`` to ``max_ngram`` tokens in the request's own tokens.

    Raises:
        ValueError: an argument is not an integer, or not 1 <= min_ngram <= max_ngram.
    """

    name = "ngram"
    kv = None

    def __init__(self, max_draft_tokens: int, *, min_ngram: int = 2, max_ngram: int = 4) -> None:
        self.max_draft_tokens = check_integer("max_draft_tokens", max_draft_tokens, 0, MAX_NODES)
        self.min_ngram = check_integer("min_ngram", min_ngram, 1)
        self.max_ngram = check_integer("max_ngram", max_ngram, 1)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: 1 <= min_ngram <= max_ngram must hold")

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [
            DraftTree.chain(self.lookup(request.token_ids, budget))
            for request, budget in zip(plan.requests, plan.draft_budgets, strict=True)
        ]

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Do nothing: each lookup reads the request's tokens again."""

    def lookup(self, token_ids: Sequence[int], budget: int) -> list[int]:
        """Return up to ``budget`` tokens that followed the most recent earlier occurrence of the longest suffix that has one."""
        if budget == 0:
            return []
        tokens = np.asarray(token_ids, np.int64)
        for length in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            suffix = tokens[-length:]
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            places = np.flatnonzero((windows == suffix).all(axis=1))
            if len(places):
                first = int(places[-1]) + length
                continuation: list[int] = tokens[first : first + budget].tolist()
                return continuation
        return []
