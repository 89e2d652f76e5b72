"""Fixtures that several test files share; which tests are slow, and how long state machines and fuzzers run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

if not torch.cuda.is_available():  # read once, when triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from back_ends import BACK_ENDS, KINDS, make_back_end
from quick_interpreter import make_quick
from zoo import Zoo

from titan.kernels.cpu.library import load_library
from titan.kernels.interfaces import Backend
from titan.kernels.triton.tools import INTERPRETED

SLOW = (
    *("/bench/", "test_packaging", "cpu-", "test_other_processors"),  # kinds of processors below the best
    *("triton", "sm90", "test_cuda_", "test_memory_profile", "test_tree_attention", "test_attention_planner"),  # its interpreter
    *("distribut", "chi_square", "test_options", "dialled"),  # statistics
    *("test_loading_peaks", "real_vocabulary", "whatever_the_neighbours", "in_bfloat16_too"),  # large, or many, models
)
"""Words in the names of tests that are slow by nature, or of their files or parameters."""

LONG = (
    *("test_chains_are_those_that_pytorch_grows", "test_an_engine_grows_its_chains_in_graphs"),
    *("growth_ends_early_where_the_host_can_look[triton]", "own_logprobs[triton"),
    *("left_on_the_device", "measures_kernels_and_the_host", "products_and_sampling_run", "what_ends_a_process_or_its_device"),
    "the_environment_says[native]",
    *("no_paths-presence", "no_paths-repetition", "[x86-64 without AVX]"),
    *("triton-beside one that ends before", "triton-in the middle", "triton-latents-dtype1"),
    *("parents-looking back", "prefix_hits_and_preemption[llama-parents", "[qwen3-chain-greedy-False]"),
    *(f"while_an_engine_serves[llama-options{i}-chunked_tokens1]" for i in (1, 2, 3, 4, 5, 6, 10)),
)
"""Words in the names of tests that take seconds, up to half a minute, and try what others try at a smaller size or elsewhere."""
LEFT_OUT = ("models", "long")
"""Marks of tests that run only if they are named."""

SOAK = settings(
    max_examples=1000, stateful_step_count=50, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck)
)
"""A round of `make soak`, in place of what the tests themselves ask for: other examples each time."""
settings.register_profile("soak", SOAK)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(word in item.nodeid for word in LONG):
            item.add_marker("long")
    unnamed = [mark for mark in LEFT_OUT if mark not in config.getoption("-m")]
    left_out = [item for item in items if any(map(item.get_closest_marker, unnamed))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if any(word in item.nodeid for word in SLOW):
            item.add_marker("slow")
        if config.getoption("--hypothesis-profile") == "soak" and is_hypothesis_test(test := getattr(item, "function", None)):
            if isinstance(item, pytest.Function) and item.cls is not None:
                item.cls.settings = SOAK  # of a state machine
            else:
                test._hypothesis_internal_use_settings = SOAK  # a second @settings is refused


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
