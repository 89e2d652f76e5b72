"""Sample-and-match against its slow twin, on random trees, from the logits of a step to its `Acceptance`.

Of PyTorch: the back ends are held to the same rules by the conformance tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from acceptance_reference import reference_match
from back_ends import make_back_end
from proposals import paths_of
from slow_logits import by_last_token, slow_probs, slow_transform
from stepping import host_trees, make_request
from torch import Tensor

from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.torch.trees import Outcome, RuledTrees
from titan.verify.accept import accept

BACKEND = make_back_end("torch")
VOCAB_SIZE = 5
EOS = 4


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=2.0, top_p=0.8, min_tokens=2),
    SamplingParams(temperature=0.0, min_tokens=4),
    SamplingParams(temperature=1.3, min_p=0.1, min_tokens=9),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, presence_penalty=-2.0),
    SamplingParams(temperature=0.0, frequency_penalty=1.2),
    SamplingParams(temperature=0.0, logit_bias={1: 2.0, 3: -100}, min_tokens=1),
    SamplingParams(temperature=0.0, logits_processors=[by_last_token], frequency_penalty=-0.5, repetition_penalty=0.8),
]


class Row(NamedTuple):
    """Of a step."""

    tree: DraftTree
    reaches_root: bool
    request: Request


def request_of(params: SamplingParams, seed: int = 0, num_output: int = 0) -> Request:
    return make_request([0, 0, 0], params, [1] * num_output, seed=seed, stop_token_ids=frozenset({EOS}))


def random_row(rng: np.random.Generator, params: SamplingParams, sizes: Sequence[int]) -> Row:
    """With a tree over few tokens, so that siblings are often equal."""
    num_nodes = int(rng.choice(sizes))
    parents = [int(rng.integers(-1, node)) if rng.random() < 0.5 else node - 1 for node in range(num_nodes)]
    tree = DraftTree(rng.integers(0, VOCAB_SIZE, num_nodes), np.array(parents, np.int32))
    request = request_of(params, int(rng.integers(2**63)), num_output=int(rng.integers(6)))
    return Row(tree, bool(rng.random() < 0.8), request)


def run_accept(
    requests: Sequence[Request], step_trees: Sequence[DraftTree], num_logits: Sequence[int], logits: Tensor
) -> Acceptance:
    """Of requests with so many rows of logits each."""
    counts = [tree.num_nodes for tree in step_trees]
    num_tokens = [each.num_uncomputed_tokens - (not number) for each, number in zip(requests, num_logits, strict=True)]
    plan = StepPlan(list(requests), num_tokens, counts, counts)
    batch: Any = SimpleNamespace(logits_start_loc=np.cumsum([0, *num_logits]), prompt_logits=None)
    return accept(BACKEND, plan, host_trees(step_trees), batch, logits)


def target_logits(request: Request, prefix: Sequence[int]) -> Tensor:
    """A target that is a function of the request and the tokens behind the root, and often wants to end."""
    return torch.from_numpy(np.random.default_rng([request.seed, *prefix]).normal([0, 0, 0, 0, 2], 2)).float()


def target_probs(request: Request, prefix: Sequence[int]) -> Tensor:
    """What the request's token after these behind the root is sampled from, by transformers' warpers."""
    output = [*request.output_token_ids, *prefix]
    scores = slow_transform(target_logits(request, prefix), request.params, request.prompt_token_ids, output, [EOS])
    if request.params.is_greedy:
        return torch.nn.functional.one_hot(scores.argmax(), VOCAB_SIZE)
    return slow_probs(scores.double(), request.params)


@pytest.mark.parametrize("seed", range(100))
def test_accepted_tokens_are_those_that_token_by_token_decoding_samples(seed: int) -> None:
    """Each row by itself: the options of its request, the position that its token will have, and its prefix' stops."""
    rng = np.random.default_rng(seed)
    sizes = [0, 1] if seed % 3 == 0 else [0, 1, 2, 5, 14]
    rows = [random_row(rng, PARAMS[i], sizes) for i in rng.permutation(len(PARAMS))[: 1 + seed].tolist()]
    step_trees = [row.tree if row.reaches_root else EMPTY_TREE for row in rows]
    num_logits = [1 + row.tree.num_nodes if row.reaches_root else 0 for row in rows]
    logits = [target_logits(row.request, path) for row in rows if row.reaches_root for path in [(), *paths_of(row.tree)]]
    stacked = torch.stack(logits) if logits else torch.empty(0, VOCAB_SIZE)
    acceptance = run_accept([row.request for row in rows], step_trees, num_logits, stacked)
    assert acceptance.logprobs == {} and acceptance.errors == [None] * len(rows)
    for row, path, tokens in zip(rows, acceptance.paths, acceptance.token_ids, strict=True):
        if row.reaches_root:
            probs = torch.stack([target_probs(row.request, prefix) for prefix in [(), *paths_of(row.tree)]])
            assert (path, tokens[-1]) == reference_match(row.tree, probs, row.request.seed, row.request.num_tokens)
            assert tokens[:-1] == row.tree.token_ids[path].tolist()
        else:
            assert (path, tokens) == ([], [])
    assert acceptance.trees.nodes.token_ids.tolist() == [token for tree in step_trees for token in tree.token_ids.tolist()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad_row", ["root", "accepted", "rejected"])
def test_logits_that_are_not_finite_end_their_request_if_they_are_its_roots(bad_row: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=1)
    logits = torch.zeros(3 + 1 + 3, VOCAB_SIZE)
    logits[:, 2] = 1.0
    logits[{"root": 0, "accepted": 2, "rejected": 6}[bad_row]] = torch.nan
    step_trees = [DraftTree.chain([2, 2]), EMPTY_TREE, DraftTree.chain([2, 3])]
    acceptance = run_accept([request_of(params)] * 3, step_trees, [3, 1, 3], logits)
    assert acceptance.errors == ["the target's logits are not finite" if bad_row == "root" else None, None, None]
    assert acceptance.paths == [{"root": [], "accepted": [0]}.get(bad_row, [0, 1]), [], [0]]
    assert acceptance.token_ids == [{"root": [], "accepted": [2, 2]}.get(bad_row, [2, 2, 2]), [2], [2, 2]]


def fail(token_ids: list[int], logits: Tensor) -> Tensor:
    if token_ids[-1] == 2:
        raise KeyError("no such rule")
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_behind_the_root_ends_its_request_in_the_next_step(temperature: float) -> None:
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[:, 2] = 40.0
    params = SamplingParams(temperature=temperature)
    requests = [request_of(replace(params, logits_processors=[fail])), request_of(params)]
    acceptance = run_accept(requests, [DraftTree.chain([2, 2])] * 2, [3, 3], logits)
    assert (acceptance.errors, acceptance.paths, acceptance.token_ids) == ([None, None], [[], [0, 1]], [[2], [2, 2, 2]])
    requests[0].token_ids.append(2)
    acceptance = run_accept(requests, [DraftTree.chain([2, 2])] * 2, [3, 3], logits)
    assert acceptance.errors == ["logits_processors: KeyError: 'no such rule'", None]
    assert acceptance.token_ids == [[], [2, 2, 2]]


def test_greedy_rows_without_options_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*args: Any) -> None:
        raise AssertionError("nothing is to be transformed")

    monkeypatch.setattr("titan.verify.accept.transform_rows", unwanted)
    request = request_of(SamplingParams(temperature=0.0))
    assert run_accept([request], [DraftTree.chain([3])], [2], torch.randn(2, VOCAB_SIZE)).errors == [None]


