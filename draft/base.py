"""The interface of drafters.

To add a drafter, write a class with the members of `Drafter`; pass an instance, or register its name
(`titan.draft.registry`). Nothing else in the engine depends on the kind of drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol, runtime_checkable

from titan.core.growth import GrowthSpec
from titan.core.kv_tensor import KVLayout, KVTensor
from titan.core.options import ModelOptions
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees
from titan.kernels.interfaces import Backend, Model, Runner


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens for all requests of a step at once.

    ``name`` is for display; ``max_draft_tokens`` is the maximum number of nodes per request; ``kv`` is the layout of its KV cache,
    which the requests' block tables index, or ``None``. A drafter with a cache is a `CachingDrafter`.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def kv(self) -> KVLayout | None: ...

    def propose(self, plan: StepPlan) -> Sequence[DraftTree] | DraftTrees:
        """Return one tree per row of the plan, of at most ``plan.draft_budgets[i]`` nodes; empty trees are allowed.

        Either one `DraftTree` each, or all of them as `DraftTrees`, which may stay on the device that they were grown on. Tokens
        may be sampled only for requests that sample, and q must be above 0 at each of them: otherwise a `DraftTree` is refused;
        `DraftTrees` are not checked for this, and the output would no longer follow the target's distribution. `commit` gets the
        trees without q.
        """
        ...

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Receive the result of verification, before the requests' counters advance."""
        ...


@runtime_checkable
class CachingDrafter(Drafter, Protocol):
    """A drafter with its own KV cache, whose bytes count when the block pool is sized; one engine at a time may use it."""

    def attach(self, kv: KVTensor) -> None:
        """Attach the cache, which has the layout ``kv``; called before the first step, and again when the cache is resized.

        The content of the blocks in use, whose ids may have changed between two steps, is in the new cache by the next one. After a
        step that failed or was interrupted, it may be called with the same cache, of which no block is in use then.
        """
        ...

    def lookahead(self, request: Request, budget: int) -> int:
        """Return how many slots after the root it would like to write for this many nodes; ``plan.num_slots`` are reserved."""
        ...


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter whose proposals take passes of a model, which cost time.

    It can tell what it would have proposed, so that requests need not draft to show whether that would pay. One that proposes
    something else in `propose` than its base class must say so in `review` as well. One that lacks any of these members counts as
    a drafter without a model, whose proposals cost no passes.
    """

    @property
    def model(self) -> Model: ...

    @property
    def runner(self) -> Runner:
        """The model with its cache; once that is attached."""
        ...

    @property
    def max_len(self) -> int:
        """Maximum tokens of a request that the model can be fed."""
        ...

    @property
    def shared_vocabulary(self) -> float | None:
        """Share of the target's tokens that the model can propose; ``None``: nobody compared them."""
        ...

    def stops_early(self, request: Request) -> bool:
        """Whether the tree of a request would end where ``plan.worths`` say so, by how sure the model is of its tokens."""
        ...

    def num_reviewable(self, request: Request) -> int | None:
        """Return of how many tokens a review would tell, once the drafter is fed all that it lacks.

        ``None``: there is no review of it as it drafts now, such as if its drafts are sampled.
        """
        ...

    def review(self, requests: Sequence[Request]) -> ReviewReport:
        """Review requests, each of them before its next token is known; the drafter may write KV of its committed tokens.

        Of one that lacks more than fits into a pass, a part may be fed, and nothing told.
        """
        ...


class Review(NamedTuple):
    """What a drafter says of tokens that a request emitted without it, the oldest first; both may be empty."""

    is_right: Sequence[bool]  # of each: whether it would have been the first child of a root
    logprobs: Sequence[float] | None  # of those first children, at the temperature of its trees; None: the draft counts as sure


class ReviewReport(NamedTuple):
    """Reviews of some requests, and what they took."""

    reviews: Sequence[Review]  # one per request
    num_rows: int = 0  # of the draft's pass
    seconds: float = 0.0  # of that pass; 0: nobody knows

    def check(self, num_requests: int) -> None:
        """Check that it is what a drafter may report.

        Raises:
            ValueError: it is not of these requests, or has log-probabilities that are none, or not one per token.
        """
        if len(self.reviews) != num_requests:
            raise ValueError(f"{len(self.reviews)} reviews are reported of {num_requests} requests: one each is allowed")
        for is_right, logprobs in self.reviews:
            if logprobs is not None and not (len(logprobs) == len(is_right) and all(-inf < each <= 0 for each in logprobs)):
                raise ValueError(
                    f"a review has logprobs={logprobs} of {len(is_right)} tokens: allowed is one each, finite, at most 0"
                )


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may need to know about its engine.

    ``prepare`` returns a runner of a model with its KV that is ready to grow trees as large as these, one of each kind, of tokens
    below the last argument.
    """

    target_vocab_size: int
    max_draft_tokens: int
    draft_tree: str | Sequence[int]
    draft_sampling: str
    is_adaptive: bool  # whether plans have worths
    max_num_batched_tokens: int
    max_model_len: int  # tokens of a request
    dtype: str  # of a draft model; "auto" = its checkpoint's
    kv_cache_dtype: str  # of a draft model; "auto" = its own dtype
    backend: Backend
    model_options: ModelOptions  # how a draft model is opened
    prepare: Callable[[Any, KVTensor, Sequence[GrowthSpec], int], Runner]
    tokenizer: Any | None  # the target's, a transformers tokenizer


class NoDrafter:
    """A drafter that proposes only empty trees: speculation is off."""

    name = "none"
    max_draft_tokens = 0
    kv = None

    def propose(self, plan: StepPlan) -> Sequence[DraftTree]:
        return [EMPTY_TREE] * len(plan.requests)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Do nothing: nothing was proposed."""
