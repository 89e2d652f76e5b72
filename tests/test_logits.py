"""Logits transforms of many rows at once, held to transformers and to a slow loop, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_logits import slow_probs, slow_transform
from torch import Tensor

from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.sample.distributions import sample_rows, target_probs
from titan.sample.logits import TransformedRows, transform_logits
from titan.verify.rows import sampling_rows

VOCAB_SIZE = 11
STOP = 4


def by_last_token(token_ids: list[int], logits: Tensor) -> Tensor:
    """Likes the tokens that have the parity of the last one."""
    return logits + 1.5 * (torch.arange(len(logits)) % 2 == token_ids[-1] % 2)


def by_length(token_ids: list[int], logits: Tensor) -> Tensor:
    """In place, as people write them."""
    logits[len(token_ids) % len(logits)] *= 0.5
    return logits


OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.9},
    {"presence_penalty": -1.5},
    {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    {"logit_bias": {3: 5, 7: -100.0}},
    {"logits_processors": [by_last_token, by_length]},
    {"min_tokens": 4, "logit_bias": {STOP: 9.5}},
    {
        "logit_bias": {0: 1.5},
        "logits_processors": (by_last_token,),
        "min_tokens": 2,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.01,
    },
]

tokens = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Branching trees over few tokens, so that a path often repeats some."""
    num_nodes = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, node - 1)) if draw(st.booleans()) else node - 1 for node in range(num_nodes)]
    return DraftTree(
        np.array(draw(st.lists(st.integers(0, 4), min_size=num_nodes, max_size=num_nodes)), np.int64), np.array(parents, np.int32)
    )


