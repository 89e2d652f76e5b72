"""Drafters that keep KV: one that checks it, and one that wants another cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from zoo import VOCAB_SIZE

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.draft.base import NoDrafter

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


class Refusing(NoDrafter):
    """A drafter that its cache does not suit."""

    name, max_draft_tokens = "refusing", 1
    kv: Any = KVLayout((KVGroup(1, 1, 4),), torch.float32)

    def attach(self, kv: KVTensor) -> None:
        raise ValueError("this draft wants another cache")

    def lookahead(self, request: Request, budget: int) -> int:
        return budget
