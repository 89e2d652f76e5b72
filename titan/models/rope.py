"""Rotary position embeddings: frequencies as transformers computes them, and the table the decoder gathers from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.checks import check_number
from titan.models.registry import WHOLE_ROPE, NotNativeError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow"),
)
"""Entries of ``rope_parameters`` that, where they are given, are above 0."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of pairs of head dimensions.

    Its frequencies hold for the positions of `titan.models.config.num_positions`, up to which ``dynamic`` equals ``default``.
    """

    rope_type: str
    inverse_frequencies: tuple[float, ...]  # of each pair: head_dim / 2, or fewer if a part of each head is not rotated
    attention_scaling: float  # multiplies cos and sin (yarn, longrope)


NO_ROPE = Rope("none", (), 1.0)
"""Rope of a layer that does not rotate."""


def read_rope(config: PretrainedConfig, head_dim: int, entry: str, *, may_rotate_part: bool) -> Rope:
    """Read a rotary embedding of a transformers config.

    Args:
        config: the config, with transformers' defaults filled in.
        head_dim: of queries and keys.
        entry: of its ``rope_parameters``, by name, or `WHOLE_ROPE`.
        may_rotate_part: ``partial_rotary_factor`` may be below 1.

    Raises:
        NotNativeError: the rope type or a partial rotation is not supported.
        ValueError: an entry is not the number that it must be.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters if entry == WHOLE_ROPE else config.rope_parameters[entry]
    rope_type = parameters.get("rope_type") if parameters else None
    if rope_type not in ROPE_TYPES:
        raise NotNativeError(f"rope type {rope_type!r} is not supported: it must be one of {', '.join(ROPE_TYPES)}")
    partial = 1.0 if (given := parameters.get("partial_rotary_factor")) is None else given
    rotary_dim = int(head_dim * check_number("partial_rotary_factor", partial, low=0, high=1, open_low=True))
    if partial != 1.0 and not may_rotate_part:
        raise NotNativeError(f"partial_rotary_factor={partial} is not supported: it must be 1")
    if rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor={partial} rotates {rotary_dim} of {head_dim} dimensions: that must be an even number"
        )
    for name in ROPE_NUMBERS:
        if parameters.get(name) is not None:
            check_number(name, parameters[name], low=0, open_low=True)
    if rope_type == "default":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        inverse_frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse_frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, layer_type=entry or None)
    return Rope(rope_type, tuple(inverse_frequencies.tolist()), float(scaling))


def rope_entries(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of all rotary embeddings of a config of a language model, of which some have one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [each for each in (parameters, *parameters.values()) if isinstance(each, Mapping)]


def rope_table(rope: Rope, head_dim: int, max_positions: int) -> Tensor:
    """Compute the cosines and signed sines of every position: float32 [max_positions, 2, head_dim].

    ``x`` is rotated to ``x * cos + roll(x, head_dim / 2) * sin``: the minus sign of the usual "rotate half" is in the
    sines of the first half. Dimensions that are not rotated have a cosine of 1; `head_places` says which they are.
    """
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    num_still = head_dim // 2 - len(rope.inverse_frequencies)
    cos = F.pad(angles.cos().mul_(rope.attention_scaling), (0, num_still), value=1.0)
    sin = F.pad(angles.sin().mul_(rope.attention_scaling), (0, num_still))
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def head_places(rope: Rope, head_dim: int) -> Tensor | None:
    """Return where each dimension of a head of queries or keys goes: int64 [head_dim]; ``None``: where it is.

    transformers rotates the first dimensions of a head, and pairs each of their first half with one of their second half. The
    decoder has the first of every pair in the first half of the head, whatever is rotated, which changes no score.
    """
    num_pairs, half = len(rope.inverse_frequencies), head_dim // 2
    if num_pairs in (0, half):
        return None
    first, second, still = torch.arange(head_dim).split([num_pairs, num_pairs, head_dim - 2 * num_pairs])
    return torch.cat((first, still[: half - num_pairs], second, still[half - num_pairs :])).argsort()
