"""Choosing draft trees and verifying them: every back end against plain Python, with vectors in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from acceptance_reference import reference_draw, reference_probs, reference_reject, reference_walk
from interpreted import ON_CUDA, triton_backend
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.batch import prefix_sums
from titan.core.limits import MAX_NODES
from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees, NodeColumns, TreeLimits, chain_parents, topology
from titan.kernels.interfaces import Backend, Candidates, Verified
from titan.kernels.triton.backend import TritonBackend

Array = NDArray[np.float64]
Option = tuple[float, int, float, float]
PLAIN, GREEDY, CUT = (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.3, 6, 0.9, 0.05)
"""Temperature, top-k, top-p, min-p."""
INF, NAN = torch.inf, torch.nan


# Choosing trees.


def random_candidates(rng: np.random.Generator, num_requests: int, num_candidates: int) -> dict[str, NDArray[np.generic]]:
    """Forests in which about every second candidate is fed; scores often tie, and what is not finite has nothing below it."""
    shape = num_requests, num_candidates
    parent_slots, slots = np.full(shape, -1), np.full(shape, -1)
    scores = np.full(shape, -np.inf, np.float32)
    for i in range(num_requests):
        fed: list[tuple[int, np.float32]] = []  # slots and scores of those that may be parents
        kind = rng.integers(3)
        for j in range(num_candidates):
            parent = (len(fed) - 1, int(rng.integers(-1, len(fed))), -1)[kind]
            parent_slots[i, j], above = fed[parent] if parent >= 0 else (-1, np.float32(0))
            step = rng.choice([0, -0.0, -0.25, -1, -rng.random(), -np.inf, np.nan], p=[0.1, 0.1, 0.2, 0.2, 0.36, 0.02, 0.02])
            scores[i, j] = above + np.float32(step)
            if kind == 0 or rng.random() < 0.5:
                slots[i, j] = (len(fed) * 7 + 3) % 1000  # in no order
                fed.append((slots[i, j], scores[i, j]))
    return {"token_ids": rng.integers(0, 9, shape), "scores": scores, "parent_slots": parent_slots, "slots": slots}


def make_candidates(backend: Backend, columns: dict[str, NDArray[np.generic]], rows: Ints, num_nodes: Ints) -> Candidates:
    flags = np.zeros(len(rows), np.bool_)
    tensors = {name: torch.from_numpy(column).to(backend.device) for name, column in columns.items()}
    return Candidates(rows, num_nodes, flags, True, **tensors)


def best_tree(columns: dict[str, NDArray[np.generic]], i: int, num_nodes: int) -> tuple[list[int], list[int]]:
    """The candidates of request ``i`` that are chosen, in the order of the nodes, and the parents of these."""
    scores, slots, above = (columns[name][i].tolist() for name in ("scores", "slots", "parent_slots"))
    ranked = sorted((j for j in range(len(scores)) if np.isfinite(scores[j])), key=lambda j: (-scores[j], j))[:num_nodes]
    owner = {slots[j]: j for j in ranked if slots[j] >= 0}
    path: list[int] = []
    slot = -1
    while (child := next((j for j in ranked if above[j] == slot and j not in path), None)) is not None:
        path.append(child)
        slot = slots[child]
        if slot < 0:
            break
    order = [*path, *(j for j in ranked if j not in path)]
    return order, [order.index(owner[above[j]]) if above[j] >= 0 else -1 for j in order]


def assert_is_tree(trees: DraftTrees, row: int, columns: dict[str, NDArray[np.generic]], i: int) -> tuple[int, int]:
    """Compare a row of the trees with the choice of request ``i``: numbers of nodes and of empty places."""
    places = slice(int(trees.start_loc[row]), int(trees.start_loc[row + 1]))
    actual = {
        name: getattr(trees.nodes, name)[places].tolist() for name in ("token_ids", "parents", "depths", "scores", "draft_slots")
    }
    bits, num_places = trees.nodes.ancestor_bits[places].tolist(), places.stop - places.start
    order, parents = best_tree(columns, i, num_places)
    n, shape = len(order), topology(np.array(parents, np.int32).tobytes())
    num_empty = num_places - n
    assert actual["token_ids"] == [*columns["token_ids"][i, order].tolist(), *[-1] * num_empty]
    assert actual["parents"] == [*parents, *[-2] * num_empty]
    assert actual["depths"] == [*shape.depths.tolist(), *[1] * num_empty]
    assert actual["scores"] == [*columns["scores"][i, order].tolist(), *[-INF] * num_empty]
    assert actual["draft_slots"] == [*columns["slots"][i, order].tolist(), *[-1] * num_empty]
    assert bits == [*shape.ancestor_bits.tolist(), *(1 << node for node in range(n, num_places))]
    return n, num_empty


@pytest.mark.parametrize(
    ("num_candidates", "num_requests"),
    [(1, 4), (6, 20), (33, 12), (64, 8), (130, 6), (512, 4), pytest.param(512, 128, marks=ON_CUDA)],
)
def test_the_best_ancestor_closed_trees_are_chosen(backend: Backend, num_candidates: int, num_requests: int) -> None:
    rng = np.random.default_rng(num_candidates)
    columns, most = random_candidates(rng, num_requests, num_candidates), min(MAX_NODES, num_candidates)
    columns["scores"][-1, num_candidates // 9 :] = -np.inf
    num_nodes = rng.integers(0, most, num_requests, endpoint=True)
    num_nodes[-1] = most
    if num_candidates >= MAX_NODES:
        num_nodes[:3] = MAX_NODES, 1, MAX_NODES - 1
    rows = np.sort(rng.choice(num_requests + 3, num_requests, replace=False))  # others draft nothing
    trees = backend.trees.select([make_candidates(backend, columns, rows, num_nodes)], num_requests + 3)
    counts = np.zeros(num_requests + 3, np.int64)
    counts[rows] = num_nodes
    assert trees.counts.tolist() == counts.tolist() and trees.num_rows == len(counts)
    assert np.flatnonzero(trees.has_scores).tolist() == rows.tolist() and not trees.is_sampled.any()
    found = [assert_is_tree(trees, row, columns, i) for i, row in enumerate(rows.tolist())]
    num_whole, num_cut = sum(n > 1 and not empty for n, empty in found), sum(empty > 0 for _, empty in found)
    assert (num_whole and num_cut) or num_candidates == 1


def test_a_chain_of_63_nodes_is_as_deep_as_that(backend: Backend) -> None:
    levels = np.arange(MAX_NODES)[None]
    columns = {"token_ids": levels, "scores": np.zeros((1, MAX_NODES), np.float32), "parent_slots": levels - 1, "slots": levels}
    trees = backend.trees.select([make_candidates(backend, columns, np.array([0]), np.array([MAX_NODES]))], 1)
    assert trees.nodes.depths.tolist() == list(range(1, MAX_NODES + 1))
    assert trees.nodes.ancestor_bits.tolist() == [(1 << node) - 1 for node in range(1, MAX_NODES + 1)]


def test_requests_that_grow_in_other_ways_come_together_and_keep_their_q(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    first, second = random_candidates(rng, 3, 12), random_candidates(rng, 2, 5)
    probs = torch.rand(40, 11, generator=torch.Generator().manual_seed(0)).to(backend.device)
    probs_rows = rng.integers(0, 40, (2, 1 + int(second["slots"].max()) + 1))
    sampled = make_candidates(backend, second, np.array([0, 4]), np.array([5, 3]))
    sampled = replace(sampled, has_scores=False, is_chain=np.array([True, False]), probs=probs, probs_rows=probs_rows)
    trees = backend.trees.select([make_candidates(backend, first, np.array([1, 3, 5]), np.array([4, 12, 7])), sampled], 7)
    assert trees.counts.tolist() == [5, 4, 0, 12, 3, 7, 0]
    assert trees.is_sampled.tolist() == [i in (0, 4) for i in range(7)] and trees.is_chain.tolist() == [i == 0 for i in range(7)]
    assert trees.has_scores.tolist() == [i in (1, 3, 5) for i in range(7)]
    for row, (columns, i) in {0: (second, 0), 1: (first, 0), 3: (first, 1), 4: (second, 1), 5: (first, 2)}.items():
        assert_is_tree(trees, row, columns, i)
    assert trees.draft_probs is probs and trees.draft_rows is not None and trees.draft_rows.dtype == torch.int32
    for i, row in enumerate((0, 4)):
        slots = [-1, *trees.nodes.draft_slots[int(trees.start_loc[row]) : int(trees.start_loc[row + 1])].tolist()]
        entries = trees.draft_rows[int(trees.start_loc[row]) + row :][: len(slots)].tolist()
        assert entries == [probs_rows[i, 1 + slot] for slot in slots]


# Verifying them.


class Outcome(NamedTuple):
    path: list[int]
    final_token: int
    match: tuple[float, float] = (NAN, NAN)


def sampling_rows(options: Sequence[Option], first: int = 0) -> SamplingRows:
    """With the seeds and positions of the requests from the first one on."""
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in options]
    return SamplingRows.of((each, i * (2**60 + 12345) % 2**64, i * 5 + 7) for i, each in enumerate(params, first))


@dataclass(frozen=True)
class Case:
    """Trees of a plan, what the target says about those that are verified, and how these sample."""

    trees: list[DraftTree]
    logits: list[Tensor]  # of each verified tree, [1 + nodes, vocab]
    options: list[Option]  # of each verified tree
    rows: list[int] | None = None  # of the plan; None: all
    num_empty: list[int] | None = None  # empty places behind the nodes of each tree of the plan

    @property
    def verified(self) -> list[int]:
        return list(range(len(self.trees))) if self.rows is None else self.rows

    @property
    def sampling(self) -> SamplingRows:
        return sampling_rows(self.options)

    def by(self, backend: Backend, dtype: torch.dtype = torch.float32) -> list[Outcome]:
        trees, counts = self.on_device(backend), self.num_empty or [0] * len(self.trees)
        logits = []
        for row, each in zip(self.verified, self.logits, strict=True):
            logits += [each, torch.full((counts[row], each.shape[1]), NAN)]
        table = torch.cat(logits).to(backend.device, dtype)
        return outcomes(backend.trees.verify(table, trees, np.array(self.verified), self.sampling))

    def on_device(self, backend: Backend) -> DraftTrees:
        on_device = [
            replace(each, draft_probs=None if each.draft_probs is None else each.draft_probs.to(backend.device))
            for each in self.trees
        ]
        limits, vocab_size = [TreeLimits(MAX_NODES, may_sample=True)] * len(on_device), self.logits[0].shape[1]
        trees = DraftTrees.of(
            on_device, limits, drafter="test", vocab_size=vocab_size, upload=backend.upload, device=backend.device
        )
        return trees if self.num_empty is None else with_empty_places(trees, np.array(self.num_empty))

    def expected(self) -> list[Outcome]:
        """By residuals as vectors, with the same random numbers."""
        found, sampling = [], self.sampling
        for i, (row, logits, option) in enumerate(zip(self.verified, self.logits, self.options, strict=True)):
            tree, key = self.trees[row], (int(sampling.options["seed"][i]), int(sampling.options["position"][i]))
            depths = [0, *tree.topology.depths.tolist()]
            names = ("temperature", "top_k", "top_p", "min_p")
            is_fine = [bool(torch.isfinite(each.max())) for each in logits]
            p = torch.stack(
                [
                    reference_probs(each, **dict(zip(names, option, strict=True))) if fine else torch.full_like(each, NAN).double()
                    for each, fine in zip(logits, is_fine, strict=True)
                ]
            )

            def uniform(row: int, purpose: Purpose, sibling: int = 0, key=key, depths=depths) -> float:  # type: ignore[no-untyped-def]
                return float(philox_uniform(key[0], key[1] + depths[row], purpose, sibling=sibling))

            token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
            if tree.draft_probs is None or not token_ids:
                wanted = [reference_draw(p[j], uniform(j, Purpose.SAMPLE)) if fine else -1 for j, fine in enumerate(is_fine)]
                found.append(Outcome(*reference_walk(token_ids, parents, wanted)))
                continue
            q = tree.draft_probs.double()[np.maximum(tree.topology.inner_rows, 0)]
            path, token = reference_reject(
                p,
                q,
                token_ids,
                parents,
                coin=lambda row, rank, uniform=uniform: uniform(row, Purpose.ACCEPT, rank),  # type: ignore[misc]
                uniform=lambda row, is_inner, uniform=uniform: uniform(row, Purpose.RESIDUAL if is_inner else Purpose.SAMPLE),  # type: ignore[misc]
            )
            token = token if is_fine[1 + path[-1] if path else 0] else -1
            found.append(Outcome(path, token, (float(p[0, q[0].argmax()]), float(torch.minimum(p[0], q[0]).sum()))))
        return found

    def check(self, backend: Backend, dtype: torch.dtype = torch.float32) -> list[Outcome]:
        actual, expected = self.by(backend, dtype), self.expected()
        assert [each[:2] for each in actual] == [each[:2] for each in expected]
        np.testing.assert_allclose([each.match for each in actual], [each.match for each in expected], rtol=1e-5, atol=1e-6)
        return actual


def outcomes(result: Verified) -> list[Outcome]:
    found = []
    matches = [[NAN, NAN]] * len(result.paths) if result.matches is None else result.matches.tolist()
    for path, token, match in zip(result.paths.tolist(), result.final_tokens.tolist(), matches, strict=True):
        kept = [node for node in path if node >= 0]
        assert path == kept + [-1] * (len(path) - len(kept))
        found.append(Outcome(kept, token, tuple(match)))
    return found


def with_empty_places(trees: DraftTrees, num_empty: Ints) -> DraftTrees:
    """The trees with so many empty places behind their nodes."""
    starts = trees.start_loc
    counts = trees.counts + num_empty
    bits = np.concatenate([1 << np.arange(count) for count in counts])
    fillers = (-1, -2, 1, torch.from_numpy(bits).to(trees.nodes.token_ids.device), -INF, -1)
    start_loc = prefix_sums(counts)
    places = np.concatenate([np.arange(n) + first for n, first in zip(trees.counts, start_loc[:-1], strict=True)])
    entries = np.concatenate(
        [np.arange(n + 1) + first + i for i, (n, first) in enumerate(zip(trees.counts, start_loc, strict=False))]
    )
    columns = []
    for column, filler in zip(trees.nodes, fillers, strict=True):
        wide = column.new_zeros(len(bits)) + filler
        columns.append(wide.to(column.dtype).index_copy(0, torch.from_numpy(places).to(column.device), column))
    rows = trees.draft_rows
    if rows is not None:
        rows = rows.new_zeros(len(bits) + len(counts)).index_copy(0, torch.from_numpy(entries).to(rows.device), rows)
    assert int(starts[-1]) == len(places)
    is_chain, nodes = trees.is_chain & (num_empty == 0), NodeColumns(*columns)
    return DraftTrees(start_loc, is_chain, trees.is_sampled, trees.has_scores, nodes, trees.draft_probs, rows)


def random_parents(rng: np.random.Generator, num_nodes: int) -> NDArray[np.int32]:
    """A chain, a star, or anything between."""
    match rng.integers(4):
        case 0:
            return chain_parents(num_nodes)
        case 1:
            return np.full(num_nodes, -1, np.int32)
        case _:
            return np.array([rng.integers(-1, node) for node in range(num_nodes)], np.int32).reshape(num_nodes)


def sampled_tree(rng: np.random.Generator, parents: NDArray[np.int32], q: Array) -> DraftTree:
    """A tree whose siblings are sampled from q, [1 + nodes, vocab], without replacement, as long as it has tokens left."""
    kept: dict[int, int] = {-1: -1}
    token_ids: list[int] = []
    new_parents: list[int] = []
    taken: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        if parent not in kept:
            continue
        left = q[parent + 1].copy()
        left[taken.setdefault(parent, [])] = 0
        if left.sum() <= 1e-6:
            continue
        taken[parent].append(int(rng.choice(len(left), p=left / left.sum())))
        kept[node] = len(token_ids)
        token_ids.append(taken[parent][-1])
        new_parents.append(kept[parent])
    used = [q[parent + 1] for parent in sorted(taken, key=lambda parent: kept[parent]) if taken[parent]]
    return DraftTree(np.array(token_ids), np.array(new_parents, np.int32), torch.tensor(np.stack(used), dtype=torch.float32))


def sampled_case(kind: str, num_trees: int, vocab_size: int, *, seed: int, option: Option = PLAIN) -> Case:
    """Random trees of one kind of drafts."""
    rng = np.random.default_rng(seed)
    trees, logits = [], []
    for _ in range(num_trees):
        parents = random_parents(rng, int(rng.integers(1, 8)))
        scores = rng.normal(size=(len(parents) + 1, vocab_size)) * (25 if kind == "certain" else 1.5)
        q = np.exp(scores + rng.normal(size=scores.shape) * (3 if kind == "certain" else 0.7))
        if kind == "holes":
            q *= rng.random(q.shape) < 0.5
            q[:, 0] += 0.01
        elif kind == "apart":
            q[:, : vocab_size // 2] = 0
            scores[:, vocab_size // 2 :] = -np.inf
        elif kind == "equal":
            q = np.exp(scores)
        tree = sampled_tree(rng, parents, q / q.sum(-1, keepdims=True))
        trees.append(tree)
        logits.append(torch.from_numpy(scores[: tree.num_nodes + 1]).float())
    return Case(trees, logits, [option] * num_trees)


def matched_case(seed: int, sizes: Sequence[int], vocab_size: int, option: Option) -> Case:
    """Proposals that were not sampled, with tokens of a small vocabulary, so that siblings are often equal."""
    rng = np.random.default_rng(seed)
    trees = [DraftTree(rng.integers(0, 4, n), random_parents(rng, n)) for n in sizes]
    logits = [torch.from_numpy(rng.integers(0, 3, (n + 1, vocab_size))).float() for n in sizes]  # many are equal
    for each in logits:
        each[:, 4:] -= 1.0 if option == GREEDY else 9.0  # so that the first tokens are often wanted
        if option == CUT:  # which of equal ones is cut is not said
            each += torch.from_numpy(rng.random(each.shape)).float()
    return Case(trees, logits, [option] * len(sizes))


def num_trees_for(backend: Backend, number: int) -> int:
    """Fewer where an interpreter runs the kernels."""
    return number // 4 if isinstance(backend, TritonBackend) else number


@pytest.mark.parametrize(
    ("option", "dtype", "number"),
    [
        (GREEDY, torch.float32, 120),
        (GREEDY, torch.bfloat16, 60),
        (GREEDY, torch.float16, 24),
        (PLAIN, torch.float32, 48),
        (PLAIN, torch.bfloat16, 24),
        (CUT, torch.float32, 12),
    ],
)
def test_random_trees_are_walked_as_in_plain_python(backend: Backend, option: Option, dtype: torch.dtype, number: int) -> None:
    """Of equal logits the first counts, and of rows that are not finite there is no token."""
    rng = np.random.default_rng(2)
    sizes = [0, 1, {GREEDY: MAX_NODES, PLAIN: 20, CUT: 6}[option], *rng.integers(0, 13, num_trees_for(backend, number))]
    case = matched_case(3, sizes, {GREEDY: 600, PLAIN: 200, CUT: 12}[option], option)
    for each in case.logits:
        each[torch.from_numpy(rng.random(len(each)) < 0.05), 7] = NAN
    case.logits[1][0, 7] = NAN
    found = case.check(backend, dtype)
    assert sum(bool(each.path) for each in found) >= len(found) // 4 and any(each.final_token < 0 for each in found)


def test_a_chain_of_63_nodes_is_accepted_to_its_end(backend: Backend) -> None:
    logits = torch.zeros(MAX_NODES + 1, 5)
    logits[:, 2], logits[-1, 3] = 50.0, 100.0
    for option in (GREEDY, PLAIN):
        [outcome] = Case([DraftTree.chain([2] * MAX_NODES)], [logits], [option]).check(backend)
        assert outcome[:2] == (list(range(MAX_NODES)), 3)


def test_the_first_of_equal_siblings_is_accepted(backend: Backend) -> None:
    tree = DraftTree(np.array([4, 7, 7, 5, 5]), np.array([-1, -1, -1, 2, 1], np.int32))
    logits = torch.nn.functional.one_hot(torch.tensor([7, 0, 5, 0, 0, 9]), 10).float() * 90
    case = Case([tree, tree], [logits] * 2, [GREEDY, PLAIN])
    assert [each[:2] for each in case.check(backend)] == [([1, 4], 9)] * 2


SAMPLED: dict[str, tuple[int, int, int, Option]] = {
    "near": (30, 9, 1, PLAIN),
    "holes": (20, 9, 2, PLAIN),
    "apart": (12, 8, 3, PLAIN),
    "equal": (12, 6, 4, PLAIN),
    "certain": (20, 7, 5, PLAIN),
    "cut": (4, 12, 6, CUT),
    "large": (6, 4096 + 900, 7, PLAIN),
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_sampled_trees_are_verified_as_by_residual_vectors(backend: Backend, kind: str) -> None:
    number, vocab_size, seed, option = SAMPLED[kind]
    found = sampled_case(kind, number, vocab_size, seed=seed, option=option).check(backend)
    if kind in ("near", "holes", "certain"):
        assert {0, 1, 2} <= {len(each.path) for each in found}, "hardly any draft token was accepted: nothing is tested"


def mixed_case(seed: int) -> Case:
    """Greedy and sampling requests, with proposals that were sampled and not, roots alone, and rows that nothing is verified of."""
    rng = np.random.default_rng(seed)
    parts = [
        matched_case(seed, [5, 0, 3], 9, GREEDY),
        matched_case(seed + 1, [4, 0, 6], 9, PLAIN),
        matched_case(seed + 2, [3, 2], 9, CUT),
        sampled_case("near", 4, 9, seed=seed),
        sampled_case("holes", 3, 9, seed=seed + 1, option=(0.7, 5, 1.0, 0.0)),
    ]
    every = [each for part in parts for each in zip(part.trees, part.logits, part.options, strict=True)]
    trees, logits, options = zip(*(every[i] for i in rng.permutation(len(every))), strict=True)
    rows = np.sort(rng.choice(len(every) + 4, len(every), replace=False)).tolist()
    plan = [EMPTY_TREE] * (len(every) + 4)
    for row, tree in zip(rows, trees, strict=True):
        plan[row] = tree
    return Case(plan, list(logits), list(options), rows)


def test_all_kinds_side_by_side(backend: Backend) -> None:
    for seed in (1,) if isinstance(backend, TritonBackend) else (1, 2, 3):
        found = mixed_case(seed).check(backend)
        assert 3 < sum(bool(each.path) for each in found) < len(found)


def over(vocab_size: int, case: Case) -> Case:
    """The case over a larger vocabulary, of which all other tokens are impossible: no sample is near the border between two."""
    ids = torch.from_numpy(np.sort(np.random.default_rng(0).permutation(vocab_size)[: case.logits[0].shape[1]]))

    def wide(values: Tensor, filler: float) -> Tensor:
        return values.new_full((len(values), vocab_size), filler).index_copy(1, ids, values)

    trees = [
        replace(
            tree,
            token_ids=ids.numpy()[tree.token_ids],
            draft_probs=None if tree.draft_probs is None else wide(tree.draft_probs, 0.0),
        )
        for tree in case.trees
    ]
    return replace(case, trees=trees, logits=[wide(each, -INF) for each in case.logits])


@pytest.mark.parametrize(("num_trees", "vocab_size"), [(3, 300), pytest.param(64, 128_256, marks=ON_CUDA)])
def test_trees_over_a_real_vocabulary(num_trees: int, vocab_size: int) -> None:
    sizes = [MAX_NODES, 0, *np.random.default_rng(1).integers(0, 13, num_trees)]
    sampled = [sampled_case(kind, num_trees, 9, seed=3) for kind in ("near", "holes", "certain")]
    for case in (*sampled, matched_case(4, sizes, 9, GREEDY), matched_case(5, sizes, 9, PLAIN)):
        found = over(vocab_size, case).check(triton_backend())
        assert any(each.path for each in found)


def test_empty_places_change_nothing(backend: Backend) -> None:
    """Some behind the nodes of every other tree, with rows of logits that nobody looks at; and trees of empty places alone."""
    for seed in (2,) if isinstance(backend, TritonBackend) else (1, 2, 3):
        case = mixed_case(seed)
        num_empty = [(i % 2) * 3 if i in case.verified else 0 for i in range(len(case.trees))]
        case.logits[2][0] = NAN  # nothing can be sampled, and an empty place has no token either
        replace(case, num_empty=num_empty).check(backend)


def test_requests_without_draft_tokens_sample_as_without_speculation(backend: Backend) -> None:
    """The first token whose running sum exceeds the uniform number, which is keyed by seed and position."""
    for vocab_size in (1, 3, 512, 513, 1500):
        number = num_trees_for(backend, 80)
        logits = torch.randn(number, 1, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
        logits[:, :, ::3] -= 200.0 if vocab_size > 1 else 0.0  # impossible
        options = [PLAIN, (0.5, 0, 1.0, 0.0), (3.0, 0, 1.0, 0.0), GREEDY] * (number // 4)
        Case([EMPTY_TREE] * number, list(logits), options).check(backend)


def test_a_tree_does_not_depend_on_its_neighbours(backend: Backend) -> None:
    """Nor on whether a neighbour cuts its distribution."""
    case = replace(sampled_case("near", 4, 9, seed=9), options=[PLAIN, CUT, PLAIN, PLAIN])
    together = case.by(backend)
    for i, (tree, logits) in enumerate(zip(case.trees, case.logits, strict=True)):
        alone = Case([tree], [logits], [PLAIN]).on_device(backend)
        result = backend.trees.verify(logits.to(backend.device), alone, np.array([0]), sampling_rows([case.options[i]], first=i))
        assert outcomes(result) == together[i : i + 1]


def star(p: list[float], q: list[float], token_ids: list[int], num_broken: int = 0) -> Case:
    """These tokens as children of the root; rows of logits from the end on hold NaN."""
    tree = DraftTree(np.array(token_ids), np.full(len(token_ids), -1, np.int32), torch.tensor([q]))
    logits = torch.tensor([p] * (len(token_ids) + 1)).log()
    logits[len(logits) - num_broken :, 0] = NAN
    return Case([tree], [logits], [PLAIN])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's in the interpreter
@pytest.mark.parametrize(
    ("p", "q", "token_ids", "path", "finals"),
    [
        ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0], [], {1}),  # impossible for the target
        ([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0, 2], [], {1, 2}),  # q had no mass left for the second child
        ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0], [], {1}),  # impossible for both, and no residual is left
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1], [0], {0, 1}),  # the same distribution
        ([0.0, 1.0, 0.0], [0.4, 0.2, 0.4], [2, 1], [1], {1}),  # all that the residual has left
        ([0.0, 1.0, 0.0], [0.4, 0.2, 0.4], [2, 0], [], {1}),
    ],
)
def test_outcomes_that_are_certain(
    backend: Backend, p: list[float], q: list[float], token_ids: list[int], path: list[int], finals: set[int]
) -> None:
    case = star(p, q, token_ids)
    trees = unchecked(case, backend)
    logits = case.logits[0].to(backend.device)
    [outcome] = outcomes(backend.trees.verify(logits, trees, np.array([0]), case.sampling))
    assert outcome.path == path and outcome.final_token in finals


def unchecked(case: Case, backend: Backend) -> DraftTrees:
    """The tree of a star, even where q is 0 at one of its tokens, which a drafter may not propose."""
    [tree] = case.trees
    assert tree.draft_probs is not None
    flag, shape = np.ones(1, np.bool_), tree.topology
    arrays = [tree.token_ids, tree.parents, shape.depths.copy(), shape.ancestor_bits.copy(), np.zeros(tree.num_nodes, np.float32)]
    *columns, rows = backend.upload([*arrays, np.full(tree.num_nodes, -1, np.int32), np.zeros(tree.num_nodes + 1, np.int32)])
    draft_probs = tree.draft_probs.to(backend.device)
    return DraftTrees(prefix_sums([tree.num_nodes]), ~flag, flag, ~flag, NodeColumns(*columns), draft_probs, rows)


def test_a_row_that_is_not_finite_ends_the_path_without_a_token(backend: Backend) -> None:
    for num_broken, path in ((1, [0]), (2, [])):
        [outcome] = star([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1], num_broken).by(backend)
        assert outcome[:2] == (path, -1)
        assert np.isnan(outcome.match).all() == (num_broken == 2)


# Sampled output, which must have the target's distribution.

VOCAB_SIZE = 4
TARGET, DRAFT = np.random.default_rng(5).dirichlet(np.ones(VOCAB_SIZE), size=(2, VOCAB_SIZE + 1))
PARENTS = np.array([-1, 0, -1, 0], np.int32)


def token_counts(backend: Backend, num_trees: int, change: Callable[[Tensor], Tensor] = lambda draft_probs: draft_probs) -> Array:
    """How often each token comes out first and second, where trees sampled from `DRAFT` are verified against `TARGET`.

    A row's distributions are those behind its token; ``change`` is done to q before the verification. [vocab + 1, vocab]: first
    tokens, then second tokens by the first one.
    """
    rng = np.random.default_rng(11)
    trees, logits = [], []
    for _ in range(num_trees):
        tokens = [-1] * (len(PARENTS) + 1)
        for node in np.unique(PARENTS).tolist():
            children = np.flatnonzero(np.equal(PARENTS, node))
            sampled = rng.choice(VOCAB_SIZE, size=len(children), replace=False, p=DRAFT[tokens[node + 1] + 1])
            for child, token in zip(children, sampled, strict=True):
                tokens[child + 1] = int(token)
        contexts = np.array(tokens) + 1
        draft_probs = torch.tensor(DRAFT[contexts[np.unique(PARENTS) + 1]], dtype=torch.float32)
        trees.append(DraftTree(np.array(tokens[1:]), PARENTS, change(draft_probs)))
        logits.append(torch.from_numpy(np.log(TARGET[contexts])).float())
    counts = np.zeros((VOCAB_SIZE + 1, VOCAB_SIZE))
    for tree, outcome in zip(trees, Case(trees, logits, [PLAIN] * num_trees).by(backend), strict=True):
        emitted = [*tree.token_ids[outcome.path].tolist(), outcome.final_token]
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
    return float(stats.chi2.sf(sum(result.statistic for result in results), 2 * (VOCAB_SIZE - 1)))


def test_tokens_are_distributed_as_the_targets(backend: Backend) -> None:
    assert p_value(token_counts(backend, 80 if isinstance(backend, TritonBackend) else 600)) > 1e-3


def test_the_chi_square_notices_a_wrong_q(backend: Backend) -> None:
    assert p_value(token_counts(backend, 60, lambda draft_probs: (draft_probs + 1.0) / (1.0 + VOCAB_SIZE))) < 1e-4
