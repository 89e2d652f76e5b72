"""Sample-and-match against its slow twin, on random trees, from the logits of a step to its `Acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from acceptance_reference import reference_draw
from back_ends import make_back_end
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from slow_logits import slow_probs, slow_transform
from stepping import host_trees
from torch import Tensor

from titan.core.outputs import RequestMetrics
from titan.core.random import Purpose, philox_uniform
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees, TreeLimits
from titan.kernels.interfaces import Backend
from titan.verify import accept
from titan.verify.accept import collect, launch

VOCAB_SIZE = 5
EOS = 4
PROMPT_TOKEN = 0


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


def make_request(params: SamplingParams, seed: int = 0, num_prompt: int = 3, num_output: int = 0) -> Request:
    prompt = [PROMPT_TOKEN] * num_prompt
    request = Request("r", None, prompt, params, seed, 1000, frozenset({EOS}), RequestMetrics(0.0), detokenizer=None)
    request.token_ids += [1] * num_output
    return request


def run_accept(
    backend: Backend, requests: list[Request], step_trees: list[DraftTree], has_rows: list[bool], logits: Tensor
) -> Acceptance:
    counts = [tree.num_nodes for tree in step_trees]
    plan = StepPlan(requests, [1] * len(requests), counts, counts)
    limits = [TreeLimits(count, may_sample=False) for count in counts]
    placed = DraftTrees.of(step_trees, limits, drafter="test", vocab_size=VOCAB_SIZE, upload=backend.upload, device=backend.device)
    start_loc = np.cumsum([0, *(1 + count if rows else 0 for count, rows in zip(counts, has_rows, strict=True))])
    return collect(backend, launch(backend, plan, placed, start_loc, logits.to(backend.device)))


def target_logits(prefix: Sequence[int]) -> Tensor:
    """A target that is a function of the tokens behind the root."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash(tuple(prefix)) % 2**32)) * 2


def decode(prefix: Sequence[int], request: Request) -> int:
    """The request's token after these behind the root, as transformers' warpers and the request's random numbers give it."""
    output = [*request.output_token_ids, *prefix]
    scores = slow_transform(target_logits(prefix), request.params, request.prompt_token_ids, output, [EOS])
    if request.params.is_greedy:
        return int(scores.argmax())
    uniform = float(philox_uniform(request.seed, request.num_tokens + len(prefix), Purpose.SAMPLE))
    return reference_draw(slow_probs(scores.double(), request.params), uniform)


def decode_along(tree: DraftTree, request: Request) -> tuple[list[int], int]:
    """The path of the tokens that decoding finds one by one, as far as the tree has it; and the next token."""
    path: list[int] = []
    while True:
        token = decode(tree.token_ids[path].tolist(), request)
        is_next = (tree.parents == (path[-1] if path else -1)) & (tree.token_ids == token)
        if not is_next.any():
            return path, token
        path.append(int(is_next.argmax()))


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=2.0, top_p=0.8, min_tokens=2),
    SamplingParams(temperature=0.0, min_tokens=4),
    SamplingParams(temperature=1.3, min_p=0.1, min_tokens=9),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4),
]


@pytest.mark.parametrize(("back_end", "num_examples"), [("torch", 150), ("cpu", 150), ("triton", 4)])
def test_accepted_tokens_are_those_that_token_by_token_decoding_samples(back_end: str, num_examples: int) -> None:
    """Each row by itself: the options of its request, the position that its token will have, and its prefix' stops."""
    backend = make_back_end(back_end)

    # without a search for smaller examples, which takes minutes in Triton's interpreter
    @settings(max_examples=num_examples, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(
        rows=st.lists(
            st.tuples(
                trees(VOCAB_SIZE),
                st.booleans(),
                st.sampled_from(PARAMS),
                st.integers(0, 2**63),
                st.integers(1, 4),
                st.integers(0, 5),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def check(rows: list[tuple[DraftTree, bool, SamplingParams, int, int, int]]) -> None:
        requests = [make_request(params, seed, num_prompt, num_output) for _, _, params, seed, num_prompt, num_output in rows]
        step_trees = [EMPTY_TREE if is_prefill else tree for tree, is_prefill, *_ in rows]
        logits = [
            target_logits(path_tokens(tree, node))
            for (tree, is_prefill, *_) in rows
            for node in (range(-1, tree.num_nodes) if not is_prefill else ())
        ]
        stacked = torch.stack(logits) if logits else torch.empty(0, VOCAB_SIZE)
        acceptance = run_accept(backend, requests, step_trees, [not is_prefill for _, is_prefill, *_ in rows], stacked)
        assert acceptance.matches == {} and acceptance.logprobs == {}
        for i, (tree, is_prefill, *_) in enumerate(rows):
            assert acceptance.errors[i] is None
            if is_prefill:
                assert (acceptance.paths[i], acceptance.token_ids[i]) == ([], [])
                continue
            path, token = decode_along(tree, requests[i])
            assert (acceptance.paths[i], acceptance.token_ids[i]) == (path, [*tree.token_ids[path].tolist(), token])
            assert acceptance.trees[i].token_ids.tolist() == tree.token_ids.tolist()

    check()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad_row", ["root", "accepted", "rejected"])
def test_logits_that_are_not_finite_end_their_request_if_they_are_needed(bad_row: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=1)
    logits = torch.zeros(3 + 1 + 3, VOCAB_SIZE)
    logits[:, 2] = 1.0
    logits[{"root": 0, "accepted": 1, "rejected": 6}[bad_row]] = torch.nan
    step_trees = [DraftTree.chain([2, 2]), EMPTY_TREE, DraftTree.chain([2, 3])]
    acceptance = run_accept(make_back_end("torch"), [make_request(params)] * 3, step_trees, [True] * 3, logits)
    is_broken = bad_row != "rejected"
    assert acceptance.errors == ["the target's logits are not finite" if is_broken else None, None, None]
    assert acceptance.token_ids == [{"root": [], "accepted": [2]}.get(bad_row, [2, 2, 2]), [2], [2, 2]]


def fail(token_ids: list[int], logits: Tensor) -> Tensor:
    if token_ids[-1] == 2:
        raise KeyError("no such rule")
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_behind_the_root_ends_its_request_there(temperature: float) -> None:
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[:, 2] = 40.0
    params = SamplingParams(temperature=temperature)
    requests = [make_request(replace(params, logits_processors=[fail])), make_request(params)]
    acceptance = run_accept(make_back_end("torch"), requests, [DraftTree.chain([2, 2])] * 2, [True] * 2, logits)
    assert acceptance.errors == ["logits_processors: KeyError: 'no such rule'", None]
    assert acceptance.token_ids == [[2], [2, 2, 2]]


def test_greedy_rows_without_options_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*args: Any) -> None:
        raise AssertionError("nothing is to be transformed")

    monkeypatch.setattr(accept, "transform_rows", unwanted)
    backend, request = make_back_end("torch"), make_request(SamplingParams(temperature=0.0))
    plan = StepPlan([request], [1], [1], [1])
    logits = torch.randn(2, VOCAB_SIZE)
    launched = launch(backend, plan, host_trees([DraftTree.chain([3])]), np.array([0, 2]), logits)
    assert launched.logits is logits and collect(backend, launched).errors == [None]
