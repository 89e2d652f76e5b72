"""Growth of draft trees by passes of a draft model: the general form, for any runner's `forward`.

The host knows before the first pass how many nodes are fed at each depth. Tokens and probabilities stay on the device until all
passes are done and `TreeOps.select` chooses the trees. The host reads a result between passes only where all trees that still grow
are beams with a `Worth`: whether the next pass pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from titan.core.arrays import Ints
from titan.core.batch import AttentionLayout, NodeQueries, RaggedBatch, join_rows, physical_slots, prefix_sums
from titan.core.growth import BeamSpec, Feed, ShapeSpec, block_table_of
from titan.core.trees import DraftTrees, GrowthReport
from titan.kernels.beam_growth import BeamGrowth
from titan.kernels.interfaces import Backend, Candidates
from titan.kernels.shape_growth import ShapeGrowth

Forward = Callable[[RaggedBatch], Tensor]
"""A pass of the draft model that returns logits [L, vocab of the draft]."""


class Growth(Protocol):
    """Grows the trees of n requests together, depth by depth.

    Args:
        feeds: n feeds, whose specs this way of growing takes together.
        logits: [n, V], of their roots.
        backend: the one that the draft runs on.
    """

    def __init__(self, feeds: Sequence[Feed], logits: Tensor, backend: Backend) -> None: ...

    @property
    def rows(self) -> Ints:
        """Rows of the plan, [n]."""
        ...

    @property
    def first_scores(self) -> Tensor | None:
        """Log-probabilities, float32 [n], that the draft gives the first children; ``None``: its trees have no scores."""
        ...

    @property
    def gain(self) -> Tensor | None:
        """Profit of the next pass, [], as a multiple of its price; ``None``: infinite."""
        ...

    @property
    def fed_slots(self) -> Sequence[Sequence[Ints]]:
        """Slots where nodes are fed, per request and depth, from depth 1 on; counted from the slot after the root."""
        ...

    def frontier(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return the r nodes fed at a depth, request by request: tokens, and ancestor bits over the slots after the root.

        Returns:
            int64 [r] and int64 [r].
        """
        ...

    def extend(self, depth: int, logits: Tensor) -> None:
        """Add the children of the nodes that were fed at a depth, from their logits, [r, V]."""
        ...

    def candidates(self) -> Candidates:
        """Return the nodes of all depths, of which `TreeOps.select` makes trees."""
        ...


def grow_by_passes(
    forward: Forward, backend: Backend, feeds: Sequence[Feed], num_rows: int, vocab_size: int, block_size: int
) -> DraftTrees:
    """Feed the tokens that each request lacks in one pass, then grow all trees together, one pass per depth over all frontiers.

    Args:
        forward: runs a pass of the draft.
        backend: the one that the draft runs on.
        feeds: as in `titan.kernels.interfaces.Runner.grow`.
        num_rows: as there.
        vocab_size: as there.
        block_size: tokens per KV block.
    """
    num_rows_of_passes = list[int]()
    seconds = 0.0
    first_scores = np.full(num_rows, np.nan, np.float32)

    def run(batch: RaggedBatch) -> Tensor:
        nonlocal seconds
        start = time.perf_counter()
        logits = forward(batch)
        seconds += time.perf_counter() - start
        num_rows_of_passes.append(len(batch.token_ids))
        return logits

    def report() -> GrowthReport:
        return GrowthReport(
            num_passes=len(num_rows_of_passes),
            num_rows=sum(num_rows_of_passes),
            seconds=seconds if backend.is_host else None,  # other devices compute beside the host
            first_scores=first_scores,
        )

    root_logits = run(root_batch(feeds, block_size))
    growing = [feed for feed in feeds if feed.spec is not None]
    if not growing:
        return replace(DraftTrees.empty(num_rows, backend.device), growth=report())
    draft_vocab_size = root_logits.shape[-1]
    root_logits = of_vocabulary(root_logits, vocab_size)
    groups = _group(growing)
    growths: list[Growth] = []
    for kind, members in groups:
        logits = root_logits if len(members) == len(growing) else root_logits[backend.upload([np.array(members)])[0]]
        growths.append(kind([growing[i] for i in members], logits, backend))
    ordered = [growing[i] for _, members in groups for i in members]
    slots_of = [growth.fed_slots for growth in growths]
    for depth, layout in enumerate(_lay_out_frontiers(ordered, [*chain(*slots_of)], block_size), start=1):
        active = [growth for growth, slots in zip(growths, slots_of, strict=True) if max(map(len, slots)) >= depth]
        gains = [growth.gain for growth in active if growth.gain is not None]
        if len(gains) == len(active) and torch.stack(gains).sum().item() <= 1:
            break
        token_ids, bits = zip(*(growth.frontier(depth) for growth in active), strict=True)
        # a shape may have more children than the draft has tokens
        fed = _cat(token_ids).clamp(max=draft_vocab_size - 1) if vocab_size > draft_vocab_size else _cat(token_ids)
        batch = replace(layout, nodes=NodeQueries(layout.logits_start_loc, fed, _cat(bits), None))
        of_growths = of_vocabulary(run(batch), vocab_size).split([len(each) for each in token_ids])
        for growth, logits in zip(active, of_growths, strict=True):
            growth.extend(depth, logits)
    trees = backend.trees.select([growth.candidates() for growth in growths], num_rows)
    if backend.is_host:
        trees = trees.packed()
        for growth in growths:
            if growth.first_scores is not None:
                first_scores[growth.rows] = growth.first_scores.numpy()
    return replace(trees, growth=report())


