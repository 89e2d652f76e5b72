"""Draft trees that grow along one chain: several depths are one CUDA graph, with the output head and the choice of the next token.

A draft pass takes the device less time than a host needs to launch its parts. What changes from depth to depth follows, on the
device, from the depth before.

Legend: n chains, D depths and k children of each node as in `chain_trees`; R requests of a graph, which are n and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.growth import BeamSpec, Feed, GrowthSpec
from titan.core.kv_tensor import KVTensor
from titan.core.trees import DraftTrees, GrowthReport
from titan.kernels.growth import Forward, of_vocabulary, root_batch
from titan.kernels.interfaces import Backend, Model, PassInputs
from titan.kernels.shape_growth import shape_candidates
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.chain_sampler import ChainSampler
from titan.kernels.triton.chain_trees import (
    Chains,
    child_columns,
    children_per_node,
    greedy_trees,
    is_sampled_chain,
    node_columns,
    probs_rows,
    scored_trees,
)
from titan.kernels.triton.cuda_graphs import Replays
from titan.kernels.triton.pass_inputs import BlockTables
from titan.kernels.triton.row_distribution import row_bytes
from titan.kernels.triton.upload import aligned

MAX_DEPTHS = 8
"""Most depths of one graph; a longer chain is several replays, whose launches cost little beside that many passes."""


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """How children of the nodes just fed are chosen."""

    num_children: int
    is_sampled: bool  # else they are the most likely tokens
    num_tokens: int  # of the vocabulary, that may be drafted

    @property
    def has_scores(self) -> bool:
        """Whether children have scores: of a sampled one 0, or -inf if nothing could be sampled here or above."""
        return self.is_sampled or self.num_children > 1


@dataclass(frozen=True, slots=True, order=True)
class ChainSize:
    """The shapes of some depths; unlike a tuple, never equal to the `PassSize` of another pass."""

    num_requests: int
    choice: Choice
    num_depths: int


@triton.jit(do_not_specialize=["num_requests", "stride_block_table", "bytes_of_probs"])
def _lay_out_depth_kernel(
    next_slots_ptr,  # [R], of the next node of each chain; advanced
    num_left_ptr,  # [R], descending: nodes that are still to be fed; lowered
    positions_ptr,  # [R]
    slot_mapping_ptr,  # [R]
    seq_lens_ptr,  # [R], all of which the one token of a request sees
    query_start_loc_ptr,  # [R + 1]
    addresses_ptr,  # [R], of the q of the next node, advanced; 0: none is written; None: nothing is sampled
    bytes_of_probs,
    block_table_ptr,  # [R, blocks]
    stride_block_table,
    num_requests,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the inputs of the pass over the next depth, in one program: one token of each chain that goes on, then padding."""
    requests = tl.arange(0, BLOCK_R)
    exists = requests < num_requests
    slots = tl.load(next_slots_ptr + requests, mask=exists, other=0)
    num_left = tl.load(num_left_ptr + requests, mask=exists, other=0)
    is_fed = num_left > 0
    places = block_table_ptr + requests.to(tl.int64) * stride_block_table + slots // BLOCK_SIZE
    blocks = tl.load(places, mask=is_fed, other=0).to(tl.int64)
    tl.store(slot_mapping_ptr + requests, tl.where(is_fed, blocks * BLOCK_SIZE + slots % BLOCK_SIZE, -1), mask=exists)
    tl.store(positions_ptr + requests, tl.where(is_fed, slots, 0), mask=exists)
    tl.store(seq_lens_ptr + requests, slots + 1, mask=exists)
    num_fed = tl.sum(is_fed.to(tl.int32), axis=0)
    tl.store(query_start_loc_ptr + requests, tl.minimum(requests, num_fed), mask=exists)
    tl.store(query_start_loc_ptr + num_requests, num_fed)
    tl.store(next_slots_ptr + requests, slots + 1, mask=is_fed)
    tl.store(num_left_ptr + requests, num_left - 1, mask=is_fed)
    if addresses_ptr is not None:
        addresses = tl.load(addresses_ptr + requests, mask=is_fed, other=0)
        tl.store(addresses_ptr + requests, tl.where(addresses > 0, addresses + bytes_of_probs, 0), mask=exists)


