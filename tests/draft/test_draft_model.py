"""The draft model: its proposals are its own greedy continuations, however the requests are mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from proposals import record
from stepping import AMPLE, greedy, make_engine, run_all, submit
from text_tools import make_tokenizer
from tiny_models import make_model
from transformers import PreTrainedModel
from zoo import Zoo, random_prompts

from titan.core.sampling_params import SamplingParams
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import DraftContext, Drafter, NoDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.registry import _FACTORIES, create_drafter, register
from titan.engine import Engine

PROMPTS = random_prompts(8, seed=2, max_len=40)


@torch.no_grad()
def continuation(model: PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("draft", ["other", "useless", "mistral"])
def test_every_proposal_is_the_drafts_own_greedy_continuation(zoo: Zoo, draft: str) -> None:
    """Requests with budgets of 0 to 6 in one batch, with prompts in chunks, and a draft that has a sliding window."""
    engine = make_engine(zoo.path("llama"), zoo.path(draft), prefill_chunk_size=9, **AMPLE)
    rows = record(engine)
    params = [greedy(8 + i, max_draft_tokens=i % 7 if i % 7 < 6 else None) for i in range(len(PROMPTS))]
    run_all(engine, PROMPTS, params)
    drafted = [(tokens, budget, tree) for tokens, budget, tree in rows if budget > 0]
    assert {budget for _, budget, _ in drafted} >= {1, 2, 3, 4, 5, 6}
    assert all(not tree.num_nodes for _, budget, tree in rows if budget == 0)
    assert all(tree.topology.is_chain for *_, tree in rows)
    for tokens, budget, tree in drafted[::3]:
        assert tree.token_ids.tolist() == continuation(zoo.model(draft), tokens, budget)


def test_the_drafts_pass_stays_within_the_token_budget_and_the_rest_waits(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), "ngram", **(AMPLE | {"max_num_batched_tokens": 40}))
    submit(engine, [[5] * 30, [6] * 30, [7] * 30], [greedy(30, ignore_eos=True)] * 3)
    for _ in range(6):
        engine.step()
    engine.swap_draft(zoo.path("other"))
    fed = []
    runner: Any = engine.drafter.runner  # type: ignore[attr-defined]
    forward = runner.forward
    runner.forward = lambda batch: (fed.append(len(batch.token_ids)), forward(batch))[1]
    for _ in range(4):
        fed.append(0)
        engine.step()
    assert max(fed) <= 40 < sum(fed)


def test_a_draft_with_a_smaller_padded_vocabulary_works(zoo: Zoo, tmp_path: Any) -> None:
    """The tokenizers agree; the target has rows for tokens that the draft does not have, and they can be in a prompt."""
    make_model(tmp_path / "target", vocab_size=150)
    make_model(tmp_path / "draft", vocab_size=140)
    for folder in ("target", "draft"):
        make_tokenizer().save_pretrained(tmp_path / folder)
    prompts = [[5, 6, 145, 7], [8, 9], [149] * 20, [139, 140]]
    params = [greedy(20, ignore_eos=True)] * 4
    plain = run_all(make_engine(str(tmp_path / "target"), None, **AMPLE), prompts, params)
    engine = make_engine(str(tmp_path / "target"), str(tmp_path / "draft"), **AMPLE)
    rows = record(engine)
    assert run_all(engine, prompts, params) == plain
    assert max(token for *_, tree in rows for token in tree.token_ids) < 140
    larger = make_engine(str(tmp_path / "draft"), str(tmp_path / "target"), **AMPLE)
    rows = record(larger)
    plain = run_all(make_engine(str(tmp_path / "draft"), None, **AMPLE), prompts[1:2], params[:1])
    assert run_all(larger, prompts[1:2], params[:1]) == plain
    assert max(token for *_, tree in rows for token in tree.token_ids) < 140


@pytest.mark.parametrize("draft_tree", ["chain", "auto", "dynamic"])
def test_tokens_that_only_the_draft_has_are_never_proposed(tmp_path: Any, draft_tree: str) -> None:
    """Two rows of the draft's padding have logits of opposite signs, so large that one of them is the most likely everywhere."""
    make_model(tmp_path / "target", vocab_size=140)
    draft = make_model(tmp_path / "draft", vocab_size=150)
    with torch.no_grad():
        draft.lm_head.weight[145] = 1000 * draft.lm_head.weight[7]
        draft.lm_head.weight[146] = -1000 * draft.lm_head.weight[7]
    draft.save_pretrained(tmp_path / "draft")
    for folder in ("target", "draft"):
        make_tokenizer().save_pretrained(tmp_path / folder)
    plain = run_all(make_engine(str(tmp_path / "target"), None, **AMPLE), [[8, 9]], [greedy(20, ignore_eos=True)])
    engine = make_engine(str(tmp_path / "target"), str(tmp_path / "draft"), **AMPLE, draft_tree=draft_tree)
    proposed: list[int] = []
    engine.observers.append(lambda plan, acceptance: proposed.extend(acceptance.trees[0].token_ids.tolist()))
    assert run_all(engine, [[8, 9]], [greedy(20, ignore_eos=True)]) == plain
    assert len(proposed) > 0 and max(proposed) < 140