def of_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Pad logits with -inf for tokens that the draft lacks, or cut tokens that are not proposed: [any, vocab_size]."""
    num_missing = vocab_size - logits.shape[-1]
    return pad(logits, (0, num_missing), value=float("-inf")) if num_missing > 0 else logits[..., :vocab_size]


def root_batch(feeds: Sequence[Feed], block_size: int) -> RaggedBatch:
    """Return the pass that feeds committed tokens; it has logits for the roots of feeds with a spec."""
    _, _, starts, row_tokens, specs, _ = zip(*feeds, strict=True)
    return join_rows(block_table_of(feeds), starts, row_tokens, [spec is not None for spec in specs], block_size=block_size)


def _group(feeds: Sequence[Feed]) -> list[tuple[type[Growth], list[int]]]:
    """Group the indices of requests whose trees can grow together."""
    members: dict[tuple[type[Growth], object], list[int]] = {}
    for i, feed in enumerate(feeds):
        match feed.spec:
            case BeamSpec(width=width, num_children=num_children, worth=worth):
                members.setdefault((BeamGrowth, (width, num_children, worth is None)), []).append(i)
            case ShapeSpec(params=params):
                members.setdefault((ShapeGrowth, params is not None), []).append(i)
            case _:
                raise TypeError(f"{type(feed.spec).__name__} is not a spec that can be grown")
    return [(kind, indices) for (kind, _), indices in members.items()]


def _lay_out_frontiers(feeds: Sequence[Feed], fed_slots: Sequence[Sequence[Ints]], block_size: int) -> Iterator[RaggedBatch]:
    """Lay out the passes over the frontiers of the requests' trees on the host, one per depth from 1 on.

    Their nodes are added later: the previous depth makes them on the device.

    Args:
        feeds: one per request; their block tables cover the slots of all nodes that are fed.
        fed_slots: slots of the fed nodes per request and depth, ascending, counted from the slot after the root. A request takes
            part in as many passes as it has depths.
        block_size: tokens per KV block.
    """
    num_depths = np.array([*map(len, fed_slots)])
    roots = np.array([feed.root for feed in feeds])
    table = block_table_of(feeds)
    active = np.arange(len(feeds))  # requests that take part at a depth
    active_table = table  # their block tables: one array for all depths with the same requests, which a device keeps
    for depth in range(1, num_depths.max() + 1):
        if len(still := np.flatnonzero(num_depths >= depth)) < len(active):
            active, active_table = still, table[still]
        of_depth = [fed_slots[i][depth - 1] for i in active.tolist()]
        query_start_loc = prefix_sums([len(slots) for slots in of_depth])
        owners = np.repeat(active, np.diff(query_start_loc))
        slots = roots[owners] + 1 + np.concatenate(of_depth)
        layout = AttentionLayout(
            query_start_loc=query_start_loc,
            seq_lens=slots[query_start_loc[1:] - 1] + 1,
            block_table=active_table,
            tree_starts=roots[active] + 1,
            positions=roots[owners] + depth,
            visible_lens=roots[owners] + 1,
            ancestor_bits=np.zeros(len(owners), np.int64),
            block_size=block_size,
        )
        rows = np.arange(len(slots))
        yield RaggedBatch(
            token_ids=np.zeros_like(rows),
            slot_mapping=physical_slots(table, owners, slots, block_size),
            logits_rows=rows,
            logits_start_loc=query_start_loc,
            attention=layout,
        )


def _cat(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
