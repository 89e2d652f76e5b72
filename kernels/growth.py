"""Growth of draft trees by passes of a draft model: the general form, for any runner's `forward`.

What may be fed at which depth is known on the host before the first pass; tokens and probabilities stay on the device until all
passes are done and `TreeOps.select` chooses the trees. Only where all trees that go on are beams with a `Worth`, the host looks,
before each pass, whether it pays.

Legend: n requests of a growth, V vocabulary of the trees, W beam width, k children considered per node, I inner nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from titan.core.arrays import Ints
from titan.core.batch import (
    AttentionLayout,
    NodeQueries,
    RaggedBatch,
    join_rows,
    pad_block_tables,
    physical_slots,
    prefix_sums,
)
from titan.core.growth import BeamSpec, Feed, ShapeSpec, Worth
from titan.core.limits import MAX_NODES
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees, GrowthReport, Upload
from titan.kernels.interfaces import Backend, Candidates

Forward = Callable[[RaggedBatch], Tensor]
"""A pass of the draft model that returns logits [L, vocab of the draft]."""


def grow_by_passes(
    forward: Forward, backend: Backend, feeds: Sequence[Feed], num_rows: int, vocab_size: int, block_size: int
) -> DraftTrees:
    """Feed the tokens that each request lacks in one pass, then grow all trees together, one pass per depth over all frontiers.

    Args:
        forward: the draft model.
        backend: the one it runs on.
        feeds: as in `titan.kernels.interfaces.Runner.grow`; so are the next two.
        num_rows: of the plan.
        vocab_size: of the trees.
        block_size: tokens per KV block.
    """
    passes = TimedPasses(forward)
    root_logits = passes.run(root_batch(feeds, block_size))
    growing = [feed for feed in feeds if feed.spec is not None]
    if not growing:
        return DraftTrees.empty(num_rows, backend.device)
    draft_vocab_size = root_logits.shape[-1]
    root_logits, groups = of_vocabulary(root_logits, vocab_size), _group(growing)
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
        of_growths = of_vocabulary(passes.run(batch), vocab_size).split([len(each) for each in token_ids])
        for growth, logits in zip(active, of_growths, strict=True):
            growth.extend(depth, logits)
    trees = backend.trees.select([growth.candidates() for growth in growths], num_rows)
    first_scores = np.full(num_rows, np.nan, np.float32)
    if not backend.is_host:
        return replace(trees, growth=passes.report(first_scores)._replace(seconds=None))
    for growth in growths:
        if isinstance(growth, BeamGrowth):
            first_scores[growth.rows] = growth.first_scores.numpy()
    return replace(trees.packed(), growth=passes.report(first_scores))


def of_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Pad logits with -inf for tokens that the draft lacks, or cut those of tokens that are not proposed: [any, vocab_size]."""
    num_missing = vocab_size - logits.shape[-1]
    return pad(logits, (0, num_missing), value=float("-inf")) if num_missing else logits


