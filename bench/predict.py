"""The speed-up that theory gives a draft, from its acceptance and the costs of the passes.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, section 3: if every draft token is accepted
with the same probability alpha, independently of the others, a step with gamma of them emits

    E = (1 - alpha ** (gamma + 1)) / (1 - alpha)        (their equation 1)

tokens, and its speed-up is E / (gamma * c + 1) with c the cost of a draft pass over that of a target pass (their theorem 3.8).
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023, is the same algorithm. Here the costs are
measured, and a verification need not cost what a decode costs, so that the speed-up is E / (drafting + verification), both in
decodes. What the host does between the passes is in neither.
"""

from __future__ import annotations

from collections.abc import Sequence


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


def mean_expected_tokens(alpha: float, num_trees: Sequence[float], num_steps: float) -> float:
    """`expected_tokens` over steps whose trees differ in depth.

    Args:
        alpha: probability that one more depth is accepted.
        num_trees: that reach each depth, from depth 1 on.
        num_steps: of a request, those without a tree among them.
    """
    return 1 + sum(alpha**depth * count for depth, count in enumerate(num_trees, 1)) / num_steps


def predicted_speed_up(tokens_per_step: float, drafting: float, verification: float) -> float:
    """Speed-up over decoding without a draft.

    Args:
        tokens_per_step: per request, final token included.
        drafting: the time of a step's draft passes, in target passes without draft tokens.
        verification: that of a target pass with them, in the same.
    """
    return tokens_per_step / (drafting + verification)
