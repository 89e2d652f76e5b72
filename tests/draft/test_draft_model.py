"""The draft model: its proposals are its own greedy continuations, however the requests are mixed."""

from __future__ import annotations

from pathlib import Path

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
from titan.draft.base import NoDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.registry import _FACTORIES, create_drafter, register

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


@pytest.mark.parametrize("draft_tree", ["chain", "auto", "dynamic", [-1, -1, 0]])
@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize(("target_size", "draft_size"), [(150, 140), (140, 150)])
def test_only_tokens_that_both_models_have_are_drafted(
    tmp_path: Path, target_size: int, draft_size: int, is_sampled: bool, draft_tree: str | list[int]
) -> None:
    """The tokenizers agree, but not the padding. Of two tokens that only the draft may have, one is its most likely everywhere.

    Tokens that only the target has can be in a prompt, and are emitted.
    """
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


class Claiming(NoDrafter):
    """Gives a distribution with its proposal."""

    name = "claiming"
    max_draft_tokens = 1

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [DraftTree.chain([5][:budget], torch.full((min(budget, 1), 131), 1 / 131)) for budget in plan.draft_budgets]


def test_a_distribution_at_temperature_0_is_refused(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), Claiming(), **AMPLE)
    submit(engine, PROMPTS[1:2], [greedy(9)])
    with pytest.raises(ValueError, match=r"'claiming' gave draft_probs .* at temperature 0"):
        engine.step()


def test_specs_of_every_kind_become_drafters(zoo: Zoo) -> None:
    context = make_engine(zoo.path("llama"), **AMPLE)._draft_context()
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
