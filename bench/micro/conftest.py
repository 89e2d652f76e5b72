"""Fixtures of the micro-benchmarks; `titan.bench.parts` provides ``seed`` and ``swap_pair``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

collect_ignore = [] if find_spec("triton") else ["micro_cuda_host.py"]  # not every platform has it


@pytest.fixture
def measure(benchmark: BenchmarkFixture) -> Iterator[Callable[..., Any]]:
    """Benchmark a function with its arguments, on a GPU until its work is done."""
    is_on_gpu = torch.cuda.is_available()

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def call() -> None:
            function(*args, **kwargs)
            if is_on_gpu:
                torch.cuda.synchronize()

        benchmark(call)

    with torch.inference_mode():
        yield run
