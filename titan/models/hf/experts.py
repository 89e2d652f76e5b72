"""Experts of mixtures, as transformers' modules call them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def run_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply the experts that were chosen for each token; the signature is that of transformers' expert functions.

    Args:
        module: with the weights of all experts.
        hidden_states: [T, hidden_size].
        top_k_index: int64 [T, k], the experts of each token.
        top_k_weights: [T, k].

    Returns:
        [T, hidden_size].
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    if hidden_states.is_meta:  # which expert gets how many tokens is not known
        return torch.zeros_like(hidden_states)
    output: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return output
