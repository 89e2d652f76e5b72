"""The draft model: each node of its trees is what the draft itself says, as transformers computes it path by path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import BACK_ENDS, ON_HOST, make_back_end
from machines import Machine
from proposals import BUSHY, SHAPES, paths_of, record
from stepping import AMPLE, SCARCE, greedy, make_engine, run_all, submit
from text_tools import make_tokenizer
from tiny_models import make_model
from torch import Tensor
from zoo import Zoo, random_prompts

from titan.core.draft_history import DraftHistory
from titan.core.growth import BeamSpec, Feed, ShapeSpec, chain_spec
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree, DraftTrees
from titan.draft.base import CachelessDrafter, NoDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.policy import CHAIN_CHILDREN, GREEDY_TEMPERATURE, MAX_CHAIN_NODES, MAX_NARROW_NODES, DraftPolicy
from titan.draft.registry import _FACTORIES, open_drafter, register
from titan.kernels import growth
from titan.kernels.shape_growth import ShapeGrowth
from titan.kernels.triton.chain_trees import children_per_node

PROMPTS = random_prompts(8, seed=10, max_len=40)


class Draft:
    """The draft's distributions as transformers computes them."""

    def __init__(self, zoo: Zoo, name: str, context: Sequence[int], temperature: float) -> None:
        self.model = zoo.model(name)
        self.context = list(context)
        self.temperature = temperature
        self.logprobs = cache(self._logprobs)

    @torch.no_grad()
    def _logprobs(self, path: tuple[int, ...]) -> Tensor:
        logits: Tensor = self.model(torch.tensor([[*self.context, *path]])).logits[0, -1]
        return (logits / self.temperature).log_softmax(-1)

    def best_children(self, path: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        best = self.logprobs(path).topk(count)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@pytest.mark.long_where("llama3_rope", "qwen2", "narrow_window-auto_16", "narrow_window-dynamic]", "narrow_window-parents")
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *product(("llama", "narrow_window"), [shape for shape in SHAPES if shape != "chain"]),
        *(("llama3_rope", "auto"), ("mistral", "dynamic_63"), ("qwen2", "parents"), ("qwen3", "auto_16")),
    ],
)
def test_greedy_output_is_that_of_transformers_whatever_the_shape(zoo: Zoo, family: str, shape: str) -> None:
    options = SCARCE | {"num_kv_blocks": 12, "max_num_batched_tokens": 150} | SHAPES[shape]
    engine = make_engine(zoo.path(family), zoo.path(f"{family}~"), **options)
    outputs = run_all(engine, PROMPTS, [greedy(4 + i % 3 * 9, ignore_eos=True) for i in range(len(PROMPTS))])
    assert outputs == [zoo.greedy(family, prompt, 4 + i % 3 * 9, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    assert engine.metrics().mean_acceptance_length > 1.5
    assert engine.counters.num_preemptions > 0 or shape in ("auto_16", "dynamic_63"), "few have room beside each other"


@pytest.mark.long_where("other-chain-torch", "useless-chain-torch")
@pytest.mark.parametrize("back_end", ON_HOST)
@pytest.mark.parametrize(("draft", "shape"), [("other", "chain"), ("useless", "chain"), ("mistral", "chain"), ("other", "parents")])
def test_a_fixed_shape_holds_the_drafts_most_likely_tokens_by_rank(zoo: Zoo, draft: str, shape: str, back_end: str) -> None:
    """Requests with budgets of 0 to 7 in one batch, with prompts in chunks, and a draft that has a sliding window.

    No budget is larger than the shape.
    """
    most = 10 if shape == "parents" else 7
    options = {"prefill_chunk_size": 9, "max_draft_tokens": most, "draft_tree": SHAPES[shape]["draft_tree"]}
    engine = make_engine(zoo.path("llama"), zoo.path(draft), backend=make_back_end(back_end), **AMPLE | options)
    rows = record(engine)
    run_all(engine, PROMPTS, [greedy(9 + i, ignore_eos=True, max_draft_tokens=i if i < 7 else most) for i in range(len(PROMPTS))])
    assert {budget for _, budget, _ in rows} == set(range(8))
    assert all(tree.num_nodes == budget for _, budget, tree in rows)
    parents = BUSHY if shape == "parents" else list(range(-1, 6))  # as it was asked for: main paths come first in a tree
    for context, budget, tree in [row for row in rows if row.budget == 7 or shape == "chain"][::9]:
        oracle = Draft(zoo, draft, context, 1.0)
        expected: list[tuple[int, ...]] = []
        for node, parent in enumerate(parents[:budget]):
            above, rank = expected[parent] if parent >= 0 else (), parents[:node].count(parent)
            expected.append((*above, oracle.best_children(above, rank + 1)[rank][0]))
        assert sorted(paths_of(tree)) == sorted(expected)


def beam_search(draft: Draft, width: int, num_children: int, depth: int, budget: int) -> set[tuple[int, ...]]:
    """The dynamic tree, slowly: expand the best of each depth, keep the best of all."""
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    for _ in range(depth):
        level = [
            ((*path, token), score + logprob) for path, score in beam for token, logprob in draft.best_children(path, num_children)
        ]
        candidates += level
        beam = sorted(level, key=lambda each: -each[1])[:width]
    return {path for path, _ in sorted(candidates, key=lambda each: -each[1])[:budget]}


@pytest.mark.long_where("torch-auto-0.0", "torch-dynamic-0.0")
@pytest.mark.parametrize(
    ("shape", "temperature"), [("dynamic", 0.0), ("dynamic", 1.5), ("auto_16", 0.0), ("auto", 0.0), ("auto", 1.5)]
)
@pytest.mark.parametrize("back_end", ON_HOST)
def test_a_grown_tree_is_the_best_ancestor_closed_set_of_what_was_expanded(
    zoo: Zoo, back_end: str, shape: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftHistory, "note_surprises", lambda *_: None)  # the temperature stays where it starts
    engine = make_engine(zoo.path("llama"), zoo.path("other"), backend=make_back_end(back_end), **AMPLE | SHAPES[shape])
    policy: Any = engine.drafter.policy  # type: ignore[attr-defined]
    rows = record(engine)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=12, ignore_eos=True) for i in range(len(PROMPTS))]
    run_all(engine, PROMPTS, params)
    first_drafts = {tuple(context): (budget, tree) for context, budget, tree in reversed(rows) if budget > 1}
    assert len(first_drafts) > 21
    for context, (budget, tree) in list(first_drafts.items())[::12]:
        draft = Draft(zoo, "other", context, temperature or GREEDY_TEMPERATURE)
        if shape.startswith("auto") and budget <= MAX_NARROW_NODES:
            # how deep is up to the request's history
            options = [beam_search(draft, 1, CHAIN_CHILDREN, depth, budget) for depth in range(1, budget + 1)]
            chain = beam_search(draft, 1, 1, budget, budget)
            assert set(paths_of(tree)) in (options if budget > MAX_CHAIN_NODES else [*options, chain])
        else:
            depth = min(policy.beam_depth, budget)
            assert set(paths_of(tree)) == beam_search(draft, policy.width, policy.width + 1, depth, budget)


