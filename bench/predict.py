"""The speed-up that theory gives a draft, from its acceptance and the costs of the passes.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, section 3: if every draft token is accepted
with the same probability alpha, independently of the others, a step with gamma of them emits

    E = (1 - alpha ** (gamma + 1)) / (1 - alpha)        (their equation 1)

tokens, and its speed-up is E / (gamma * c + 1) with c the cost of a draft pass over that of a target pass (their theorem 3.8).
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023, is the same algorithm, to which it
applies as well. Here the costs are measured ones, and a verification need not cost what a decode costs, so that

    speed-up = E * decode / (passes * draft pass + verify pass).

What the host does between the passes is in neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FORMULA = "E * decode / (passes * draft pass + verify pass) with E = (1 - alpha^(gamma+1)) / (1 - alpha)"


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Mean seconds, for a whole batch, and draft passes per step."""

    decode: float  # a target pass without draft tokens
    verify: float  # a target pass with them
    draft_pass: float
    num_draft_passes: float

    @property
    def draft(self) -> float:
        """Seconds of drafting per step."""
        return self.num_draft_passes * self.draft_pass


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a step with ``gamma`` draft tokens in a chain, final token included (Leviathan et al. 2023, equation 1).

    Args:
        alpha: probability that one more draft token is accepted.
        gamma: 0 or more.

    Raises:
        ValueError: ``alpha`` is no probability, or ``gamma`` is negative.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} is not allowed: it must be between 0 and 1")
    if gamma < 0:
        raise ValueError(f"gamma={gamma} is not allowed: it must be 0 or more")
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def mean_expected_tokens(alpha: float, depths: Mapping[int, int]) -> float:
    """`expected_tokens` over steps whose trees differ in depth; 1 where there are none.

    Args:
        alpha: probability that one more depth is accepted.
        depths: number of steps by the depth of their tree, 0 for nothing drafted.
    """
    num_steps = sum(depths.values())
    return sum(expected_tokens(alpha, depth) * count for depth, count in depths.items()) / num_steps if num_steps else 1.0


def predicted_speed_up(tokens_per_step: float, costs: PassCosts) -> float:
    """Speed-up over decoding without a draft of steps that emit ``tokens_per_step`` tokens per request."""
    return tokens_per_step * costs.decode / (costs.draft + costs.verify)