class TimedPasses:
    """Runs and times passes."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._num_passes = self._num_rows = 0
        self._seconds = 0.0

    def run(self, batch: RaggedBatch) -> Tensor:
        """Run one pass."""
        start = time.perf_counter()
        logits = self._forward(batch)
        self._seconds += time.perf_counter() - start
        self._num_passes, self._num_rows = self._num_passes + 1, self._num_rows + len(batch.token_ids)
        return logits

    def report(self, first_scores: NDArray[np.float32]) -> GrowthReport:
        """Return what the passes took."""
        return GrowthReport(self._num_passes, self._num_rows, self._seconds, first_scores)


def root_batch(feeds: Sequence[Feed], block_size: int) -> RaggedBatch:
    """Return the pass that feeds committed tokens; it has logits of the last token of each feed with a spec."""
    rows, block_tables, starts, row_tokens, specs, (of_plan, *_) = zip(*feeds, strict=True)
    if of_plan is None:
        table = pad_block_tables(block_tables)
    else:  # the same array where these are all rows, so that it is uploaded once
        table = of_plan if rows == (*range(len(of_plan)),) else of_plan[list(rows)]
    return join_rows(table, starts, row_tokens, [spec is not None for spec in specs], block_size=block_size)


class BeamGrowth:
    """Expands, at each depth, the nodes with the greatest cumulative probability.

    Args:
        feeds: n feeds with beam specs of equal width and number of children, all with a worth, or none.
        logits: of their roots, [n, V].
        backend: the one the draft runs on.
    """

    def __init__(self, feeds: Sequence[Feed], logits: Tensor, backend: Backend) -> None:
        specs = [feed.spec for feed in feeds if isinstance(feed.spec, BeamSpec)]
        self.rows, self._specs, self._backend = np.array([feed.row for feed in feeds]), specs, backend
        self._max_depths = np.array([spec.depth for spec in specs])
        self._width, self._num_children = specs[0].width, specs[0].num_children
        # one per depth, for all requests: the columns of Candidates
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._beam: Tensor  # int64 [n, W], the candidates of the last level that are fed
        self._beam_scores: Tensor  # float32 [n, W]; -inf where they are not worth it: what follows is no candidate
        self._bits: Tensor  # int64 [n, W], their ancestor bits
        # of feeding the beam: the profits of all nodes, in prices of a pass; None: infinite
        self.gain: Tensor | None = None
        self._worths = BeamWorths.of([spec.worth for spec in specs if spec.worth is not None], backend.upload)
        depths = range(1, int(self._max_depths.max()) + 1)
        self._temperatures, *columns = backend.upload(
            [
                np.array([spec.temperature for spec in specs], np.float32),
                *(np.flatnonzero(self._max_depths > depth) for depth in depths),
                *((self._max_depths <= depth)[:, None] for depth in depths),
            ]
        )
        # per depth, from 1 on: the requests that feed nodes of that depth; bool [n, 1], those that feed none of them
        self._going_on, self._is_last = columns[: len(depths)], columns[len(depths) :]
        token_ids, scores = backend.sampling.top_candidates(logits, self._num_children, self._temperatures)
        self.first_scores = scores[:, 0]  # float32 [n]
        self._add_level(token_ids, scores, torch.full_like(token_ids, -1), torch.zeros_like(token_ids), depth=1)

    @property
    def fed_slots(self) -> list[list[Ints]]:
        """Slots where nodes are fed, per request and depth, from depth 1 on; counted from the slot after the root."""
        return [list(np.arange((depth - 1) * self._width).reshape(-1, self._width)) for depth in self._max_depths.tolist()]

    def frontier(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return the nodes fed at a depth, request by request: tokens, and ancestor bits over the slots after the root."""
        index = self._going_on[depth - 1]
        token_ids = self._levels[-1][0]
        return token_ids.gather(1, self._beam)[index].flatten(), self._bits[index].flatten()

    def extend(self, depth: int, logits: Tensor) -> None:
        index = self._going_on[depth - 1]
        n, width, k = len(self._specs), self._width, self._num_children
        temperatures = self._temperatures[index].repeat_interleave(width)
        token_ids, logprobs = self._backend.sampling.top_candidates(logits, k, temperatures)
        scores = logprobs.new_full((n, width * k), float("-inf"))
        parent_scores = self._beam_scores[index]
        scores[index] = (logprobs.reshape(-1, width, k) + parent_scores[:, :, None]).flatten(1)
        all_tokens = token_ids.new_zeros(n, width * k)
        all_tokens[index] = token_ids.reshape(-1, width * k)
        parent_slots = torch.arange((depth - 1) * width, depth * width, device=logits.device).repeat_interleave(k).expand(n, -1)
        self._add_level(all_tokens, scores, parent_slots, self._bits.repeat_interleave(k, dim=1), depth=depth + 1)

    def candidates(self) -> Candidates:
        token_ids, scores, parent_slots, slots = (torch.cat(column, 1) for column in zip(*self._levels, strict=True))
        slots[:, -self._levels[-1][0].shape[1] :] = -1  # the last level was not fed
        num_nodes = np.array([min(spec.num_nodes, token_ids.shape[1]) for spec in self._specs])
        is_chain = np.zeros(len(num_nodes), np.bool_)
        return Candidates(self.rows, num_nodes, is_chain, True, token_ids, scores, parent_slots, slots)

    def _add_level(self, token_ids: Tensor, scores: Tensor, parent_slots: Tensor, parent_bits: Tensor, depth: int) -> None:
        """Add the candidates of a depth, [n, c] each, and choose which of them are fed."""
        is_last = self._is_last[depth - 1]
        if self._worths is not None:
            scores = self._worths.cut(scores, depth)
        self._beam = scores.topk(self._width, dim=-1).indices
        self._beam_scores = scores.gather(1, self._beam)
        places = torch.arange((depth - 1) * self._width, depth * self._width, device=scores.device).expand_as(self._beam)
        # nodes of the deepest level are never fed: no node has its parent in their slots
        self._bits = parent_bits.gather(1, self._beam) | (1 << places.clamp(max=MAX_NODES - 1))
        fed = places.masked_fill(is_last, -1)
        if self._worths is not None:
            profits = self._worths.profits(self._beam_scores, depth).masked_fill(is_last, 0)
            self.gain = (profits / self._worths.pass_price).sum()
            fed = fed.where(profits > 0, -1)
            self._beam_scores = self._beam_scores.where(profits > 0, float("-inf"))
        self._levels.append((token_ids, scores, parent_slots, torch.full_like(token_ids, -1).scatter(1, self._beam, fed)))


