"""The weights of a decoder: streamed from safetensors into its parameters, piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from titan.kernels.interfaces import Backend
from titan.models.config import DecoderConfig
from titan.models.decoder import Decoder
from titan.models.rope import Rope, head_places
from titan.models.token_order import TokenOrder
from titan.models.weight_files import WEIGHT_DTYPES, StoredTensor, check_dtypes, misfits, refuse_misfits

LOG = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names in transformers of the weights that may be tied."""

CHUNK_BYTES = 8 * 2**20
"""Approximate size of the pieces in which weights are copied, so that few pages of a file are mapped at a time."""

MAX_SHARED_NUMBERS = 2**24
"""Size of the largest weight whose place in memory is shared while it is packed; the allocator gives larger ones back at once."""


def read_decoder(
    config: DecoderConfig,
    name: str,
    tensors: dict[str, StoredTensor],
    *,
    dtype: torch.dtype,
    backend: Backend,
    pack: bool,
    order: TokenOrder | None,
    weight_bits: int | None,
) -> Decoder:
    """Return a decoder with its weights, ready to run; see `titan.models.loader.load_model`.

    If its config says that embedding and head are tied, the checkpoint may have either. If it has both, and they differ, they are
    not tied: as in transformers, the weights count.

    Raises:
        ValueError: the weights do not fit the config, or are not finite.
    """
    check_dtypes(tensors, WEIGHT_DTYPES, ", unless model_impl='transformers', of target and draft")
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if "tied_embedding" in config.traits and head is not None:
        if embedding is None:
            tensors = {**tensors, EMBEDDING: head}
        elif not _are_equal(embedding, head, dtype):
            LOG.warning(
                "model %r runs untied: its config has tie_word_embeddings=true, but its %s differs from its %s",
                *(name, HEAD, EMBEDDING),
            )
            config = replace(config, traits=config.traits - {"tied_embedding"})
    model = Decoder(config, dtype=dtype, backend=backend)
    destinations = destinations_of(model)
    _check_weights(destinations, tensors, config)
    _load_weights(model, destinations, tensors, pack, order, weight_bits)
    model.prepare(pack=pack, weight_bits=weight_bits, num_outputs=None if order is None else order.num_outputs)
    return model


@dataclass(frozen=True, slots=True)
class Destination:
    """The rows of a parameter that a tensor of the checkpoint fills."""

    owner: nn.Module
    parameter: str
    rows: slice
    shape: tuple[int, ...]  # that the checkpoint's tensor must have
    offset: float = 0.0  # is added to its numbers
    factor: float = 1.0  # of the sums
    places: Tensor | None = None  # int64, where its rows go among those rows; None: in their order

    def folded(self, numbers: Tensor) -> Tensor:
        """Return numbers of the checkpoint as the decoder has them: in float32 where they change, so that they are rounded once."""
        return numbers if self.offset == 0 and self.factor == 1 else (numbers.float() + self.offset) * self.factor


def destinations_of(model: Decoder) -> dict[str, Destination]:
    """Return where each tensor of a checkpoint goes, by its name in transformers."""
    config, family = model.config, model.config.family
    q_size, kv_size, ffn_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    qkv, gate_up = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, {"gate_proj": ffn_size, "up_proj": ffn_size}
    if family.is_fused:
        qkv, gate_up = {"qkv_proj": q_size + 2 * kv_size}, {"gate_up_proj": 2 * ffn_size}
    destinations: dict[str, Destination] = {}

    def whole(source: str, owner: nn.Module, parameter: str, offset: float = 0.0, factor: float = 1.0) -> None:
        shape = tuple(owner.get_parameter(parameter).shape)
        destinations[source] = Destination(owner, parameter, slice(0, shape[0]), shape, offset, factor)

    def stacked(prefix: str, owner: nn.Module, target: str, parts: Mapping[str, int], all_places: Tensor | None = None) -> None:
        for kind in ("weight", "bias"):
            parameter = f"{target}_{kind}"
            if parameter not in owner._parameters:
                continue
            columns = tuple(owner.get_parameter(parameter).shape[1:])
            first = 0
            for part, size in parts.items():
                rows = slice(first, first + size)
                places = None if all_places is None else all_places[rows] - first
                destinations[f"{prefix}{part}.{kind}"] = Destination(owner, parameter, rows, (size, *columns), places=places)
                first += size

    whole(EMBEDDING, model, "embedding")
    whole("model.norm.weight", model, "final_norm", offset=family.norm_offset, factor=family.logits_scale)
    if model.lm_head is not None:
        whole(HEAD, model, "lm_head")
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for parameter, source in family.norms.items():
            whole(f"{prefix}{source}.weight", layer, parameter, offset=family.norm_offset)
        stacked(f"{prefix}self_attn.", layer, "qkv", qkv, _qkv_places(config, config.ropes[i]))
        stacked(f"{prefix}self_attn.", layer, "output", {"o_proj": config.hidden_size})
        stacked(f"{prefix}mlp.", layer, "gate_up", gate_up)
        stacked(f"{prefix}mlp.", layer, "down", {"down_proj": config.hidden_size})
        if "qk_norm" in config.traits:
            q_rows, k_rows = slice(0, config.num_heads), slice(config.num_heads, None)
            for source, rows in (("q_norm", q_rows), ("k_norm", k_rows)):  # one weight for all heads
                shape = (config.head_dim,)
                destinations[f"{prefix}self_attn.{source}.weight"] = Destination(layer, "qk_norm", rows, shape, family.norm_offset)
        if "row_norm" in config.traits:
            for source, rows in (("q_norm", slice(0, q_size)), ("k_norm", slice(q_size, q_size + kv_size))):
                shape = (rows.stop - rows.start,)
                destinations[f"{prefix}self_attn.{source}.weight"] = Destination(layer, "row_norm", rows, shape)
    return destinations


