"""The runner that makes each pass, and the growth of draft trees, one call of compiled C++."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan.core.attention import LayerSpec
from titan.core.batch import RaggedBatch, prefix_sums
from titan.core.growth import BeamSpec, Feed, GrowthSpec, ShapePlan, ShapeSpec, Worth, block_table_of
from titan.core.kv_tensor import KVTensor
from titan.core.sampling_rows import options_of
from titan.core.trees import DraftTrees, GrowthReport, NodeColumns, allocate_nodes
from titan.kernels.cpu.compiled import BOOL, COMPILED_DTYPES, FLOAT32, INT, INT32, POINTER, CompiledKernels, address
from titan.kernels.cpu.structs import (
    LAYER_TENSORS,
    TREE_GROWTH,
    DecoderStruct,
    GrowingStruct,
    LayerStruct,
    NodeColumnsStruct,
    kv_struct,
    plan_struct,
    spec_struct,
)
from titan.kernels.cpu.weights import is_packed, weight_struct
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend
from titan.kernels.torch.runner import TorchRunner, place_nodes

TRAITS = frozenset(
    {"rms_norm", "pre_norm", "post_norm", "qk_norm", "row_norm", "silu", "gelu_tanh", "rope", "rope_per_layer"}
    | {"sliding_window", "tied_embedding", "attention_bias", "output_bias", "mlp_bias"}
)
"""Traits of models whose passes are one call of C++; see `titan.models.config.ModelConfig.traits`."""

OP_TRAITS = TRAITS | {"transformers", "soft_cap", "sinks", "chunked_window", "narrow_values", "latent_kv"}
"""Traits of models whose linear layers and attention are in C++."""

UNPRICED = Worth(agreement=1.0, acceptance=1.0, node_price=-math.inf, row_price=0.0, pass_price=1.0)
"""The worth of nodes that are fed whatever that costs: each has an infinite profit."""

UNSAMPLED = (1.0, 1.0, 0.0, 0, 0, 0)
"""The options of growth that samples nothing: a temperature, and what is not read."""


class CompiledRunner(TorchRunner):
    """Runs each pass in one call of C++.

    There is little to do between two depths of a draft tree, but once a pass has filled the caches with weights, each operation of
    Python or PyTorch takes several times as long as otherwise; so all depths are one call.

    Args:
        backend: the one that made the model's operations.
        kernels: the compiled C++ of this folder.
        model: a `titan.models.decoder.Decoder` that `is_one_call`.
        kv: of the model.
    """

    def __init__(self, backend: Backend, kernels: CompiledKernels, model: Any, kv: KVTensor) -> None:
        super().__init__(backend, model, kv)
        self._forward = kernels.plain_function("forward", model.dtype, *[POINTER] * 5, INT, POINTER)
        self._grow_trees = kernels.plain_function("grow", model.dtype, *[POINTER] * 2)
        self._kernels = kernels
        config = model.config
        layers = zip(model.layer_weights, kv.layers, config.layers, strict=True)
        self._layers = (LayerStruct * config.num_layers)(*(_layer_struct(*layer, config.hidden_size) for layer in layers))
        self._decoder = DecoderStruct(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=len(model.embedding),
            has_gelu="gelu_tanh" in config.traits,
            has_wide_norms=model.final_norm.dtype != model.dtype,
            eps=config.rms_norm_eps,
            embedding_scale=model.embedding_scale,
            embedding=None if is_packed(model.embedding) else model.embedding.data_ptr(),
            final_norm=model.final_norm.data_ptr(),
            layers=ctypes.addressof(self._layers),
            team=kernels.team,
            head=weight_struct(model.head, None, config.hidden_size),
        )

    def forward(self, batch: RaggedBatch) -> Tensor:
        place_nodes(batch)
        decoder, layout = self._decoder, batch.attention
        self.model.config.check_positions(layout.positions)
        structs = decoder, plan_struct(layout)
        arrays, num_rows = (batch.token_ids, batch.slot_mapping, batch.logits_rows), len(batch.logits_rows)
        logits = torch.empty(num_rows, decoder.head.num_outputs, dtype=self.model.dtype)
        self._forward(*map(ctypes.addressof, structs), *map(address, arrays), num_rows, logits.data_ptr())
        return logits

    def grow(self, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        if not all(isinstance(feed.spec, GrowthSpec | None) for feed in feeds):  # another way of growing
            return grow_by_passes(self.forward, self.backend, feeds, num_rows, vocab_size, self.kv.block_size)
        feeds = sorted(feeds, key=attrgetter("row"))  # the order of the trees
        trees, num_probs = list[tuple[Any, ...]](), 0
        for feed in feeds:
            last_slot = feed.root + (0 if feed.spec is None else feed.spec.num_slots)
            if last_slot >= len(feed.block_ids) * self.kv.block_size:
                raise IndexError(f"a block table of {len(feed.block_ids)} blocks does not cover slot {last_slot}")
            trees.append(_growth(feed.spec, feed.root, feed.row, num_probs))
            if isinstance(feed.spec, ShapeSpec) and feed.spec.params is not None:
                num_probs += 1 + feed.spec.num_slots
        growths, rows = np.array(trees, TREE_GROWTH), [feed.row for feed in feeds]
        self.model.config.check_positions(growths["root"] + growths["depth"] - 1)
        (is_sampled, has_scores), max_nodes = np.zeros((2, num_rows), np.bool_), int(growths["max_nodes"].sum())
        is_sampled[rows], has_scores[rows] = growths["is_sampled"], (growths["parents"] == 0) & (growths["max_nodes"] > 0)
        table, lengths = block_table_of(feeds), np.array([len(feed.token_ids) for feed in feeds])
        token_ids = np.array([*chain(*(feed.token_ids for feed in feeds))])
        counts, is_chain = np.zeros(num_rows, np.int64), np.ones(num_rows, np.bool_)
        nodes, first_scores, probs, draft_rows = allocate_nodes(max_nodes, None), np.full(num_rows, np.nan, np.float32), None, None
        if num_probs:
            probs = torch.empty(num_probs, vocab_size, dtype=torch.float32)
            draft_rows = torch.zeros(max_nodes + num_rows, dtype=torch.int32)
        growing = GrowingStruct(
            *(len(feeds), table.shape[1], vocab_size),
            *(address(growths, TREE_GROWTH), *map(address, (table, token_ids, lengths))),
            NodeColumnsStruct(*(column.data_ptr() for column in nodes)),
            *(0 if draft_rows is None else draft_rows.data_ptr(), address(counts), address(is_chain, BOOL)),
            *(0 if probs is None else probs.data_ptr(), address(first_scores, FLOAT32)),
        )
        self._grow_trees(ctypes.addressof(self._decoder), ctypes.addressof(growing))
        num_nodes = int(counts.sum())
        nodes = NodeColumns(*(column[:num_nodes] for column in nodes))
        draft_rows = None if draft_rows is None else draft_rows[: num_nodes + num_rows]
        report = GrowthReport(growing.num_passes, growing.num_rows, growing.pass_seconds, first_scores)
        return DraftTrees(prefix_sums(counts), is_chain, is_sampled, has_scores, nodes, probs, draft_rows, report)


def _growth(spec: GrowthSpec | None, root: int, row: int, first_probs: int) -> tuple[Any, ...]:
    """Return one record of `TREE_GROWTH`."""
    places = 0 if spec is None else spec.num_nodes, row, first_probs
    match spec:
        case None:
            return 0, root, 1, 0, 0, *places, UNSAMPLED, False, UNPRICED
        case BeamSpec(depth=depth, width=width, num_children=num_children, temperature=temperature, worth=worth):
            return 0, root, depth, width, num_children, *places, (temperature, *UNSAMPLED[1:]), False, worth or UNPRICED
        case ShapeSpec(plan=plan, params=params, seed=seed):
            options = UNSAMPLED if params is None else options_of(params, seed, root + 1)
            return _parents(plan), root, 1 + len(plan.feeds), 0, 0, *places, options, params is not None, UNPRICED


@lru_cache(maxsize=4096)
def _parents(plan: ShapePlan) -> int:
    """Return the address of the parents of a shape, which the cache keeps alive."""
    return address(plan.parents, INT32)


def is_one_call(model: Any, kv: KVTensor) -> bool:
    """Whether passes of a model can be one call: the C++ has its traits, its weights are packed, and its KV is one group."""
    has_kernels = model.dtype in COMPILED_DTYPES and model.config.traits <= TRAITS
    return has_kernels and is_packed(model.head) and len(kv.groups) == 1


def _layer_struct(weights: Any, kv_layer: Tensor, layer: LayerSpec, hidden_size: int) -> ctypes.Structure:
    """Return a layer as the library reads it: its `titan.models.layers.LayerWeights`, its KV and its heads; all must outlive it."""
    tensors = (getattr(weights, name) for name in LAYER_TENSORS)
    return LayerStruct(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        weight_struct(weights.qkv_weight, weights.qkv_bias, hidden_size),
        weight_struct(weights.output_weight, weights.output_bias, layer.num_heads * layer.head_dim),
        weight_struct(weights.gate_up_weight, weights.gate_up_bias, hidden_size),
        weight_struct(weights.down_weight, weights.down_bias, weights.gate_up_weight.shape[0] // 2),
        kv_struct(kv_layer, layer.head_dim),
        spec_struct(layer.attention, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.is_latent, None),
    )
