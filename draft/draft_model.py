"""The draft model: an ordinary causal language model with its own weights and KV, drafting for all requests together.

The first pass of a step feeds, for each request, the committed tokens that the draft cache lacks: 1 or 2 after a normal step, a
chunk in prefill, everything after a swap or a pause (`num_drafted_context` counts those it has). The policy specifies how trees
grow from there, and the runner grows them. A review is that first pass alone: its logits tell what the draft would have proposed
in place of tokens that were emitted without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.core.batch import QueryRow, build_batch
from titan.core.checks import shown
from titan.core.growth import Feed, GrowthSpec, Worth
from titan.core.kv_tensor import KVTensor
from titan.core.out_of_memory import is_out_of_memory
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.draft.base import DraftContext, Review, ReviewReport
from titan.draft.policy import DraftPolicy, score_temperature
from titan.draft.vocabulary import VocabularyMap
from titan.kernels.interfaces import Model, Runner

T = TypeVar("T")

MAX_REVIEWED = 16
"""Most tokens of a request that a review compares with what the draft would have proposed: the last of those that it lacked."""


class DraftModelDrafter:
    """Drafts trees with a causal language model.

    Args:
        name: for display.
        model: has the target's vocabulary (padded sizes may differ), or was loaded in the order of ``vocabulary``.
        context: of the engine.
        vocabulary: maps the draft's tokens to the target's; ``None`` = they are the same, which is not checked.
        is_same_vocabulary: whether the caller has checked that they are.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        context: DraftContext,
        vocabulary: VocabularyMap | None = None,
        *,
        is_same_vocabulary: bool = False,
    ) -> None:
        self.name = name
        self.model = model
        self.kv = model.kv_layout.stored_as(context.kv_cache_dtype)
        self.max_num_batched_tokens = context.max_num_batched_tokens
        self._most_fed = self.max_num_batched_tokens  # tokens of a first pass; fewer for a while where memory was lacking
        self.vocab_size = model.config.vocab_size
        self.target_vocab_size = context.target_vocab_size
        self.vocabulary = vocabulary
        self.shared_vocabulary = vocabulary.share if vocabulary is not None else 1.0 if is_same_vocabulary else None
        self._num_proposable = context.target_vocab_size if vocabulary is None else vocabulary.num_shared
        self.max_len: int = model.config.max_position_embeddings
        self.policy = DraftPolicy(
            context.draft_tree,
            context.draft_sampling,
            context.max_draft_tokens,
            stops_early=context.is_adaptive and context.backend.is_host,
        )
        self.runner: Runner
        self._block_size: int
        self.context = context

    @property
    def max_draft_tokens(self) -> int:
        return self.policy.max_draft_tokens

    def attach(self, kv: KVTensor) -> None:
        self._block_size = kv.block_size
        self.runner = self.context.prepare(self.model, kv, self.policy.largest_specs(), self._num_proposable)

    def lookahead(self, request: Request, budget: int) -> int:
        return self.policy.lookahead(request, self._budget(request, budget))

    def stops_early(self, request: Request) -> bool:
        return self.policy.stops_early(request)

    def propose(self, plan: StepPlan) -> DraftTrees:
        feeds = self._feeds(plan)
        num_rows = len(plan.requests)
        if not feeds:
            return DraftTrees.empty(num_rows, self.context.backend.device)
        trees = self._run_first(lambda: self.runner.grow(feeds, num_rows, self._num_proposable), feeds)
        for feed in feeds:  # now that their KV is written
            plan.requests[feed.row].cover_draft(len(feed.token_ids))
        return trees if self.vocabulary is None else self.vocabulary.to_target(trees)

    def num_reviewable(self, request: Request) -> int | None:
        if self.policy.is_sampled(request):
            return None
        return len(self._reviewed(request, request.num_drafted_context, min(request.num_tokens - 1, self.max_len)))

    def review(self, requests: Sequence[Request]) -> ReviewReport:
        fed = self._fed_by_review(requests)
        reviewed = [self._reviewed(each, of_request.start, of_request.stop) for each, of_request in zip(requests, fed, strict=True)]
        rows = [
            QueryRow(
                request.block_ids,
                positions.start,
                self._known(request.token_ids[positions.start : positions.stop]),
                bool(judged),
                range(judged.start - positions.start, len(positions) - 1),
            )
            for request, positions, judged in zip(requests, fed, reviewed, strict=True)
            if positions
        ]
        if not rows:
            return ReviewReport([Review((), None) for _ in requests])
        batch = build_batch(rows, block_size=self._block_size)
        start_s = time.perf_counter()
        logits = self._run_first(lambda: self.runner.forward(batch), rows)
        seconds = time.perf_counter() - start_s
        for request, positions in zip(requests, fed, strict=True):  # now that their KV is written
            request.cover_draft(len(positions))
        temperatures = np.repeat([*map(score_temperature, requests)], [*map(len, reviewed)])
        children = zip(*self._first_children(logits, temperatures), strict=True)
        reviews = [self._judge(*each, children) for each in zip(requests, reviewed, strict=True)]
        return ReviewReport(reviews, len(batch.token_ids), seconds if self.context.backend.is_host else 0.0)

    def _fed_by_review(self, requests: Sequence[Request]) -> list[range]:
        """Return the positions of each request that a review feeds: the first ones that the draft lacks, until a pass is full."""
        num_left, fed = self._most_fed, list[range]()
        for request in requests:
            start = request.num_drafted_context
            fed.append(range(start, min(request.num_tokens - 1, self.max_len, start + num_left)))
            num_left -= len(fed[-1])
        return fed

    def _judge(self, request: Request, positions: range, children: Iterator[tuple[int, float]]) -> Review:
        """Compare the tokens that follow these positions with the next children, of which those that are not finite say nothing."""
        found = [(i, *child) for i, child in zip(positions, children, strict=False) if isfinite(child[1])]
        labels = [request.token_ids[i + 1] == token_id for i, token_id, _ in found]
        return Review(labels, [logprob for _, _, logprob in found] if self.policy.stops_early(request) else None)

    def _run_first(self, run: Callable[[], T], rows: Sequence[Feed | QueryRow]) -> T:
        """Run a first pass over these rows; if it lacks memory, the next one has half of the tokens, and twice as many after it."""
        try:
            result = run()
        except Exception as error:
            if is_out_of_memory(error):
                self._most_fed = max(1, sum([len(row.token_ids) for row in rows]) // 2)
            raise
        self._most_fed = min(2 * self._most_fed, self.max_num_batched_tokens)
        return result

    def _first_children(self, logits: Tensor, temperatures: NDArray[np.float64]) -> tuple[list[int], list[float]]:
        """Return each row's most likely token, by the target's ids, and its log-probability: the first child of a root there."""
        backend = self.context.backend
        uploaded = backend.upload([temperatures.astype(np.float32)])
        token_ids, logprobs = backend.sampling.top_candidates(logits[:, : self._num_proposable], 1, *uploaded)
        if self.vocabulary is not None:
            token_ids = self.vocabulary.target_ids[token_ids]
        tokens, scores = backend.download([token_ids[:, 0], logprobs[:, 0]])
        return tokens.tolist(), scores.tolist()

    @staticmethod
    def _reviewed(request: Request, start: int, end: int) -> range:
        """Return the fed positions from ``start`` to ``end`` that are reviewed: the last ones whose next token was emitted."""
        return range(max(start, request.num_prompt_tokens - 1, end - MAX_REVIEWED), end)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Do nothing: the requests' histories record what was accepted."""

    def _may_draft(self, request: Request) -> bool:
        """Whether a request may draft once its tokens are computed."""
        return request.most_drafts(self.max_draft_tokens, self.max_len) > 0

    def _budget(self, request: Request, budget: int) -> int:
        """Return a request's draft budget, lowered to the policy's maximum and the room that the draft's context length leaves."""
        most, num_left = self.policy.max_draft_tokens, self.max_len - len(request.token_ids)
        if budget > most:
            budget = most
        return budget if budget <= num_left else max(0, num_left)

    def _feeds(self, plan: StepPlan) -> list[Feed]:
        """Return the feeds of a step: the committed tokens that the draft lacks, in the order of the rows until a pass is full."""
        num_left = self._most_fed
        table = plan.block_table
        feeds: list[Feed] = []
        rows = zip(plan.requests, plan.num_tokens, plan.draft_budgets, plan.num_slots, strict=True)
        for i, (request, num_tokens, draft_budget, num_slots) in enumerate(rows):
            budget, start = self._budget(request, draft_budget), request.num_drafted_context
            is_wanted = budget > 0 or (plan.drafts_prompts and not plan.reaches_root(i) and self._may_draft(request))
            end = min(request.num_computed_tokens + num_tokens, start + num_left)
            if is_wanted and end > start:
                has_root = budget > 0 and end == len(request.token_ids)
                spec = self._spec(request, num_tokens, budget, num_slots, plan.worths.get(i)) if has_root else None
                feeds.append(Feed(i, request.block_ids, start, self._known(request.token_ids[start:end]), spec, table))
                num_left -= end - start
        return feeds

    def _spec(self, request: Request, num_tokens: int, budget: int, num_slots: int, worth: Worth | None) -> GrowthSpec:
        """Return the policy's spec of a request's tree.

        Raises:
            TypeError, ValueError: it is no spec, or takes more slots than were reserved.
        """
        # a device runs prefill chunks from a graph only if no tree after them branches
        if num_tokens + budget > 1 + self.max_draft_tokens and not self.context.backend.is_host:
            budget = self.policy.chain_budget(request, budget)
        spec = self.policy.spec(request, budget, num_slots, worth)
        if not hasattr(spec, "num_slots"):
            raise TypeError(f"the policy's spec() returned {shown(spec)}: allowed is a BeamSpec or a ShapeSpec")
        if spec.num_slots > num_slots:  # before KV is written to slots that are not the request's
            raise ValueError(
                f"the policy's spec has num_slots={spec.num_slots}: at most {num_slots} are allowed, which were reserved; "
                f"lookahead() of a policy asks for more"
            )
        return spec

    def _known(self, token_ids: list[int]) -> list[int]:
        """Convert the target's tokens to the draft's; padding beyond the draft's vocabulary becomes its last token."""
        if self.vocabulary is not None:
            return self.vocabulary.to_draft(token_ids)
        if self.vocab_size >= self.target_vocab_size:
            return token_ids
        return [min(token_id, self.vocab_size - 1) for token_id in token_ids]