BAD_OUTCOMES: list[Any] = [
    None,
    ([0], 1),
    Outcome([1], 0),  # not a child of the root
    Outcome([0, 2], 0),
    Outcome([0, 0], 0),
    Outcome([-1], 0),
    Outcome([3], 0),
    Outcome([], VOCAB_SIZE),
    Outcome([], 1.0),  # type: ignore[arg-type]
    Outcome([0, 1], -1),  # p is finite there
    Outcome([2, 3], 0),  # and not before its last node
]


@pytest.mark.parametrize("outcome", [*BAD_OUTCOMES, Outcome([0, 1], 4), Outcome([2], -1)])
def test_a_rule_of_ones_own_returns_an_outcome_of_its_tree(outcome: Any) -> None:
    logits = torch.zeros(5, VOCAB_SIZE)
    logits[3] = torch.nan
    trees = host_trees([DraftTree(np.array([2, 3, 4, 1]), np.array([-1, 0, -1, 2]))])
    ruled = RuledTrees(BACKEND, lambda tree: outcome)
    sampling = SamplingRows.of([(SamplingParams(), 0, 3)])
    if outcome in BAD_OUTCOMES:
        with pytest.raises(ValueError, match=r"the acceptance rule returned .* parents=\[-1, 0, -1, 2\].* token from 0 to 4"):
            ruled.verify(logits, trees, np.array([0]), sampling)
    else:
        verified = ruled.verify(logits, trees, np.array([0]), sampling)
        assert ([*verified.paths[0].tolist()], verified.final_tokens.tolist()) == (outcome.path, [outcome.final_token])
