"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # read once, when triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from zoo import Zoo

from titan.kernels.cpu.library import usable_library


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models here are too small to gain from threads, and results do not depend on how many cores there are."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _kernels_are_chosen_anew() -> Iterator[None]:
    """Of the CPU: what one test has chosen is not the next one's."""
    yield
    usable_library.cache_clear()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Small random models, made when first asked for."""
    return Zoo(tmp_path_factory.mktemp("zoo"))
