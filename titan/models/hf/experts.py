"""Experts of mixtures, as transformers' modules call them."""

from __future__ import annotations

from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from titan.kernels.interfaces import LayerOps
from titan.models.hf.modules import is_close, is_unhooked, mixed_rows

GROUPED = "grouped_mm"
"""Name of transformers' default, which it has of plain and of quantised experts; packed ones do not go by it."""
TRAITS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
"""Attributes of modules of experts, given by transformers' decorator of their classes."""


class PackedExperts:
    """The experts of a module with packed weights, each run on the tokens that chose it."""

    def __init__(self, ops: LayerOps, module: Any) -> None:
        self._ops, self._module = ops, proxy(module)  # which owns this: no cycle keeps the weights of a model that is gone
        self._up, self._down = (pack_layers(ops, module, name) for name in layer_names(module))

    def run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts that were chosen for each token; the signature is that of the module's own forward.

        Args:
            hidden_states: [T, hidden_size].
            top_k_index: int64 [T, k], the experts of each token.
            top_k_weights: [T, k].

        Returns:
            [T, hidden_size].
        """
        module = self._module
        num_tokens, top_k = top_k_index.shape
        experts, order = top_k_index.flatten().sort()
        counts = experts.bincount(minlength=len(self._up)).tolist()
        rows = hidden_states[order // top_k].split(counts)
        outputs = []
        for x, up, down in zip(rows, self._up, self._down, strict=True):
            if len(x):
                inner = self._ops.linear(x, *up)
                inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
                outputs.append(self._ops.linear(inner, *down))
        output = torch.cat(outputs)
        if module.has_post_expert_norm:
            output = module.post_expert_norm(output)
        by_choice = torch.empty_like(output)
        by_choice[order] = output
        weighted = by_choice.view(num_tokens, top_k, -1) * top_k_weights[:, :, None]
        return weighted.sum(1).to(hidden_states.dtype)


def set_experts(model: nn.Module, name: str) -> None:
    """Make all modules of experts in a model call the function that is registered with transformers under a name."""
    from transformers import PreTrainedModel

    for module in model.modules():  # transformers asks only the outermost, which may take in a language model of another kind
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation(name)


def pack_experts(ops: LayerOps, module: Any) -> bool:
    """Pack the weights of a module's experts, if it has any, which replace its own; return whether that could be done."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    if not all(hasattr(module, trait) for trait in TRAITS) or not is_unhooked(module):
        return False
    weights = [getattr(module, name, None) for name in layer_names(module)]
    if not all(type(each) is nn.Parameter and each.ndim == 3 for each in weights):
        return False
    size = weights[1].shape[2 if module.is_transposed else 1]  # type: ignore[union-attr]
    rows, num_experts = mixed_rows(weights[1].new_empty(1, size)), len(weights[1])  # type: ignore[union-attr,arg-type]
    chosen = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(i))[:2] for i in range(len(rows))])
    choice = chosen.to(rows.device), torch.linspace(0.1, 0.9, chosen.numel()).view(chosen.shape).to(rows)
    packed = PackedExperts(ops, module)
    if not is_close(packed.run(rows, *choice), grouped_mm_experts_forward(module, rows, *choice)):
        return False
    module.forward = packed.run
    for name in layer_names(module):
        setattr(module, name, None)
    return True


def layer_names(module: Any) -> tuple[str, str]:
    """Return the names of the weights of a module of experts."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def pack_layers(ops: LayerOps, module: Any, name: str) -> list[tuple[Tensor, Tensor | None]]:
    """Return the packed weight and the bias of a linear layer of each expert."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach().clone() if module.has_bias else [None] * len(weights)
    return [(ops.pack(w.T.contiguous() if module.is_transposed else w), bias) for w, bias in zip(weights, biases, strict=True)]