@pytest.mark.parametrize("draft_tree", ["chain", "auto", "dynamic", [-1, -1, 0]])
@pytest.mark.parametrize(("target_size", "draft_size"), [(150, 140), (140, 150)])
def test_sampled_drafts_with_another_padded_vocabulary_work(
    tmp_path: Any, target_size: int, draft_size: int, draft_tree: Any
) -> None:
    """Nothing is sampled that only one of the models has; the target may still emit what only it has."""
    make_model(tmp_path / "target", vocab_size=target_size)
    make_model(tmp_path / "draft", vocab_size=draft_size)
    for folder in ("target", "draft"):
        make_tokenizer().save_pretrained(tmp_path / folder)
    engine = make_engine(
        str(tmp_path / "target"), str(tmp_path / "draft"), draft_sampling="sampled", draft_tree=draft_tree, num_kv_blocks=400
    )
    rows = record(engine)
    params = [SamplingParams(temperature=3.0, seed=i, max_tokens=30, ignore_eos=True) for i in range(12)]
    outputs = run_all(engine, [[5, 6, 7]] * 12, params)
    proposed = [tree for *_, tree in rows if tree.num_nodes]
    assert proposed and max(token for tree in proposed for token in tree.token_ids) < 140
    assert all(tree.draft_probs is not None and tree.draft_probs.shape[1] == target_size for tree in proposed)
    assert max(token for output in outputs for token in output) >= (140 if target_size > draft_size else 0)


class Claiming(NoDrafter):
    """Gives distributions with its proposals."""

    name = "claiming"
    max_draft_tokens = 1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [
            DraftTree.chain([5][:budget], torch.full((min(budget, 1), self.vocab_size), 1 / 131)) for budget in plan.draft_budgets
        ]


@pytest.mark.parametrize(("temperature", "vocab_size"), [(0.0, 131), (1.0, 130)])
def test_distributions_that_cannot_be_meant_are_refused(zoo: Zoo, temperature: float, vocab_size: int) -> None:
    engine = make_engine(zoo.path("llama"), Claiming(vocab_size), **AMPLE)
    submit(engine, PROMPTS[1:2], [SamplingParams(temperature=temperature, max_tokens=9)])
    with pytest.raises(
        ValueError, match=r"'claiming' gave draft_probs .* \[nodes with children, 131\] on cpu, at temperatures above 0 only"
    ):
        engine.step()


def context_of(engine: Engine) -> DraftContext:
    return engine._draft_context()


def test_specs_of_every_kind_become_drafters(zoo: Zoo) -> None:
    context = context_of(make_engine(zoo.path("llama"), **AMPLE))
    own = NgramDrafter(2)
    assert isinstance(create_drafter(None, context), NoDrafter)
    assert isinstance(create_drafter("ngram", context), NgramDrafter)
    assert isinstance(create_drafter(zoo.path("other"), context), DraftModelDrafter)
    assert create_drafter(own, context) is own


def test_a_registered_name_means_its_factory(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(NoDrafter):
        name = "mine"

    monkeypatch.setattr("titan.draft.registry._FACTORIES", dict(_FACTORIES))
    register("mine", lambda context: Mine())
    engine = make_engine(zoo.path("llama"), "mine", **AMPLE)
    assert engine.metrics().draft == "mine"
    assert run_all(engine, PROMPTS[:2], [greedy(5)] * 2) == [zoo.greedy("llama", prompt, 5) for prompt in PROMPTS[:2]]


class Scripted(NoDrafter):
    """A drafter of one's own, with trees instead of chains: right and wrong tokens at every depth."""

    name = "scripted"
    max_draft_tokens = 7

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.num_commits = 0

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        trees = []
        for request, budget in zip(plan.requests, plan.draft_budgets, strict=True):
            rest = self.answers[tuple(request.prompt_token_ids)][request.num_output_tokens :]
            tokens: list[int] = []
            parents: list[int] = []
            above = -1
            for token in rest:
                if len(tokens) + 2 > budget:
                    break
                tokens += [(token + 1) % 131, token]  # the wrong sibling comes first: what is accepted must be moved
                parents += [above, above]
                above = len(tokens) - 1
            trees.append(DraftTree(np.array(tokens, np.int64), np.array(parents, np.int32)))
        return trees

    def commit(self, plan: StepPlan, acceptance: Any) -> None:
        self.num_commits += 1
        for num_nodes, path in zip(acceptance.trees.counts.tolist(), acceptance.paths, strict=True):
            assert path == list(range(1, num_nodes, 2))


def test_a_drafter_of_ones_own_may_propose_trees(zoo: Zoo) -> None:
    """The seam: nothing in the engine knows chains. The accepted path's KV is moved to where it belongs."""
    expected = {tuple(prompt): zoo.greedy("qwen3", prompt, 30, ignore_eos=True) for prompt in PROMPTS}
    drafter = Scripted(expected)
    assert isinstance(drafter, Drafter)
    engine = make_engine(zoo.path("qwen3"), drafter, **AMPLE | {"max_draft_tokens": 7})
    outputs = run_all(engine, PROMPTS, [greedy(30, ignore_eos=True)] * len(PROMPTS))
    assert outputs == list(expected.values())
    assert drafter.num_commits == engine.metrics().num_steps
    assert engine.metrics().mean_acceptance_length > 3
    assert engine.metrics().accepted_per_depth[:3] == [count // 2 for count in engine.metrics().proposed_per_depth[:3]]


def test_nothing_is_drafted_before_the_whole_context_is_fed(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), "ngram", **(AMPLE | {"max_num_batched_tokens": 40}))
    [request] = submit(engine, [[5] * 30], [greedy(60, ignore_eos=True)])
    while request.num_tokens < 60:
        engine.step()
    engine.swap_draft(zoo.path("other"))
    rows = record(engine)
    for _ in range(4):
        engine.step()
    num_nodes = [tree.num_nodes for *_, tree in rows]
    assert num_nodes[0] == 0 and min(num_nodes[1:]) > 0
    assert all(tree.token_ids.tolist() == continuation(zoo.model("other"), tokens, tree.num_nodes) for tokens, _, tree in rows)
