"""Prompt lookup against the obvious search."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from titan.draft.ngram import NgramDrafter


def slow_lookup(tokens: list[int], budget: int, min_ngram: int, max_ngram: int) -> list[int]:
    """What followed the longest suffix that occurred before, the last time it did."""
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                return tokens[start + length :][:budget]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
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
    assert drafter.lookup(tokens, budget) == slow_lookup(tokens, budget, min_ngram, min_ngram + more)
