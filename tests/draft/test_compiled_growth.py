"""Trees grown in one call of the compiled library, against the same trees grown depth by depth in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from stepping import AMPLE, make_engine, run_all, submit
from torch import Tensor
from zoo import Zoo, random_prompts

from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.trees import MAX_NODES, DraftTree
from titan.draft.compiled_growth import CompiledGrower
from titan.draft.draft_model import DraftModelDrafter, _Feed
from titan.draft.shapes import in_main_path_order
from titan.draft.tree_builder import BeamGrowth, ChainGrowth, Growth, ShapeGrowth
from titan.engine import Engine
from titan.kernels.cpu.library import usable_library

pytestmark = pytest.mark.skipif(usable_library() is None, reason="no C++ compiler")

PROMPTS = random_prompts(5, seed=4, max_len=40)
TEMPERATURES = [0.7, 1.0, 1.4, 0.3, 1.0]
BUSHY = np.array([-1, 0, 1, -1, 0, 3, 5, -1], np.int32)
WIDE = np.full(12, -1, np.int32)
LINE = np.arange(5, dtype=np.int32) - 1

Growths = list[tuple[list[int], Growth]]


MAKERS: dict[str, Callable[[list[Request]], Growths]] = {
    "chains": lambda _: [([0, 1, 2, 3, 4], ChainGrowth([4, 1, 6, 2, 6]))],
    "chains with siblings": lambda _: [([0, 1, 2, 3, 4], BeamGrowth([6] * 5, [4, 1, 6, 2, 6], 1, 3, TEMPERATURES))],
    "beams": lambda _: [([0, 1, 2, 3, 4], BeamGrowth([9, 1, 6, 2, 16], [5, 1, 4, 2, 5], 2, 3, TEMPERATURES))],
    "large beams": lambda _: [([0, 1, 2, 3, 4], BeamGrowth([MAX_NODES] * 5, [8] * 5, 7, 8, TEMPERATURES))],
    "shapes": lambda _: [([0, 1, 2, 3, 4], ShapeGrowth([BUSHY, LINE, WIDE, BUSHY, BUSHY], None))],
    "drawn": lambda requests: [([0, 1, 2, 3, 4], ShapeGrowth([BUSHY, LINE, WIDE, BUSHY, BUSHY], requests))],
    "all kinds": lambda requests: [
        ([3], ChainGrowth([3])),
        ([4], BeamGrowth([6], [3], 2, 3, [0.5])),
        ([0, 2], ShapeGrowth([BUSHY, LINE], [requests[0], requests[2]])),
        ([1], ShapeGrowth([WIDE], None)),
    ],
}


def drafter_of(engine: Engine) -> tuple[DraftModelDrafter, CompiledGrower]:
    drafter = engine.drafter
    assert isinstance(drafter, DraftModelDrafter)
    if drafter._compiled is None:
        pytest.skip("a layout of this processor that the library does not read")
    return drafter, drafter._compiled


def running(zoo: Zoo, family: str, draft: str, prompts: list[list[int]] = PROMPTS, **options: Any) -> tuple[Engine, list[Request]]:
    """Requests in flight that have room for the largest tree, some of which the draft lacks tokens of."""
    engine = make_engine(zoo.path(family), zoo.path(draft), max_draft_tokens=6, **AMPLE | options)
    params = [SamplingParams(temperature=t, seed=i, max_tokens=30, ignore_eos=True) for i, t in enumerate(TEMPERATURES)]
    requests = submit(engine, prompts, params)
    for _ in range(3):
        engine.step()
    for i, request in enumerate(requests):
        request.num_drafted_context -= i % 3
        assert engine.kv.reserve(request, request.num_tokens + MAX_NODES)
    engine.kv.clear_new_blocks()
    return engine, requests


def lacking(request: Request) -> list[int]:
    return request.token_ids[request.num_drafted_context :]


def feed(drafter: DraftModelDrafter, requests: list[Request]) -> Tensor:
    return drafter._feed([_Feed(i, request, lacking(request), 1) for i, request in enumerate(requests)])


def assert_same(actual: list[DraftTree], expected: list[DraftTree]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        assert (one.draft_slots is None) == (other.draft_slots is None)
        if one.draft_slots is not None and other.draft_slots is not None:
            assert one.draft_slots.tolist() == other.draft_slots.tolist()
        assert (one.scores is None) == (other.scores is None)
        if one.scores is not None:
            np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-4)
        assert (one.draft_probs is None) == (other.draft_probs is None)
        if one.draft_probs is not None and other.draft_probs is not None:
            torch.testing.assert_close(one.draft_probs, other.draft_probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("family", "draft"), [("llama", "other"), ("narrow_window", "narrow_window~")])
def test_the_trees_are_those_that_are_grown_depth_by_depth(
    zoo: Zoo, family: str, draft: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same nodes, scores and distributions, and the same KV; whether the roots are fed in the same call or before."""
    engine, requests = running(zoo, family, draft)
    drafter, compiled = drafter_of(engine)
    make = MAKERS[kind]
    with torch.inference_mode():
        before = drafter.kv.clone()
        in_one_call = compiled.grow(requests, make(requests), [lacking(request) for request in requests])
        kv = drafter.kv.clone()
        drafter.kv.copy_(before)
        behind_roots = compiled.grow(requests, make(requests), feed(drafter, requests))
        drafter.kv.copy_(before)
        monkeypatch.setattr(drafter.runner, "max_rows", 0)  # all passes operation by operation
        growths = make(requests)
        drafter._grow(requests, growths, feed(drafter, requests))
        by_request = {i: tree for rows, growth in growths for i, tree in zip(rows, growth.harvest(), strict=True)}
        expected = [by_request[i] for i in range(len(requests))]
        assert_same(in_one_call, expected)
        assert_same(behind_roots, expected)
        torch.testing.assert_close(kv, drafter.kv, rtol=1e-4, atol=1e-5)
    assert not torch.equal(kv, before)


