"""Draft trees: what follows from the parents, against the obvious walk; and what a drafter may hand over."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from hypothesis import given
from hypothesis import strategies as st

from titan.core.limits import MAX_NODES
from titan.core.proposals import TreeLimits, checked_trees
from titan.core.trees import EMPTY_TREE, NODE_DTYPES, DraftTree, DraftTrees, GrowthReport, NodeColumns

VOCAB_SIZE = 9


PARENTS = st.integers(0, MAX_NODES).flatmap(lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n))).map(list))


def ancestors(parent_of: list[int], node: int) -> list[int]:
    return [node, *ancestors(parent_of, parent_of[node])] if node >= 0 else []


@given(PARENTS)
def test_depths_ancestors_ranks_and_inner_nodes_follow_from_the_parents(parent_of: list[int]) -> None:
    tree = DraftTree(np.arange(len(parent_of)), np.array(parent_of, np.int32))
    shape = tree.topology
    assert tree.num_nodes == len(parent_of)
    assert shape.depths.tolist() == [len(ancestors(parent_of, node)) for node in range(tree.num_nodes)]
    for node, bits in enumerate(shape.ancestor_bits.view(np.uint64).tolist()):
        assert [i for i in range(64) if bits >> i & 1] == sorted(ancestors(parent_of, node))
    assert shape.child_ranks.tolist() == [parent_of[:node].count(parent) for node, parent in enumerate(parent_of)]
    inner = sorted(set(parent_of))
    assert shape.inner.tolist() == inner
    assert shape.inner_rows.tolist() == [inner.index(node) if node in inner else 0 for node in range(-1, tree.num_nodes)]
    chain = DraftTree.chain(tree.token_ids)
    assert shape.is_chain == (parent_of == chain.parents.tolist())
    assert chain.parents.tolist() == list(range(-1, len(parent_of) - 1)) and chain.topology.is_chain


def test_what_trees_of_a_shape_share_cannot_be_changed() -> None:
    tree = DraftTree(np.array([5, 6]), np.array([-1, -1], np.int32))
    for array in (DraftTree.chain([1, 2]).parents, tree.topology.depths, tree.topology.inner_rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_numbers_of_other_dtypes_become_those_of_trees() -> None:
    tree = DraftTree(np.array([5], np.int32), np.array([-1]), None, draft_slots=np.array([3]), scores=np.array([0.5]))  # type: ignore[arg-type]
    assert tree.draft_slots is not None and tree.scores is not None
    dtypes = [each.dtype for each in (tree.token_ids, tree.parents, tree.draft_slots, tree.scores)]
    assert dtypes == [np.int64, np.int32, np.int32, np.float32]


@pytest.mark.parametrize(
    ("token_ids", "parent_of", "others", "message"),
    [
        ([5, 6], [-1], {}, "parents has shape [1]: it must be [2], one per node"),
        ([[5]], [-1], {}, "token_ids has shape [1, 1]: it must be [1], one per node"),
        ([5], [[-1]], {}, "parents has shape [1, 1]: it must be [1], one per node"),
        ([5], [-1], {"draft_slots": np.zeros(2)}, "draft_slots has shape [2]: it must be [1], one per node"),
        ([5], [-1], {"draft_slots": np.zeros((1, 1))}, "draft_slots has shape [1, 1]: it must be [1], one per node"),
        ([5], [-1], {"scores": np.zeros(2)}, "scores has shape [2]: it must be [1], one per node"),
        ([5], [-1], {"scores": np.zeros((1, 1))}, "scores has shape [1, 1]: it must be [1], one per node"),
        ([1.5], [-1], {}, "token_ids has [1.5]: they must be integers"),
        ([5], [-1], {"draft_slots": np.array([0.5])}, "draft_slots has [0.5]: they must be integers"),
        ([5] * 64, range(-1, 63), {}, "a draft tree of 64 nodes is too large: at most 63 are allowed"),
        ([5, 6], [-1, 1], {}, "parents=[-1, 1] is not topological: -1 <= parents[i] < i must hold"),
        ([5, 6], [0, 0], {}, "parents=[0, 0] is not topological"),
        ([5, 6], [-2, 0], {}, "parents=[-2, 0] is not topological"),
        ([5, 6], [-1, 0], {"draft_probs": torch.ones(1, 8)}, "draft_probs has 1 rows: the tree has 2 nodes with children"),
        ([5], [-1], {"draft_probs": torch.ones(1, 8).double()}, "draft_probs is a Tensor of torch.float64: it must be a torch"),
        ([5], [-1], {"draft_probs": np.ones((1, 8), np.float32)}, "draft_probs is a ndarray of float32: it must be a"),
    ],
)
def test_what_is_no_tree_is_refused(token_ids: list[Any], parent_of: Any, others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DraftTree(np.array(token_ids), np.array(parent_of, np.int32), **others)


def test_a_chain_of_fractions_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("token_ids has [1.0, 2.5]: they must be integers")):
        DraftTree.chain(np.array([1, 2.5]))


# the trees of a step

LIMITS = TreeLimits([3, 4, 0], [False, True, True], [MAX_NODES] * 3)
BUSHY = np.array([-1, 0, -1], np.int32)
Q = torch.tensor([[0.5, 0.25, 0.25, *[0.0] * 6], [0.0, 1.0, *[0.0] * 7]])
SAMPLED = DraftTree(np.array([1, 1, 2]), BUSHY, Q)


def of(proposal: Any, limits: TreeLimits = LIMITS) -> DraftTrees:
    return checked_trees(
        proposal, limits, drafter="mine", vocab_size=VOCAB_SIZE, upload=make_back_end("torch").upload, device=torch.device("cpu")
    )


def test_trees_are_joined_as_they_are() -> None:
    """Scores, slots and q where they are given; the rows of q are those of the root and the nodes that have children.

    One by one, they are what they were; and without q once they are on the host.
    """
    scored = DraftTree(np.array([7, 8]), np.array([-1, -1]), draft_slots=np.array([2, -1]), scores=np.array([-0.5, -1.0]))
    trees = of([scored, SAMPLED, EMPTY_TREE])
    assert (trees.num_rows, trees.num_nodes, trees.counts.tolist(), trees.start_loc.tolist()) == (3, 5, [2, 3, 0], [0, 2, 5, 5])
    flags = trees.is_chain, trees.is_sampled, trees.has_scores
    assert [each.tolist() for each in flags] == [[False, False, True], [False, True, False], [True, False, False]]
    assert [column.tolist() for column in trees.nodes] == [
        [7, 8, 1, 1, 2],
        [-1, -1, -1, 0, -1],
        [1, 1, 1, 2, 1],
        [0b1, 0b10, 0b1, 0b11, 0b100],
        [-0.5, -1.0, 0.0, 0.0, 0.0],
        [2, -1, -1, -1, -1],
    ]
    assert [column.dtype for column in trees.nodes] == list(NODE_DTYPES)
    assert trees.draft_probs is not None and trees.draft_rows is not None and trees.draft_rows.dtype == torch.int32
    assert len(trees.draft_rows) == trees.num_nodes + trees.num_rows
    of_sampled = trees.draft_rows[2 + 1 : 5 + 2].long()  # its root, then its nodes
    assert torch.equal(trees.draft_probs[of_sampled[[0, 1]]], Q)
    for row, tree in enumerate((scored, SAMPLED, EMPTY_TREE)):
        found = trees[row]
        assert (found.token_ids.tolist(), found.parents.tolist()) == (tree.token_ids.tolist(), tree.parents.tolist())
        assert (found.draft_probs is None) == (tree.draft_probs is None) and found.draft_slots is not None
        assert tree.draft_probs is None or torch.equal(tree.draft_probs, found.draft_probs)  # type: ignore[arg-type]
        assert found.draft_slots.tolist() == ([2, -1] if row == 0 else [-1] * tree.num_nodes)
        assert (found.scores is None) == (tree.scores is None)
        assert tree.scores is None or np.array_equal(tree.scores, found.scores)  # type: ignore[arg-type]
    assert trees.on_host([column.numpy() for column in trees.nodes])[1].draft_probs is None


NO_DISTRIBUTIONS = "gave draft_probs that are no distributions: each row must have numbers from 0 on that add up to 1"
EQUAL = "token ids [1, 1, 1] and parents [-1, 0, -1]: siblings must be sampled without replacement"
MISPLACED = "they must be [nodes with children, 9] on cpu, at temperatures above 0 only"


def second(**changes: Any) -> list[DraftTree]:
    return [EMPTY_TREE, replace(SAMPLED, **changes), EMPTY_TREE]


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        ([], "proposed 0 trees: the plan has 3 rows"),
        ([EMPTY_TREE] * 4, "proposed 4 trees: the plan has 3 rows"),
        (DraftTrees.empty(2, torch.device("cpu")), "proposed 2 trees: the plan has 3 rows"),
        ([DraftTree.chain([1] * 4), EMPTY_TREE, EMPTY_TREE], "proposed 4 nodes: at most 3 were allowed"),
        ([EMPTY_TREE, EMPTY_TREE, DraftTree.chain([1])], "proposed 1 nodes: at most 0 were allowed"),
        ([DraftTree.chain([1, 9]), *[EMPTY_TREE] * 2], "proposed token ids [1, 9]: allowed are 0 to 8"),
        ([DraftTree.chain([-1, 8]), *[EMPTY_TREE] * 2], "proposed token ids [-1, 8]: allowed are 0 to 8"),
        ([SAMPLED, EMPTY_TREE, EMPTY_TREE], f"gave draft_probs of shape [2, 9] on cpu at temperature 0: {MISPLACED}"),
        (second(draft_probs=Q[:, :8]), f"gave draft_probs of shape [2, 8] on cpu at temperature above 0: {MISPLACED}"),
        (second(draft_probs=Q.to("meta")), f"gave draft_probs of shape [2, 9] on meta at temperature above 0: {MISPLACED}"),
        (second(draft_slots=np.array([0, 64, -1])), "gave draft_slots [0, 64, -1]: allowed are -1 to 62"),
        (second(scores=np.array([-0.5, 7.0, -1.0], np.float32)), "gave scores [-0.5, 7.0, -1.0]: allowed are cumulative"),
        (second(scores=np.array([-0.5, np.nan, -1.0], np.float32)), "gave scores [-0.5, nan, -1.0]: allowed are cumulative"),
        (second(scores=np.array([-8.0, -0.25, -1.0], np.float32)), "gave scores [-8.0, -0.25, -1.0]: allowed are cumulative"),
        (second(scores=np.array([-0.5, -0.5, 0.25], np.float32)), "gave scores [-0.5, -0.5, 0.25]: allowed are cumulative"),
        (second(draft_slots=np.array([0, -2, -1])), "gave draft_slots [0, -2, -1]: allowed are -1 to 62"),
        (second(token_ids=np.array([1, 2, 2])), "gave draft_probs that are 0 at tokens that were sampled: q must be above 0 there"),
        (second(token_ids=np.array([1, 1, 1])), f"gave draft_probs for equal siblings, with {EQUAL}"),
        (second(draft_probs=Q.where(Q > 0, torch.nan)), NO_DISTRIBUTIONS),
        (second(draft_probs=Q.where(Q > 0, torch.inf)), NO_DISTRIBUTIONS),
        (second(draft_probs=Q + 0.1 * torch.eye(9)[4] - 0.1 * torch.eye(9)[5]), NO_DISTRIBUTIONS),
        (second(draft_probs=Q * torch.tensor([[1.0], [0.98]])), NO_DISTRIBUTIONS),
        (second(draft_probs=Q.log_softmax(-1)), NO_DISTRIBUTIONS),
    ],
)
def test_proposals_that_would_reach_what_is_not_theirs_are_refused(proposal: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the drafter 'mine' {message}")):
        of(proposal)


def test_a_q_that_was_rounded_is_made_to_add_up_to_1() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 3.0, 10.0):
        q = (torch.randn(99, 5000, generator=generator) * scale).bfloat16().softmax(-1).float()
        trees = [DraftTree.chain([int(row.argmax())], row[None]) for row in q]
        limits = TreeLimits([1] * 99, [True] * 99, [1] * 99)
        upload, device = make_back_end("torch").upload, torch.device("cpu")
        made = checked_trees(trees, limits, drafter="mine", vocab_size=5000, upload=upload, device=device)
        assert made.num_nodes == 99 and made.draft_probs is not None
        assert (made.draft_probs.double().sum(1) - 1).abs().max() < 1e-5 < (q.sum(1) - 1).abs().max()
        torch.testing.assert_close(made.draft_probs, q, rtol=0.01, atol=0)


def on_device(**changes: Any) -> DraftTrees:
    """Trees of three nodes, none, and none, that are ready; with some fields changed."""
    trees = of(second())
    columns = {name: changes.pop(name) for name in NodeColumns._fields if name in changes}
    return replace(trees, nodes=trees.nodes._replace(**columns), **changes)


@pytest.mark.parametrize("name", NodeColumns._fields)
def test_columns_that_would_be_misread_are_refused(name: str) -> None:
    dtype = getattr(NODE_DTYPES, name)
    other = torch.int32 if dtype != torch.int32 else torch.int64
    ones = [torch.ones(4, dtype=dtype), torch.ones(2, dtype=dtype), torch.ones(3, 1, dtype=dtype), torch.ones(3, dtype=other)]
    for column in (*ones, torch.ones(3, 2, dtype=dtype)[:, 0], torch.ones(3, dtype=dtype, device="meta")):
        found = f"the drafter 'mine' gave {name} of shape {list(column.shape)} and {column.dtype} on {column.device}"
        with pytest.raises(ValueError, match=re.escape(f"{found}: it must be [3] and {dtype} on cpu, contiguous")):
            of(on_device(**{name: column}))


@pytest.mark.parametrize(
    ("name", "dtype"), [("start_loc", np.int32), ("is_chain", np.int64), ("is_sampled", np.int8), ("has_scores", np.uint8)]
)
def test_flags_that_would_be_misread_are_refused(name: str, dtype: Any) -> None:
    with pytest.raises(ValueError, match="the drafter 'mine' gave start_loc or flags of another dtype or length"):
        of(on_device(**{name: getattr(on_device(), name).astype(dtype)}))


def test_a_report_of_growth_that_is_not_of_these_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the drafter 'mine' gave 2 first_scores of its growth: they must be 3"):
        of(on_device(growth=GrowthReport(1, 3, 0.1, np.zeros(2, np.float32))))


@pytest.mark.parametrize("score", [0.5, 1000.0, np.inf])
def test_first_scores_that_are_no_probabilities_are_refused(score: float) -> None:
    """Rounding may make one a little more than 1, and of some trees there are none."""
    scores = np.array([1e-6, score, np.nan], np.float32)
    with pytest.raises(ValueError, match="the drafter 'mine' gave first_scores above 0 of its growth"):
        of(on_device(growth=GrowthReport(1, 3, 0.1, scores)))
    of(on_device(growth=GrowthReport(1, 3, 0.1, np.minimum(scores, np.float32(1e-6)))))


@pytest.mark.parametrize("seconds", [0.0, -1.0, np.inf, np.nan])
def test_passes_that_took_no_time_are_refused(seconds: float) -> None:
    """Costs are followed by its logarithm."""
    with pytest.raises(ValueError, match=f"gave seconds={seconds} of its growth: they must be above 0 and finite, or None"):
        of(on_device(growth=GrowthReport(1, 3, seconds, np.zeros(3, np.float32))))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"draft_probs": None}, "draft_probs None and draft_rows [6] torch.int32 cpu"),
        ({"draft_rows": None}, "draft_probs [2, 9] torch.float32 cpu and draft_rows None"),
        ({"draft_probs": Q[:, :8].contiguous()}, "draft_probs [2, 8] torch.float32 cpu and"),
        ({"draft_probs": Q[0]}, "draft_probs [9] torch.float32 cpu and"),
        ({"draft_probs": Q.double()}, "draft_probs [2, 9] torch.float64 cpu and"),
        ({"draft_probs": Q.T.contiguous().T}, "draft_probs [2, 9] torch.float32 cpu and"),
        ({"draft_probs": Q.to("meta")}, "draft_probs [2, 9] torch.float32 meta and"),
        ({"draft_rows": torch.zeros(6, dtype=torch.int32, device="meta")}, "and draft_rows [6] torch.int32 meta"),
        ({"draft_rows": torch.zeros(5, dtype=torch.int32)}, "and draft_rows [5] torch.int32"),
        ({"draft_rows": torch.zeros(6, dtype=torch.int64)}, "and draft_rows [6] torch.int64"),
        ({"draft_rows": torch.zeros(12, dtype=torch.int32)[::2]}, "and draft_rows [6] torch.int32"),
    ],
)
def test_sampled_trees_without_readable_distributions_are_refused(changes: dict[str, Any], found: str) -> None:
    allowed = ": they must be [any, 9] torch.float32 and [6] torch.int32, contiguous and on cpu, where trees were sampled"
    with pytest.raises(ValueError, match=f"the drafter 'mine' gave .*{re.escape(found)}.*{re.escape(allowed)}"):
        of(on_device(**changes))
    of(on_device(**changes, is_sampled=np.zeros(3, np.bool_)))  # nobody reads them


def test_trees_that_are_ready_stay_where_they_are_if_they_hold_to_the_limits() -> None:
    trees = on_device()
    assert of(trees) is trees
    with pytest.raises(ValueError, match="the drafter 'mine' proposed 3 nodes: at most 2 were allowed"):
        of(on_device(), LIMITS._replace(num_nodes=[3, 2, 0]))
    with pytest.raises(ValueError, match="the drafter 'mine' sampled a tree at temperature 0: it may at temperatures above 0 only"):
        of(on_device(), LIMITS._replace(may_sample=[False] * 3))


def test_on_the_host_empty_places_are_left_out() -> None:
    """Of a tree with one node of three, one with none of two, and one that is whole."""
    places = [  # token, parent, depth, ancestor bits, score, slot
        (4, -1, 1, 1, -0.5, 3),
        (-1, -2, 1, 2, -torch.inf, -1),
        (-1, -2, 1, 4, -torch.inf, -1),
        (-1, -2, 1, 1, -torch.inf, -1),
        (-1, -2, 1, 2, -torch.inf, -1),
        (5, -1, 1, 1, -1.0, 0),
        (6, 0, 2, 3, -2.0, -1),
    ]
    nodes = NodeColumns(*map(torch.tensor, zip(*places, strict=True)))
    is_chain, has_scores = np.array([False, False, True]), np.array([True, True, False])
    trees = DraftTrees(np.array([0, 3, 5, 7]), is_chain, np.zeros(3, np.bool_), has_scores, nodes)
    found = trees.on_host([column.numpy() for column in nodes])
    assert found.start_loc.tolist() == [0, 1, 1, 3] and trees.start_loc.tolist() == [0, 3, 5, 7]
    assert list(zip(*(column.tolist() for column in found.nodes), strict=True)) == [places[0], *places[5:]]
    assert [found[row].token_ids.tolist() for row in range(3)] == [[4], [], [5, 6]]
    assert found[0].scores is not None and found[0].scores.tolist() == [-0.5]
    assert found[1].scores is not None and found[2].scores is None
    assert (trees.packed().is_chain.tolist(), trees.packed().start_loc.tolist()) == ([True, True, True], [0, 1, 1, 3])
    whole = on_device().on_host([column.numpy() for column in on_device().nodes])
    assert whole.draft_probs is None and whole.draft_rows is None and whole.start_loc.tolist() == [0, 0, 3, 3]
    assert DraftTrees.empty(2, torch.device("cpu"))[1].num_nodes == 0


def test_packed_trees_keep_their_rows_of_q() -> None:
    """Of an empty row, a tree with one empty place, and one with nothing else; each has an entry for its root."""
    nodes = NodeColumns(*map(torch.tensor, ([4, 5, -1, -1], [-1, -1, -2, -2], [1] * 4, [1, 2, 4, 1], [0.0] * 4, [0, -1, -1, -1])))
    flags, q = np.ones(3, np.bool_), torch.rand(9, 6)
    rows = torch.tensor([8, 10, 11, 12, 13, 20, 21], dtype=torch.int32)
    packed = DraftTrees(np.array([0, 0, 3, 4]), flags, flags, flags, nodes, q, rows).packed()
    assert packed.start_loc.tolist() == [0, 0, 2, 2] and packed.nodes.token_ids.tolist() == [4, 5]
    assert packed.is_chain.tolist() == [True, False, True] and packed.draft_probs is q
    assert packed.draft_rows is not None and packed.draft_rows.tolist() == [8, 10, 11, 12, 20]
    assert packed.draft_rows.dtype == torch.int32 and packed.packed().draft_rows is packed.draft_rows
