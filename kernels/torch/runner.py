"""Runs a model operation by operation, with batches on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.core.batch import RaggedBatch
from titan.core.growth import Feed, GrowthSpec
from titan.core.kv_tensor import KVTensor
from titan.core.trees import DraftTrees
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend, Model, PassInputs, WarmUp


class TorchRunner:
    """See `titan.kernels.interfaces.Runner`."""

    padded_sizes: Sequence[int] = ()

    def __init__(self, backend: Backend, model: Model, kv: KVTensor) -> None:
        self.backend = backend
        self.model = model
        self.kv = kv

    def forward(self, batch: RaggedBatch) -> Tensor:
        place_nodes(batch)
        self.model.config.check_positions(batch.attention.positions)
        arrays = [batch.token_ids, batch.attention.positions, batch.slot_mapping, batch.logits_rows]
        token_ids, positions, slot_mapping, logits_rows = (torch.from_numpy(array).to(self.backend.device) for array in arrays)
        inputs = PassInputs(token_ids, positions, slot_mapping, logits_rows, batch.attention)
        return self.model.logits(self.model.hidden_states(inputs, self.kv))

    def grow(self, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        return grow_by_passes(self.forward, self.backend, feeds, num_rows, vocab_size, self.kv.block_size)

    def warm_up(self, specs: Sequence[GrowthSpec], vocab_size: int) -> Sequence[WarmUp]:
        return ()


def place_nodes(batch: RaggedBatch) -> None:
    """Copy the nodes of a batch, if it has any, to their places in its arrays on the host."""
    if (nodes := batch.nodes) is None:
        return
    rows, roots, masks = batch.node_places()
    batch.token_ids[rows] = np.maximum(nodes.token_ids.cpu().numpy(), 0)  # empty places have token -1
    batch.attention.ancestor_bits[rows] = nodes.ancestor_bits.cpu().numpy() & masks
    if nodes.depths is not None:
        batch.attention.positions[rows] = roots + nodes.depths.cpu().numpy()
