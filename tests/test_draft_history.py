"""Histories: averages that learn fast at first, and a temperature that makes probabilities acceptances."""

from __future__ import annotations

import numpy as np
import pytest

from titan.core.draft_history import Average, DraftHistory


def test_an_average_forgets_its_guess_soon_and_then_changes_slowly() -> None:
    average = Average(0.0)
    for _ in range(10):
        average.note(1.0)
    assert average.value > 0.8
    for _ in range(100):
        average.note(1.0)
    average.note(0.0)
    assert average.value > 0.96


@pytest.mark.parametrize("margin", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("acceptance", [0.5, 0.75, 0.95])
def test_the_temperature_makes_the_drafts_probability_the_acceptance(margin: float, acceptance: float) -> None:
    """Two tokens whose logits differ by the margin: the best temperature is margin / logit(acceptance)."""
    rng = np.random.default_rng(0)
    history = DraftHistory()
    probabilities = []
    for _ in range(600):
        probability = 1 / (1 + np.exp(-margin / (history.temperature or 1.0)))
        history.note_surprises(1.0, [bool(rng.random() < acceptance) - probability])
        probabilities.append(probability)
    ideal = 1 / (1 + np.exp(-margin / min(max(margin / np.log(acceptance / (1 - acceptance) + 1e-9), 0.02), 2.0)))
    assert np.mean(probabilities[200:]) == pytest.approx(ideal, abs=0.06)


def test_children_count_by_rank_and_only_where_there_are_so_many() -> None:
    history = DraftHistory()
    for _ in range(20):
        history.note_children(2, 1)
    first, second, third, _ = (rank.value for rank in history.rank_acceptance)
    assert first < 0.1 and second > 0.8 and third == DraftHistory().rank_acceptance[2].value
    history.note_children(2, None)
    assert history.rank_acceptance[1].value < second
