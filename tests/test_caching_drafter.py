"""A drafter of one's own that keeps KV: sized, matched, moved, rolled back and evicted with the target's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from stepping import AMPLE, SCARCE, greedy, make_engine, run_all
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree

PROMPTS = random_prompts(12)
MAX_TOKENS = 30
PARENTS = np.array([-1, -1, 0, 1, 3, 3], np.int32)
RIGHT_NODES = {1: 0, 3: 1, 5: 2}  # of these the token is the one that follows the root, the next one, ...


class Remembering:
    """Keeps the id of each token as its KV, and checks it; the right path of its trees is beside the first slots, so KV moves."""

    name = "remembering"
    max_draft_tokens = len(PARENTS)
    kv = KVLayout((KVGroup(1, 1, 16), KVGroup(2, 1, 16)), torch.float64)

    def __init__(self, continuations: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self.continuations = continuations
        self.num_checked = 0
        self.num_scattered = {False: 0, True: 0}  # trees, by whether they had the slots that they would have liked

    def attach(self, kv: KVTensor) -> None:
        self.cache = kv

    def lookahead(self, request: Request, budget: int) -> int:
        return 2 * budget

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        rows = zip(plan.requests, plan.num_tokens, plan.draft_budgets, plan.num_slots, strict=True)
        return [self._draft(*row) for row in rows]

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        pass

    def _draft(self, request: Request, num_tokens: int, budget: int, num_slots: int) -> DraftTree:
        start, end = request.num_drafted_context, request.num_computed_tokens + num_tokens
        for remembered in self._slots(request, range(start)):
            assert (remembered == torch.tensor(request.token_ids[:start], dtype=torch.float64)[:, None]).all()
        self.num_checked += start
        self._write(request, range(start, end), request.token_ids[start:end])
        request.cover_draft(end - start)
        if not budget:
            return EMPTY_TREE
        right = self.continuations[tuple(request.prompt_token_ids)][request.num_output_tokens :]
        token_ids = [right[RIGHT_NODES[node]] if node in RIGHT_NODES else VOCAB_SIZE - 1 for node in range(budget)]
        is_scattered = num_slots >= 2 * budget
        draft_slots = 2 * np.arange(budget, dtype=np.int32) + 1 if is_scattered else np.arange(budget, dtype=np.int32)[::-1]
        self.num_scattered[is_scattered] += 1
        self._write(request, end + draft_slots, token_ids)
        return DraftTree(np.array(token_ids), PARENTS[:budget], draft_slots=draft_slots)

    def _slots(self, request: Request, slots: Iterable[int]) -> list[torch.Tensor]:
        """KV of some slots of a request by layer and by key or value, [slots, head_dim] each."""
        block_size = self.cache.block_size
        physical = [request.block_ids[slot // block_size] * block_size + slot % block_size for slot in slots]
        return [each.flatten(1, 2)[0, physical] for layer in self.cache.layers for each in layer]

    def _write(self, request: Request, slots: Iterable[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            block, offset = divmod(int(slot), self.cache.block_size)
            for layer in self.cache.layers:
                layer[:, :, request.block_ids[block], offset] = token_id


class Refusing(Remembering):
    def attach(self, kv: KVTensor) -> None:
        raise OSError("no cache")


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
    """Per token, target: 3 layers of 2 * 2 heads * 16 * 4 bytes; drafter: 3 layers of 2 * 16 * 8 bytes."""
    memory = 16 * (3 * 256 + 3 * 256) * 10
    assert make_engine(zoo.path("llama"), Remembering({}), kv_cache_memory=memory).kv.num_blocks == 10
    assert make_engine(zoo.path("llama"), kv_cache_memory=memory).kv.num_blocks == 20


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
    with pytest.raises(OSError, match="no cache"):
        first.swap_draft(Refusing({}))
    with pytest.raises(ValueError, match="is in use by another LLM"):
        second.swap_draft(drafter)
    first.swap_draft(None)
    second.swap_draft(drafter)
    del second
    make_engine(zoo.path("llama"), drafter)
