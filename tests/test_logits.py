"""Logits transforms of many rows at once, held to transformers and to a slow loop, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from slow_logits import by_last_token, slow_transform
from stepping import host_trees, make_request
from torch import Tensor

from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.torch.backend import TorchBackend
from titan.verify.options import explain_row, transform_rows
from titan.verify.transforms import TransformResult

VOCAB_SIZE = 11
STOP = 4

upload = TorchBackend(torch.device("cpu")).upload


def by_length(token_ids: list[int], logits: Tensor) -> Tensor:
    """In place, with another dtype, and without care for what it is given, as people write them."""
    assert (logits.dtype, logits.shape) == (torch.float32, (VOCAB_SIZE,))
    logits[len(token_ids) % len(logits)] *= 0.5
    token_ids.clear()
    return logits.double()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.9},
    {"presence_penalty": -1.5},
    {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    {"logit_bias": {3: 5, 7: -100.0}},
    {"logits_processors": [by_length, by_last_token]},
    {"min_tokens": 4, "logit_bias": {STOP: 9.5}},
    {"allowed_token_ids": [1, 3, STOP, 9], "min_tokens": 3},
    {"bad_words": ["7", "12", "21", "00", "3123"], "repetition_penalty": 1.2},
    {
        "logit_bias": {0: 1.5},
        "logits_processors": (by_last_token,),
        "allowed_token_ids": [0, 1, 2, 3, 5, 6, 10],
        "bad_words": ["01", "2"],
        "min_tokens": 2,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.01,
    },
]


def request_of(options: dict[str, Any], prompt: Sequence[int], output: Sequence[int]) -> Request:
    params = SamplingParams(**options)
    words = tuple(tuple(map(int, word)) for word in params.bad_words or ())
    return make_request(prompt, params, output, seed=5, stop_token_ids=frozenset({STOP}), bad_word_ids=words)


tokens = st.integers(0, VOCAB_SIZE - 1)
requests = st.builds(request_of, st.sampled_from(OPTIONS), st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Branching trees over few tokens, so that a path often repeats some."""
    token_ids = draw(st.lists(st.integers(0, 4), max_size=8))
    parents = [draw(st.integers(-1, node - 1)) if draw(st.booleans()) else node - 1 for node in range(len(token_ids))]
    return DraftTree(np.array(token_ids, np.int64), np.array(parents, np.int32))


def prefixes_of(request: Request, tree: DraftTree) -> list[list[int]]:
    """The output tokens before each row of the request: its own, then with the path to each node."""
    prefixes = [request.output_token_ids]
    for token_id, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        prefixes.append([*prefixes[1 + parent], token_id])
    return prefixes


def transform(logits: Tensor, requests: Sequence[Request], trees: Sequence[DraftTree], start_loc: Sequence[int]) -> TransformResult:
    return transform_rows(logits, requests, host_trees(trees), np.array(start_loc), upload)