class BeamWorths(NamedTuple):
    """What the nodes of n beams are worth, and what time costs, see `titan.core.growth.Worth`: float32 [n, 1] each."""

    agreement: Tensor
    acceptance: Tensor
    node_price: Tensor
    row_price: Tensor
    pass_price: Tensor

    @classmethod
    def of(cls, worths: Sequence[Worth], upload: Upload) -> BeamWorths | None:
        """Upload the worths of n beams; ``None`` if there are none."""
        columns = (np.array([[getattr(worth, name)] for worth in worths], np.float32) for name in cls._fields)
        return cls(*upload([*columns])) if worths else None

    def cut(self, scores: Tensor, depth: int) -> Tensor:
        """Set scores of candidates at a depth that are not worth verifying to -inf: [n, c]."""
        return scores.where(self._values(scores, depth) >= self.node_price, float("-inf"))

    def profits(self, scores: Tensor, depth: int) -> Tensor:
        """Compute the profits of feeding candidates at a depth, 0 if they are not worth it: [n, c]."""
        profits = self._values(scores, depth) * self.acceptance - (self.node_price + self.row_price)
        return profits.where(profits > 0, 0)

    def _values(self, scores: Tensor, depth: int) -> Tensor:
        return self.agreement**depth * scores.exp()


class ShapeLevel(NamedTuple):
    """The inner nodes at one depth of all shapes: [r] each."""

    places: Tensor  # int64, among the I inner nodes of all trees, tree by tree
    sources: Tensor  # int64, indices of their tokens in the table of children
    ancestor_bits: Tensor  # int64
    owners: Ints  # their requests
    num_children: Ints


