"""How a kernel's output is held to what it must be."""

from __future__ import annotations

import torch
from torch import Tensor

from titan.bench.gpu.sections import Goal, Measurement

COLUMNS = {"error": ".2e", "allowed": ".2e", "shape": ""}

ROUNDED_ONCE = {torch.float32: 1e-5, torch.float16: 2.0**-11 + 1e-5, torch.bfloat16: 2.0**-8 + 1e-5}
"""Largest difference of a number that was computed in float32 and rounded once, relative where it is above 1."""


def held_to(error: float, allowed: float, shape: str) -> Measurement:
    """A row of the table; NaN is an error like any other."""
    goal = Goal("error", allowed, error, is_at_most=True)
    problem = None if goal.is_met else f"the error is {error:.2e}: at most {allowed:.1e} is allowed"
    return Measurement({"error": error, "allowed": allowed, "shape": shape}, problem=problem)


def largest_difference(output: Tensor, exact: Tensor) -> float:
    """Largest ``|output - exact| / max(|exact|, 1)``; NaN if any number of the output is."""
    exact = exact.double()
    difference = (output.double() - exact).abs() / exact.abs().clamp(min=1)
    return float(difference.max())  # NaN wins