def make_request(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Request:
    request = Request("r", None, list(prompt), params, 5, 1000, frozenset({STOP}), RequestMetrics(0.0), detokenizer=None)
    request.token_ids += output
    return request


def prefixes_of(request: Request, tree: DraftTree) -> list[list[int]]:
    """The output tokens before each row of the request: its own, then with the path to each node."""
    return [request.output_token_ids + tree.token_ids[tree.path_to(node)].tolist() for node in range(-1, tree.num_nodes)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    data=st.lists(
        st.tuples(
            st.sampled_from(OPTIONS),
            st.sampled_from([0.0, 0.8]),
            st.lists(tokens, min_size=1, max_size=6),
            st.lists(tokens, max_size=6),
            trees(),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_each_row_gets_its_requests_transforms_with_its_own_drafted_prefix(
    data: list[tuple[dict[str, Any], float, list[int], list[int], DraftTree, bool]], dtype: torch.dtype, seed: int
) -> None:
    """Requests of all options side by side, some in prefill, over branching trees: argmax and distribution of every row."""
    requests = [make_request(SamplingParams(temperature=t, **options), prompt, output) for options, t, prompt, output, *_ in data]
    step_trees = [EMPTY_TREE if is_prefill else tree for *_, tree, is_prefill in data]
    start_loc = np.cumsum([0, *(0 if is_prefill else 1 + tree.num_nodes for *_, tree, is_prefill in data)])
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(int(start_loc[-1]), VOCAB_SIZE, generator=generator) * 2).to(dtype)
    raw = logits.clone()
    if not len(logits):
        return
    rows = sampling_rows(requests, step_trees, start_loc)
    drawn = sample_rows(logits, rows)
    index = np.flatnonzero(rows.temperature > 0)
    probs = dict(zip(index.tolist(), target_probs(logits[index], rows, index), strict=True)) if len(index) else {}
    assert torch.equal(logits, raw), "the model's own logits are needed later"
    assert rows.errors == {}
    for i, (request, tree) in enumerate(zip(requests, step_trees, strict=True)):
        for row, output in zip(range(start_loc[i], start_loc[i + 1]), prefixes_of(request, tree), strict=False):
            scores = slow_transform(raw[row].float(), request.params, request.prompt_token_ids, output, [STOP])
            if row in probs:
                torch.testing.assert_close(probs[row] / probs[row].sum(), slow_probs(scores, request.params), rtol=1e-4, atol=1e-5)
            else:
                assert scores[drawn[row]] >= scores.max() - 1e-5


def test_rows_of_other_requests_are_left_alone() -> None:
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={1: 3.0}, logits_processors=[by_last_token])
    transformed = TransformedRows(params, [1, 2], [3, 3], {4: [], 1: [5, 5]})
    result = transform_logits(logits, [transformed], [(3, [2])])
    assert torch.equal(result.logits[[0, 2, 5]], logits[[0, 2, 5]])
    assert result.logits[3].isinf().nonzero().tolist() == [[2]]
    for row, output in ((4, [3, 3]), (1, [3, 3, 5, 5])):
        torch.testing.assert_close(result.logits[row], slow_transform(logits[row], params, [1, 2], output))


def test_a_processor_sees_the_whole_prefix_and_float32_logits() -> None:
    seen = []

    def spy(token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append((list(token_ids), logits.dtype, tuple(logits.shape)))
        token_ids.clear()  # its own copy
        return logits.double()

    tree = DraftTree(np.array([7, 8, 9, 8]), np.array([-1, 0, -1, 2], np.int32))
    request = make_request(SamplingParams(temperature=0.0, logits_processors=[spy]), [1, 2], [3])
    logits = torch.randn(5, VOCAB_SIZE, dtype=torch.bfloat16)
    drawn = sample_rows(logits, sampling_rows([request], [tree], np.array([0, 5])))
    assert [token_ids for token_ids, _, _ in seen] == [[1, 2, 3], [1, 2, 3, 7], [1, 2, 3, 7, 8], [1, 2, 3, 9], [1, 2, 3, 9, 8]]
    assert {(dtype, shape) for _, dtype, shape in seen} == {(torch.float32, (VOCAB_SIZE,))}
    assert torch.equal(drawn, logits.argmax(-1)) and request.token_ids == [1, 2, 3]


def fail(token_ids: list[int], logits: Tensor) -> Tensor:
    raise KeyError("no such rule")


BAD_PROCESSORS: dict[str, tuple[Any, str]] = {
    "raises": (fail, "logits_processors: KeyError: 'no such rule'"),
    "shape": (lambda ids, logits: logits[:3], "a processor returned shape [3]: it must be a tensor of shape [11]"),
    "more rows": (lambda ids, logits: logits[None], "a processor returned shape [1, 11]: it must be a tensor of shape [11]"),
    "nothing": (lambda ids, logits: None, "a processor returned None: it must be a tensor of shape [11]"),
    "list": (lambda ids, logits: [0.0], "a processor returned [0.0]"),
    "arguments": (lambda ids: ids, "logits_processors: TypeError"),
    "nan": (lambda ids, logits: logits * torch.nan, "leave no token that can be drawn"),
    "all cut": (lambda ids, logits: logits - torch.inf, "leave no token that can be drawn"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", BAD_PROCESSORS)
def test_a_bad_processor_costs_its_own_rows_only(name: str, temperature: float) -> None:
    processor, message = BAD_PROCESSORS[name]
    options: dict[str, Any] = {"temperature": temperature, "top_k": 1, "repetition_penalty": 1.1}
    good, bad = SamplingParams(**options), SamplingParams(logits_processors=[by_length, processor], **options)
    requests = [make_request(params, [1, 2], [3]) for params in (good, bad, good)]
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    rows = sampling_rows(requests, [DraftTree.chain([1])] * 3, np.array([0, 2, 4, 6]))
    drawn = sample_rows(logits, rows)
    assert drawn[2:4].tolist() == [-1, -1]
    assert set(rows.errors) == {2, 3} and all(message in error for error in rows.errors.values())
    if temperature > 0:  # rows of a part of the logits carry their own numbers
        part, index = replace(rows, errors={}), np.array([3, 4])
        probs = target_probs(logits[index], part, index)
        assert set(part.errors) == {3}
        assert probs[0].isnan().all() and probs[1].isfinite().all()
    for row, output in ((0, [3]), (1, [3, 1]), (4, [3]), (5, [3, 1])):
        assert drawn[row] == slow_transform(logits[row], good, [1, 2], output).argmax()


def test_a_row_on_which_a_processor_and_min_tokens_leave_nothing() -> None:
    """The processor wants the end, which min_tokens holds back."""

    def only_the_end(token_ids: list[int], logits: Tensor) -> Tensor:
        return torch.where(torch.arange(len(logits)) == STOP, logits, -torch.inf)

    request = make_request(SamplingParams(logits_processors=[only_the_end], min_tokens=2), [1], [2])
    logits = torch.zeros(2, VOCAB_SIZE)
    rows = sampling_rows([request], [DraftTree.chain([3])], np.array([0, 2]))
    assert sample_rows(logits, rows).tolist() == [-1, STOP]
    assert list(rows.errors) == [0] and "min_tokens" in rows.errors[0]


def test_greedy_rows_without_options_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*args: Any) -> None:
        raise AssertionError("nothing is to be transformed")

    monkeypatch.setattr("titan.sample.distributions.transform_logits", unwanted)
    request = make_request(SamplingParams(temperature=0.0), [1], [2])
    logits = torch.randn(2, VOCAB_SIZE)
    rows = sampling_rows([request], [DraftTree.chain([3])], np.array([0, 2]))
    assert torch.equal(sample_rows(logits, rows), logits.argmax(-1))
