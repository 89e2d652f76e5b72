"""What the machine itself does: the measures that the other benchmarks are divided by, before them and after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Measure = Callable[..., Any]


@pytest.fixture(params=["first", "last"], autouse=True)
def moment(request: pytest.FixtureRequest) -> str:
    """When a reference runs: before all others, or after them."""
    return str(request.param)


@pytest.mark.benchmark(group="kernel")
def test_reference_kernel(measure: Measure) -> None:
    """A product of two float32 matrices."""
    matrix = torch.ones(256, 256, device="cuda" if torch.cuda.is_available() else "cpu")
    measure(torch.mm, matrix, matrix)


@pytest.mark.benchmark(group="host")
def test_reference_host(measure: Measure) -> None:
    """A loop of Python."""
    measure(lambda: sum(i & 7 for i in range(5000)))
