"""Recursive rejection against the engine's own, against residuals as vectors, and against the target's distribution."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_trees import DEVICE, accepted, packed, random_parents
from row_options import RowOptions
from scipy import stats
from torch import Tensor

from titan.bench.gpu.acceptance_reference import reference_reject
from titan.core.trees import DraftTree
from titan.kernels.torch.sampling import LazyProbs
from titan.kernels.triton.root_matches import root_matches
from titan.kernels.triton.row_distribution import CHUNK, RowDistributions, normalized_probs, row_distributions
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_walk import TreePaths
from titan.sample.distributions import Purpose, philox_uniform, target_probs
from titan.verify.rejection import reject, reject_by_torch

Array = NDArray[np.float64]
MAX_DEPTH = 12


@dataclass(frozen=True)
class Verification:
    """Trees with what the target says about their rows."""

    trees: list[DraftTree]
    distributions: RowDistributions
    probs: Tensor  # float32 [L, vocab], p as the host computes it
    options: RowOptions

    @property
    def start_loc(self) -> NDArray[np.int64]:
        return np.cumsum([0] + [tree.num_nodes + 1 for tree in self.trees])

    @property
    def draft_probs(self) -> Tensor:
        return torch.cat([tree.draft_probs for tree in self.trees if tree.draft_probs is not None]).to(DEVICE)

    @property
    def draft_rows(self) -> Tensor:
        rows = np.full(len(self.options), -1, np.int32)
        inner = np.concatenate([first + 1 + tree.inner for first, tree in zip(self.start_loc, self.trees, strict=False)])
        rows[inner] = np.arange(len(inner))
        return torch.from_numpy(rows).to(DEVICE)

    def by_kernel(self) -> TreePaths:
        arguments = (self.distributions, self.draft_probs, self.draft_rows, *packed(self.trees))
        return reject_trees(*arguments, **self.options.for_draw(), max_depth=MAX_DEPTH)

    def by_host(self) -> list[tuple[list[int], int]]:
        result = reject_by_torch(self.trees, self.probs, self.options.seeds, self.options.positions)
        last_nodes = result.last_rows.numpy() - self.start_loc[:-1] - 1
        paths = [tree.path_to(int(node)) for tree, node in zip(self.trees, last_nodes, strict=True)]
        return list(zip(paths, result.final_tokens.tolist(), strict=True))

    def by_reference(self) -> list[tuple[list[int], int]]:
        def uniform(row: int, purpose: Purpose, sibling: int = 0) -> float:
            one = slice(row, row + 1)
            return float(philox_uniform(self.options.seeds[one], self.options.positions[one], purpose, sibling=sibling)[0])

        results = []
        for first, tree in zip(self.start_loc, self.trees, strict=False):
            p = self.probs[first : first + tree.num_nodes + 1].double()
            q = torch.zeros_like(p)
            assert tree.draft_probs is not None
            q[tree.inner + 1] = tree.draft_probs.double()
            results.append(
                reference_reject(
                    p / p.sum(-1, keepdim=True),
                    q,
                    tree.token_ids.tolist(),
                    tree.parents.tolist(),
                    coin=lambda row, rank, first=first: uniform(first + row, Purpose.ACCEPT, rank),
                    uniform=lambda row, is_inner, first=first: uniform(
                        first + row, Purpose.RESIDUAL if is_inner else Purpose.SAMPLE
                    ),
                )
            )
        return results


def drawn_tree(rng: np.random.Generator, parents: NDArray[np.int32], q_of: Callable[[int], Array]) -> DraftTree:
    """A tree whose siblings are drawn from ``q_of`` their parent without replacement, as long as q has tokens left."""
    kept: dict[int, int] = {-1: -1}
    token_ids: list[int] = []
    new_parents: list[int] = []
    q: dict[int, Array] = {}
    taken: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        if parent not in kept:
            continue
        q.setdefault(parent, q_of(parent + 1))
        left = q[parent].copy()
        left[taken.setdefault(parent, [])] = 0
        if left.sum() <= 1e-6:
            continue
        taken[parent].append(int(rng.choice(len(left), p=left / left.sum())))
        kept[node] = len(token_ids)
        token_ids.append(taken[parent][-1])
        new_parents.append(kept[parent])
    used = [q[parent] for parent in sorted(q, key=lambda parent: kept[parent]) if taken[parent]]
    draft_probs = torch.tensor(np.stack(used), dtype=torch.float32)
    return DraftTree(np.array(token_ids), np.array(new_parents, np.int32), draft_probs)


def verification(
    kind: str, num_trees: int, vocab_size: int, *, seed: int, option: tuple[float, int, float, float] = (1.0, 0, 1.0, 0.0)
) -> Verification:
    """Random trees of one kind of drafts."""
    rng = np.random.default_rng(seed)
    trees, logits = [], []
    for _ in range(num_trees):
        parents = random_parents(rng, int(rng.integers(1, 8)))
        scores = rng.normal(size=(len(parents) + 1, vocab_size)) * (25 if kind == "certain" else 1.5)
        options = RowOptions([option] * len(scores))
        p = target_probs(torch.from_numpy(scores).float(), options.on_host(), np.arange(len(scores))).double().numpy()
        q = np.exp(scores + rng.normal(size=scores.shape) * (3 if kind == "certain" else 0.7))
        if kind == "holes":
            q *= rng.random(q.shape) < 0.5
            q[:, 0] += 0.01
        elif kind == "apart":
            q[:, : vocab_size // 2] = 0
            scores[:, vocab_size // 2 :] = -np.inf
        elif kind == "equal":
            q = p
        q = q / q.sum(-1, keepdims=True)
        tree = drawn_tree(rng, parents, lambda row, q=q: q[row])  # type: ignore[misc]
        trees.append(tree)
        logits.append(scores[: tree.num_nodes + 1])
    table = torch.from_numpy(np.concatenate(logits)).float()
    options = RowOptions([option] * len(table))
    probs = target_probs(table, options.on_host(), np.arange(len(table)))
    return Verification(trees, row_distributions(table.to(DEVICE), **options.for_distribution()), probs, options)


CASES = {
    "near": {"num_trees": 30, "vocab_size": 9, "seed": 1},
    "holes": {"num_trees": 20, "vocab_size": 9, "seed": 2},
    "apart": {"num_trees": 12, "vocab_size": 8, "seed": 3},
    "equal": {"num_trees": 12, "vocab_size": 6, "seed": 4},
    "certain": {"num_trees": 20, "vocab_size": 7, "seed": 5},
    "cut": {"num_trees": 4, "vocab_size": 12, "seed": 6, "option": (1.3, 6, 0.9, 0.05)},
    "large": {"num_trees": 6, "vocab_size": CHUNK + 900, "seed": 7},
}


@pytest.mark.parametrize("kind", CASES)
def test_random_trees_are_verified_as_by_the_engine_and_by_residual_vectors(kind: str) -> None:
    case = verification(kind, **CASES[kind])  # type: ignore[arg-type]
    result = case.by_kernel()
    actual = list(zip(accepted(result.paths, result.num_accepted), result.final_tokens.tolist(), strict=True))
    assert actual == case.by_host()
    assert actual == case.by_reference()
    if kind in ("near", "holes", "certain"):
        lengths = {len(path) for path, _ in actual}
        assert {0, 1, 2} <= lengths, "hardly any draft token was accepted: nothing is tested"


@pytest.mark.parametrize("kind", ["near", "holes", "large"])
def test_matches_at_the_root_are_those_of_the_engine(kind: str) -> None:
    case = verification(kind, **{**CASES[kind], "num_trees": 6})  # type: ignore[arg-type]
    actual = root_matches(case.distributions, case.draft_probs, case.draft_rows, packed(case.trees)[2])
    expected = reject(case.trees, LazyProbs(case.probs, None), case.options.seeds, case.options.positions).matches
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["near", "holes"])
def test_empty_places_change_nothing(kind: str) -> None:
    """Some behind the nodes of every other tree, with rows of logits that nobody looks at; and a tree of empty places alone."""
    case = verification(kind, 16, 9, seed=21)
    token_ids, parents, start_loc = (each.tolist() for each in packed(case.trees))
    rows, nodes = [], []  # of the case; None where a place is empty
    counts = [0]
    for i, (first, last) in enumerate(pairwise(start_loc)):
        empty = [None] * (i % 2 * 3)
        nodes += [*range(first, last), *empty]
        rows += [*range(first + i, last + i + 1), *empty]
        counts.append(len(nodes))
    nodes += [None, None]
    rows += [0, None, None]
    counts.append(len(nodes))
    index = torch.tensor([0 if row is None else row for row in rows], device=DEVICE)
    given = {name: getattr(case.distributions, name)[index].clone() for name in RowDistributions.__slots__}
    given["logits"][[row is None for row in rows]] = torch.nan
    draft_rows = torch.tensor([-9 if row is None else int(case.draft_rows[row]) for row in rows], dtype=torch.int32, device=DEVICE)
    result = reject_trees(
        RowDistributions(**given),
        case.draft_probs,
        draft_rows,
        torch.tensor([-1 if node is None else token_ids[node] for node in nodes], device=DEVICE),
        torch.tensor([-2 if node is None else parents[node] for node in nodes], dtype=torch.int32, device=DEVICE),
        torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        **{name: values[index] for name, values in case.options.for_draw().items()},
        max_depth=MAX_DEPTH,
    )
    actual = list(zip(accepted(result.paths, result.num_accepted), result.final_tokens.tolist(), strict=True))
    assert actual[:-1] == case.by_host()
    [path], [token] = zip(actual[-1], strict=True)
    assert path == [] and token >= 0


def single(p: list[float], q: list[float], token_ids: list[int], num_rows_broken: int = 0) -> Verification:
    """A star of these tokens; rows from the end on hold NaN."""
    tree = DraftTree(np.array(token_ids), np.full(len(token_ids), -1, np.int32), torch.tensor([q]))
    logits = torch.tensor([p] * (len(token_ids) + 1)).log()
    logits[len(logits) - num_rows_broken :, 0] = torch.nan
    options = RowOptions([(1.0, 0, 1.0, 0.0)] * len(logits))
    distributions = row_distributions(logits.to(DEVICE), **options.for_distribution())
    return Verification([tree], distributions, torch.tensor([p] * len(logits)), options)


@pytest.mark.parametrize(
    ("p", "q", "token_ids", "paths", "finals"),
    [
        ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0], [[]], {1}),  # impossible for the target
        ([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0, 2], [[]], {1, 2}),  # q had no mass left for the second child
        ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0], [[]], {1}),  # impossible for both, and no residual is left
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1], [[0]], {0, 1}),  # the same distribution
        ([0.0, 1.0, 0.0], [0.4, 0.2, 0.4], [2, 1], [[1]], {1}),  # all that the residual has left
        ([0.0, 1.0, 0.0], [0.4, 0.2, 0.4], [2, 0], [[]], {1}),
    ],
)
def test_outcomes_that_are_certain(
    p: list[float], q: list[float], token_ids: list[int], paths: list[list[int]], finals: set[int]
) -> None:
    result = single(p, q, token_ids).by_kernel()
    assert accepted(result.paths, result.num_accepted) == paths and set(result.final_tokens.tolist()) <= finals


def test_a_row_that_is_not_finite_ends_the_path_without_a_token() -> None:
    for num_broken, path in ((1, [0]), (2, [])):
        result = single([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1], num_broken).by_kernel()
        assert accepted(result.paths, result.num_accepted) == [path] and result.final_tokens.tolist() == [-1]
    case = single([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1], 2)
    assert root_matches(case.distributions, case.draft_probs, case.draft_rows, packed(case.trees)[2]).isnan().all()


def test_a_request_without_draft_tokens_samples_as_without_speculation() -> None:
    case = verification("near", 3, 9, seed=8)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    start_loc = torch.zeros(len(case.options) + 1, dtype=torch.int32, device=DEVICE)
    arguments = (case.distributions, case.draft_probs, case.draft_rows, none, none.int(), start_loc)
    result = reject_trees(*arguments, **case.options.for_draw(), max_depth=1)
    assert accepted(result.paths, result.num_accepted) == [[]] * len(case.options)
    probs = normalized_probs(case.distributions).double().cpu()
    uniform = philox_uniform(case.options.seeds, case.options.positions, Purpose.SAMPLE)
    cdf = probs.cumsum(-1) / probs.sum(-1, keepdim=True)
    assert result.final_tokens.tolist() == (cdf > torch.from_numpy(uniform)[:, None]).int().argmax(-1).tolist()
    assert root_matches(case.distributions, case.draft_probs, case.draft_rows, start_loc).isnan().all()


VOCAB_SIZE = 4
TARGET, DRAFT = np.random.default_rng(3).dirichlet(np.full(VOCAB_SIZE, 0.7), size=(2, VOCAB_SIZE + 1))
PARENTS = np.array([-1, 0, -1, 0, 2, 1], np.int32)


def first_token_counts(num_trees: int, change: Callable[[Tensor], Tensor] = lambda draft_probs: draft_probs) -> Array:
    """How often each token comes out first and second, where trees drawn from `DRAFT` are verified against `TARGET`.

    A row's distributions are those behind its token; ``change`` is done to q before the verification. [vocab + 1, vocab]: first
    tokens, then second tokens by the first one.
    """
    rng = np.random.default_rng(11)
    trees = []
    for _ in range(num_trees):
        tokens = [-1] * (len(PARENTS) + 1)
        for node in np.unique(PARENTS).tolist():
            children = np.flatnonzero(np.equal(PARENTS, node))
            drawn = rng.choice(VOCAB_SIZE, size=len(children), replace=False, p=DRAFT[tokens[node + 1] + 1])
            for child, token in zip(children, drawn, strict=True):
                tokens[child + 1] = int(token)
        inner = np.unique(PARENTS) + 1
        draft_probs = torch.tensor(DRAFT[np.array(tokens)[inner] + 1], dtype=torch.float32)
        trees.append(DraftTree(np.array(tokens[1:]), PARENTS, change(draft_probs)))
    contexts = RowOptions([(1.0, 0, 1.0, 0.0)] * (VOCAB_SIZE + 1))
    logits = torch.from_numpy(np.log(TARGET)).float().to(DEVICE)
    table = row_distributions(logits, **contexts.for_distribution())
    rows = torch.from_numpy(np.concatenate([np.append(0, tree.token_ids + 1) for tree in trees])).to(DEVICE)
    distributions = RowDistributions(**{name: getattr(table, name)[rows] for name in RowDistributions.__slots__})
    options = RowOptions([(1.0, 0, 1.0, 0.0)] * len(rows))
    options.positions = np.concatenate([np.append(7, 7 + tree.depths) for tree in trees]).astype(np.int64)
    options.seeds = np.repeat(np.arange(num_trees, dtype=np.uint64), len(PARENTS) + 1)
    result = Verification(trees, distributions, torch.empty(0), options).by_kernel()
    counts = np.zeros((VOCAB_SIZE + 1, VOCAB_SIZE))
    for tree, path, final in zip(trees, accepted(result.paths, result.num_accepted), result.final_tokens.tolist(), strict=True):
        emitted = [*tree.token_ids[path].tolist(), final]
        counts[0, emitted[0]] += 1
        if len(emitted) > 1:
            counts[emitted[0] + 1, emitted[1]] += 1
    return counts


def p_value(counts: Array) -> float:
    """That the first tokens, and the second behind the most frequent first one, come from `TARGET`.

    Whether there is a second token depends on the coins of the first alone, so it does not change its distribution.
    """
    context = int(counts[1:].sum(-1).argmax()) + 1
    results = [stats.chisquare(counts[i], TARGET[i] * counts[i].sum()) for i in (0, context)]
    statistic = sum(result.statistic for result in results)
    return float(stats.chi2.sf(statistic, 2 * (VOCAB_SIZE - 1)))


def test_tokens_are_distributed_as_the_targets() -> None:
    assert p_value(first_token_counts(160)) > 1e-3


def test_the_chi_square_notices_a_wrong_q() -> None:
    def flattened(draft_probs: Tensor) -> Tensor:
        return (draft_probs + 1.0) / (1.0 + VOCAB_SIZE)

    assert p_value(first_token_counts(80, flattened)) < 1e-4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("distributions", None, "distributions has 1 rows on "),
        ("draft_probs", torch.zeros(1, 8), "draft_probs has shape [1, 8]: it must be [any, 3]"),
        ("draft_probs", torch.zeros(1, 3).double(), "draft_probs has dtype torch.float64: it must be torch.float32"),
        ("draft_rows", torch.zeros(2), "draft_rows has dtype torch.float32: it must be torch.int32"),
        ("draft_token_ids", torch.zeros(1), "draft_token_ids has dtype torch.float32: it must be torch.int64"),
        ("parents", torch.zeros(2, dtype=torch.int32), "parents has shape [2]: it must be [1]"),
        ("node_start_loc", torch.zeros(2, dtype=torch.int64), "node_start_loc has dtype torch.int64: it must be torch.int32"),
        ("seeds", torch.zeros(1, dtype=torch.int64), "seeds has shape [1]: it must be [2]"),
        ("positions", torch.zeros(2, dtype=torch.int64, device="meta"), "positions is on meta: it must be on "),
        ("max_depth", 64, "max_depth=64 is not allowed: it must be 1 to 63"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(name: str, value: Tensor | int | None, message: str) -> None:
    case = single([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1])
    token_ids, parents, start_loc = packed(case.trees)
    given = {"distributions": case.distributions, "draft_probs": case.draft_probs, "draft_rows": case.draft_rows}
    given |= {"draft_token_ids": token_ids, "parents": parents, "node_start_loc": start_loc}
    given |= {**case.options.for_draw(), "max_depth": 2}
    if name == "distributions":
        given[name] = RowDistributions(**{each: getattr(case.distributions, each)[:1] for each in RowDistributions.__slots__})
    else:
        given[name] = value.to(DEVICE) if isinstance(value, Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        reject_trees(**given)
