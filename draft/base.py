"""The interface of drafters.

To add a drafter, write a class with the members of `Drafter`; pass an instance, or register its name
(`titan.draft.registry`). The engine asks which members a drafter has: those of `CachingDrafter` give it a cache, those of
`ModelDrafter` have its passes measured and reviews asked for. Only `titan.draft.registry` asks for a class: it refuses options that
Titan's own draft model alone can follow, and such a model that was made for another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol, TypeGuard

from titan.core.checks import missing_members
from titan.core.growth import GrowthSpec
from titan.core.kv_tensor import KVLayout, KVTensor
from titan.core.options import ModelOptions
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees
from titan.kernels.interfaces import Backend, Model, Runner


class Drafter(Protocol):
    """Proposes draft tokens for all requests of a step at once.

    ``name`` is for display; ``max_draft_tokens`` is the maximum number of nodes per request, at least 1; ``kv`` is the layout of
    its KV cache, which is indexed by the requests' block tables, or ``None``. A drafter with KV must be a `CachingDrafter`.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def kv(self) -> KVLayout | None: ...

    def propose(self, plan: StepPlan) -> Sequence[DraftTree] | DraftTrees:
        """Return one tree per row of the plan, of at most ``plan.draft_budgets[i]`` nodes; empty trees are allowed.

        The result is a list of `DraftTree`, or all trees as `DraftTrees`, which may stay on the device that they were grown on.
        Tokens may be sampled only for requests that sample, and q must be above 0 at each of them. This is checked for a
        `DraftTree`, but not for `DraftTrees`: if it is violated there, the output does not follow the target's distribution.
        `commit` gets the trees without q.
        """
        ...

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Receive the result of verification, before the requests' counters advance."""
        ...


class CachingDrafter(Drafter, Protocol):
    """A drafter with its own KV cache, whose bytes count when the block pool is sized; only one engine at a time may use it."""

    @property
    def kv(self) -> KVLayout: ...

    def attach(self, kv: KVTensor) -> None:
        """Take a cache of the drafter's layout; called before the first step, and again when the cache is resized.

        Block ids may change when it is resized; by the next step, the new cache holds the content of all blocks in use. After a
        step that failed or was interrupted, the same cache may be attached again; no block is in use then.
        """
        ...

    def lookahead(self, request: Request, budget: int) -> int:
        """Return how many slots after the root it needs to draft ``budget`` nodes best; ``plan.num_slots`` is what it gets."""
        ...


class ModelDrafter(Drafter, Protocol):
    """A drafter that runs a model, whose passes take time.

    `review` says what it would have proposed for tokens that were emitted without it, so that the engine learns whether drafting
    would pay while it drafts nothing. A subclass that overrides `propose` must override `review` accordingly.

    A drafter that lacks some of these members counts as one without a model, which costs no passes; one that has `model` and
    `runner` must have all.
    """

    @property
    def model(self) -> Model: ...

    @property
    def runner(self) -> Runner:
        """Runs the model with its cache; it may be missing until the cache is attached."""
        ...

    @property
    def max_len(self) -> int:
        """Maximum tokens of a request that the model can be fed."""
        ...

    @property
    def shared_vocabulary(self) -> float | None:
        """Share of the target's tokens that the model can propose; ``None``: unknown."""
        ...

    def stops_early(self, request: Request) -> bool:
        """Whether a request's trees end where, by the model's own confidence, more nodes do not pay (``plan.worths``)."""
        ...

    def num_reviewable(self, request: Request) -> int | None:
        """Return how many emitted tokens a review of the request would judge, if all that the drafter lacks is fed.

        ``None``: the request cannot be reviewed, for instance because its drafts are sampled.
        """
        ...

    def review(self, requests: Sequence[Request]) -> ReviewReport:
        """Say what would have been proposed for the last emitted tokens of requests; may write KV of committed tokens.

        If a request lacks more tokens than fit into a pass, only some of them are fed, and its review may be empty.
        """
        ...


def has_cache(drafter: object) -> TypeGuard[CachingDrafter]:
    """Whether a drafter has a KV cache, and the members that it takes."""
    return getattr(drafter, "kv", None) is not None and not missing_members(drafter, CachingDrafter)


def runs_model(drafter: object) -> TypeGuard[ModelDrafter]:
    """Whether a drafter runs a model; one with a cache may have its runner only once that is attached."""
    return not missing_members(drafter, ModelDrafter)


class Review(NamedTuple):
    """A drafter's judgement of tokens that a request emitted without it, the oldest first; both fields may be empty."""

    is_right: Sequence[bool]  # per token: whether the drafter would have proposed it as the first child of a root
    logprobs: Sequence[float] | None  # log-probabilities of these first children at the trees' temperature; None: counted as 0


class ReviewReport(NamedTuple):
    """Reviews of some requests, and the cost of their pass."""

    reviews: Sequence[Review]  # one per request
    num_rows: int = 0  # tokens of the draft's pass
    seconds: float = 0.0  # duration of that pass; 0: unknown

    def check(self, num_requests: int) -> None:
        """Check what a drafter reported.

        Raises:
            ValueError: there is not one review per request, or not one valid log-probability per token.
        """
        if len(self.reviews) != num_requests:
            raise ValueError(f"{len(self.reviews)} reviews of {num_requests} requests were reported: allowed is one each")
        for is_right, logprobs in self.reviews:
            if logprobs is not None and not (len(logprobs) == len(is_right) and all(-inf < each <= 0 for each in logprobs)):
                raise ValueError(
                    f"a review has logprobs={logprobs} of {len(is_right)} tokens: allowed is one each, finite, at most 0"
                )


@dataclass(frozen=True, slots=True)
class DraftContext:
    """An engine's options and parts, as a drafter may need them.

    ``prepare(model, kv, specs, num_proposable)`` returns a runner that is ready to grow trees up to the size of ``specs``, one of
    each kind, with token ids below ``num_proposable``.
    """

    target_vocab_size: int
    max_draft_tokens: int
    draft_tree: str | Sequence[int]
    draft_sampling: str
    is_adaptive: bool  # whether plans may have worths
    max_num_batched_tokens: int
    max_model_len: int  # most tokens of a request
    dtype: str  # dtype of a draft model; "auto" = its checkpoint's
    kv_cache_dtype: str  # dtype of its KV; "auto" = its own dtype
    backend: Backend
    model_options: ModelOptions  # how a draft model is opened
    prepare: Callable[[Any, KVTensor, Sequence[GrowthSpec], int], Runner]
    tokenizer: Any | None  # the target's, a transformers tokenizer


class CachelessDrafter:
    """A base for drafters that have no KV cache, and learn nothing from verification: they lack name, size and `propose`."""

    kv = None

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Do nothing."""


class NoDrafter(CachelessDrafter):
    """A drafter that proposes only empty trees: speculation is off."""

    name = "none"
    max_draft_tokens = 0

    def propose(self, plan: StepPlan) -> Sequence[DraftTree]:
        return [EMPTY_TREE] * len(plan.requests)
