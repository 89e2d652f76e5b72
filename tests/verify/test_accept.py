"""The acceptance rule against its slow twin, on random trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.execute.batch import RaggedBatch
from titan.sample.distributions import SamplingRows, sample_rows
from titan.verify.accept import accept, walk
from titan.verify.reference import reference_walk

VOCAB_SIZE = 5
EOS = 4


@st.composite
def trees(draw: st.DrawFn, vocab_size: int = 3) -> DraftTree:
    """Random trees over few tokens, so that siblings are often equal."""
    num_nodes = draw(st.integers(0, 14))
    parents = [draw(st.integers(-1, node - 1)) if draw(st.booleans()) else node - 1 for node in range(num_nodes)]
    token_ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=num_nodes, max_size=num_nodes))
    return DraftTree(np.array(token_ids, np.int64), np.array(parents, np.int32))


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    """Tokens from the root down to a node; -1 is the root, which has none."""
    tokens: list[int] = []
    while node >= 0:
        tokens.insert(0, int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return tokens


def pseudo_random_token(seed: int, prefix: Sequence[int], vocab_size: int = 3) -> int:
    """The target's token after a prefix: any function of it will do."""
    return int(np.random.default_rng([seed, *prefix]).integers(vocab_size))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tree=trees(), seed=st.integers(0, 1000))
def test_the_walk_is_that_of_the_slow_twin(tree: DraftTree, seed: int) -> None:
    tokens = [pseudo_random_token(seed, path_tokens(tree, node)) for node in range(-1, tree.num_nodes)]
    path = walk(tree, tokens)
    emitted = [*tree.token_ids[path].tolist(), tokens[1 + path[-1] if path else 0]]
    assert emitted == reference_walk(tree, lambda prefix: pseudo_random_token(seed, prefix))
    assert [int(tree.parents[node]) for node in path] == [-1, *path][: len(path)], "a path goes from parent to child"


def test_of_equal_siblings_the_first_is_taken() -> None:
    tree = DraftTree(np.array([7, 7, 8, 9, 8]), np.array([-1, -1, 1, 0, 0], np.int32))
    assert walk(tree, [7, 8, 8, 1, 2, 3]) == [0, 4]


def make_request(params: SamplingParams, seed: int = 0, num_prompt: int = 3, num_output: int = 0) -> Request:
    request = Request("r", None, [0] * num_prompt, params, seed, 1000, frozenset({EOS}), RequestMetrics(0.0), detokenizer=None)
    request.token_ids += [1] * num_output
    return request


def run_accept(requests: list[Request], step_trees: list[DraftTree], has_rows: list[bool], logits: torch.Tensor) -> Acceptance:
    plan = StepPlan(requests, [1] * len(requests), [tree.num_nodes for tree in step_trees])
    counts = [1 + tree.num_nodes if rows else 0 for tree, rows in zip(step_trees, has_rows, strict=True)]
    batch = RaggedBatch(*[cast(Any, None)] * 4, np.cumsum([0, *counts]), cast(Any, None))
    return accept(plan, step_trees, batch, logits)


def target_logits(prefix: Sequence[int]) -> torch.Tensor:
    """A target that is a function of the tokens behind the root."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash(tuple(prefix)) % 2**32)) * 2


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=2.0, top_p=0.8, min_tokens=2),
    SamplingParams(temperature=0.0, min_tokens=4),
    SamplingParams(temperature=1.3, min_p=0.1, min_tokens=9),
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(
            trees(VOCAB_SIZE), st.booleans(), st.sampled_from(PARAMS), st.integers(0, 2**63), st.integers(1, 4), st.integers(0, 5)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_accepted_tokens_are_those_that_token_by_token_decoding_draws(
    rows: list[tuple[DraftTree, bool, SamplingParams, int, int, int]],
) -> None:
    """Each row by itself: the options of its request, the position that its token will have, and its prefix' stops."""
    requests = [make_request(params, seed, num_prompt, num_output) for _, _, params, seed, num_prompt, num_output in rows]
    step_trees = [EMPTY_TREE if is_prefill else tree for tree, is_prefill, *_ in rows]
    logits = [
        target_logits(path_tokens(tree, node))
        for (tree, is_prefill, *_) in rows
        for node in (range(-1, tree.num_nodes) if not is_prefill else ())
    ]
    stacked = torch.stack(logits) if logits else torch.empty(0, VOCAB_SIZE)
    acceptance = run_accept(requests, step_trees, [not is_prefill for _, is_prefill, *_ in rows], stacked)
    for i, (tree, is_prefill, params, seed, num_prompt, num_output) in enumerate(rows):
        if is_prefill:
            assert (acceptance.paths[i], acceptance.token_ids[i], acceptance.errors[i]) == ([], [], None)
            continue

        def decode(prefix: Sequence[int]) -> int:
            position = num_prompt + num_output + len(prefix)  # noqa: B023
            sampling = SamplingRows(
                np.array([params.temperature], np.float32),  # noqa: B023
                np.array([params.top_k]),  # noqa: B023
                np.array([params.top_p], np.float32),  # noqa: B023
                np.array([params.min_p], np.float32),  # noqa: B023
                np.array([seed], np.uint64),  # noqa: B023
                np.array([position]),
                [(0, [EOS])] if position - num_prompt < params.min_tokens else [],  # noqa: B023
            )
            return int(sample_rows(target_logits(prefix)[None], sampling))

        assert acceptance.token_ids[i] == reference_walk(tree, decode)
        assert acceptance.errors[i] is None
        assert acceptance.token_ids[i][:-1] == tree.token_ids[acceptance.paths[i]].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize("num_output", range(5))
def test_an_end_is_held_back_up_to_min_tokens_within_a_run(num_output: int, temperature: float) -> None:
    """A target that always wants to end: it may after three tokens, wherever in the run they are reached."""
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[:, 2], logits[:, EOS] = 1.0, 2.0
    request = make_request(SamplingParams(temperature=temperature, min_tokens=3), num_output=num_output)
    acceptance = run_accept([request], [DraftTree.chain([2] * 5)], [True], logits)
    assert acceptance.token_ids == [[2] * max(3 - num_output, 0) + [EOS]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad_row", ["root", "accepted", "rejected"])
def test_logits_that_are_not_finite_end_their_request_if_they_are_needed(bad_row: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=1)
    logits = torch.zeros(3 + 1 + 3, VOCAB_SIZE)
    logits[:, 2] = 1.0
    logits[{"root": 0, "accepted": 1, "rejected": 6}[bad_row]] = torch.nan
    requests = [make_request(params), make_request(params), make_request(params)]
    step_trees = [DraftTree.chain([2, 2]), EMPTY_TREE, DraftTree.chain([2, 3])]
    acceptance = run_accept(requests, step_trees, [True] * 3, logits)
    is_broken = bad_row != "rejected"
    assert acceptance.errors == ["the target's logits are not finite" if is_broken else None, None, None]
    assert acceptance.token_ids == [{"root": [], "accepted": [2]}.get(bad_row, [2, 2, 2]), [2], [2, 2]]
