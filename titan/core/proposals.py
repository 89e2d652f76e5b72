"""What a drafter may propose, and how its proposal becomes the trees of a step."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import torch

from titan.core.arrays import Ints
from titan.core.checks import shown
from titan.core.trees import NODE_DTYPES, DraftTree, DraftTrees, NodeColumns, Upload

MASS_TOLERANCE = 0.01
"""Largest difference of the sum of a q from 1; rounding to bfloat16 stays below it."""

SCORE_ROUNDING = 1e-3
"""Most by which rounding makes the log-probability of a token that is sure larger than 0."""


class TreeLimits(NamedTuple):
    """Limits on what a drafter may propose, one entry per row of a plan."""

    num_nodes: Sequence[int]
    may_sample: Sequence[bool]  # whether tokens may be sampled: at temperatures above 0 only
    num_slots: Sequence[int]  # reserved after the root


def checked_trees(
    proposal: Sequence[DraftTree] | DraftTrees,
    limits: TreeLimits,
    *,
    drafter: str,
    vocab_size: int,
    upload: Upload,
    device: torch.device,
) -> DraftTrees:
    """Return a drafter's proposal as trees of the step, checked before it could touch slots or embeddings outside its request.

    Of each `DraftTree`, tokens, slots, shape, scores and q are checked. Of `DraftTrees`, whose values may be on a device, only
    shapes, dtypes and devices are checked. The drafter is responsible for the values: tokens are in the vocabulary, parents
    precede their children, no score is above its parent's, siblings of sampled trees differ, and all ``draft_rows`` exist.

    Args:
        proposal: one tree per row of the plan, or all trees on the device.
        limits: of the rows.
        drafter: its name, for errors.
        vocab_size: of the target.
        upload: uploads arrays to the device; ``draft_probs`` must be there already.
        device: where the trees are verified.

    Raises:
        ValueError: the proposal breaks a rule; the message has what was found and what is allowed.
    """
    if isinstance(proposal, DraftTrees):
        num_rows = proposal.num_rows
    elif isinstance(proposal, Sequence) and all(isinstance(tree, DraftTree) for tree in proposal):
        num_rows = len(proposal)
    else:
        raise ValueError(
            f"the drafter {drafter!r} proposed {shown(proposal)}: propose() must return a list of one DraftTree per row of the "
            f"plan, or DraftTrees"
        )
    if num_rows != len(limits.num_nodes):
        raise ValueError(f"the drafter {drafter!r} proposed {num_rows} trees: the plan has {len(limits.num_nodes)} rows")
    if isinstance(proposal, DraftTrees):
        _check_trees(proposal, limits, drafter, vocab_size, device)
        return proposal
    if not any(len(tree.token_ids) for tree in proposal):
        return DraftTrees.empty(num_rows, device)
    for tree, most, may_sample, num_slots in zip(proposal, *limits, strict=True):
        _check_tree(tree, most, may_sample, num_slots, drafter, vocab_size, device)
    return _join(proposal, upload)


def placeholder_chains(lengths: Sequence[int], upload: Upload, device: torch.device) -> DraftTrees:
    """Return chains of these lengths with tokens 0, for passes that are only run to be measured."""
    limits = TreeLimits(lengths, [False] * len(lengths), lengths)
    chains = [DraftTree.chain([0] * length) for length in lengths]
    return checked_trees(chains, limits, drafter="profile", vocab_size=1, upload=upload, device=device)


def _join(trees: Sequence[DraftTree], upload: Upload) -> DraftTrees:
    is_sampled = [tree.draft_probs is not None and tree.num_nodes > 0 for tree in trees]
    draft_rows = list[Ints]()
    num_inner = 0  # inner nodes of the sampled trees so far
    for tree, has_probs in zip(trees, is_sampled, strict=True):
        draft_rows.append(num_inner + tree.topology.inner_rows)
        num_inner += len(tree.topology.inner) if has_probs else 0
    columns_of_trees = (  # in the order of `NodeColumns`
        (
            *(tree.token_ids, tree.parents, tree.topology.depths, tree.topology.ancestor_bits),
            np.zeros(tree.num_nodes, np.float32) if tree.scores is None else tree.scores,
            np.full(tree.num_nodes, -1, np.int32) if tree.draft_slots is None else tree.draft_slots,
        )
        for tree in trees
    )
    columns = map(np.concatenate, zip(*columns_of_trees, strict=True))
    *nodes, rows = upload([*columns, np.concatenate(draft_rows).astype(np.int32)])
    given = [tree.draft_probs for tree in trees if tree.draft_probs is not None and tree.num_nodes]
    probs = [each / each.sum(1, keepdim=True) for each in given]  # a rounded q adds up to 1 only about
    return DraftTrees(
        start_loc=np.cumsum([0, *(tree.num_nodes for tree in trees)]),
        is_chain=np.array([tree.topology.is_chain for tree in trees]),
        is_sampled=np.array(is_sampled),
        has_scores=np.array([tree.scores is not None for tree in trees]),
        nodes=NodeColumns(*nodes),
        draft_probs=torch.cat(probs) if probs else None,
        draft_rows=rows if probs else None,
    )


def _check_trees(trees: DraftTrees, limits: TreeLimits, drafter: str, vocab_size: int, device: torch.device) -> None:
    """Check shapes, dtypes, devices and flags, without reading values from the device."""
    name = f"the drafter {drafter!r}"
    for row in np.flatnonzero(trees.counts > limits.num_nodes).tolist():
        _check_count(int(trees.counts[row]), limits.num_nodes[row], drafter)
    flags = (trees.is_chain, trees.is_sampled, trees.has_scores)
    if trees.start_loc.dtype != np.int64 or any(each.dtype != np.bool_ or len(each) != trees.num_rows for each in flags):
        raise ValueError(f"{name} gave start_loc or flags of another dtype or length: they must be int64 and bool, one per row")
    if (growth := trees.growth) is not None:
        if len(growth.first_scores) != trees.num_rows:
            raise ValueError(f"{name} gave {len(growth.first_scores)} first_scores of its growth: they must be {trees.num_rows}")
        if (growth.first_scores > SCORE_ROUNDING).any():
            raise ValueError(f"{name} gave first_scores above 0 of its growth: they must be log-probabilities, or NaN")
        if growth.seconds is not None and not 0 < growth.seconds < inf:
            raise ValueError(f"{name} gave seconds={growth.seconds} of its growth: they must be above 0 and finite, or None")
    num_nodes = trees.num_nodes
    for field_name, column, dtype in zip(NodeColumns._fields, trees.nodes, NODE_DTYPES, strict=True):
        is_fine = column.shape == (num_nodes,) and column.dtype == dtype and column.device == device
        if not is_fine or not column.is_contiguous():
            raise ValueError(
                f"{name} gave {field_name} of shape {list(column.shape)} and {column.dtype} on {column.device}: it must be "
                f"[{num_nodes}] and {dtype} on {device}, contiguous"
            )
    if trees.is_sampled.any():
        if not all(limits.may_sample[row] for row in np.flatnonzero(trees.is_sampled).tolist()):
            raise ValueError(f"{name} sampled a tree at temperature 0: it may at temperatures above 0 only")
        probs, rows = trees.draft_probs, trees.draft_rows
        num_entries = num_nodes + trees.num_rows
        if not (
            (probs is not None and probs.shape[1:] == (vocab_size,) and probs.dtype == torch.float32 and probs.is_contiguous())
            and (rows is not None and rows.shape == (num_entries,) and rows.dtype == torch.int32 and rows.is_contiguous())
            and probs.device == rows.device == device
        ):
            found = [None if each is None else f"{list(each.shape)} {each.dtype} {each.device}" for each in (probs, rows)]
            raise ValueError(
                f"{name} gave draft_probs {found[0]} and draft_rows {found[1]}: they must be [any, {vocab_size}] torch.float32 "
                f"and [{num_entries}] torch.int32, contiguous and on {device}, where trees were sampled"
            )


def _check_count(num_nodes: int, most: int, drafter: str) -> None:
    if num_nodes > most:
        raise ValueError(f"the drafter {drafter!r} proposed {num_nodes} nodes: at most {most} were allowed")


def _check_tree(
    tree: DraftTree, most: int, may_sample: bool, num_slots: int, drafter: str, vocab_size: int, device: torch.device
) -> None:
    """Check the tree of a row, given its entries of `TreeLimits`."""
    _check_count(tree.num_nodes, most, drafter)
    token_ids = tree.token_ids
    if tree.num_nodes and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise ValueError(f"the drafter {drafter!r} proposed token ids {token_ids.tolist()}: allowed are 0 to {vocab_size - 1}")
    slots, probs, scores = tree.draft_slots, tree.draft_probs, tree.scores
    if scores is not None and not (np.isfinite(scores) & (scores <= np.append(scores, 0.0)[tree.parents])).all():
        raise ValueError(
            f"the drafter {drafter!r} gave scores {scores.tolist()}: allowed are cumulative log-probabilities, finite, at most 0, "
            f"and none above its parent's"
        )
    if slots is not None and tree.num_nodes and not -1 <= slots.min() <= slots.max() < num_slots:
        raise ValueError(f"the drafter {drafter!r} gave draft_slots {slots.tolist()}: allowed are -1 to {num_slots - 1}")
    if probs is None:
        return
    if not may_sample or probs.shape[1:] != (vocab_size,) or probs.device != device:
        where = "above 0" if may_sample else "0"
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs of shape {list(probs.shape)} on {probs.device} at temperature {where}: they "
            f"must be [nodes with children, {vocab_size}] on {device}, at temperatures above 0 only"
        )
    if not ((probs >= 0).all() & ((probs.sum(1) - 1).abs() < MASS_TOLERANCE).all()):
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs that are no distributions: each row must have numbers from 0 on that add up "
            f"to 1"
        )
    if len(set(zip(tree.parents.tolist(), token_ids.tolist(), strict=True))) < tree.num_nodes:
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs for equal siblings, with token ids {token_ids.tolist()} and parents "
            f"{tree.parents.tolist()}: siblings must be sampled without replacement"
        )
    rows = torch.from_numpy(tree.topology.inner_rows[1 + tree.parents]).to(device)
    q = probs[rows, torch.from_numpy(token_ids).to(device)]
    if not (q > 0).all():
        raise ValueError(
            f"the drafter {drafter!r} gave draft_probs that are 0 at tokens that were sampled: q must be above 0 there"
        )
