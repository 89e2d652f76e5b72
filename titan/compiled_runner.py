"""A model on a CPU whose passes over few tokens are one call of compiled C++ each."""

from __future__ import annotations

import ctypes

from torch import Tensor

from titan.batch import RaggedBatch
from titan.kernels.compiled_decoder import CompiledDecoder, DecoderStruct, layer_struct
from titan.kernels.cpu_library import COMPILED_DTYPES, usable_library
from titan.kernels.packed_weight import MAX_ROWS, PackedWeightStruct, find_packed_weight, multiply_few_rows
from titan.models.decoder import Decoder


class CompiledRunner:
    """Runs passes of at most `MAX_ROWS` tokens in C++, longer ones operation by operation.

    Args:
        model: the model.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
        library: the C++ of `kernels/cpu/`, compiled.
        decoder: the model's layers, readable by it.
        head: the model's output head; ``None``: not readable by it.
    """

    def __init__(
        self, model: Decoder, kv: Tensor, library: ctypes.CDLL, decoder: CompiledDecoder, head: PackedWeightStruct | None
    ) -> None:
        self.model = model
        self.kv = kv
        self._library = library
        self._decoder = decoder
        self._head = head

    def forward(self, batch: RaggedBatch) -> Tensor:
        """One pass over the ragged batch: logits [L, vocab] of the rows that need them."""
        if len(batch.token_ids) > MAX_ROWS:
            logits: Tensor = self.model(batch, self.kv)
            return logits
        self.model.check_positions(batch.attention.positions)
        hidden = self._decoder.hidden_states(
            batch.attention, batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows, self.kv
        )
        return self.model.logits(hidden) if self._head is None else multiply_few_rows(self._library, self._head, hidden)


def make_compiled_runner(model: Decoder, kv: Tensor) -> CompiledRunner | None:
    """The runner, or ``None`` where there is no library, or the model's weights are not packed in a way that it can read.

    Args:
        model: the model.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
    """
    library = usable_library() if model.device.type == "cpu" and model.dtype in COMPILED_DTYPES else None
    if library is None:
        return None
    config, layers = model.config, []
    for weights, window in zip(model.layer_weights, config.layer_windows, strict=True):
        packed = [
            find_packed_weight(library, weight, bias)
            for weight, bias in (
                (weights.qkv_weight, weights.qkv_bias),
                (weights.output_weight, weights.output_bias),
                (weights.gate_up_weight, weights.gate_up_bias),
                (weights.down_weight, weights.down_bias),
            )
        ]
        readable = [each for each in packed if each is not None]
        if len(readable) < len(packed):
            return None
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
    )
    compiled = CompiledDecoder(library, model.dtype, decoder, layers)
    return CompiledRunner(model, kv, library, compiled, find_packed_weight(library, model.head, None))
