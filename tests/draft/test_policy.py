"""The policy: what grows fits the budget and the slots that were reserved for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from proposals import BUSHY
from stepping import host_trees, make_request

from titan.core.draft_history import AcceptanceCounts, Average, DraftHistory
from titan.core.growth import BeamSpec, GrowthSpec, ShapeSpec
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree, GrowthReport
from titan.draft.feedback import note_verification
from titan.draft.policy import CHAIN_CHILDREN, MAX_CHAIN_NODES, DraftPolicy


def request_of(temperature: float = 0.0, seed: int | None = None) -> Request:
    return make_request([1, 2], SamplingParams(temperature=temperature, seed=seed))


def kind_of(spec: GrowthSpec) -> str:
    if isinstance(spec, BeamSpec):
        return "siblings" if spec.width == 1 else "beam"
    return "sampled" if spec.params is not None else "chain" if spec.plan.shape.is_chain else "shape"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled", "auto"])
@pytest.mark.parametrize("draft_tree", ["chain", "auto", "dynamic", BUSHY])
def test_a_tree_fits_its_budget_and_the_slots_that_it_asks_for(
    draft_tree: str | Sequence[int], draft_sampling: str, temperature: float
) -> None:
    """Whatever the history; and where no more slots are there than nodes, it grows within these."""
    for max_draft_tokens in (7, 16, 63):
        policy = DraftPolicy(draft_tree, draft_sampling, max_draft_tokens)
        largest = {kind_of(spec): spec.num_slots for spec in policy.largest_specs()}
        for history in (DraftHistory(), DraftHistory(rank_acceptance=[Average(0.2)] * 4), DraftHistory(temperature=2.0)):
            request = request_of(temperature)
            request.draft_history = history
            assert policy.lookahead(request, 0) == 0
            for budget in range(1, max_draft_tokens + 1):
                lookahead = policy.lookahead(request, budget)
                assert lookahead >= budget
                for num_slots in (lookahead, budget):
                    spec = policy.spec(request, budget, num_slots)
                    assert 0 <= spec.num_slots <= num_slots and 1 <= spec.num_nodes <= budget
                    kind = kind_of(spec)
                    assert kind not in ("chain", "siblings") or spec.num_slots <= largest[kind]


@pytest.mark.parametrize(
    ("draft_tree", "draft_sampling", "temperature", "budget", "kind"),
    [
        ("chain", "greedy", 0.8, 6, "chain"),
        ("auto", "greedy", 0.0, 4, "chain"),
        ("auto", "greedy", 0.0, 5, "siblings"),
        ("auto", "greedy", 0.8, 8, "siblings"),
        ("auto", "greedy", 0.0, 9, "beam"),
        ("dynamic", "greedy", 0.0, 1, "chain"),
        ("dynamic", "greedy", 0.0, 2, "beam"),
        (BUSHY, "greedy", 0.0, 7, "shape"),
        (BUSHY, "sampled", 0.0, 7, "shape"),
        (BUSHY, "sampled", 0.8, 7, "sampled"),
        ("dynamic", "sampled", 0.8, 7, "sampled"),
        ("auto", "auto", 0.8, 7, "sampled"),
        ("auto", "auto", 0.0, 7, "siblings"),
    ],
)
def test_what_grows(draft_tree: str | Sequence[int], draft_sampling: str, temperature: float, budget: int, kind: str) -> None:
    policy, request = DraftPolicy(draft_tree, draft_sampling, 16), request_of(temperature)
    spec = policy.spec(request, budget, policy.lookahead(request, budget))
    assert kind_of(spec) == kind
    if isinstance(spec, ShapeSpec) and spec.params is not None:
        assert (spec.params, spec.seed) == (request.params, request.seed)


@pytest.mark.parametrize(
    ("draft_tree", "temperature", "kind", "num_nodes"),
    [("auto", 0.0, "chain", MAX_CHAIN_NODES), ("auto", 0.8, "sampled", 12), ("dynamic", 0.0, "beam", 12), (BUSHY, 0.0, "shape", 7)],
)
def test_a_chain_where_one_is_better_if_neither_tokens_nor_what_was_asked_for_change(
    draft_tree: str | Sequence[int], temperature: float, kind: str, num_nodes: int
) -> None:
    policy, request = DraftPolicy(draft_tree, "auto", 16), request_of(temperature)
    spec = policy.spec(request, policy.chain_budget(request, 12), policy.lookahead(request, 12))
    assert (kind_of(spec), spec.num_nodes) == (kind, num_nodes)


def test_a_beam_without_its_slots_is_a_chain_with_siblings() -> None:
    policy, request = DraftPolicy("dynamic", "greedy", 16), request_of()
    lookahead = policy.lookahead(request, 9)
    assert lookahead > 9 and kind_of(policy.spec(request, 9, lookahead)) == "beam"
    narrow = policy.spec(request, 9, lookahead - 1)
    assert isinstance(narrow, BeamSpec) and (narrow.width, narrow.num_children) == (1, CHAIN_CHILDREN)


def test_the_calibrated_temperature_is_that_of_the_beam() -> None:
    policy, request = DraftPolicy("dynamic", "greedy", 16), request_of(0.8)
    first = policy.spec(request, 9, 63)
    request.draft_history.temperature = 0.3
    second = policy.spec(request, 9, 63)
    assert isinstance(first, BeamSpec) and isinstance(second, BeamSpec)
    assert (first.temperature, second.temperature) == (0.8, 0.3)


@pytest.mark.parametrize(("temperature", "seed", "is_sampled"), [(1.0, None, True), (1.0, 7, False), (0.0, None, False)])
def test_auto_samples_unless_the_request_has_a_seed_of_its_own(temperature: float, seed: int | None, is_sampled: bool) -> None:
    policy, request = DraftPolicy("chain", "auto", 16), request_of(temperature, seed)
    assert kind_of(policy.spec(request, 6, 6)) == ("sampled" if is_sampled else "chain")
    assert kind_of(DraftPolicy("chain", "sampled", 16).spec(request, 6, 6)) == ("sampled" if temperature else "chain")


@pytest.mark.parametrize("is_sampled", [True, False])
def test_only_sampled_trees_tell_how_often_siblings_of_a_rank_are_accepted(is_sampled: bool) -> None:
    request, siblings = request_of(0.8), DraftTree(np.array([7, 3]), np.array([-1, -1], np.int32))
    trees = replace(host_trees([siblings]), is_sampled=np.array([is_sampled]))
    note_verification(StepPlan([request], [1], [2], [2]), Acceptance(trees, [[1]], [[3, 5]], [None]))
    learnt, before = (each.rank_acceptance for each in (request.draft_history, DraftHistory()))
    assert [a.value > b.value for a, b in zip(learnt, before, strict=True)] == [False, is_sampled, False, False]
    assert [a.value < b.value for a, b in zip(learnt, before, strict=True)] == [is_sampled, False, False, False]


def test_a_child_that_is_scored_above_its_parent_is_sure_at_most() -> None:
    """Scores on a device are not checked."""
    request, fleet, scores = request_of(0.8), AcceptanceCounts(), np.array([-1000.0, -0.1], np.float32)
    trees = host_trees([DraftTree(np.array([7, 3]), np.array([-1, 0], np.int32), scores=np.zeros(2, np.float32))])
    nodes = trees.nodes._replace(scores=torch.from_numpy(scores))
    trees = replace(trees, nodes=nodes, growth=GrowthReport(2, 2, 0.1, scores[:1]))
    note_verification(StepPlan([request], [1], [2], [2]), Acceptance(trees, [[0, 1]], [[7, 3, 5]], [None]), fleet)
    assert fleet.num_expected == 1.0 < fleet.num_accepted


@pytest.mark.parametrize(("draft_tree", "is_caterpillar"), [("auto", True), ("dynamic", False)])
def test_siblings_have_children_in_sampled_trees_unless_one_node_is_fed_per_depth(draft_tree: str, is_caterpillar: bool) -> None:
    request = request_of(0.8)
    request.draft_history = DraftHistory(rank_acceptance=[Average(0.4), Average(0.3), Average(0.2)])
    spec = DraftPolicy(draft_tree, "sampled", 16).spec(request, 8, 8)
    assert (max(map(len, spec.plan.feeds)) == 1) == is_caterpillar


def test_names_that_are_none_are_refused() -> None:
    for changes, message in (
        ({"draft_tree": "chains"}, "draft_tree='chains' is not allowed"),
        ({"draft_sampling": "none"}, "draft_sampling='none' is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            DraftPolicy(**{"draft_tree": "auto", "draft_sampling": "auto", "max_draft_tokens": 6} | changes)
