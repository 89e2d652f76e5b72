"""Updates of the requests' draft histories by verifications and reviews; the next drafts are planned from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp, expm1, isnan, nan

from titan.core.draft_history import AcceptanceCounts, DraftHistory
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.draft.base import Review
from titan.draft.policy import score_temperature

TEMPERATURE_PRIOR = 8.0
"""Strength of the prior for the old temperature: expected minus right tokens that remain per factor of e of change."""

NUM_HALVINGS = 12
"""Bisection steps by which the change of a temperature is found."""


def note_verification(plan: StepPlan, acceptance: Acceptance, fleet: AcceptanceCounts | None = None) -> None:
    """Update the histories of a step's requests by the nodes that verification reached.

    Args:
        plan: the step.
        acceptance: of its rows. Where its trees have no report of their growth, or that no confidence, the draft counts as sure.
        fleet: counts that all requests share, except those with options that the draft does not see. ``None``: no counts are kept.
    """
    trees, growth = acceptance.trees, acceptance.trees.growth
    if growth is None and not trees.num_nodes:
        return
    starts = trees.start_loc.tolist()
    all_parents, all_scores = trees.nodes.parents.tolist(), trees.nodes.scores.tolist()
    is_sampled, has_scores = trees.is_sampled.tolist(), trees.has_scores.tolist()
    first_scores = [nan] * len(plan.requests) if growth is None else growth.first_scores.tolist()
    rows = zip(plan.requests, acceptance.paths, starts[:-1], starts[1:], is_sampled, has_scores, first_scores, strict=True)
    for request, path, first, end, was_sampled, was_scored, first_score in rows:
        is_sure = isnan(first_score)
        if first == end and is_sure:
            continue
        counts = _counts(request, fleet)
        for each in counts:
            each.note_draft(1.0 if is_sure else exp(first_score))
        if first == end:
            continue
        parents = all_parents[first:end]
        if was_sampled:
            _note_children(request.draft_history, parents, path)
        if counts or was_scored:
            _note_first_children(request, parents, all_scores[first:end] if was_scored else None, path, counts, is_sure)


def note_review(request: Request, review: Review, fleet: AcceptanceCounts | None) -> None:
    """Update the history of a reviewed request, as if each token had been verified as a draft of one node.

    Args:
        request: it emitted the tokens.
        review: of these tokens.
        fleet: as in `note_verification`.
    """
    probabilities = [1.0] * len(review.is_right)
    if review.logprobs is not None and len(review.logprobs):
        before = score_temperature(request)
        request.draft_history.move_temperature(before, _matching_ratio(review.logprobs, sum(review.is_right)), len(probabilities))
        probabilities = _at_temperature(review.logprobs, score_temperature(request) / before)
    for counts in _counts(request, fleet):
        for probability, is_right in zip(probabilities, review.is_right, strict=True):
            counts.note_draft(probability)
            counts.note(probability, is_right)


def _matching_ratio(logprobs: Sequence[float], num_right: int) -> float:
    """Return the factor by which the temperature should change, so that ``num_right`` right tokens are expected.

    Its logarithm x solves ``expected(x) - num_right = TEMPERATURE_PRIOR * x``, by bisection: the left side falls.
    """
    low, high = -len(logprobs) / TEMPERATURE_PRIOR, len(logprobs) / TEMPERATURE_PRIOR
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_higher = sum(_at_temperature(logprobs, exp(middle))) - num_right > TEMPERATURE_PRIOR * middle
        low, high = (middle, high) if is_higher else (low, middle)
    return exp(low)


def _at_temperature(logprobs: Sequence[float], ratio: float) -> list[float]:
    """Estimate the probabilities of most likely tokens if the temperature is multiplied by ``ratio``.

    Assumes that a distribution is p, p (1 - p), p (1 - p)**2, ...: at any other temperature, it is geometric, too.
    """
    return [1 - (-expm1(logprob)) ** (1 / ratio) for logprob in logprobs]


def _counts(request: Request, fleet: AcceptanceCounts | None) -> tuple[AcceptanceCounts, ...]:
    """Return the counts for a request's drafts: its own, and the fleet's unless its options change logits unseen by the draft."""
    if fleet is None:
        return ()
    own = request.draft_history.acceptance
    return (own,) if request.has_transforms else (own, fleet)


def _note_children(history: DraftHistory, parents: list[int], path: list[int]) -> None:
    """Record the rank of the accepted child, if any, at each node that verification reached."""
    num_children = Counter(parents)
    for node, child in zip([-1, *path], [*path, None], strict=True):
        if num_children[node]:
            history.note_children(num_children[node], None if child is None else parents[:child].count(node))


def _note_first_children(
    request: Request,
    parents: list[int],
    scores: list[float] | None,
    path: list[int],
    counts: tuple[AcceptanceCounts, ...],
    is_sure: bool,
) -> None:
    """Record whether the first, most likely child of each node that verification reached was accepted."""
    surprises: list[float] = []
    node, score, confidence = -1, 0.0, 1.0
    for child in (*path, -1):
        try:
            first = parents.index(node)
        except ValueError:  # a leaf
            break
        is_accepted = first == child
        if scores is not None:
            confidence = exp(min(scores[first] - score, 0.0))  # a drafter on the device may score a child above its parent
            surprises.append(is_accepted - confidence)
            score = scores[child]
        for each in counts:
            each.note(1.0 if is_sure else confidence, is_accepted)
        node = child
    if surprises:
        request.draft_history.note_surprises(score_temperature(request), surprises)
