"""Draft trees as text, and the observer that collects them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from stepping import AMPLE, SCARCE, make_engine, make_request, run_all
from text_tools import make_byte_tokenizer, make_piece_tokenizer
from zoo import Zoo, random_prompts

from titan.core.sampling_params import SamplingParams
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.tree_view import VerifiedTree, render_tree, token_text, verified_trees

TEXTS = ["def", " f", "(", "x", ")", " g", ":\n", "y"]
REQUEST = make_request([0])
TREE = DraftTree(np.array([1, 2, 4, 3, 5, 6]), np.array([-1, 0, 1, 1, -1, 4], np.int32))


def render(path: list[int], final_token_id: int | None, tree: DraftTree = TREE, *, color: bool = False) -> str:
    return render_tree(VerifiedTree(REQUEST, 0, tree, path, final_token_id), lambda token_id: TEXTS[token_id], color=color)


def test_accepted_nodes_are_green_rejected_ones_dim_and_the_final_token_bold() -> None:
    expected = """
'def'
  \x1b[32m+ ' f'\x1b[0m
    \x1b[32m+ '('\x1b[0m
      \x1b[2m- ')'\x1b[0m
      \x1b[2m- 'x'\x1b[0m
      \x1b[1m> 'y'\x1b[0m
  \x1b[2m- ' g'\x1b[0m
    \x1b[2m- ':\\n'\x1b[0m
"""
    assert render([0, 1], 7, color=True) == expected.strip()
    assert render([0, 1], 7) == re.sub(r"\x1b\[\d*m", "", expected.strip())


def test_the_final_token_behind_a_leaf_behind_the_root_without_drafts_nowhere_and_escaped() -> None:
    tree = DraftTree(np.array([1, 5]), np.array([-1, -1], np.int32))
    assert render([1], 7, tree) == "'def'\n  - ' f'\n  + ' g'\n    > 'y'"
    assert render([], 7, tree) == "'def'\n  - ' f'\n  - ' g'\n  > 'y'"
    assert render([], 7, EMPTY_TREE) == "'def'\n  > 'y'"
    assert render([0], None, DraftTree.chain([1, 2])) == "'def'\n  + ' f'\n    - '('"
    shown = render_tree(VerifiedTree(REQUEST, 0, EMPTY_TREE, [], 1), ["\x1b[2J", "\r"].__getitem__)
    assert shown == "'\\x1b[2J'\n  > '\\r'"


@pytest.mark.parametrize("tokenizer", [make_byte_tokenizer(), make_piece_tokenizer()], ids=["byte-level", "pieces"])
def test_the_text_of_a_token_keeps_its_leading_space(tokenizer: Any) -> None:
    vocab: dict[str, int] = tokenizer.get_vocab()
    spaced = {
        piece: token_id for piece, token_id in vocab.items() if piece[0] in "Ġ▁" and piece[1:].isascii() and piece[1:].isalpha()
    }
    assert "the" in {piece[1:] for piece in spaced}
    assert all(token_text(tokenizer, token_id) == f" {piece[1:]}" for piece, token_id in spaced.items())
    assert token_text(tokenizer, vocab["h"]) == "h"
    assert token_text(tokenizer, vocab["</s>"]) == "</s>"


@pytest.mark.parametrize("options", [AMPLE, SCARCE], ids=["ample", "scarce"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_an_observer_sees_every_token_come_out_of_a_tree(zoo: Zoo, options: dict[str, Any], sampling: str) -> None:
    """Also with chunked prefill and preemption: rows that do not reach their root have no tree."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), draft_tree="auto", draft_sampling=sampling, **options)
    seen: dict[str, list[int]] = {}

    def observe(plan: Any, acceptance: Any) -> None:
        for verified in verified_trees(plan, acceptance):
            request = verified.request
            tokens = seen.setdefault(request.request_id, [])
            assert verified.root_token_id == (tokens or request.prompt_token_ids)[-1]
            assert verified.tree.draft_probs is None
            assert verified.final_token_id is not None
            tokens += [*verified.tree.token_ids[verified.path].tolist(), verified.final_token_id]

    engine.observers.append(observe)
    prompts = random_prompts(5, seed=3, max_len=30)
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=14, ignore_eos=True) for i in range(len(prompts))]
    outputs = run_all(engine, prompts, params)
    assert list(map(seen.get, map(str, range(len(prompts))))) == outputs
    assert sum(engine.counters.accepted_per_depth) > 0
