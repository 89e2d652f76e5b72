"""The seam of drafting: what a drafter is.

To add a drafter, write a class with the members of `Drafter`; pass an instance, or register its name
(`titan.draft.registry`). Nothing else in the engine knows kinds of drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from titan.core.kv_tensor import KVLayout, KVTensor
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees
from titan.kernels.interfaces import Backend, Runner


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens for all requests of a step at once.

    ``name`` is for people; ``max_draft_tokens`` the most nodes per request it can propose; ``kv`` what it keeps of each token in a
    cache that the requests' block tables index for it, or ``None``: one with a cache is a `CachingDrafter`.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def kv(self) -> KVLayout | None: ...

    def propose(self, plan: StepPlan) -> Sequence[DraftTree] | DraftTrees:
        """Return one tree per row of the plan, of at most ``plan.draft_budgets[i]`` nodes; empty trees are allowed.

        Either `DraftTree` one by one; or all of them as `DraftTrees`, which may stay on the device that they were grown on. Tokens
        may be sampled for requests that sample only, and q must be above 0 at each of them: where it is not, `DraftTree`s are
        refused, while of `DraftTrees` nobody looks, and the output is no longer distributed as the target's. `commit` gets the
        trees without q.
        """
        ...

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Hear what verification kept, before the requests' counters advance."""
        ...


@runtime_checkable
class CachingDrafter(Drafter, Protocol):
    """A drafter with a cache of its own; its bytes count when the block pool is sized."""

    def attach(self, kv: KVTensor) -> None:
        """Take the cache, of the layout ``kv``; called once, before the first step."""
        ...

    def lookahead(self, request: Request, budget: int) -> int:
        """Slots after the root that it would like to write for so many nodes; ``plan.num_slots`` says how many there are."""
        ...


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may need to know of its engine; ``prepare`` makes a model with its KV ready to run."""

    target_vocab_size: int
    max_draft_tokens: int
    draft_tree: str | Sequence[int]
    draft_sampling: str
    max_num_batched_tokens: int
    dtype: str
    backend: Backend
    prepare: Callable[[Any, KVTensor], Runner]
    tokenizer: Any | None  # the target's, a transformers tokenizer


class NoDrafter:
    """Speculation switched off: every tree is empty."""

    name = "none"
    max_draft_tokens = 0
    kv = None

    def propose(self, plan: StepPlan) -> Sequence[DraftTree]:
        return [EMPTY_TREE] * len(plan.requests)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Nothing to hear: nothing was proposed."""
