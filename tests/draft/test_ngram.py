"""Prompt lookup against the obvious search."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import greedy, make_engine, run_all
from zoo import Zoo, random_prompts

from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.ngram import NgramDrafter


def slow_lookup(tokens: list[int], budget: int, min_ngram: int, max_ngram: int) -> list[int]:
    """What followed the longest suffix that occurred before, the last time it did."""
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                return tokens[start + length :][:budget]
    return []


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    budget=st.integers(0, 6),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_the_most_recent_occurrence_of_the_longest_suffix_is_continued(
    tokens: list[int], budget: int, min_ngram: int, more: int
) -> None:
    drafter = NgramDrafter(6, min_ngram=min_ngram, max_ngram=min_ngram + more)
    assert drafter.lookup(np.array(tokens), budget) == slow_lookup(tokens, budget, min_ngram, min_ngram + more)


def test_lookups_go_through_all_tokens_of_requests_that_grow(zoo: Zoo) -> None:
    drafter, proposed = NgramDrafter(6), list[list[int]]()

    class Checked(NgramDrafter):
        def propose(self, plan: StepPlan) -> list[DraftTree]:
            trees = drafter.propose(plan)
            for tree, request, budget in zip(trees, plan.requests, plan.draft_budgets, strict=True):
                assert [*tree.token_ids] == slow_lookup(request.token_ids, budget, 2, 4)
                proposed.append([*tree.token_ids])
            return trees

    prompts = [[5, 6, 7, 5, 6], [9, 8, 9, 8], random_prompts(1)[0]]
    few = dict.fromkeys(range(5, 9), 100.0)  # tokens, so that they repeat
    params = [greedy(length, ignore_eos=True, logit_bias=few) for length in (40, 10, 25)]
    run_all(make_engine(zoo.path("llama"), Checked(6)), prompts, params)
    assert sum(map(bool, proposed)) > 10
