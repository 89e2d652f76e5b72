"""The seam of drafting: what a drafter is.

To add a drafter, write a class with the members of `Drafter`; pass an instance, or register its name
(`titan.draft.registry`). Nothing else in the engine knows kinds of drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from titan.core.device_trees import Proposal
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.execute.model_runner import Runner
from titan.memory.kv_cache import KVCache
from titan.models.decoder import Decoder


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens for all requests of a step at once.

    ``name`` is for people; ``max_draft_tokens`` the most nodes per request it can propose; ``kv`` the cache that the
    requests' block tables shall index for it, made by `titan.memory.kv_cache.allocate_kv`, or ``None``.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def kv(self) -> Tensor | None: ...

    def propose(self, plan: StepPlan) -> Proposal:
        """Return one tree per row of the plan, of at most ``plan.draft_budgets[i]`` nodes; empty trees are allowed.

        Either a list of `DraftTree`, on any device; or, on CUDA, `titan.core.device_trees.DeviceTrees`, trees that were grown on the
        device and stay there. `titan.core.device_trees.outlines_of` says of both what the host knows, by row. Only for requests that
        sample may tokens be drawn. `commit` gets `DraftTree` in either case, those from the device without ``draft_probs``.
        """
        ...

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Hear what verification kept, before the requests' counters advance."""
        ...


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may need to know of its engine; ``make_runner`` makes a model with its KV ready to run."""

    target_vocab_size: int
    max_draft_tokens: int
    draft_tree: str | Sequence[int]
    draft_sampling: str
    max_num_batched_tokens: int
    dtype: str
    device: torch.device
    make_runner: Callable[[Decoder, Tensor], Runner]
    kv: KVCache
    tokenizer: Any | None  # the target's, a transformers tokenizer


class NoDrafter:
    """Speculation switched off: every tree is empty."""

    name = "none"
    max_draft_tokens = 0
    kv = None

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [EMPTY_TREE] * len(plan.requests)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Nothing to hear: nothing was proposed."""