def _qkv_places(config: DecoderConfig, rope: Rope) -> Tensor | None:
    """Return where each row of a layer's q, k and v goes among them all; ``None``: where it is."""
    places, num_heads = head_places(rope, config.head_dim), config.num_heads + config.num_kv_heads
    if places is None:
        return None
    rows = torch.arange((num_heads + config.num_kv_heads) * config.head_dim)
    rows[: num_heads * config.head_dim] = (torch.arange(num_heads)[:, None] * config.head_dim + places).flatten()
    return rows


def _check_weights(destinations: dict[str, Destination], tensors: dict[str, StoredTensor], config: DecoderConfig) -> None:
    """Raise a `ValueError` for missing, unexpected or wrongly shaped tensors."""
    is_tied = "tied_embedding" in config.traits
    found = {
        key: tensor.shape
        for key, tensor in tensors.items()
        if not (key.endswith("rotary_emb.inv_freq") or (is_tied and key == HEAD))
    }
    lacks_prefix = any(f"model.{key}" in destinations for key in found.keys() - destinations.keys())
    advice = "; model_impl='transformers' takes names without 'model.' as well" if lacks_prefix else ""
    refuse_misfits(misfits(found, {key: each.shape for key, each in destinations.items()}), config.architecture, advice)


def _load_weights(
    model: Decoder,
    destinations: dict[str, Destination],
    tensors: dict[str, StoredTensor],
    pack: bool,
    order: TokenOrder | None,
    weight_bits: int | None,
) -> None:
    """Fill the parameters of an empty decoder one by one, and pack those that can be."""
    token_places = None if order is None else order.token_ids.argsort()  # of the checkpoint's tokens
    parts: dict[tuple[nn.Module, str], list[str]] = {}
    for key, destination in destinations.items():
        parts.setdefault((destination.owner, destination.parameter), []).append(key)
    packs = pack and (model.ops.packs or weight_bits is not None)
    packed = {part for part in parts if packs and model.is_packable(part[1])}
    # Plain weights that are to be packed share one buffer: freed one by one, they would leave holes in the heap that the
    # packed ones do not fit into, which adds up to a third of the model. Large ones leave none.
    sizes = [owner.get_parameter(parameter).numel() for owner, parameter in packed]
    size = max((size for size in sizes if size <= MAX_SHARED_NUMBERS), default=0)
    buffer = torch.empty(size, dtype=model.dtype, device=model.device)
    for (owner, parameter), keys in parts.items():
        shape = (empty := owner.get_parameter(parameter)).shape
        is_packed = (owner, parameter) in packed
        is_shared = is_packed and shape.numel() <= MAX_SHARED_NUMBERS
        value = buffer[: shape.numel()].view(shape) if is_shared else torch.empty_like(empty, device=model.device)
        for key in keys:
            places = token_places if parameter in ("embedding", "lm_head") else destinations[key].places
            _copy_tensor(value, destinations[key], tensors[key], None if places is None else places.to(model.device))
        setattr(owner, parameter, nn.Parameter(model.ops.pack(value, weight_bits) if is_packed else value, requires_grad=False))
        del value


def _are_equal(a: StoredTensor, b: StoredTensor, dtype: torch.dtype) -> bool:
    """Whether two stored tensors are the same in a dtype; they are read piece by piece, up to the first difference."""
    if a.shape != b.shape:
        return False
    step = max(1, CHUNK_BYTES // max(1, dtype.itemsize * prod(a.shape[1:])))
    pieces = (slice(first, first + step) for first in range(0, a.shape[0], step))
    return all(torch.equal(*(each.read(dtype, rows).to(dtype) for each in (a, b))) for rows in pieces)


def _copy_tensor(parameter: Tensor, destination: Destination, tensor: StoredTensor, places: Tensor | None) -> None:
    """Copy a stored tensor piece by piece; one without the parameter's first dimension is broadcast along it.

    Its rows go to ``places``, int64 [rows], if there are any, else they keep their order.

    Raises:
        ValueError: numbers of it are not finite, or not in the target's dtype.
    """
    target = parameter[destination.rows]
    if target.dim() > len(tensor.shape):
        target.copy_(destination.folded(tensor.read(target.dtype)))
        return
    step = max(1, CHUNK_BYTES // max(1, target[:1].nbytes))
    for first in range(0, len(target), step):
        rows = slice(first, first + step)
        read = destination.folded(tensor.read(target.dtype, rows))
        if places is None:
            target[rows].copy_(read)
        else:
            target.index_copy_(0, places[rows], read.to(target))
