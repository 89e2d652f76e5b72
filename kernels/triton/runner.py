"""The runner of a model with Triton kernels: a batch is uploaded in one copy, and all but the largest passes are CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor

from titan.core.batch import RaggedBatch
from titan.core.growth import BeamSpec, Feed, GrowthSpec
from titan.core.kv_tensor import KVTensor
from titan.core.trees import DraftTrees
from titan.kernels.growth import grow_by_passes, of_vocabulary
from titan.kernels.interfaces import Backend, Model, PassCounts, PassLimits, WarmUp
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.cuda_graphs import Capture, GraphSizes, PassSize, Replays
from titan.kernels.triton.draft_chain import DraftChains
from titan.kernels.triton.pass_inputs import BlockTables, StaticInputs, short_query_len, size_of, upload_inputs, upload_rows
from titan.kernels.triton.short_weights import TILINGS
from titan.kernels.triton.tuning import TileConfig
from titan.kernels.triton.warm_up import choose_idle_children, idle_batch


class TritonRunner:
    """Runs a target or a draft without synchronizing.

    Passes are replayed up to the final norm, but for the largest; the output head runs only for the rows that need logits.
    Nothing else depends on whether a pass is replayed, not even rounding: a size runs padded the first time too, before it is
    captured, and every time if memory is too short to capture it, but for passes with prefill chunks, whose padding costs time.

    Raises:
        ValueError: attention heads or a block size that the kernels do not support.
    """

    def __init__(
        self,
        backend: Backend,
        model: Model,
        kv: KVTensor,
        limits: PassLimits,
        tables: BlockTables,
        counts: PassCounts,
        capture: Capture,
    ) -> None:
        self.backend = backend
        self.model = model
        self.kv = kv
        layers = model.config.layers
        self._geometries = {AttentionGeometry.of(layer, kv.block_size, model.dtype) for layer in layers}
        self._max_query_len = limits.query_len
        self._sizes = GraphSizes(limits)
        self._tables = tables
        self._static = StaticInputs(self._sizes.largest, tables)
        may_fail = "transformers" in model.config.traits
        self._replays = Replays(capture, counts, backend.device, may_fail=may_fail)
        self._counts = counts

    @cached_property
    def _chains(self) -> DraftChains:
        """Made when it is first needed: a target grows nothing."""
        num_nodes, request_counts = self._max_query_len - 1, self._sizes.request_counts
        return DraftChains(self.backend, self.model, self.kv, request_counts, num_nodes, self._tables, self._replays)

    @property
    def padded_sizes(self) -> Sequence[int]:
        small = {size.num_tokens for size in self._sizes.without_chunks()}
        return sorted(small | {size.num_tokens for size in self._sizes.with_chunks() if size.num_tokens > max(small)})

    def forward(self, batch: RaggedBatch) -> Tensor:
        self.model.config.check_positions(batch.attention.positions)
        size = self._size(batch)
        if size is None or size not in self._replays:
            self._counts.num_eager += 1
        if size is None:
            return self._eager_logits(batch)
        hidden, rows = self._padded_hidden_states(batch, size), upload_rows(batch, self.backend.device)
        return self.model.logits(hidden[: len(batch.attention.positions)] if rows is None else hidden.index_select(0, rows))

    def grow(self, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        if self._chains.can_grow(feeds):
            return self._chains.grow(self.forward, feeds, num_rows, vocab_size)
        return grow_by_passes(self.forward, self.backend, feeds, num_rows, vocab_size, self.kv.block_size)

    def warm_up(self, specs: Sequence[GrowthSpec], vocab_size: int) -> Sequence[WarmUp]:
        """See `titan.kernels.interfaces.Runner`; of passes that run eagerly, all kinds of tiles and plans are compiled.

        Passes with prefill chunks are captured last: memory may be short, and most passes are decodes.
        """
        idle = partial(idle_batch, block_size=self.kv.block_size)
        one = idle([1])
        sizes = self._sizes.without_chunks()
        passes: list[WarmUp] = [partial(self._padded_logits, one, size, specs, vocab_size) for size in sizes[:1]]
        passes += [partial(self._padded_hidden_states, one, size) for size in sizes[1:]]
        if specs:
            passes += self._chains.warm_up(specs, vocab_size)
        passes += [partial(self._warm_up_chunks, one, size) for size in self._sizes.with_chunks()]
        most, query_lens = self._sizes.request_counts[-1], self._query_lens_of_tiles()
        chunk = max(self._max_query_len, *query_lens) + 1  # longer than the query beside it, or it would not count as a chunk
        numbers = {max(2, min(2**i, most)) for i in range(4, max(4, most.bit_length()) + 1)}  # plans are for powers of two
        for number, query_len in product(sorted(numbers), query_lens):
            passes.append(partial(self._eager_logits, idle([chunk, query_len, *[1] * (number - 2)])))
        return passes

    def _size(self, batch: RaggedBatch) -> PassSize | None:
        """Return the size that a batch is padded to; ``None``: it runs eagerly, as do branching trees behind long chunks."""
        size, most = size_of(batch), self._max_query_len
        has_long_tree = self._has_chunk(size) and short_query_len(batch, most) > most
        found = self._sizes.find(size) if self._static.have_room_for(batch) and not has_long_tree else None
        return None if found is not None and self._has_chunk(found) and self._replays.lacks(found) else found

    def _has_chunk(self, size: PassSize) -> bool:
        return size.max_query_len > self._max_query_len

    def _warm_up_chunks(self, batch: RaggedBatch, size: PassSize) -> None:
        if not self._replays.lacks(size):
            self._padded_hidden_states(batch, size)

    def _padded_logits(self, batch: RaggedBatch, size: PassSize, specs: Sequence[GrowthSpec], vocab_size: int) -> None:
        """Run a pass, and what its graph lacks: the output head, for as many rows as products are compiled for, and choices."""
        hidden = self._padded_hidden_states(batch, size)
        for rows in TILINGS:
            self.model.logits(hidden[:rows])
        if specs:
            self._choose_idly(self.model.logits(hidden[: max(TILINGS)]), specs, vocab_size)

    def _choose_idly(self, logits: Tensor, specs: Sequence[GrowthSpec], vocab_size: int) -> None:
        """Choose children of nodes as growth does that is no graph, as many as beams have, and as reviews do."""
        temperatures = torch.ones(len(logits), device=self.backend.device)
        self.backend.sampling.top_candidates(logits[:, :vocab_size], 1, temperatures)
        logits = of_vocabulary(logits, vocab_size)
        for count in {spec.num_children for spec in specs if isinstance(spec, BeamSpec)}:
            self.backend.sampling.top_candidates(logits, count, temperatures)
        choose_idle_children(self.backend, logits)

    def _query_lens_of_tiles(self) -> list[int]:
        """Return query lengths with which attention is compiled for each size of tiles of each kind of layer."""

        def tiles(query_len: int) -> tuple[TileConfig, ...]:
            return tuple(geometry.tiles(query_len, self.backend.device) for geometry in self._geometries)

        return list({tiles(query_len): query_len for query_len in (1, 2, 4, 8, 16, 32, 64, 128)}.values())

    def _eager_logits(self, batch: RaggedBatch) -> Tensor:
        inputs = upload_inputs(batch, self.backend.device, self._max_query_len)
        return self.model.logits(self.model.hidden_states(inputs, self.kv))

    def _padded_hidden_states(self, batch: RaggedBatch, size: PassSize) -> Tensor:
        """Return the hidden states of all tokens of a size, valid until the next pass: [size.num_tokens, hidden_size]."""
        inputs = self._static.fill(batch, size)

        def run() -> Tensor:
            return self.model.hidden_states(inputs, self.kv)

        if size in self._replays:
            return self._replays.run(size, run)
        return self._replays.record(size, run, f"a pass of {size.num_tokens} tokens")
