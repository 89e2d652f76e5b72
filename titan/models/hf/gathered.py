"""Models of transformers whose attention is their own: it gets the slots of all requests, gathered, under one mask.

Slow for many requests, but right for whatever updates a cache and takes masks of four dimensions (Falcon, GPT-J).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from titan.core.arrays import Ints
from titan.core.attention import AttentionSpec, LayerSpec
from titan.core.batch import AttentionLayout, QueryRow, build_batch, physical_slots
from titan.core.kv_tensor import KVLayout, KVTensor, kv_planes
from titan.kernels.interfaces import Backend, LayerOps, PassInputs
from titan.kernels.torch.attention import visible_slots
from titan.models.config import ModelConfig
from titan.models.hf.split import Head, find_decoder

MAX_DIFFERENCE = 0.1
"""Largest difference of logits by rounding, in norms; in float32 it is below 1e-4."""


class GatheredModel:
    """A causal language model with attention of its own, over paged KV; see `titan.kernels.interfaces.Model`.

    Args:
        model: with its weights on the back end's device.
        config: of the model.
        dtype: of weights, activations and logits.
        backend: whose plain operations write the cache.
        max_positions: positions that can be run; ``None``: those of the config.
    """

    def __init__(
        self, model: Any, config: ModelConfig, *, dtype: torch.dtype, backend: Backend, max_positions: int | None = None
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = backend.device
        self.max_positions = config.max_position_embeddings if max_positions is None else max_positions
        self.ops = backend.layer_ops(dtype, config.traits)
        self._decoder: nn.Module = find_decoder(model)
        self._head = Head(model, self._decoder)

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of the model's KV."""
        return self.config.kv_layout(self.dtype)

    def check_positions(self, positions: Ints) -> None:
        """Check that the model has these positions.

        Raises:
            IndexError: a position is not in 0 to ``max_positions - 1``.
        """
        if positions.max() >= self.max_positions or positions.min() < 0:
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not allowed: there are {self.max_positions}")

    def hidden_states(self, inputs: PassInputs, kv: KVTensor) -> Tensor:
        """Run the decoder on the query tokens of a pass, and write their KV: [L, hidden_size]."""
        gathered = gather(inputs.attention)
        slots, mask = (torch.from_numpy(each).to(self.device) for each in gathered)
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        bias.masked_fill_(~mask, torch.finfo(self.dtype).min)
        output = self._decoder(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            attention_mask=bias[None, None],
            past_key_values=PagedCache(self.ops, kv, inputs.slot_mapping, slots),
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if inputs.logits_rows is None else hidden.index_select(0, inputs.logits_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head: [L, hidden_size] -> [L, vocab_size]."""
        return self._head(hidden)


class Gathered(NamedTuple):
    """The slots of all requests of a batch, one after another, and what each query token sees of them."""

    slots: Ints  # int64 [N], of the cache
    mask: Any  # bool [T, N]


def gather(layout: AttentionLayout) -> Gathered:
    """Return the slots that the requests of a batch have, and the mask over them."""
    seq_lens, starts = layout.seq_lens, layout.query_start_loc
    owners = np.repeat(np.arange(len(seq_lens)), seq_lens)
    firsts = np.cumsum(seq_lens) - seq_lens
    places = np.arange(len(owners)) - firsts[owners]
    mask = np.zeros((len(layout.positions), len(owners)), np.bool_)
    for i, (first, length) in enumerate(zip(firsts.tolist(), seq_lens.tolist(), strict=True)):
        mask[starts[i] : starts[i + 1], first : first + length] = visible_slots(layout, i, None)
    return Gathered(physical_slots(layout.block_table, owners, places, layout.block_size), mask)


class PagedCache:
    """Stands in for a transformers cache: it writes what is new to the paged one, and returns what all requests may look at.

    Args:
        ops: that write.
        kv: of the model.
        new_slots: int64 [T], of the query tokens.
        slots: int64 [N], of all requests.
    """

    is_compileable = False

    def __init__(self, ops: LayerOps, kv: KVTensor, new_slots: Tensor, slots: Tensor) -> None:
        self._ops = ops
        self._kv = kv
        self._new_slots = new_slots
        self._slots = slots

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature of transformers
        """Return 0: the mask and the positions are given."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values, [1, K, T, D] each, and return those of all slots, [1, K, N, D] each."""
        kv_layer = self._kv.layers[layer_idx]
        self._ops.write_kv(kv_layer, self._new_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        if kv_layer.dtype == torch.int8:
            numbers, scales = (plane.flatten(2, 3).index_select(2, self._slots) for plane in kv_planes(kv_layer, key.shape[3]))
            rows = (numbers * scales[..., None]).to(key.dtype)
        else:
            rows = kv_layer.flatten(2, 3).index_select(2, self._slots)
        return rows[0][None], rows[1][None]


def check_gathering(ours: GatheredModel, model: Any) -> None:
    """Check that a model goes by its mask, by running two requests together and alone.

    One of them is in the middle, so that its slots lie before the other's queries and after them: a model that masks by places
    besides hides the wrong ones.

    Args:
        ours: the model over paged KV.
        model: the same as transformers has it.

    Raises:
        ValueError: the logits differ by more than rounding.
    """
    tokens = [[1, 2, 3, 4, 5], [3, 1, 2]]
    kv = KVTensor(ours.kv_layout, 2, 8, ours.device)
    rows = [[QueryRow([1], 0, tokens[0][:3])], [QueryRow([0], 0, tokens[1]), QueryRow([1], 3, tokens[0][3:])]]
    with torch.no_grad():
        for batch in (build_batch(each, block_size=8) for each in rows):
            arrays = [batch.token_ids, batch.attention.positions, batch.slot_mapping]
            token_ids, positions, slots = (torch.from_numpy(each).to(ours.device) for each in arrays)
            inputs = PassInputs(token_ids, positions, slots, None, batch.attention)
            together = ours.logits(ours.hidden_states(inputs, kv))
        first, second = (model(torch.tensor([each], device=ours.device), use_cache=False).logits[0] for each in tokens)
    alone = torch.cat((second, first[3:]))
    if not (together - alone).norm() <= MAX_DIFFERENCE * alone.norm():
        raise ValueError(f"{type(model).__name__} does not go by the mask it is given, without which trees cannot be run")


class ShapeCache:
    """Stands in for a transformers cache, and records the shapes that a model stores."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[LayerSpec] = []
        self.num_heads = 1

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature of transformers
        """Return 0."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Record the layer."""
        num_kv_heads, head_dim = key.shape[1], key.shape[3]
        if value.shape[3] != head_dim or layer_idx != len(self.layers):
            raise ValueError(f"layer {layer_idx} stores values of {value.shape[3]} numbers for keys of {head_dim}: not supported")
        self.layers.append(LayerSpec(num_kv_heads, num_kv_heads, head_dim, AttentionSpec(1.0)))
        return key, value
