"""Draft trees that grow along one chain: several depths are one CUDA graph, with the output head and the choice of the next token.

A draft pass takes the device less time than a host needs to launch its parts. What changes from depth to depth follows, on the
device, from the depth before.

Legend: n chains, D depths and k children of each node as in `chain_trees`; R requests of a graph, which are n and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from titan.kernels.growth import Forward, root_batch
from titan.kernels.interfaces import Backend, Model, PassInputs
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.chain_trees import (
    Chains,
    child_columns,
    children_per_node,
    greedy_trees,
    node_columns,
    sibling_candidates,
)
from titan.kernels.triton.cuda_graphs import Replays
from titan.kernels.triton.pass_inputs import BlockTables

MAX_DEPTHS = 8
"""Most depths of one graph; a longer chain is several replays, whose launches cost little beside that many passes."""


@dataclass(frozen=True, slots=True, order=True)
class ChainSize:
    """The shapes of some depths; unlike a tuple, never equal to the `PassSize` of another pass."""

    num_requests: int
    num_children: int  # with their scores; 1: the most likely token alone, without
    num_depths: int
    num_tokens: int  # of the vocabulary, that may be drafted


@triton.jit(do_not_specialize=["num_requests", "stride_block_table"])
def _lay_out_depth_kernel(
    next_slots_ptr,  # [R], of the next node of each chain; advanced
    num_left_ptr,  # [R], descending: nodes that are still to be fed; lowered
    positions_ptr,  # [R]
    slot_mapping_ptr,  # [R]
    visible_lens_ptr,  # [R]
    seq_lens_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
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
    tl.store(visible_lens_ptr + requests, slots + 1, mask=exists)
    tl.store(seq_lens_ptr + requests, slots + 1, mask=exists)
    num_fed = tl.sum(is_fed.to(tl.int32), axis=0)
    tl.store(query_start_loc_ptr + requests, tl.minimum(requests, num_fed), mask=exists)
    tl.store(query_start_loc_ptr + num_requests, num_fed)
    tl.store(next_slots_ptr + requests, slots + 1, mask=is_fed)
    tl.store(num_left_ptr + requests, num_left - 1, mask=is_fed)


class DraftChains:
    """Grows the trees of a step if all of them are greedy chains or beams of width one.

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
        self._next_slots, self._num_left = zeros(most), zeros(most)
        self._token_ids, self._positions, self._slot_mapping, self._no_bits = (zeros(most, dtype=torch.int64) for _ in range(4))
        self._visible_lens, self._seq_lens, self._no_trees = (zeros(most) for _ in range(3))
        self._query_start_loc = zeros(most + 1)
        # of the nodes that are fed next; of all requests
        self._scores, self._temperatures = zeros(most, dtype=torch.float32), zeros(most, dtype=torch.float32).fill_(1)

    def can_grow(self, feeds: Sequence[Feed]) -> bool:
        """Whether there are trees to grow, all along one chain, beams with as many siblings, within the bounds of the graphs."""
        specs = [feed.spec for feed in feeds if feed.spec is not None]
        beams = {spec.num_children for spec in specs if isinstance(spec, BeamSpec)}
        most_rows, most_blocks = self._tables.tensor.shape
        is_bounded = len(feeds) <= most_rows and max(map(_num_fed, feeds)) <= self._max_fed
        table = feeds[0].block_table
        width = max(len(feed.block_ids) for feed in feeds) if table is None else table.shape[1]
        return bool(specs) and all(map(children_per_node, specs)) and len(beams) <= 1 and is_bounded and width <= most_blocks

    def grow(self, forward: Forward, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        """Grow trees as `can_grow` accepts them, the same ones as `titan.kernels.growth.grow_by_passes`, whose arguments these are.

        Raises:
            IndexError: a block table does not cover the nodes of its chain.
        """
        ordered = sorted(feeds, key=_num_fed, reverse=True)  # so that the chains that go on are the first ones
        batch = root_batch(ordered, self._kv.block_size)
        root_logits = forward(batch)
        growing, layout = ordered[: len(root_logits)], batch.attention
        chains = Chains.of(growing, layout.seq_lens[: len(growing)] - 1)
        self._check(growing, chains.roots + chains.num_fed)
        if not self._tables.holds(layout.block_table):  # the pass over the roots was too large for a graph
            self._tables.load(layout.block_table, *self._backend.upload([layout.block_table.astype(np.int32)]))
        num_tokens = min(vocab_size, root_logits.shape[1])
        if chains.num_children == 1:
            drafted, columns = self._draft(root_logits, chains, num_tokens, node_columns(chains))
            trees = greedy_trees(chains, num_rows, drafted, columns)
        else:
            drafted, columns = self._draft(root_logits, chains, num_tokens, child_columns(chains))
            trees = self._backend.trees.select([sibling_candidates(chains, drafted, columns)], num_rows)
        passes, rows = 1 + int(chains.num_fed[0]), len(batch.token_ids) + int(chains.num_fed.sum())
        return replace(trees, growth=GrowthReport(passes, rows, None, np.full(num_rows, np.nan, np.float32)))

    def warm_up(self, specs: Sequence[GrowthSpec], vocab_size: int) -> list[Callable[[], object]]:
        """Return recordings of all graphs that trees up to these need, the largest first; ``vocab_size`` as in `grow`."""
        num_tokens = min(vocab_size, self._model.config.vocab_size)
        sizes = {
            ChainSize(count, children_per_node(spec), depths, num_tokens)
            for count in self._request_counts
            for spec in specs
            for depths in self._depths
            if children_per_node(spec) and depths <= spec.num_slots
        }
        return [partial(self._record, size) for size in sorted(sizes, reverse=True)]

    def _draft(
        self, root_logits: Tensor, chains: Chains, num_tokens: int, columns: Sequence[NDArray[Any]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the children of all roots and of the nodes fed, as `_choose` does, and the columns on the device.

        The first is int64 [1 or 2, D, n, k]. Which children are there follows from the lengths of the chains.
        """
        n, num_children, num_fed = len(root_logits), chains.num_children, int(chains.num_fed[0])
        sizes = self._sizes(n, num_children, num_fed, num_tokens)
        for size in sizes:
            self._record(size)
        slots, left, temperatures, *uploaded = self._backend.upload(
            [(chains.roots + 1).astype(np.int32), chains.num_fed.astype(np.int32), chains.temperatures, *columns]
        )
        self._next_slots[:n].copy_(slots)
        self._num_left.zero_()[:n].copy_(left)
        if num_children > 1:
            self._temperatures[:n].copy_(temperatures)
            self._scores.zero_()
        of_roots = self._choose(root_logits, num_children, num_tokens)
        drafted = of_roots.new_empty(len(of_roots), 1 + num_fed, n, num_children)
        drafted[:, 0] = of_roots
        depth = 1
        for size in sizes:
            found = self._replays.run(size, partial(self._feed, size), size.num_depths)
            drafted[:, depth : depth + size.num_depths] = found[:, :, :n]
            depth += size.num_depths
        return drafted, uploaded

    def _check(self, feeds: Sequence[Feed], last_slots: Ints) -> None:
        self._model.config.check_positions(last_slots)
        for feed, slot in zip(feeds, last_slots.tolist(), strict=True):
            if slot >= len(feed.block_ids) * self._kv.block_size:
                raise IndexError(f"a block table of {len(feed.block_ids)} blocks does not cover slot {slot}")

    def _sizes(self, num_requests: int, num_children: int, num_fed: int, num_tokens: int) -> list[ChainSize]:
        """Return the graphs that feed this many depths, one after the other."""
        count = next(count for count in self._request_counts if count >= num_requests)
        sizes = list[ChainSize]()
        for depths in self._depths:
            num_replays, num_fed = divmod(num_fed, depths)
            if num_replays:
                sizes += [ChainSize(count, num_children, depths, num_tokens)] * num_replays
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
            self._lay_out_depth(size.num_requests)
            logits = self._model.logits(self._model.hidden_states(inputs, self._kv))
            found.append(self._choose(logits, size.num_children, size.num_tokens))
        return torch.stack(found, 1)

    def _choose(self, logits: Tensor, num_children: int, num_tokens: int) -> Tensor:
        """Choose the most likely of the first tokens as children of the nodes just fed, the first of them to be fed next.

        Returns:
            int64 [1 or 2, rows, k]: tokens, 0 where there is none, and, if there are siblings, the bits of their float32 scores.
        """
        count, logits = len(logits), logits[:, :num_tokens]
        if num_children == 1:
            found = self._backend.sampling.argmax(logits).clamp_(min=0).view(1, count, 1)
        else:
            token_ids, logprobs = self._backend.sampling.top_candidates(logits, num_children, self._temperatures[:count])
            scores = logprobs + self._scores[:count, None]
            self._scores[:count].copy_(scores[:, 0])
            found = torch.stack((token_ids, scores.view(torch.int32).long()))
        self._token_ids[:count].copy_(found[0, :, 0])
        return found

    def _lay_out_depth(self, count: int) -> None:
        _lay_out_depth_kernel[(1,)](
            self._next_slots,
            self._num_left,
            self._positions,
            self._slot_mapping,
            self._visible_lens,
            self._seq_lens,
            self._query_start_loc,
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
            visible_lens=self._visible_lens[:count],
            tree_starts=self._no_trees[:count],
            ancestor_bits=self._no_bits[:count],
            short_query_len=1,
            max_query_len=1,
        )
        return PassInputs(self._token_ids[:count], self._positions[:count], self._slot_mapping[:count], None, layout)


def _num_fed(feed: Feed) -> int:
    return -1 if feed.spec is None else feed.spec.num_slots