@given(
    rows=st.lists(st.tuples(requests, st.none() | trees()), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@example(rows=[(request_of(each, [1, 2], [3, 1]), DraftTree.chain([2, 1])) for each in OPTIONS], dtype=torch.float32, seed=0)
def test_each_row_gets_its_requests_transforms_with_its_own_drafted_prefix(
    rows: list[tuple[Request, DraftTree | None]], dtype: torch.dtype, seed: int
) -> None:
    """Requests of all options and of none side by side, some in prefill, over branching trees."""
    prefixes = [[] if tree is None else prefixes_of(request, tree) for request, tree in rows]  # none in prefill
    start_loc = np.cumsum([0, *map(len, prefixes)]).tolist()
    logits = (torch.randn(start_loc[-1], VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)
    raw = logits.clone()
    before = [list(request.token_ids) for request, _ in rows]
    result = transform(logits, [request for request, _ in rows], [tree or EMPTY_TREE for _, tree in rows], start_loc)
    assert [request.token_ids for request, _ in rows] == before
    assert torch.equal(logits, raw), "the model's own logits are needed later"
    assert result.errors == {}
    expected = [
        slow_transform(raw[first + i].float(), request.params, request.prompt_token_ids, output, [STOP])
        for (request, _), first, outputs in zip(rows, start_loc, prefixes, strict=False)
        for i, output in enumerate(outputs)
    ]
    torch.testing.assert_close(list(result.logits), expected, rtol=1e-5, atol=1e-5)


class Watched(list[int]):
    """Counts the items that slices take out of it."""

    num_taken = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_taken += len(found) if isinstance(index, slice) else 1
        return found


def test_penalties_take_each_token_of_a_request_once() -> None:
    """However many steps there are, in which they see all tokens."""
    request = make_request([1, 2, 3], SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4))
    request.token_ids = watched = Watched(request.token_ids)
    for token_id in np.random.default_rng(0).integers(0, VOCAB_SIZE, 50).tolist():
        watched.append(token_id)
        logits = torch.linspace(-2, 2, VOCAB_SIZE)
        result = transform(logits[None], [request], [EMPTY_TREE], [0, 1])
        torch.testing.assert_close(result.logits[0], slow_transform(logits, request.params, [1, 2, 3], list(watched)[3:]))
    assert watched.num_taken == len(watched) == 53


def fail(token_ids: list[int], logits: Tensor) -> Tensor:
    raise KeyError("no such rule")


BAD_PROCESSORS: dict[str, tuple[Any, str]] = {
    "raises": (fail, "logits_processors: KeyError: 'no such rule'"),
    "shape": (lambda ids, logits: logits[:3], "a processor returned shape [3]: it must be a tensor of shape [11]"),
    "more rows": (lambda ids, logits: logits[None], "a processor returned shape [1, 11]: it must be a tensor of shape [11]"),
    "nothing": (lambda ids, logits: None, "a processor returned None: it must be a tensor of shape [11]"),
    "list": (lambda ids, logits: [0.0], "a processor returned [0.0]"),
    "long list": (lambda ids, logits: [0.0] * 9999, "a processor returned [0.0, "),
    "arguments": (lambda ids: ids, "logits_processors: TypeError"),
    "nan": (
        lambda ids, logits: logits * torch.nan,
        "logits_processors: no token can be sampled, for the largest logit becomes nan",
    ),
    "all cut": (
        lambda ids, logits: logits - torch.inf,
        "logits_processors: no token can be sampled, for the largest logit becomes -inf",
    ),
}


@pytest.mark.parametrize("name", BAD_PROCESSORS)
def test_a_bad_processor_costs_its_own_rows_only(name: str) -> None:
    processor, message = BAD_PROCESSORS[name]
    good, bad = {"repetition_penalty": 1.1}, {"logits_processors": [by_length, processor]}
    requests = [request_of(options, [1, 2], [3]) for options in (good, bad, good)]
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    result = transform(logits, requests, [DraftTree.chain([1])] * 3, [0, 2, 4, 6])
    assert not result.logits[2:4].amax(-1).isfinite().any(), "nothing is sampled from such rows"
    assert result.errors.keys() <= {2, 3} and all(len(each) < 300 for each in result.errors.values())
    for row in (2, 3):
        assert message in (result.errors.get(row) or explain_row(requests[1], logits[row], result.logits[row]))
    for row, output in ((0, [3]), (1, [3, 1]), (4, [3]), (5, [3, 1])):
        torch.testing.assert_close(result.logits[row], slow_transform(logits[row], requests[0].params, [1, 2], output))


@pytest.mark.parametrize(
    ("options", "stops", "empty"),
    [
        ({"min_tokens": 2}, range(VOCAB_SIZE), [0]),
        ({"min_tokens": 2}, range(1, VOCAB_SIZE), []),
        ({"allowed_token_ids": [STOP], "min_tokens": 2}, [STOP], [0]),
        ({"allowed_token_ids": [1, 7], "bad_words": ["21", "7"]}, [STOP], [0]),
        ({"bad_words": ["3" + str(STOP), *"012356789"], "logit_bias": {10: -100}}, [STOP], []),
    ],
)
def test_rows_on_which_options_leave_nothing_say_so(options: dict[str, Any], stops: Sequence[int], empty: list[int]) -> None:
    """Not that the logits are not finite, which they are; the second row has a token more before it, and goes on."""
    request = request_of(options, [1], [2])
    request.stop_token_ids = frozenset(stops)
    result = transform(torch.zeros(2, VOCAB_SIZE), [request], [DraftTree.chain([3])], [0, 2])
    assert (~result.logits.isfinite().any(-1)).nonzero().flatten().tolist() == empty and not result.errors
    for row in empty:
        reason = explain_row(request, torch.zeros(VOCAB_SIZE), result.logits[row])
        assert "no token can be sampled" in reason and all(name in reason for name in options)


def test_a_row_on_which_a_processor_and_min_tokens_leave_nothing() -> None:
    """The processor wants the end, which min_tokens holds back."""

    def only_the_end(token_ids: list[int], logits: Tensor) -> Tensor:
        return torch.where(torch.arange(len(logits)) == STOP, logits, -torch.inf)

    request = request_of({"logits_processors": [only_the_end], "min_tokens": 2}, [1], [2])
    result = transform(torch.zeros(2, VOCAB_SIZE), [request], [DraftTree.chain([3])], [0, 2])
    assert result.logits.isfinite().nonzero().tolist() == [[1, STOP]]
    assert result.errors == {} and "min_tokens=2 with 1 stop tokens" in explain_row(request, torch.zeros(3), result.logits[0])
    assert explain_row(request, torch.tensor([0.0, torch.nan]), result.logits[0]) == "the target's logits are not finite"
