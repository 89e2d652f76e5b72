"""Which tests are slow, and how long state machines and fuzzers run; `session_fixtures` has what needs imports that take time."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

SLOW = (
    *("/bench/", "test_packaging", "test_examples", "cpu-", "test_other_processors"),  # kinds of processors below the best
    *("triton", "sm90", "test_cuda_", "test_memory_profile", "test_tree_attention", "test_attention_planner"),  # its interpreter
    *("distribut", "chi_square", "dialled"),  # statistics
    *("test_loading_peaks", "real_vocabulary", "whatever_the_neighbours", "in_bfloat16_too"),  # large, or many, models
)
"""Words in the names of tests that are slow by nature, or of their files or parameters."""

LEFT_OUT = ("models", "long")
"""Marks of tests that run only if they are named."""

SOAK = settings(
    max_examples=1000, stateful_step_count=50, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck)
)
"""A round of `make soak`, in place of what the tests themselves ask for: other examples each time."""
settings.register_profile("soak", SOAK)
settings.register_profile("repeatable", deadline=None, derandomize=True, phases=set(Phase) - {Phase.explain})
settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("repeatable")  # unless the command line names another


def pytest_configure(config: pytest.Config) -> None:
    """The process that shares tests out among workers runs none: the workers need not wait for its imports."""
    shares = config.getoption("numprocesses", None) and not config.getoption("collectonly")
    if hasattr(config, "workerinput") or not shares:
        gc.disable()
        config.pluginmanager.import_plugin("session_fixtures")


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: garbage is not looked for among it again and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and (mark := item.get_closest_marker("long_where")):
            parameters = item.name.removeprefix(item.originalname)
            if any(word in parameters for word in mark.args):
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
