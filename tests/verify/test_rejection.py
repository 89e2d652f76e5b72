"""Recursive rejection over siblings: exact enumeration of the rule that back ends are held to, and two corners of theirs."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from back_ends import BACK_ENDS, make_back_end
from exact_rules import Probs, inverse_cdf, reference_rejection
from stepping import trees_on

from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTree, DraftTrees, NodeColumns

VOCAB_SIZE = 5
POSITION = 7


def distributions(seed: int, sharpness: float, num_holes: int) -> tuple[Probs, Probs]:
    """A target's p and a draft's q, each with so many impossible tokens."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(VOCAB_SIZE, sharpness), size=2)
    for each in (p, q):
        each[rng.permutation(VOCAB_SIZE)[:num_holes]] = 0
    return p / p.sum(), q / q.sum()


CASES = [distributions(seed, sharpness, num_holes) for seed in range(4) for sharpness in (0.3, 3.0) for num_holes in (0, 2)]


def emitted_distribution(p: Probs, q: Probs, claimed: Probs, num_children: int) -> Probs:
    """Of the token that one node emits by the rule, over all children of q and every coin, if q is said to be another."""
    emitted = np.zeros(VOCAB_SIZE)
    for children in permutations(np.flatnonzero(q).tolist(), num_children):
        accept_probs, residual = reference_rejection(p, claimed, children)
        before = q[list(children)].cumsum() - q[list(children)]  # sampled without replacement
        reached = float(np.prod(q[list(children)] / (1 - before)))
        for child, accept_prob in zip(children, accept_probs, strict=True):
            emitted[child] += reached * accept_prob
            reached *= 1 - accept_prob
        emitted += reached * residual
    return emitted


@pytest.mark.parametrize("num_children", [1, 2, 3])
@pytest.mark.parametrize(("p", "q"), CASES)
def test_by_the_rule_the_emitted_token_is_distributed_as_the_targets_own(p: Probs, q: Probs, num_children: int) -> None:
    assert np.abs(emitted_distribution(p, q, q, num_children) - p).max() < 1e-7


@pytest.mark.parametrize("num_children", [1, 2])
def test_enumeration_notices_a_wrong_q(num_children: int) -> None:
    """The negative control: verifying with another q than the one that was sampled from is not lossless."""
    p, q = CASES[2]
    assert np.abs(emitted_distribution(p, q, np.roll(q, 1), num_children) - p).max() > 0.02


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_where_rounding_leaves_nothing_of_the_residual_p_itself_is_sampled_from(back_end: str) -> None:
    """Here q is above p everywhere, by more than rounding makes it, so that the coins that reject are found soon."""
    backend, excess = make_back_end(back_end), 1 + 2.0**-9
    p = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    coins = philox_uniform(np.arange(60_000, dtype=np.uint64), POSITION, Purpose.ACCEPT)
    seeds = np.flatnonzero(coins > 1 / excess + 1e-5)[:12].astype(np.uint64)
    tree = DraftTree.chain([2], p[None].to(backend.device))
    trees = trees_on(backend, [tree] * len(seeds), VOCAB_SIZE)
    assert trees.draft_probs is not None
    trees = replace(trees, draft_probs=trees.draft_probs * excess)
    sampling = SamplingRows.of((SamplingParams(), seed, POSITION) for seed in seeds.tolist())
    logits = p.log().repeat(2 * len(seeds), 1).to(backend.device)
    verified = backend.trees.verify(logits, trees, np.arange(len(seeds)), sampling)
    assert (verified.paths == -1).all()
    tokens = verified.final_tokens.tolist()
    assert tokens == [inverse_cdf(p.double().numpy(), float(philox_uniform(seed, POSITION, Purpose.RESIDUAL))) for seed in seeds]
    assert len(set(tokens)) > 2


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_sampled_tree_all_of_whose_places_are_empty_decodes(back_end: str) -> None:
    backend, no, yes = make_back_end(back_end), np.zeros(1, np.bool_), np.ones(1, np.bool_)
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(VOCAB_SIZE)), dtype=torch.float32)
    empty = [np.array([-1, -1]), np.array([-2, -2], np.int32), np.array([1, 1]), np.array([1, 2])]
    *columns, rows = backend.upload([*empty, np.full(2, -np.inf, np.float32), np.full(2, -1, np.int32), np.zeros(3, np.int32)])
    q = torch.full((1, VOCAB_SIZE), torch.nan, device=backend.device)
    trees = DraftTrees(np.array([0, 2]), no, yes, no, NodeColumns(*columns), q, rows)
    logits = p.log().expand(3, -1).contiguous().to(backend.device)
    verified = backend.trees.verify(logits, trees, np.array([0]), SamplingRows.of([(SamplingParams(), 4, POSITION)]))
    assert (verified.paths == -1).all()
    assert verified.final_tokens.tolist() == [inverse_cdf(p.double().numpy(), float(philox_uniform(4, POSITION, Purpose.SAMPLE)))]