class ShapeGrowth:
    """Fills given shapes, each node with the next most likely or the next sampled token.

    Args:
        feeds: n feeds with shape specs: all sampled, or none.
        logits: of their roots, [n, V].
        backend: the one the draft runs on.
    """

    gain = None  # infinite: a shape is filled whatever that costs

    def __init__(self, feeds: Sequence[Feed], logits: Tensor, backend: Backend) -> None:
        specs = [feed.spec for feed in feeds if isinstance(feed.spec, ShapeSpec)]
        self._rows = np.array([feed.row for feed in feeds])
        self._backend = backend
        self._plans = [spec.plan for spec in specs]
        self._starts = [0, *accumulate(plan.inner.shape[1] for plan in self._plans)]  # first inner node of each request
        self._max_children = max(plan.max_children for plan in self._plans)
        pairs = zip(specs, feeds, strict=True)
        sampled = [(spec.params, spec.seed, feed.root + 1) for spec, feed in pairs if spec.params is not None]
        self._sampling = SamplingRows.of(sampled) if sampled else None
        self._levels = self._make_levels()
        num_inner = self._starts[-1]
        self._children = logits.new_full((num_inner, self._max_children), -1, dtype=torch.int64)  # -1 where there is none
        self._probs = logits.new_empty((num_inner, logits.shape[1]), dtype=torch.float32) if sampled else None
        self.extend(0, logits)

    @property
    def fed_slots(self) -> list[tuple[Ints, ...]]:
        return [plan.feeds for plan in self._plans]

    def frontier(self, depth: int) -> tuple[Tensor, Tensor]:
        level = self._levels[depth]
        return self._children.view(-1).index_select(0, level.sources).clamp_(min=0), level.ancestor_bits

    def extend(self, depth: int, logits: Tensor) -> None:
        level = self._levels[depth]
        if self._sampling is None or self._probs is None:
            count = min(int(level.num_children.max()), logits.shape[1])
            if count == 1:
                self._children[level.places, 0] = self._backend.sampling.argmax(logits).clamp_(min=0)
                return
            best = logits.topk(count, dim=-1)
            self._children[level.places, :count] = best.indices.where(best.values > float("-inf"), -1)
            return
        rows = self._sampling.take(level.owners).shifted(depth)
        self._backend.sampling.sample_children(logits, rows, level.num_children, level.places, self._probs, self._children)

    def candidates(self) -> Candidates:
        """Return all nodes as candidates; those left without a token, and their descendants, have scores that are not finite."""
        num_nodes = max(len(plan.parents) for plan in self._plans)
        shape = len(self._plans), num_nodes
        sources, parent_slots, slots = np.zeros(shape, np.int64), np.full(shape, -1), np.full(shape, -1)
        bits = np.full(shape, -1)  # past the end of a shape: ancestors that are never present
        probs_rows = np.zeros((len(self._plans), 1 + num_nodes), np.int64)
        for i, (plan, start) in enumerate(zip(self._plans, self._starts, strict=False)):
            nodes = slice(len(plan.parents))
            sources[i, nodes] = (start + plan.node_parents) * self._max_children + plan.ranks
            parent_slots[i, nodes], slots[i, nodes], bits[i, nodes] = plan.parents, plan.slots, plan.ancestor_bits
            probs_rows[i, : 1 + len(plan.parents)] = start + plan.inner_rows
        index, parents, fed, ancestors, powers = self._backend.upload(
            [sources, parent_slots, slots, bits, np.int64(1) << np.arange(num_nodes)]
        )
        token_ids = self._children.view(-1).index_select(0, index.view(-1)).view(shape)
        there = ((token_ids >= 0) * powers).sum(1, keepdim=True)
        scores = torch.where((ancestors & ~there) == 0, 0.0, float("-inf"))
        counts = np.array([len(plan.parents) for plan in self._plans])
        is_chain = np.array([plan.is_chain for plan in self._plans])
        q = () if self._probs is None else (self._probs, probs_rows)
        return Candidates(self._rows, counts, is_chain, False, token_ids, scores, parents, fed, *q)

    def _make_levels(self) -> list[ShapeLevel]:
        owners = np.repeat(np.arange(len(self._plans)), [plan.inner.shape[1] for plan in self._plans])
        starts = np.array(self._starts)[owners]
        _, depths, parents, ranks, bits, num_children = np.concatenate([plan.inner for plan in self._plans], 1)
        places = np.argsort(depths, kind="stable")
        sources = (starts + parents) * self._max_children + ranks
        of_levels = np.split(places, np.cumsum(np.bincount(depths))[:-1])
        # one array per level and column: kernels read the ancestor bits, and slices of one array would be unaligned
        columns = iter(self._backend.upload([column for level in of_levels for column in (level, sources[level], bits[level])]))
        return [
            ShapeLevel(next(columns), next(columns), next(columns), owners=owners[level], num_children=num_children[level])
            for level in of_levels
        ]


Growth = BeamGrowth | ShapeGrowth


def _group(feeds: Sequence[Feed]) -> list[tuple[type[Growth], list[int]]]:
    """Group the indices of requests that grow alike."""
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
    """Lay out the passes that feed the frontier nodes of the requests' trees, one per depth from 1 on, on the host.

    The nodes themselves are missing: the previous depth makes them on the device.

    Args:
        feeds: one per request; their block tables cover the slots of all these nodes.
        fed_slots: per request and depth, ascending, counted from the slot after the root. A request takes part in the passes down
            to its last depth.
        block_size: tokens per KV block.
    """
    num_depths = max(map(len, fed_slots))
    roots, table = np.array([feed.root for feed in feeds]), pad_block_tables([feed.block_ids for feed in feeds])
    for depth in range(1, num_depths + 1):
        active = np.array([i for i, slots in enumerate(fed_slots) if len(slots) >= depth])
        of_depth = [fed_slots[i][depth - 1] for i in active.tolist()]
        query_start_loc = prefix_sums([len(slots) for slots in of_depth])
        owners = np.repeat(active, np.diff(query_start_loc))
        slots = roots[owners] + 1 + np.concatenate(of_depth)
        layout = AttentionLayout(
            query_start_loc=query_start_loc,
            seq_lens=slots[query_start_loc[1:] - 1] + 1,
            block_table=table if len(active) == len(table) else table[active],
            tree_starts=roots[active] + 1,
            positions=roots[owners] + depth,
            visible_lens=roots[owners] + 1,
            ancestor_bits=np.zeros(len(owners), np.int64),
            block_size=block_size,
        )
        rows = np.arange(len(slots))
        yield RaggedBatch(np.zeros_like(rows), physical_slots(table, owners, slots, block_size), rows, query_start_loc, layout)


def _cat(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