@pytest.mark.parametrize("back_end", ON_HOST)
@pytest.mark.parametrize("shape", ["chain", "auto", "dynamic", "parents"])
def test_a_sampled_proposal_carries_the_distributions_it_was_sampled_from(zoo: Zoo, back_end: str, shape: str) -> None:
    options = {"draft_sampling": "sampled", "backend": make_back_end(back_end)} | AMPLE | SHAPES[shape]
    engine = make_engine(zoo.path("llama"), zoo.path("other"), **options)
    rows = record(engine)
    run_all(engine, PROMPTS, [SamplingParams(temperature=1.3, seed=i, max_tokens=9, ignore_eos=True) for i in range(len(PROMPTS))])
    drafted = [(context, tree) for context, _, tree in rows if tree.num_nodes]
    assert len(drafted) > 26
    for context, tree in drafted[::17]:
        draft = Draft(zoo, "other", context, 1.3)
        assert tree.draft_probs is not None
        for probs, node in zip(tree.draft_probs, tree.topology.inner.tolist(), strict=True):
            path = () if node < 0 else paths_of(tree)[node]
            assert torch.allclose(probs, draft.logprobs(path).exp(), atol=2e-5)
            children = tree.token_ids[tree.parents == node].tolist()
            assert len(set(children)) == len(children), "without replacement"


