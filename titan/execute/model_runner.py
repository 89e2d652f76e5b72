"""A model with its KV: what runs on the device, once per step for the target and several times for a draft model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from titan.execute.batch import RaggedBatch
from titan.kernels import backend
from titan.kernels.cpu.runner import make_compiled_runner
from titan.kernels.triton.cuda_graphs import PassCounts, PassLimits, cuda_graph_capture
from titan.models.decoder import Decoder


class Runner(Protocol):
    """Runs a model; batches are laid out on the host, but for what the device alone knows of nodes that were grown there."""

    model: Decoder

    def forward(self, batch: RaggedBatch) -> Tensor:
        """One pass over the ragged batch: logits [L, vocab] of the rows that need them."""


class ModelRunner:
    """Runs a model as it is.

    Args:
        model: the model.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
    """

    def __init__(self, model: Decoder, kv: Tensor) -> None:
        self.model = model
        self.kv = kv

    def forward(self, batch: RaggedBatch) -> Tensor:
        logits: Tensor = self.model(batch, self.kv)
        return logits


def make_runner(model: Decoder, kv: Tensor, limits: PassLimits, counts: PassCounts) -> Runner:
    """The runner for the model's device.

    Args:
        model: the model.
        kv: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim].
        limits: of the small passes.
        counts: of passes, counted in where small ones are replayed.

    Raises:
        ValueError: the device's kernels cannot take the model.
    """
    if not backend.takes_triton(model.device):
        return make_compiled_runner(model, kv) or ModelRunner(model, kv)
    from titan.kernels.triton.runner import TritonRunner  # not every platform has triton

    return TritonRunner(model, kv, limits, counts, cuda_graph_capture())
