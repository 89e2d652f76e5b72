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

_LAYERS = (
    "caps",
    "sinks",
    "chunks",
    "narrow values",
    "latents",
    "latents of many heads",
    "all at once",
    "all at once over latents",
)
LONG = (
    *(
        "test_chains_are_those_that_pytorch_grows",
        "test_an_engine_grows_its_chains_in_graphs",
        "test_sampled_chains_are_those_that_pytorch_grows[narrow",
        *(f"siblings_along_sampled_chains_are_those_that_pytorch_grows[{each}" for each in ("narrow", "eight-5")),
    ),
    *("growth_ends_early_where_the_host_can_look[triton]", "own_logprobs[triton"),
    *("measures_copies_and_the_host", "products_and_sampling_run", "what_ends_a_process_or_its_device"),
    "experts_through_transformers_peaks",
    *("the_environment_says[native]", "test_other_processors"),  # whose check is compiled anew
    *("no_paths-presence", "no_paths-repetition", "[of all sizes]"),
    *("triton-beside one that ends before", "triton-in the middle", "triton-latents-dtype1"),
    *(f"other_families[triton-{each}-{kind}]" for each in _LAYERS for kind in ("dtype0-True", "dtype1-False")),
    "other_families[triton-latents of many heads-dtype0-False]",
    *(
        "as_well[phi3",
        "of_the_law[triton-never",
        "of_the_law[triton-beside one that goes on",
        "residual_vectors[triton-near-24",
        "rows_keep[triton-5000",
        "together[gemma2",
    ),
    *("queries_and_options[2]", "queries_and_options[13]", "the_requests[resize_kv_cache(200)-draft"),
    *(
        "end_drafting_soon[150M",
        "these_are_few[128-7]",
        "looks_at_the_device_once[dynamic-greedy-0.8-others2",
    ),
    *(f"whatever_the_shape[narrow_window-{each}]" for each in ("auto_16", "dynamic", "parents")),
    *("depend_on_threads[1-5]", "on_the_clock[most likely-constant"),
    *("parents-looking back", "prefix_hits_and_preemption[llama-parents", "[qwen3-chain-greedy-False]"),
    *(f"while_an_engine_serves[llama-options{i}-chunked_tokens1]" for i in (1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14)),
    *(f"while_an_engine_serves[llama-options{i}-chunked_tokens0]" for i in (2, 3, 5, 7, 12)),
    *("what_was_recorded_before[sampled]", "nothing_can_be_sampled[shape0]", "no_greedy_output[triton", "have_proposed[triton"),
    *(f"targets_distribution[{each}]" for each in ("cuts-dynamic", "all-most likely", "all-chain", "all-auto")),
    *(f"targets_distribution[{each}-shape]" for each in ("hot", "min_p", "presence_frequency", "logit_bias", "processor")),
    "targets_distribution[min_tokens-shape]",
    *("is_judged[lossless]", "flat_q-hot-chain-torch", "the_sampled_tokens[None-0]"),
    *("without_valid_kv[qwen2-", "without_valid_kv[llama3_rope", "replayed_together[granite_swa]", "on_pytorch[chain-sampled"),
    *(f"on_the_clock[own seed-{each}]" for each in ("constant", "jumping")),
    *(f"on_the_clock[greedy drafts-{each}]" for each in ("constant", "random")),
    "on_the_clock[most likely-random]",
    *(f"expected_of_them[{each}" for each in ("150M", "demo AVX2")),
    *("before_it_showed[150M", "mixed_fleet[demo float32-2-", "nothing_drafts[demo float32-32-"),
    *(f"fall_ends_drafting[GPU, 8 B and 1 B-8-{each}]" for each in ("confident", "always sure")),
    *(f"fall_ends_drafting[150M bfloat16-8-{each}]" for each in ("confident", "no confidence")),
    *("prompts_have_the_models_own_logprobs[torch-False", "half_a_percent[bfloat16]", "depend_on_threads[1-2]"),
    *(f"the_requests[{each}]" for each in ("compact_kv_cache()-draft", "compact_kv_cache()-pool", "resize_kv_cache(200)-tables")),
)
"""Words in the names of tests that take seconds, up to half a minute, and try what others try at a smaller size or elsewhere."""
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
