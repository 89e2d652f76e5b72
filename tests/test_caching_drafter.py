"""A drafter of one's own that keeps KV: sized, matched, moved, rolled back and evicted with the target's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from custom_drafters import PARENTS, Refusing, Remembering
from stepping import AMPLE, SCARCE, greedy, make_engine, run_all
from zoo import Zoo, random_prompts

PROMPTS = random_prompts(12)
MAX_TOKENS = 30


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("options", [AMPLE, SCARCE], ids=["ample", "scarce"])
def test_its_kv_is_that_of_the_tokens_whatever_becomes_of_the_blocks(zoo: Zoo, options: dict[str, Any], caching: bool) -> None:
    written = [zoo.greedy("llama", prompt, MAX_TOKENS + len(PARENTS), ignore_eos=True) for prompt in PROMPTS]
    drafter = Remembering({tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, written, strict=True)})
    engine = make_engine(zoo.path("llama"), drafter, draft_tree="auto", enable_prefix_caching=caching, **options)
    outputs = run_all(engine, PROMPTS, [greedy(MAX_TOKENS, ignore_eos=True)] * len(PROMPTS))
    assert outputs == [tokens[:MAX_TOKENS] for tokens in written]
    assert engine.metrics().mean_acceptance_length > 3
    assert (engine.counters.num_preemptions > 0) == (options is SCARCE)
    assert drafter.num_checked > len(PROMPTS) * MAX_TOKENS
    assert drafter.num_scattered[True] > 0
    assert (drafter.num_scattered[False] > 0) == (options is SCARCE), "where blocks are scarce it gets no more than its drafts"


def test_its_bytes_count_when_the_pool_is_sized(zoo: Zoo) -> None:
    """Per token, target: 2 layers of 2 * 2 heads * 16 * 4 bytes; drafter: 3 layers of 2 * 16 * 8 bytes."""
    memory = 16 * (2 * 256 + 3 * 256) * 10
    assert make_engine(zoo.path("llama"), Remembering({}), kv_cache_memory=memory).kv.num_blocks == 10
    assert make_engine(zoo.path("llama"), kv_cache_memory=memory).kv.num_blocks == 25


def test_one_engine_at_a_time_uses_it(zoo: Zoo) -> None:
    """A second one would give it a cache of its own, and the first one's blocks would be written past its end."""
    drafter = Remembering({})
    first, second = make_engine(zoo.path("llama"), drafter), make_engine(zoo.path("llama"), zoo.path("llama~"))
    for draft in (drafter, second.drafter):
        for use in (partial(make_engine, zoo.path("llama")), make_engine(zoo.path("llama")).swap_draft):
            with pytest.raises(ValueError, match=r"draft_model=.* is in use by another LLM.*allowed is one for each"):
                use(draft)
    with pytest.raises(ValueError, match="is in use by another LLM"):
        second.swap_draft(drafter)
    first.swap_draft(drafter)  # it has it already
    with pytest.raises(ValueError, match="wants another cache"):
        first.swap_draft(Refusing())
    with pytest.raises(ValueError, match="is in use by another LLM"):
        second.swap_draft(drafter)
    first.swap_draft(None)
    second.swap_draft(drafter)
    del second
    make_engine(zoo.path("llama"), drafter)
