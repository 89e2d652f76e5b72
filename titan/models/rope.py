"""Rotary position embeddings: frequencies as transformers computes them, and the table the decoder gathers from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan.models.registry import NotNativeError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow"),
)
"""Entries of ``rope_parameters`` that, where they are given, are above 0."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of each pair of head dimensions.

    ``dynamic`` is used only up to the trained length, where it equals ``default``: beyond it, the frequencies would depend
    on the length of each sequence and cached keys would go stale, so longer sequences are not admitted.
    """

    rope_type: str
    inverse_frequencies: tuple[float, ...]  # head_dim / 2
    attention_scaling: float  # multiplies cos and sin (yarn)


def read_rope(config: PretrainedConfig, head_dim: int) -> Rope:
    """Read the rotary embedding of a transformers config.

    Raises:
        NotNativeError: the rope type or a partial rotation is not supported.
        ValueError: an entry is not the number that it must be.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type") if parameters else None
    if rope_type not in ROPE_TYPES:
        raise NotNativeError(f"rope type {rope_type!r} is not supported: it must be one of {', '.join(ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise NotNativeError(f"partial_rotary_factor={partial} is not supported: it must be 1")
    for name in ROPE_NUMBERS:
        value = parameters.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf):
            raise ValueError(f"{name}={value!r} of the rotary embedding is not allowed: it must be a number above 0")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse_frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse_frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
    return Rope(rope_type, tuple(inverse_frequencies.tolist()), float(scaling))


def rope_table(rope: Rope, max_positions: int) -> Tensor:
    """Compute the cosines and signed sines of every position: float32 [max_positions, 2, head_dim].

    ``x`` is rotated to ``x * cos + roll(x, head_dim / 2) * sin``: the minus sign of the usual "rotate half" is in the
    sines of the first half.
    """
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table.mul_(rope.attention_scaling)
