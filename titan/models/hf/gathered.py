"""Models of transformers whose attention is their own: it gets the slots of all requests, gathered, under one mask.

Slow for many requests, but right for whatever updates a cache and takes masks of four dimensions (Falcon, GPT-J).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan.core.arrays import Flags, Ints
from titan.core.attention import AttentionSpec, LayerSpec, visible_slots
from titan.core.batch import AttentionLayout, QueryRow, build_batch, physical_slots
from titan.core.kv_tensor import KVTensor, kv_planes
from titan.kernels.interfaces import LayerOps, Model, PassInputs
from titan.models.hf.modules import difference
from titan.models.hf.trial_pass import MAX_DIFFERENCE
from titan.models.token_order import TokenOrder


class GatheredAttention:
    """The attention of a model's own modules, over slots that are gathered for each pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def decode(self, decoder: nn.Module, token_ids: Tensor, inputs: PassInputs, kv: KVTensor, ops: LayerOps) -> Tensor:
        """Run a decoder on the query tokens of a pass, and write their KV: [T, hidden_size], NaN where a token sees such KV."""
        device = token_ids.device
        slots, mask = (torch.from_numpy(each).to(device) for each in gather(inputs.attention))
        bias = torch.zeros(mask.shape, dtype=self._dtype, device=device).masked_fill_(~mask, -torch.inf)
        cache = PagedCache(ops, kv, inputs.slot_mapping, slots)
        arguments = {"attention_mask": bias[None, None], "past_key_values": cache, "use_cache": True}
        output = decoder(input_ids=token_ids[None], position_ids=inputs.positions[None], **arguments)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden.masked_fill((mask & ~cache.are_finite).any(1, keepdim=True), torch.nan)


def gather(layout: AttentionLayout) -> tuple[Ints, Flags]:
    """Return the slots of all requests, one after another: int64 [N]; and which of them tokens see: bool [T, N]."""
    seq_lens, starts = layout.seq_lens, layout.query_start_loc
    owners = np.repeat(np.arange(len(seq_lens)), seq_lens)
    firsts = np.cumsum(seq_lens) - seq_lens
    places = np.arange(len(owners)) - firsts[owners]
    mask = np.zeros((len(layout.positions), len(owners)), np.bool_)
    for i, (first, length) in enumerate(zip(firsts.tolist(), seq_lens.tolist(), strict=True)):
        mask[starts[i] : starts[i + 1], first : first + length] = visible_slots(layout, i, None)
    return physical_slots(layout.block_table, owners, places, layout.block_size), mask


class PagedCache:
    """Stands in for a transformers cache: it writes what is new to the paged one, and returns what all requests may look at.

    Numbers that are not finite are returned as zeros, since a mask that is added to scores hides no NaN. `are_finite` says which
    slots had none of these in any layer, bool [N].

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
        self._places = slots // kv.block_size, slots % kv.block_size  # the same for all layers
        self.are_finite = torch.ones_like(slots, dtype=torch.bool)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature of transformers
        """Return 0: the mask and the positions are given."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values, [1, K, T, D] each, and return those of all slots, [1, K, N, D] each."""
        kv_layer = self._kv.layers[layer_idx]
        self._ops.write_kv(kv_layer, self._new_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        if kv_layer.dtype == torch.int8:
            numbers, scales = (plane[:, :, *self._places] for plane in kv_planes(kv_layer, key.shape[3]))
            rows = numbers * scales[..., None]
        else:
            rows = kv_layer[:, :, *self._places]
        rows = rows.to(key.dtype)  # the queries', whatever the cache has
        self.are_finite &= rows.abs().amax((0, 1, 3)).isfinite()
        rows.nan_to_num_(0.0, 0.0, 0.0)
        return rows[0][None], rows[1][None]


def check_gathering(ours: Model, model: Any, order: TokenOrder | None) -> None:
    """Check that a model goes by its mask and its positions, by running two requests together and alone.

    One of them is in the middle, so that its slots lie before the other's queries and after them: a model that masks by places
    besides hides the wrong ones. It ends with the children of a token: a model that goes by the distance of slots, as ALiBi may, is
    wrong about all but the first of them, whose places are not their positions.

    Args:
        ours: the model over paged KV.
        model: the same as transformers has it.
        order: of the tokens of ``ours``; ``None`` = the checkpoint's.

    Raises:
        ValueError: the logits differ by more than rounding.
    """
    other, prompt, children = [3, 1, 2], [1, 2, 3, 4], [5, 2, 3, 1]
    kv = KVTensor(ours.kv_layout, 2, 8, ours.device)
    batches = (
        build_batch([QueryRow([1], 0, prompt[:3])], block_size=8),
        build_batch([QueryRow([0], 0, other), QueryRow([1], 3, [*prompt[3:], *children])], block_size=8),
    )
    layout = batches[1].attention
    layout.tree_starts[1] = layout.visible_lens[-4:] = layout.positions[-4:] = len(prompt)
    layout.ancestor_bits[-4:] = 1, 2, 4, 8
    with torch.no_grad():
        for batch in batches:
            arrays = [batch.token_ids, batch.attention.positions, batch.slot_mapping]
            token_ids, positions, slots = (torch.from_numpy(each).to(ours.device) for each in arrays)
            inputs = PassInputs(token_ids, positions, slots, None, batch.attention)
            together = ours.logits(ours.hidden_states(inputs, kv))
        sequences = [torch.tensor(each, device=ours.device) for each in (other, *([*prompt, child] for child in children))]
        if order is not None:
            token_ids = order.token_ids.to(ours.device)
            sequences = [token_ids[each] for each in sequences]
        first, *paths = (model(each[None], use_cache=False).logits[0] for each in sequences)
    alone = torch.cat((first, paths[0][3:4], *(each[4:] for each in paths)))
    if order is not None:
        alone = alone.index_select(1, token_ids[: order.num_outputs])
    if difference(together.float(), alone.float()) > MAX_DIFFERENCE:
        raise ValueError(f"{type(model).__name__} does not go by the mask it is given, without which trees cannot be run")


class ShapeCache:
    """Stands in for a transformers cache, and records the shapes that a model stores."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[LayerSpec] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature of transformers
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        num_kv_heads, head_dim = key.shape[1], key.shape[3]
        if value.shape[3] != head_dim or layer_idx != len(self.layers):
            raise ValueError(f"layer {layer_idx} stores values of {value.shape[3]} numbers for keys of {head_dim}: not supported")
        self.layers.append(LayerSpec(num_kv_heads, num_kv_heads, head_dim, AttentionSpec(1.0)))
        return key, value
