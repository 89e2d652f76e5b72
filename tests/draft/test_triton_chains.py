"""Trees along one chain, whose depths are captured together, against PyTorch, which grows them pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from interpreted import triton_backend
from proposals import assert_same_trees, filled
from stepping import make_engine, run_all
from twins import GrowthTwins
from zoo import Zoo, random_prompts

from titan.core.growth import BeamSpec, Feed, GrowthSpec, ShapeSpec, Worth
from titan.core.sampling_params import SamplingParams
from titan.core.trees import chain_parents
from titan.kernels.interfaces import PassCounts
from titan.kernels.triton import draft_chain
from titan.kernels.triton.cuda_graphs import Replays
from titan.kernels.triton.draft_chain import DraftChains


def chains(*num_nodes: int) -> list[GrowthSpec]:
    return [filled(chain_parents(n)) for n in num_nodes]


def beams(*depths: int, num_children: int = 3, heat: float = 0.0) -> list[GrowthSpec]:
    """Of width one, all of other temperatures, with places for all nodes of the chain or one more."""
    return [BeamSpec(depth + i % 2, depth, 1, num_children, 0.3 + 0.4 * i + heat) for i, depth in enumerate(depths)]


def sampled(*num_nodes: int) -> list[GrowthSpec]:
    """Chains with and without each cut; as rows come and go, the same row has other options."""
    params = [
        SamplingParams(temperature=0.6 + 0.3 * i, top_k=9 * (i % 2), top_p=1 - 0.2 * (i > 1), min_p=0.05 * (i > 2))
        for i in range(len(num_nodes))
    ]
    pairs = zip(chains(*num_nodes), params[:: 1 - 2 * (len(params) % 2)], strict=True)
    return [replace(spec, params=each, seed=2**64 - 1 - 5 * i) for i, (spec, each) in enumerate(pairs)]


def sampled_shapes(*shapes: Sequence[int]) -> list[GrowthSpec]:
    """With the options of `sampled` chains."""
    return [
        replace(spec, plan=filled(np.array(parents, np.int32)).plan)
        for spec, parents in zip(sampled(*map(len, shapes)), shapes, strict=True)
    ]


def feeds_at(twins: GrowthTwins, roots: Sequence[int], specs: Sequence[GrowthSpec | None]) -> list[Feed]:
    """Of one or two tokens, in another order than that of the plan."""
    pairs = enumerate(zip(roots, specs, strict=True))
    feeds = [Feed(i, twins.tables[i], root - i % 2, [4, 5][: 1 + i % 2], spec) for i, (root, spec) in pairs]
    return feeds[::-1]


def assert_grown(twins: GrowthTwins, feeds: Sequence[Feed]) -> None:
    trees, expected = twins.grow(feeds), twins.expected(feeds)
    # of trees that stay on the device, only those of chains as specified are known to be such
    assert trees.is_chain.tolist() == (expected.is_chain & ~expected.has_scores & (expected.counts > 0)).tolist()
    assert trees.has_scores.tolist() == expected.has_scores.tolist()
    for actual, column in zip(trees.on_host(twins.backend.download(trees.nodes)).nodes, expected.nodes, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), column, rtol=1e-4, atol=1e-4)  # exact but for scores
    twins.assert_same_kv()


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "vocab_size", "max_depths", "kind"),
    [
        ("thin", 90, 8, "chains"),
        ("thin", 90, 2, "beams"),
        ("narrow_window~", 150, 8, "mixed"),
    ],
)
def test_chains_are_those_that_pytorch_grows(
    zoo: Zoo, draft: str, vocab_size: int, max_depths: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of unequal lengths and single nodes, around the borders of blocks, beside a chunk, in a batch that grows and shrinks."""
    monkeypatch.setattr(draft_chain, "MAX_DEPTHS", max_depths)
    twins = GrowthTwins(zoo.path(draft), vocab_size, make_back_end("triton"))
    for heat in (0.0, 0.5):

        def specs(*depths: int, heat: float = heat) -> list[GrowthSpec]:
            narrow, greedy = beams(*depths, heat=heat), chains(*depths)
            pairs = enumerate(zip(greedy, narrow, strict=True))
            return [pair[kind != "chains" and (kind == "beams" or i % 3 > 0)] for i, pair in pairs]

        assert_grown(twins, feeds_at(twins, (13, 15, 16, 31, 40), specs(6, 3, 1, 6, 2)))
        assert_grown(twins, [*feeds_at(twins, (14, 30, 90), specs(1, 4, 5)), twins.chunk()])
        assert_grown(twins, feeds_at(twins, (29,), specs(1)))
    # a pass per depth beside that over the roots; passes over padded roots, one with a chunk, are not replayed the first time
    per_round = sum(1 + depths for depths in (5, 4, 0))
    assert twins.counts == PassCounts(num_replayed=2 * per_round - 3, num_eager=3)