class DraftChains:
    """Grows the trees of a step if all of them are chains, or greedy chains and beams of width one.

    Args:
        backend: the one whose device the model is on.
        model: the draft.
        kv: of the model.
        request_counts: numbers of requests that graphs are captured for, ascending.
        num_nodes: of the longest chain.
        tables: which have those of the requests already, where the pass over the roots was replayed.
        replays: where graphs are recorded.
    """

    def __init__(
        self,
        backend: Backend,
        model: Model,
        kv: KVTensor,
        request_counts: Sequence[int],
        num_nodes: int,
        tables: BlockTables,
        replays: Replays,
    ) -> None:
        self._backend, self._model, self._kv = backend, model, kv
        self._request_counts = request_counts
        self._max_fed, longest = num_nodes - 1, max(1, min(num_nodes - 1, MAX_DEPTHS))
        # of the graphs, longest first; powers of two add up to any other number in a few replays
        self._depths = [longest, *(2**i for i in reversed(range((longest - 1).bit_length())))]
        self._tables, self._replays = tables, replays

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=backend.device)

        most = request_counts[-1]
        # the state of all chains, loaded in one copy; scores are those of the nodes that are fed next
        self._state = zeros(4, aligned(4 * most) // 4)
        self._next_slots, self._num_left = self._state[:2]
        self._temperatures, self._scores = self._state[2:].view(torch.float32)
        self._temperatures.fill_(1)
        self._token_ids, self._positions, self._slot_mapping, self._no_bits = (zeros(most, dtype=torch.int64) for _ in range(4))
        self._seq_lens, self._no_trees = zeros(most), zeros(most)
        self._query_start_loc = zeros(most + 1)
        self._sampler = ChainSampler(backend, most)
        # what the host knows of the trees, on the device; of many steps in a row it is the same
        self._known: Hashable = None
        self._columns = list[Tensor]()

    def can_grow(self, feeds: Sequence[Feed]) -> bool:
        """Whether there are trees to grow, all along one chain, within the bounds of the graphs.

        Beams must have equally many siblings, and none may be beside sampled chains, which may have any.
        """
        specs = [feed.spec for feed in feeds if feed.spec is not None]
        beams = {spec.num_children for spec in specs if isinstance(spec, BeamSpec)}
        most_rows, most_blocks = self._tables.tensor.shape
        is_bounded = len(feeds) <= most_rows and max(map(_num_fed, feeds)) <= self._max_fed
        table = feeds[0].block_table
        width = max(len(feed.block_ids) for feed in feeds) if table is None else table.shape[1]
        num_kinds = len(beams) + any(map(is_sampled_chain, specs))  # greedy chains go along with any
        return bool(specs) and all(map(children_per_node, specs)) and num_kinds <= 1 and is_bounded and width <= most_blocks

    def grow(self, forward: Forward, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        """Grow trees as `can_grow` accepts them, the same ones as `titan.kernels.growth.grow_by_passes`, whose arguments these are.

        Raises:
            IndexError: a block table does not cover the nodes of its chain.
        """
        ordered = sorted(feeds, key=_num_fed, reverse=True)  # so that the chains that go on are the first ones
        batch = root_batch(ordered, self._kv.block_size)
        root_logits = forward(batch)
        growing, layout = ordered[: len(root_logits)], batch.attention
        chains = Chains.of(growing, layout.seq_lens[: len(growing)] - 1, num_rows)
        self._check(growing, chains.roots + chains.num_fed)
        if not self._tables.holds(layout.block_table):  # the pass over the roots was too large for a graph
            self._tables.load(layout.block_table, *self._backend.upload([layout.block_table.astype(np.int32)]))
        choice = self._choice(chains.num_children, chains.sampling is not None, vocab_size)
        probs = root_logits.new_empty(chains.num_probs, vocab_size, dtype=torch.float32) if choice.is_sampled else None
        drafted = self._draft(root_logits, chains, choice, probs)
        passes, rows = 1 + int(chains.num_fed[0]), len(batch.token_ids) + int(chains.num_fed.sum())
        growth = GrowthReport(passes, rows, None, np.full(num_rows, np.nan, np.float32))
        if probs is not None and chains.plans:
            children = self._sampler.with_siblings(chains, drafted, probs)
            found = shape_candidates(chains.rows, chains.plans, children, self._backend)
            found = replace(found, probs=probs, probs_rows=probs_rows(chains))
            return replace(self._backend.trees.select([found], num_rows), growth=growth)
        if choice.has_scores:
            return scored_trees(chains, drafted, self._columns, probs, growth)
        return greedy_trees(chains, drafted, self._columns, growth)

    def warm_up(self, specs: Sequence[GrowthSpec], vocab_size: int) -> list[Callable[[], object]]:
        """Return recordings of all graphs that trees up to these need, the largest first; ``vocab_size`` as in `grow`."""
        sizes = {
            ChainSize(count, self._choice(children_per_node(spec), is_sampled_chain(spec), vocab_size), depths)
            for count in self._request_counts
            for spec in specs
            for depths in self._depths
            if children_per_node(spec) and depths <= spec.num_slots
        }
        return [partial(self._record, size) for size in sorted(sizes, reverse=True)]

    def _choice(self, num_children: int, is_sampled: bool, vocab_size: int) -> Choice:
        """Return the choice in trees of a vocabulary; q is over all of it, even if the draft has fewer tokens."""
        return Choice(num_children, is_sampled, vocab_size if is_sampled else min(vocab_size, self._model.config.vocab_size))

    def _draft(self, root_logits: Tensor, chains: Chains, choice: Choice, probs: Tensor | None) -> Tensor:
        """Return the children of all roots and of the nodes fed, as `_choose` does: int64 [1 or 2, n, D, k].

        Which of them are there follows from the lengths of the chains. The q of sampled chains are written to ``probs``.
        """
        n, num_fed = len(root_logits), int(chains.num_fed[0])
        sizes = self._sizes(n, num_fed, choice)
        for size in sizes:
            self._record(size)
        self._load(chains, choice, probs)
        of_roots = self._choose(root_logits, choice)
        drafted = of_roots.new_empty(len(of_roots), n, 1 + num_fed, choice.num_children)
        drafted[:, :, 0] = of_roots
        depth = 1
        for size in sizes:
            found = self._replays.run(size, partial(self._feed, size), size.num_depths)
            drafted[:, :, depth : depth + size.num_depths] = found[:, :, :n].transpose(1, 2)
            depth += size.num_depths
        return drafted

    def _load(self, chains: Chains, choice: Choice, probs: Tensor | None) -> None:
        """Load the state of the chains and, unless it is there from the last step, what the host knows of the trees."""
        state = np.zeros(self._state.shape, np.int32)
        (next_slots, num_left), (temperatures, _) = state[:2], state[2:].view(np.float32)
        n = len(chains.rows)
        next_slots[:n], num_left[:n] = chains.roots + 1, chains.num_fed
        temperatures[:n], temperatures[n:] = chains.temperatures, 1
        sampling: list[NDArray[Any]] = []
        if chains.sampling is not None and probs is not None:
            sampling = self._sampler.arrays(chains.sampling, probs, probs_rows(chains)[:, 0])
        known = choice, *(each.tobytes() for each in (chains.rows, chains.start_loc, chains.num_fed, chains.is_greedy))
        columns: list[NDArray[Any]] = []
        if known != self._known and not chains.plans:
            columns = child_columns(chains) if choice.has_scores else node_columns(chains)
        loaded, *uploaded = self._backend.upload([state, *columns, *sampling])
        self._state.copy_(loaded)
        if columns:
            self._known, self._columns = known, uploaded[: len(columns)]
        if sampling:
            self._sampler.load(uploaded[len(columns) :])

    def _check(self, feeds: Sequence[Feed], last_slots: Ints) -> None:
        self._model.config.check_positions(last_slots)
        for feed, slot in zip(feeds, last_slots.tolist(), strict=True):
            if slot >= len(feed.block_ids) * self._kv.block_size:
                raise IndexError(f"a block table of {len(feed.block_ids)} blocks does not cover slot {slot}")

    def _sizes(self, num_requests: int, num_fed: int, choice: Choice) -> list[ChainSize]:
        """Return the graphs that feed this many depths, one after the other."""
        count = next(count for count in self._request_counts if count >= num_requests)
        sizes: list[ChainSize] = []
        for depths in self._depths:
            num_replays, num_fed = divmod(num_fed, depths)
            if num_replays:
                sizes += [ChainSize(count, choice, depths)] * num_replays
        return sizes

    def _record(self, size: ChainSize) -> None:
        """Capture a graph, unless it was before; no chain goes on meanwhile, so that nothing is written to the cache."""
        if size not in self._replays:
            self._num_left.zero_()
            passes = f"{size.num_depths} draft passes of {size.num_requests} tokens"
            self._replays.record(size, partial(self._feed, size), passes)

    def _feed(self, size: ChainSize) -> Tensor:
        """Feed the next depths of all chains; return the children found at each, as `_choose` does: [1 or 2, num_depths, R, k]."""
        inputs, found = self._inputs(size.num_requests), []
        for _ in range(size.num_depths):
            self._lay_out_depth(size.num_requests, size.choice)
            logits = self._model.logits(self._model.hidden_states(inputs, self._kv))
            found.append(self._choose(logits, size.choice))
        return torch.stack(found, 1)

    def _choose(self, logits: Tensor, choice: Choice) -> Tensor:
        """Choose children of the nodes just fed, the first of which are fed next.

        Returns:
            int64 [1 or 2, rows, k]: tokens, 0 where there is none, and, if they have scores, the float32 bits of these.
        """
        count, logits = len(logits), of_vocabulary(logits, choice.num_tokens)
        if not choice.has_scores:
            found = self._backend.sampling.argmax(logits).clamp_(min=0).view(1, count, 1)
        else:
            scores_above = self._scores[:count, None]
            if choice.is_sampled:
                sampled = self._sampler.sample(logits, self._next_slots[:count].long())[:, None]
                token_ids, scores = sampled.clamp(min=0), scores_above.masked_fill(sampled < 0, float("-inf"))
            else:
                temperatures = self._temperatures[:count]
                token_ids, logprobs = self._backend.sampling.top_candidates(logits, choice.num_children, temperatures)
                scores = scores_above + logprobs
            self._scores[:count].copy_(scores[:, 0])
            found = torch.stack((token_ids, scores.view(torch.int32).long()))
        self._token_ids[:count].copy_(found[0, :, 0])
        return found

    def _lay_out_depth(self, count: int, choice: Choice) -> None:
        _lay_out_depth_kernel[(1,)](
            self._next_slots,
            self._num_left,
            self._positions,
            self._slot_mapping,
            self._seq_lens,
            self._query_start_loc,
            self._sampler.addresses if choice.is_sampled else None,
            row_bytes(choice.num_tokens),
            self._tables.tensor,
            self._tables.tensor.stride(0),
            count,
            BLOCK_SIZE=self._kv.block_size,
            BLOCK_R=max(16, triton.next_power_of_2(count)),
            num_warps=4,
        )

    def _inputs(self, count: int) -> PassInputs:
        layout = DeviceLayout(
            block_size=self._kv.block_size,
            query_start_loc=self._query_start_loc[: count + 1],
            seq_lens=self._seq_lens[:count],
            block_table=self._tables.tensor[:count],
            positions=self._positions[:count],
            visible_lens=self._seq_lens[:count],
            tree_starts=self._no_trees[:count],
            ancestor_bits=self._no_bits[:count],
            short_query_len=1,
            max_query_len=1,
        )
        return PassInputs(self._token_ids[:count], self._positions[:count], self._slot_mapping[:count], None, layout)


def _num_fed(feed: Feed) -> int:
    return -1 if feed.spec is None else feed.spec.num_slots