SAMPLED = [
    SamplingParams(temperature=(0.6, 1.0, 1.4)[i % 3], top_p=(1.0, 0.9)[i % 2], seed=i, max_tokens=5 + 7 * i % 23, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.mark.parametrize("shape", ["chain", "auto", "dynamic", "parents"])
def test_a_sampled_output_is_its_own_whatever_the_neighbours_chunks_and_preemptions(zoo: Zoo, shape: str) -> None:
    """With blocks for all drafts: fewer drafts give other tokens."""
    options = {"draft_sampling": "sampled"} | SHAPES[shape]
    models = zoo.path("llama"), zoo.path("llama~")
    alone = [
        run_all(make_engine(*models, **AMPLE | options), [prompt], [params])[0]
        for prompt, params in zip(PROMPTS, SAMPLED, strict=True)
    ]
    together = make_engine(*models, **AMPLE | options)
    assert run_all(together, PROMPTS[::-1], SAMPLED[::-1]) == alone[::-1]
    chunked = make_engine(*models, **AMPLE | {"prefill_chunk_size": 7} | options)

    def preempt(step: int) -> None:
        for request in chunked.scheduler.running[-2:] if step % 3 == 2 else ():
            chunked.scheduler.queues.preempt(request)

    assert run_all(chunked, PROMPTS, SAMPLED, before_step=preempt) == alone
    assert chunked.counters.num_preemptions > len(PROMPTS) / 2


@pytest.mark.parametrize(
    ("sampling", "shape"), [*product(["greedy"], SHAPES), *product(["sampled"], ("chain", "auto_16", "parents"))]
)
def test_a_draft_that_breaks_down_for_one_request_costs_nobody_an_output(zoo: Zoo, sampling: str, shape: str) -> None:
    options = {"draft_sampling": sampling, "backend": make_back_end("torch")} | AMPLE | SHAPES[shape]
    engine = make_engine(zoo.path("llama"), zoo.path("other"), **options)
    runner: Any = engine.drafter.runner  # type: ignore[attr-defined]
    forward, passes = runner.forward, count()

    def broken(batch: Any) -> Tensor:
        logits: Tensor = forward(batch)
        if next(passes) % 2 == 0:
            logits[:1] = torch.nan
        return logits

    runner.forward = broken
    params = [SamplingParams(temperature=float(sampling == "sampled"), top_k=1, seed=1, max_tokens=8, ignore_eos=True)] * 4
    outputs = run_all(engine, PROMPTS[:4], params)
    assert next(passes) > 0
    assert outputs == [zoo.greedy("llama", prompt, 8, ignore_eos=True) for prompt in PROMPTS[:4]]


@pytest.mark.parametrize(
    ("target_size", "draft_size", "is_sampled", "draft_tree"),
    [
        *(
            (150, 140, is_sampled, tree)
            for is_sampled, tree in ((False, "chain"), (True, "auto"), (False, "dynamic"), (True, [-1, -1, 0]))
        ),
        *(
            (140, 150, is_sampled, tree)
            for is_sampled, tree in ((True, "chain"), (False, "auto"), (True, "dynamic"), (False, [-1, -1, 0]))
        ),
    ],
)
def test_only_tokens_that_both_models_have_are_drafted(
    tmp_path: Path, target_size: int, draft_size: int, is_sampled: bool, draft_tree: str | list[int]
) -> None:
    """The padding of the vocabularies differs; of two tokens that only the draft may have, one is its most likely everywhere."""
    folders = str(tmp_path / "target"), str(tmp_path / "draft")
    make_model(tmp_path / "target", vocab_size=target_size)
    draft = make_model(tmp_path / "draft", vocab_size=draft_size)
    draft.lm_head.weight.data[-5] = 1000 * draft.lm_head.weight.data[7] * (draft_size > target_size)
    draft.lm_head.weight.data[-4] = -draft.lm_head.weight.data[-5]
    draft.save_pretrained(tmp_path / "draft")
    for folder in folders:
        make_tokenizer().save_pretrained(folder)
    prompts = [[5, 6, target_size - 5, 7], [8, 9], [target_size - 1] * 20, [139, 3]] * 3
    options = {"draft_sampling": "sampled" if is_sampled else "greedy", "draft_tree": draft_tree}
    params = [SamplingParams(temperature=3.0 * is_sampled, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(prompts))]
    engine = make_engine(*folders, **AMPLE | options)
    rows = record(engine)
    outputs = run_all(engine, prompts, params)
    if is_sampled:
        assert max(token for output in outputs for token in output) >= target_size - 5
    else:
        assert outputs == run_all(make_engine(folders[0], None, **AMPLE), prompts, params)
    proposed = [tree for *_, tree in rows if tree.num_nodes]
    assert proposed and max(token for tree in proposed for token in tree.token_ids) < 140
    shapes = {None if tree.draft_probs is None else tree.draft_probs.shape[1] for tree in proposed}
    assert shapes == {target_size if is_sampled else None}


def test_a_distribution_at_temperature_0_is_refused(zoo: Zoo) -> None:
    class Claiming(CachelessDrafter):
        name, max_draft_tokens = "claiming", 1

        def propose(self, plan: StepPlan) -> list[DraftTree]:
            return [DraftTree.chain([5][:budget], torch.full((1, 131), 1 / 131)[:budget]) for budget in plan.draft_budgets]

    engine = make_engine(zoo.path("llama"), Claiming(), **AMPLE)
    submit(engine, PROMPTS[1:2], [greedy(9)])
    with pytest.warns(RuntimeWarning, match=r"'claiming' failed, .*'claiming' gave draft_probs .* at temperature 0"):
        engine.step()


def test_a_draft_model_that_was_made_for_another_engine_is_refused(zoo: Zoo) -> None:
    """It would go by that one's vocabulary and options."""
    first, second = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE), make_engine(zoo.path("llama"), **AMPLE)
    drafter = first.drafter
    first.swap_draft(None)
    for use in (second.swap_draft, partial(make_engine, zoo.path("llama"))):
        with pytest.raises(ValueError, match=r"llama~\) was made for another LLM.*: allowed is a folder or hub id"):
            use(drafter)
    first.swap_draft(drafter)


def test_a_registered_name_means_its_factory(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(NoDrafter):
        name, max_draft_tokens = "mine", 1

    monkeypatch.setattr("titan.draft.registry._FACTORIES", dict(_FACTORIES))
    register("mine", lambda context: NoDrafter())
    register("mine", lambda context: Mine())  # as when a cell of a notebook runs again
    for taken in ("demo", "ngram"):
        with pytest.raises(ValueError, match=f"name='{taken}' is taken, as each of these is: demo, ngram"):
            register(taken, lambda context: Mine())
    engine = make_engine(zoo.path("llama"), "mine", **AMPLE)
    assert engine.metrics().draft == "mine"
    assert run_all(engine, PROMPTS[:2], [greedy(5)] * 2) == [zoo.greedy("llama", prompt, 5) for prompt in PROMPTS[:2]]
    register("mine", lambda context: pytest.fail("it may load a model"))
    assert make_engine(zoo.path("llama"), "mine", speculation="off", **AMPLE).metrics().draft == "none"


class Wrapper:
    """Has its members from another object: from Python 3.12 on, `isinstance` would not find them in a protocol's stead."""

    def __init__(self, wrapped: object) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@pytest.mark.parametrize("draft", ["ngram", "llama~"])
def test_a_drafter_may_be_wrapped(zoo: Zoo, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    runs_model = draft != "ngram"
    engine = make_engine(zoo.path("llama"), **AMPLE | {"speculation": "adaptive", "draft_tree": "auto"})
    wrapper: Any = Wrapper(open_drafter(zoo.path(draft) if runs_model else draft, engine.draft_context())())
    engine.swap_draft(wrapper)
    assert engine.drafting.is_fed == runs_model
    assert engine.adaptive is not None and (engine.adaptive.controller.costs.draft is not None) == runs_model
    assert run_all(engine, PROMPTS, [greedy(9)] * len(PROMPTS)) == [zoo.greedy("llama", prompt, 9) for prompt in PROMPTS]
    metrics = engine.metrics()
    assert metrics.num_draft_failures == 0 and (sum(metrics.accepted_per_depth) > 0) == runs_model


def test_a_draft_model_may_be_given_again_whatever_the_shape_of_its_trees(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), draft_tree="dynamic")
    drafter = engine.drafter
    engine.swap_draft(drafter)
    assert engine.drafter is drafter and "draft" in engine.kv.tensors


@pytest.mark.parametrize("back_end", ON_HOST)
def test_a_policy_that_takes_more_slots_than_were_reserved_costs_drafts_and_no_request(
    zoo: Zoo, back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It overlooks `lookahead`; slots behind those of a request would be those of others."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), backend=make_back_end(back_end), max_draft_tokens=3, **AMPLE)
    assert isinstance(engine.drafter, DraftModelDrafter)
    monkeypatch.setattr(engine.drafter.policy, "spec", lambda *_, **__: BeamSpec(1, 9, 7, 7, 1.0))
    with pytest.warns(RuntimeWarning, match="ValueError: the policy's spec has num_slots=56: at most [123] are allowed"):
        assert run_all(engine, PROMPTS, [greedy(9)] * len(PROMPTS)) == [zoo.greedy("llama", prompt, 9) for prompt in PROMPTS]


@pytest.mark.parametrize("draft_tree", ["chain", "dynamic"])
def test_a_policy_may_grow_smaller_trees_than_the_engine_allows(zoo: Zoo, draft_tree: str) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), max_draft_tokens=12, **AMPLE)
    assert isinstance(engine.drafter, DraftModelDrafter)
    engine.drafter.policy = DraftPolicy(draft_tree, "auto", 3)
    rows = record(engine)
    assert run_all(engine, PROMPTS, [greedy(9)] * len(PROMPTS)) == [zoo.greedy("llama", prompt, 9) for prompt in PROMPTS]
    assert max(row.tree.num_nodes for row in rows) == 3 and engine.metrics().num_draft_failures == 0


@dataclass(frozen=True)
class OwnSpec:
    """A spec of another way of growing."""

    shape: ShapeSpec

    @property
    def num_nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def num_slots(self) -> int:
        return self.shape.num_slots


class OwnGrowth(ShapeGrowth):
    def __init__(self, feeds: Sequence[Feed], *args: Any) -> None:
        super().__init__([feed._replace(spec=feed.spec.shape) for feed in feeds], *args)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_another_way_of_growing_runs_pass_by_pass(zoo: Zoo, back_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/speculation.md says, with its case in `_group`; no call of C++ and no graph knows it."""
    spec = OwnSpec(chain_spec(3))
    assert children_per_node(spec) == 0
    monkeypatch.setattr(growth, "_group", lambda feeds: [(OwnGrowth, [*range(len(feeds))])])
    options = {"max_draft_tokens": 3, "speculation": "fixed"}
    engine = make_engine(zoo.path("llama"), zoo.path("llama"), backend=make_back_end(back_end), **AMPLE | options)
    assert isinstance(engine.drafter, DraftModelDrafter)
    monkeypatch.setattr(engine.drafter.policy, "spec", lambda *_, **__: spec)
    assert run_all(engine, PROMPTS[:1], [greedy(9, ignore_eos=True)]) == [zoo.greedy("llama", PROMPTS[0], 9, ignore_eos=True)]
    assert engine.drafting.num_failures == 0 and sum(engine.counters.accepted_per_depth) >= 6


@pytest.mark.long_where("adaptive-2]", "adaptive-20", "fixed-2]")
@pytest.mark.parametrize("max_draft_tokens", [2, 6, 20])
@pytest.mark.parametrize("speculation", ["adaptive", "fixed"])
def test_the_tokens_of_a_seed_depend_on_nothing_but_their_request(zoo: Zoo, speculation: str, max_draft_tokens: int) -> None:
    """Where drafts may be sampled, too: those of requests with a seed of their own are not."""
    plain = run_all(make_engine(zoo.path("llama"), **AMPLE), PROMPTS, SAMPLED)
    options = {"speculation": speculation, "max_draft_tokens": max_draft_tokens, "draft_tree": "auto", "draft_sampling": "auto"}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE | options)
    assert run_all(engine, PROMPTS, SAMPLED) == plain
    assert [run_all(engine, [prompt], [params])[0] for prompt, params in zip(PROMPTS, SAMPLED, strict=True)] == plain
    assert speculation == "adaptive" or sum(engine.counters.accepted_per_depth) > 20


def test_a_step_reports_the_growth_of_its_trees_whether_or_not_nodes_are_left(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks of prompts, of trees, and of trees all of whose nodes are dropped."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE | {"prefill_chunk_size": 9})
    assert isinstance(engine.drafter, DraftModelDrafter)
    grow, reports, found, kinds = engine.drafter.runner.grow, list[Any](), list[Any](), set[tuple[bool, bool]]()

    def grow_or_drop(*args: Any) -> DraftTrees:
        trees = grow(*args)
        reports.append(trees.growth)
        empty = DraftTrees.empty(trees.num_rows, engine.backend.device)
        return replace(empty, growth=trees.growth) if len(reports) % 3 == 0 else trees

    def note(_: StepPlan, acceptance: Acceptance) -> None:
        if acceptance.trees.growth is not None:
            found.append(acceptance.trees.growth)
            kinds.add((acceptance.trees.num_nodes > 0, any(acceptance.token_ids)))

    monkeypatch.setattr(engine.drafter.runner, "grow", grow_or_drop)
    engine.observers.append(note)
    run_all(engine, [[3, 4, 5, 6, 7] * 4], [greedy(20, ignore_eos=True)])
    assert [*map(id, found)] == [*map(id, reports)] and kinds == {(False, False), (False, True), (True, True)}


@pytest.mark.parametrize(("back_end", "num_nodes"), [("cpu", 6), ("triton", MAX_CHAIN_NODES)])
def test_on_a_device_a_tree_behind_a_prompt_is_a_short_chain(zoo: Zoo, back_end: str, num_nodes: int) -> None:
    options = AMPLE | {"draft_tree": "auto", "max_draft_tokens": 6}
    engine = make_engine(zoo.path("eight"), zoo.path("eight~"), backend=make_back_end(back_end), **options)
    num_nodes_of = list[int]()
    engine.observers.append(lambda _, acceptance: num_nodes_of.append(acceptance.trees.num_nodes))
    submit(engine, [[3, 4, 5, 6, 7] * 4], [greedy(9, ignore_eos=True)])
    engine.step()
    assert num_nodes_of == [num_nodes]
