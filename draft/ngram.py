"""Prompt lookup: propose the tokens that followed the most recent earlier occurrence of the last few tokens.

Saxena, "Prompt lookup decoding", 2023. Costs no model pass; pays off if the output repeats the prompt or itself.
"""

from __future__ import annotations

import numpy as np

from titan.core.arrays import Ints
from titan.core.checks import check_integer
from titan.core.limits import MAX_NODES
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import CachelessDrafter


class NgramDrafter(CachelessDrafter):
    """Looks up the longest suffix of ``min_ngram`` to ``max_ngram`` tokens in the request's own tokens.

    Raises:
        ValueError: an argument is not an integer, or not 1 <= min_ngram <= max_ngram.
    """

    name = "ngram"

    def __init__(self, max_draft_tokens: int, *, min_ngram: int = 2, max_ngram: int = 4) -> None:
        self.max_draft_tokens = check_integer("max_draft_tokens", max_draft_tokens, 1, MAX_NODES)
        self.min_ngram = check_integer("min_ngram", min_ngram, 1)
        self.max_ngram = check_integer("max_ngram", max_ngram, 1)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: 1 <= min_ngram <= max_ngram must hold")

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [
            DraftTree.chain(self.lookup(request.token_array, budget) if budget else [])
            for request, budget in zip(plan.requests, plan.draft_budgets, strict=True)
        ]

    def lookup(self, tokens: Ints, budget: int) -> list[int]:
        """Return up to ``budget`` tokens that followed the longest suffix that occurred before, where it last did.

        Args:
            tokens: int64 [n], at least one.
            budget: how many to return at most.
        """
        found = list[int]()
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # last positions of earlier occurrences of the suffix
        for length in range(1, min(self.max_ngram, len(tokens) - 1) + 1):
            if length >= self.min_ngram and len(ends):
                first = ends[-1] + 1
                found = tokens[first : first + budget].tolist()
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]]
        return found