@pytest.mark.long_where("narrow")
@pytest.mark.parametrize(
    ("draft", "vocab_size", "max_depths", "kind"),
    [("thin", 90, 2, "mixed"), ("narrow_window~", 150, 8, "sampled")],
)
def test_sampled_chains_are_those_that_pytorch_grows(
    zoo: Zoo, draft: str, vocab_size: int, max_depths: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their q, of as many tokens as the target has; beside greedy chains, in rows that had other options before."""
    monkeypatch.setattr(draft_chain, "MAX_DEPTHS", max_depths)
    twins = GrowthTwins(zoo.path(draft), vocab_size, make_back_end("triton"))

    def grow(roots: Sequence[int], *num_nodes: int, others: Sequence[Feed] = ()) -> None:
        pairs = enumerate(zip(sampled(*num_nodes), chains(*num_nodes), strict=True))
        specs = [pair[kind == "mixed" and i % 3 == 1] for i, pair in pairs]
        feeds = [*feeds_at(twins, roots, specs), *others]
        trees, expected = twins.grow(feeds), twins.expected(feeds)
        assert_same_trees(twins.backend, trees, expected, range(7), 1e-4)
        assert trees.is_chain.tolist() == (expected.counts > 0).tolist() and trees.is_sampled.any()
        assert trees.draft_probs is not None and trees.draft_probs.shape == expected.draft_probs.shape
        twins.assert_same_kv()

    grow((13, 15, 16, 31, 40), 6, 3, 1, 6, 2)
    grow((14, 30, 90), 1, 4, 5, others=[twins.chunk()])
    grow((29,), 1)
    grow((13, 16, 31, 40, 15), 1, 3, 2, 1, 1)
    assert twins.counts == PassCounts(num_replayed=sum(1 + depths for depths in (5, 4, 0, 2)) - 3, num_eager=3)


STAR, LATE, DEEP, LONG = (-1, -1, -1), (-1, 0, 1, 1, 0, -1), (-1, 0, 1, 2, 2, 1), (-1, 0, 1, 2, 3, 0, -1)


@pytest.mark.long_where("narrow", "eight-5")
@pytest.mark.parametrize(("draft", "vocab_size", "max_depths"), [("eight", 12, 2), ("eight", 5, 8), ("narrow_window~", 150, 8)])
def test_siblings_along_sampled_chains_are_those_that_pytorch_grows(
    zoo: Zoo, draft: str, vocab_size: int, max_depths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same random numbers, in the order of the shape; also of rows cut to fewer tokens, and beside chains of any kind."""
    monkeypatch.setattr(draft_chain, "MAX_DEPTHS", max_depths)
    twins, num_empty = GrowthTwins(zoo.path(draft), vocab_size, make_back_end("triton")), 0

    def grow(roots: Sequence[int], specs: Sequence[GrowthSpec], *others: Feed) -> None:
        nonlocal num_empty
        feeds = [*feeds_at(twins, roots, specs), *others]
        trees, expected = twins.grow(feeds), twins.expected(feeds)
        assert_same_trees(twins.backend, trees, expected, range(7), 1e-4)
        is_chain = {feed.row: isinstance(feed.spec, ShapeSpec) and feed.spec.plan.shape.is_chain for feed in feeds}
        assert trees.is_chain.tolist() == [is_chain.get(row, False) for row in range(7)] and not trees.is_chain.all()
        assert trees.draft_probs is not None and trees.draft_probs.shape == expected.draft_probs.shape
        assert trees.growth is not None and trees.growth.num_passes == 1 + max(feed.spec.num_slots for feed in feeds if feed.spec)
        num_empty += int((twins.backend.download(trees.nodes)[0] < 0).sum())
        twins.assert_same_kv()

    grow((13, 15, 16, 31, 40, 60), [*sampled_shapes(LATE, (-1, 0), LONG, STAR, DEEP), *chains(5)])
    for _ in range(2):
        grow((14, 30, 90), [*sampled_shapes((-1,), STAR, DEEP)], twins.chunk()._replace(token_ids=[5] * 40))
        grow((29,), sampled_shapes(STAR))
    grow((31, 16), [*chains(3), *sampled_shapes((-1, 0, -1, *[0] * 9))])
    per_grow = [1 + depths for depths in (4, 3, 0, 3, 0, 2)]  # where passes over the roots are padded, they are eager at first
    assert twins.counts == PassCounts(num_replayed=sum(per_grow) - 4, num_eager=4)
    assert (num_empty > 0) == (draft == "eight"), "places stay empty where tokens are few"


@pytest.mark.long_where("shape0")
@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning")  # by numpy, which interprets kernels
@pytest.mark.parametrize("shape", [chain_parents(6), DEEP])
def test_a_sampled_chain_ends_where_nothing_can_be_sampled(zoo: Zoo, shape: Sequence[int]) -> None:
    """As the draft's numbers are no longer finite behind some tokens."""
    twins = GrowthTwins(zoo.path("other"), 131, make_back_end("triton"))
    for runner in (twins.plain, twins.runner):
        runner.model.embedding[50:] = torch.inf
    feeds = feeds_at(twins, (20, 40, 45, 60), [*sampled_shapes(shape, shape, shape), *chains(6)])
    trees, expected = twins.grow(feeds), twins.expected(feeds)
    assert_same_trees(twins.backend, trees, expected, range(7), 1e-4)
    assert 0 < (twins.backend.download(trees.nodes)[0] < 0).sum() < 18


def with_siblings(*num_nodes: int) -> list[GrowthSpec]:
    return sampled_shapes(*([*range(-1, n - 1), -1] for n in num_nodes))


@pytest.mark.long_where("sampled")
@pytest.mark.parametrize("make", [chains, sampled, with_siblings])
def test_a_chain_of_any_length_is_a_few_replays_of_what_was_recorded_before(
    make: Callable[..., list[GrowthSpec]], zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins, depths, run = GrowthTwins(zoo.path("eight"), 8, make_back_end("triton")), list[int](), Replays.run
    recorded = {each.args[0] for each in twins.runner._chains.warm_up([*chains(6), *sampled(6)], 8)}

    def noted(self: Replays, key: Any, *args: Any) -> Any:
        if isinstance(key, draft_chain.ChainSize):
            assert key in recorded
            depths.append(key.num_depths)
        return run(self, key, *args)

    monkeypatch.setattr(Replays, "run", noted)
    for num_nodes, expected in {6: [5], 4: [2, 1], 1: []}.items():
        depths.clear()
        twins.grow(feeds_at(twins, (20, 31), make(num_nodes, 1)))
        assert depths == expected


@pytest.mark.parametrize("vocab_size", [8, 12, 5])
def test_beams_consider_more_children_than_there_are_tokens(zoo: Zoo, vocab_size: int) -> None:
    """Places that stay empty, as they may where the target has fewer tokens than the draft, or more."""
    twins = GrowthTwins(zoo.path("eight"), vocab_size, make_back_end("triton"))
    assert_grown(twins, feeds_at(twins, (20, 31), [BeamSpec(20, 2, 1, 11, 0.7), *chains(3)]))


OTHERS: dict[str, Any] = {
    "beam": [*beams(3), BeamSpec(6, 4, 2, 3, 1.0)],
    "siblings": [*beams(2, num_children=2), *beams(3)],
    "no siblings": [*beams(2, num_children=1), *beams(3)],
    "priced": [*beams(4), BeamSpec(4, 4, 1, 3, 1.0, Worth(1.0, 0.8, 0.05, 0.01, 0.3))],
    "star": [*chains(3), filled(np.array([-1, -1], np.int32))],
    "sampled": [*beams(3), *sampled(3)],
    "sampled branches": [*sampled(3), *sampled_shapes([-1, 0, -1, 2])],
    "sampled siblings beside beams": [*beams(3), *sampled_shapes([-1, 0, -1])],
    "long chain": chains(7, 1),
    "long beam": beams(7, 1),
    "none": [None, None],
}


@pytest.mark.long_where("long beam")
@pytest.mark.parametrize("other", OTHERS)
def test_a_step_with_any_other_tree_or_more_nodes_takes_the_general_way(
    zoo: Zoo, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftChains, "grow", None)
    twins = GrowthTwins(zoo.path("eight"), 8, make_back_end("triton"))
    feeds = feeds_at(twins, (20, 21), OTHERS[other])
    assert_same_trees(twins.backend, twins.grow(feeds), twins.expected(feeds), range(7), 1e-4)


def test_slots_without_blocks_and_positions_without_rotations_are_refused(zoo: Zoo) -> None:
    twins = GrowthTwins(zoo.path("short"), 131, make_back_end("triton"))
    with pytest.raises(IndexError, match="2 blocks does not cover slot 32"):
        twins.grow([Feed(0, [1, 2], 29, [5], *chains(4))])
    with pytest.raises(IndexError, match="positions 40 to 40"):
        twins.grow([Feed(0, [1, 2, 3], 38, [5], *chains(3))])


def test_chains_grow_without_graphs_where_memory_is_too_short(zoo: Zoo) -> None:
    twins = GrowthTwins(zoo.path("eight"), 8, triton_backend(lambda: lambda passes: None))
    for _ in range(2):
        assert_grown(twins, feeds_at(twins, (20, 31), chains(3, 2)))
        assert_grown(twins, feeds_at(twins, (20, 31), beams(3, 2)))
        for specs in (sampled(3, 2), sampled_shapes((-1, 0, 1, 0), STAR)):
            feeds = feeds_at(twins, (20, 31), specs)
            assert_same_trees(twins.backend, twins.grow(feeds), twins.expected(feeds), range(7), 1e-4)
    assert twins.counts == PassCounts(num_eager=24)


@pytest.mark.long
@pytest.mark.parametrize(("temperature", "draft_tree"), [(0.0, "auto"), (0.9, "auto"), (0.9, [-1, 0, 1, -1, 0])])
def test_an_engine_grows_its_chains_in_graphs(
    temperature: float, draft_tree: str | list[int], zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled ones, too: from the same random numbers, all back ends emit the same tokens."""
    num_calls = 0

    def counted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return grow(*args)

    grow = DraftChains.grow
    monkeypatch.setattr(DraftChains, "grow", counted)
    prompts = random_prompts(3, max_len=20)
    options: dict[str, Any] = {"max_batch_size": 4, "num_kv_blocks": 40, "max_draft_tokens": 5, "draft_sampling": "sampled"}
    options["draft_tree"] = draft_tree
    params = [SamplingParams(temperature=temperature, max_tokens=8 - i, ignore_eos=True, seed=i) for i in range(3)]
    engines = [
        make_engine(zoo.path("llama"), zoo.path("llama~"), backend=make_back_end(each), **options) for each in ("triton", "torch")
    ]
    outputs, expected = (run_all(engine, prompts, params) for engine in engines)
    assert outputs == expected
    if not temperature:
        assert outputs == [zoo.greedy("llama", prompt, 8 - i, ignore_eos=True) for i, prompt in enumerate(prompts)]
    assert num_calls > 1 and sum(engines[0].counters.accepted_per_depth) > 2
