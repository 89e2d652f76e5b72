"""Fixtures that several test files share, and what is compiled before the first test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # read once, when triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from back_ends import BACK_ENDS, KINDS, make_back_end
from quick_interpreter import make_quick
from zoo import Zoo

from titan.kernels.cpu.library import load_library
from titan.kernels.interfaces import Backend
from titan.kernels.triton.tools import INTERPRETED


@pytest.hookimpl(tryfirst=True)  # before the tests are shared out
def pytest_collection_finish(session: pytest.Session) -> None:
    """Of several workers, let each compile some of the kinds that tests name, before any begins; else all compile the same ones."""
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        calls = [each.callspec for each in session.items if hasattr(each, "callspec")]
        named = {value for call in calls for value in call.params.values() if isinstance(value, str)}
        kinds = [kind for name, kind in KINDS.items() if name in named]
        for kind in kinds[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
            load_library(kind)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models here are too small to gain from threads, and results do not depend on how many cores there are."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Triton's interpreter takes a quarter of the time."""
    if INTERPRETED:
        make_quick()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Small random models, made when first asked for."""
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session", params=BACK_ENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each of the back ends that conformance tests hold to the same oracles."""
    return make_back_end(request.param)
