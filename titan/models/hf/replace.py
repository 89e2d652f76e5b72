"""Replacement of a model's modules by Titan's, wherever these compute the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import LayerOps
from titan.models.hf.experts import pack_experts
from titan.models.hf.fused_attention import PROJECTIONS, fuse_attention
from titan.models.hf.modules import (
    PackedLinear,
    apply_linear,
    fuse_embedding,
    fuse_mlp,
    fuse_norm,
    is_close,
    is_plain_linear,
    mixed_rows,
)
from titan.models.hf.paged import BINDING
from titan.models.hf.process_heap import give_back
from titan.models.hf.quantised import quantisation
from titan.models.hf.trial_pass import NUM_TOKENS, run_without_attention
from titan.models.hf.widen import parts, widen, widened_in_turn


def replace_modules(model: Any, decoder: nn.Module, ops: LayerOps, kv: KVTensor, max_positions: int, dtype: torch.dtype) -> None:
    """Replace the modules of a model, one after another, by those that run on a back end's operations.

    Each is compared on random input with the one it replaces, and is not used if it differs by more than rounding. The attention of
    the model is bound; ``kv`` has one block, which is overwritten. In float32, weights may be of 16 bits, and are widened if they
    are not replaced.
    """
    is_narrow = dtype == torch.float32 and quantisation(model.config) is None
    all_parts = parts(model)
    if is_narrow:
        for module in set(model.modules()).difference(*(part.modules() for part in all_parts)):
            widen(module, recurse=False)
    with widened_in_turn(all_parts if is_narrow else ()):
        calls = record_calls(decoder, ops, kv)
    replacing = _Replacing(ops, kv, calls, max_positions, set(all_parts), dtype, is_narrow)
    if ops.packs:
        replacing.replace_tied_embedding(model)
    replacing.replace_children(model)


def reads_weight(parent: nn.Module, name: str) -> bool:
    """Whether the class of a module reads the weight of a child itself, or does not show what it does."""
    module_class: Any = type(parent)  # which mypy takes for unhashable
    source = _source(module_class)
    return source is None or re.search(rf"\bself\.{name}\.(weight|bias)\b", source) is not None


@cache  # Python parses a whole file for it, and layers are many, of few classes
def _source(module_class: type[nn.Module]) -> str | None:
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):
        return None


def record_calls(decoder: nn.Module, ops: LayerOps, kv: KVTensor) -> dict[nn.Module, dict[str, Any]]:
    """Return what attention modules are called with, by name, in a pass of a few tokens; those called otherwise are left out."""
    bound = {module: getattr(module, BINDING) for module in decoder.modules() if hasattr(module, BINDING)}
    calls: dict[nn.Module, dict[str, Any]] = {}
    if not bound:
        return calls

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args:
            calls[module] = kwargs

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in bound]
    tokens = torch.arange(NUM_TOKENS, device=kv.groups[0].device)[None]
    try:
        with run_without_attention(next(iter(bound.values())).attention, ops, kv):
            decoder(input_ids=tokens, position_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@dataclass(slots=True, eq=False)
class _Replacing:
    """Replacement of the modules of one model."""

    ops: LayerOps
    kv: KVTensor  # with one block
    calls: Mapping[nn.Module, dict[str, Any]]  # of attention modules, see `record_calls`
    max_positions: int
    parts: Collection[nn.Module]  # which are made ready one after another
    dtype: torch.dtype  # in which the model runs
    is_narrow: bool  # weights may be of fewer bits, and are widened if they are not replaced
    kept: nn.Module | None = None  # an output head whose weight others read

    def replace_tied_embedding(self, model: Any) -> None:
        """Replace embeddings and output head, if they have the same weight: both then read the packed one."""
        try:
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        except NotImplementedError:  # code of a checkpoint need not say where they are
            return
        if not isinstance(head, nn.Linear) or getattr(embedding, "weight", None) is not head.weight:
            return
        packed = self._packed_linear(head)
        places = [
            (parent, name) for parent in model.modules() for name, child in parent.named_children() if child in (head, embedding)
        ]
        if any(reads_weight(*place) for place in places):
            packed = None
        rows = None if packed is None else fuse_embedding(self.ops, embedding, packed.packed.weight, packed.dtype)
        if packed is None or rows is None:
            self.kept = head
            return
        for parent, name in places:
            setattr(parent, name, packed if getattr(parent, name) is head else rows)

    def replace_children(self, parent: nn.Module) -> None:
        """Replace what can be replaced below a module."""
        for name, child in parent.named_children():
            is_read = reads_weight(parent, name)
            replacement: nn.Module | None = None if is_read or child is self.kept else self._packed_linear(child)
            if replacement is None and child in self.parts and self.is_narrow:
                widen(child)
            if replacement is None and not is_read:
                replacement = self._replacement(child)
            if replacement is not None:
                setattr(parent, name, replacement)
            elif not self.ops.packs or not pack_experts(self.ops, child):
                self.replace_children(child)
            if child in self.parts:
                give_back()

    def _replacement(self, module: nn.Module) -> nn.Module | None:
        ops, bound = self.ops, getattr(module, BINDING, None)
        if bound is not None and module in self.calls:
            attention = fuse_attention(ops, bound, module, self.calls[module], self.kv, self.max_positions)
            for name in PROJECTIONS if attention is not None else ():
                setattr(module, name, None)  # its weights are no longer needed, but others may hold the module
            return attention
        return fuse_norm(ops, module) or fuse_mlp(ops, module, self.dtype)

    def _packed_linear(self, module: nn.Module) -> PackedLinear | None:
        if not self.ops.packs or not is_plain_linear(module):
            return None
        linear = cast("nn.Linear", module)
        if not self.is_narrow and linear.weight.dtype != self.dtype:  # it computes in a dtype of its own
            return None
        packed = PackedLinear(self.ops, linear, self.dtype)
        rows = mixed_rows(torch.empty(linear.in_features, dtype=self.dtype, device=linear.weight.device))
        return packed if is_close(packed(rows), apply_linear(linear, rows)) else None
