"""A model on a CPU whose passes over few tokens are calls of compiled C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.core.attention_layout import Int
from titan.execute.batch import RaggedBatch, pad_block_tables
from titan.kernels.cpu.decoder import CompiledDecoder, DecoderStruct, GrownTrees, layer_struct
from titan.kernels.cpu.library import COMPILED_DTYPES, usable_library
from titan.kernels.cpu.rows import max_rows
from titan.kernels.cpu.weight_layout import find_weight
from titan.models.decoder import Decoder


class CompiledRunner:
    """Runs passes of at most `max_rows` tokens in C++, longer ones operation by operation.

    Args:
        model: the model.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
        compiled: the model and the KV, for short passes.
        max_rows: tokens of a short pass, at most.
    """

    def __init__(self, model: Decoder, kv: Tensor, compiled: CompiledDecoder, max_rows: int) -> None:
        self.max_rows = max_rows
        self.model = model
        self.kv = kv
        self._compiled = compiled

    @property
    def attention_seconds(self) -> float:
        """That attention has taken in passes that are one call."""
        return self._compiled.attention_seconds

    def forward(self, batch: RaggedBatch) -> Tensor:
        """One pass over the ragged batch: logits [L, vocab] of the rows that need them."""
        if len(batch.token_ids) > self.max_rows:
            logits: Tensor = self.model(batch, self.kv)
            return logits
        self.model.check_positions(batch.attention.positions)
        return self._compiled.forward(batch.attention, batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows)

    def grow(
        self,
        growths: NDArray[Any],
        last_slots: Int,
        block_tables: Sequence[list[int]],
        roots: Tensor | tuple[Int, Int],
        target_vocab_size: int,
        num_probs: int,
    ) -> GrownTrees:
        """Grow draft trees, the passes over all their depths in one call; those should be of at most `max_rows` nodes.

        Args:
            growths: `TREE_GROWTH` [n].
            last_slots: int64 [n], the last slot that each request writes.
            block_tables: n of them, covering these slots.
            roots: see `CompiledDecoder.grow`.
            target_vocab_size: likewise.
            num_probs: likewise.

        Raises:
            IndexError: a position without a rotation or a slot without a block.
        """
        self.model.check_positions(growths["root"] + growths["depth"] - 1)
        table = pad_block_tables(block_tables)
        num_blocks = np.array([len(block_ids) for block_ids in block_tables])
        if (last_slots // self.kv.shape[4] >= num_blocks).any():
            raise IndexError(f"block tables of {num_blocks.tolist()} blocks do not cover slots {last_slots.tolist()}")
        return self._compiled.grow(growths, table, roots, target_vocab_size, num_probs)


def make_compiled_runner(model: Decoder, kv: Tensor) -> CompiledRunner | None:
    """The runner, or ``None`` where there is no library, or weights are packed in a way that it cannot read.

    Args:
        model: the model.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
    """
    config, layer_weights, layers = model.config, model.layer_weights, []
    library = usable_library() if model.device.type == "cpu" and model.dtype in COMPILED_DTYPES else None
    head = None if library is None else find_weight(library, model.head, None)
    if library is None or head is None:
        return None
    num_rows = max_rows(library, model.dtype, head)
    for weights, window in zip(layer_weights, config.layer_windows, strict=True):
        found = [
            find_weight(library, weight, bias)
            for weight, bias in (
                (weights.qkv_weight, weights.qkv_bias),
                (weights.output_weight, weights.output_bias),
                (weights.gate_up_weight, weights.gate_up_bias),
                (weights.down_weight, weights.down_bias),
            )
        ]
        readable = [weight for weight in found if weight is not None]
        if len(readable) < len(found):
            return None
        num_rows = min(num_rows, *(max_rows(library, model.dtype, weight) for weight in readable))
        layers.append(layer_struct((weights.input_norm, weights.post_norm, weights.qk_norm), readable, window))
    decoder = DecoderStruct(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        embedding=model.embedding.data_ptr(),
        rope_table=model.rope_table.data_ptr(),
        final_norm=model.final_norm.data_ptr(),
        head=head,
    )
    return CompiledRunner(model, kv, CompiledDecoder(library, decoder, layers, kv), num_rows)