@pytest.mark.parametrize("kind", ["chains", "beams", "all kinds"])
def test_a_tree_does_not_depend_on_its_neighbours(zoo: Zoo, kind: str) -> None:
    """Bit by bit."""
    engine, requests = running(zoo, "llama", "other")
    _, compiled = drafter_of(engine)
    with torch.inference_mode():
        together = compiled.grow(requests, MAKERS[kind](requests), [lacking(request) for request in requests])
        [(rows, growth)] = [each for each in MAKERS[kind](requests) if 4 in each[0]]
        place = rows.index(4)
        alone: Growth
        if isinstance(growth, BeamGrowth):
            columns = [growth.budgets[place]], [int(growth.depths[place])], growth.width, growth.num_children
            alone = BeamGrowth(*columns, [float(growth.temperatures[place])])
        else:
            assert isinstance(growth, ChainGrowth)
            alone = ChainGrowth([int(growth.depths[place])])
        [tree] = compiled.grow(requests[4:], [([0], alone)], [lacking(requests[4])])
    assert tree.token_ids.tolist() == together[4].token_ids.tolist()
    assert tree.scores is None or tree.scores.tolist() == together[4].scores.tolist()  # type: ignore[union-attr]


def test_steps_grow_trees_in_one_call_and_emit_the_same(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an engine around it, for as many requests as make short passes."""
    for options in ({"draft_tree": "chain"}, {"draft_tree": "auto"}, {"draft_tree": "dynamic"}, {"draft_sampling": "sampled"}):
        engine = make_engine(zoo.path("llama"), zoo.path("other"), max_batch_size=4, num_kv_blocks=100, **options)
        _, compiled = drafter_of(engine)
        calls: list[int] = []
        grow = compiled.grow

        def counted(requests: list[Request], *rest: Any, grow: Any = grow, calls: list[int] = calls) -> list[DraftTree]:
            calls.append(len(requests))
            return grow(requests, *rest)  # type: ignore[no-any-return]

        monkeypatch.setattr(compiled, "grow", counted)
        temperature = float("draft_sampling" in options)
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=12, ignore_eos=True) for i in range(len(PROMPTS))]
        outputs = run_all(engine, PROMPTS, params)
        assert len(calls) > 3 and max(calls) > 1
        other = make_engine(zoo.path("llama"), zoo.path("other"), max_batch_size=4, num_kv_blocks=100, **options)
        other_drafter, _ = drafter_of(other)
        other_drafter._compiled = None
        assert run_all(other, PROMPTS, params) == outputs


def test_cuts_and_long_passes_are_left_to_pytorch(zoo: Zoo) -> None:
    engine, requests = running(zoo, "llama", "other")
    _, compiled = drafter_of(engine)
    assert all(compiled.can_grow(make(requests)) for name, make in MAKERS.items() if name in ("chains", "chains with siblings"))
    too_many = [([0], BeamGrowth([MAX_NODES], [2], compiled.max_rows + 1, 80, [1.0]))]
    assert not compiled.can_grow(too_many)
    requests[0].params = SamplingParams(temperature=1.0, top_p=0.9)
    assert not compiled.can_grow([([0], ShapeGrowth([LINE], requests[:1]))])


def test_slots_without_blocks_and_positions_without_rotations_are_refused(zoo: Zoo) -> None:
    engine, requests = running(zoo, "llama", "other")
    drafter, compiled = drafter_of(engine)
    request = requests[0]
    del request.block_ids[-4:]
    beam = [([0], BeamGrowth([MAX_NODES], [8], 7, 8, [1.0]))]
    with pytest.raises(IndexError, match="do not cover slots"):
        compiled.grow([request], beam, [lacking(request)])
    request.token_ids += [5] * drafter.max_len
    with pytest.raises(IndexError, match=str(drafter.max_len)):
        compiled.grow([request], [([0], ChainGrowth([3]))], [[5]])


@pytest.mark.parametrize("kind", ["chains", "chains with siblings", "beams", "shapes", "drawn"])
def test_logits_that_are_not_finite_cost_the_neighbours_nothing(zoo: Zoo, kind: str) -> None:
    """A root whose logits are NaN may get any tree of known tokens, or none."""
    engine, requests = running(zoo, "llama", "other")
    drafter, compiled = drafter_of(engine)
    make = MAKERS[kind]
    with torch.inference_mode():
        logits = feed(drafter, requests)
        expected = compiled.grow(requests, make(requests), logits)
        broken = logits.clone()
        broken[2] = torch.nan
        actual = compiled.grow(requests, make(requests), broken)
    others = [0, 1, 3, 4]
    assert_same([actual[i] for i in others], [expected[i] for i in others])
    assert ((actual[2].token_ids >= 0) & (actual[2].token_ids < drafter.target_vocab_size)).all()


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_shape_with_more_children_than_there_are_tokens_is_cut(zoo: Zoo, is_drawn: bool) -> None:
    """Also where a node that is missing would have children of its own, which are fed as if it were there."""
    engine, requests = running(zoo, "eight", "eight_other", prompts=[[3, 4], [5, 6, 3], [4], [3], [7, 7]])
    drafter, compiled = drafter_of(engine)
    wide = in_main_path_order(np.array([*[-1] * 12, 10, 10, 11, 0, 12], np.int32))
    with torch.inference_mode():
        feeds = [lacking(request) for request in requests]
        members = list(range(len(requests)))
        growths: Growths = [(members, ShapeGrowth([wide] * 5, requests if is_drawn else None))]
        actual = compiled.grow(requests, growths, feeds)
        growths = [(members, ShapeGrowth([wide] * 5, requests if is_drawn else None))]
        drafter._grow(requests, growths, feed(drafter, requests))
        assert_same(actual, growths[0][1].harvest())
    assert {tree.num_nodes for tree in actual} == {9}, "a star of all eight tokens, and a node behind the first"
