"""The target model with its KV: what runs on the device for it, once per step."""

from __future__ import annotations

from torch import Tensor

from titan.batch import RaggedBatch
from titan.models.decoder import Decoder


class ModelRunner:
    """Runs the target.

    Args:
        model: the target.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
    """

    def __init__(self, model: Decoder, kv: Tensor) -> None:
        self.model = model
        self.kv = kv

    def forward(self, batch: RaggedBatch) -> Tensor:
        """One pass over the ragged batch: logits [L, vocab] of the rows that need them."""
        logits: Tensor = self.model(batch, self.kv)
        return logits
