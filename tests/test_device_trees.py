"""Engines whose trees stay on the device, on the Triton kernels, against the same engines on PyTorch: the same step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from back_ends import make_back_end
from proposals import SHAPES, trees_on_host
from stepping import check_blocks, host_trees, make_engine, submit
from zoo import Zoo, random_prompts

from titan.core.batch import QueryRow, build_batch
from titan.core.limits import MAX_NODES
from titan.core.sampling_params import SamplingParams
from titan.core.trees import DraftTree, topology
from titan.kernels.interfaces import Backend

PROMPTS = [*random_prompts(3, seed=6, max_len=9), random_prompts(1, seed=7, max_len=25)[0]]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 4,
    "sampled": [
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 3},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
    ],
    "looking back": [
        {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 3, "ignore_eos": False},
        {"temperature": 0.0, "logit_bias": {7: 3.0}, "use_speculative": False},
        {"temperature": 1.0, "presence_penalty": 0.5},
    ],
}
NUM_COLUMNS = 6
"""Of trees on the device, brought to the host."""

POOL: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk_size": 6, "num_kv_blocks": 40, "max_num_batched_tokens": 40}


class Trace(NamedTuple):
    """A run, step by step."""

    steps: list[Any]  # trees, paths, tokens and errors
    scores: list[float]
    histories: list[Any]  # what was learnt of each request


def run(zoo: Zoo, backend: Backend, shape: str, options: str, draft_sampling: str, *, one_by_one: bool = False) -> Trace:
    choice = POOL | SHAPES[shape] | {"draft_sampling": draft_sampling}
    engine = make_engine(zoo.path("short"), zoo.path("short~"), backend=backend, **choice)
    trace = Trace([], [], [])
    if one_by_one:
        propose = engine.drafter.propose
        proposed: Any = lambda plan: trees_on_host(engine.backend, propose(plan))  # type: ignore[arg-type]  # noqa: E731
        engine.drafter.propose = proposed  # type: ignore[method-assign]

    def observe(plan: Any, acceptance: Any) -> None:
        token_ids, parents, _, _, scores, draft_slots = (column.tolist() for column in acceptance.trees.nodes)
        trees = acceptance.trees.start_loc.tolist(), token_ids, parents, draft_slots
        trace.steps.append((trees, acceptance.paths, acceptance.token_ids, acceptance.errors))
        trace.scores.extend(scores)

    engine.observers.append(observe)
    params = [SamplingParams(max_tokens=4, seed=i, **({"ignore_eos": True} | each)) for i, each in enumerate(OPTIONS[options])]
    requests = submit(engine, PROMPTS, params)
    while engine.scheduler.has_unfinished:
        engine.step()
        check_blocks(engine)
    histories = [request.draft_history for request in requests]
    trace.histories.extend((each.num_confidences, each.rank_acceptance) for each in histories)
    assert sum(engine.counters.accepted_per_depth) >= 3
    return trace


def assert_same(actual: Trace, expected: Trace) -> None:
    assert actual._replace(scores=[]) == expected._replace(scores=[])
    np.testing.assert_allclose(actual.scores, expected.scores, atol=1e-4)


@pytest.mark.long_where("chain-sampled", "parents")
@pytest.mark.parametrize(
    ("shape", "options", "draft_sampling"),
    [
        ("chain", "sampled", "greedy"),
        ("auto", "greedy", "greedy"),
        ("auto", "sampled", "sampled"),
        ("dynamic", "looking back", "greedy"),
        ("parents", "looking back", "sampled"),
    ],
)
def test_steps_on_triton_are_those_on_pytorch(
    shape: str, options: str, draft_sampling: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton, choice = make_back_end("triton"), (shape, options, draft_sampling)
    expected = run(zoo, make_back_end("torch"), *choice)
    download, downloads = triton.download, []  # of each copy to the host the number of tensors
    monkeypatch.setattr(triton, "download", lambda tensors: (downloads.append(len(tensors)), download(tensors))[1])
    assert_same(run(zoo, triton, *choice), expected)
    assert len(downloads) - downloads.count(NUM_COLUMNS) <= len(expected.steps), "one look per step; none where nothing is drafted"
    assert (NUM_COLUMNS in downloads) == (options == "looking back"), "the trees alone, because options look at them"


@pytest.mark.parametrize(("back_end", "shape", "options"), [("torch", "parents", "sampled"), ("cpu", "auto", "looking back")])
def test_trees_one_by_one_are_verified_as_those_that_were_ready(back_end: str, shape: str, options: str, zoo: Zoo) -> None:
    """As of a drafter that knows nothing of trees on the device. With their q; some of each step are not sampled."""
    ready = run(zoo, make_back_end("torch"), shape, options, "sampled")
    assert_same(run(zoo, make_back_end(back_end), shape, options, "sampled", one_by_one=True), ready)


def test_places_in_a_batch_bound_what_the_device_will_write() -> None:
    """Positions that the host checks are no smaller than any that a tree of so many nodes can have."""
    for num_nodes in (1, 5, MAX_NODES):
        for parents in (np.arange(-1, num_nodes - 1, dtype=np.int32), np.full(num_nodes, -1, np.int32)):
            tree = DraftTree(np.full(num_nodes, 7), parents)
            is_chain = topology(parents.tobytes()).is_chain
            rows = [QueryRow([0] * 9, start, [3] * (root + 1 - start)) for start, root in ((40, 40), (10, 30))]
            batch = build_batch(rows, host_trees([tree, tree]), block_size=16)
            layout = batch.attention
            ends = layout.query_start_loc[1:] - 1
            assert layout.positions[ends].tolist() == [40 + num_nodes, 30 + num_nodes]
            assert (layout.tree_starts.tolist() == [0, 0]) == is_chain
            assert layout.seq_lens.tolist() == [41 + num_nodes, 31 + num_nodes]
