"""Fixtures of the micro-benchmarks; `titan.bench.kernels` provides ``seed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from titan.bench.micro.stage import Stage, make_stage

NUM_REQUESTS = (1, 32)


@pytest.fixture(params=NUM_REQUESTS)
def num_requests(request: pytest.FixtureRequest) -> int:
    """Requests in flight."""
    count: int = request.param
    return count


@pytest.fixture
def stage(num_requests: int, seed: int) -> Stage:
    """An engine before the verification of dynamic trees."""
    return make_stage(num_requests, seed)


@pytest.fixture
def measure(benchmark: BenchmarkFixture) -> Iterator[Callable[..., Any]]:
    """Benchmark a function with its arguments, on a GPU until its work is done."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():

            def synchronized() -> None:
                function(*args, **kwargs)
                torch.cuda.synchronize()

            benchmark(synchronized)
        else:
            benchmark(function, *args, **kwargs)

    with torch.inference_mode():
        yield run
