"""The draft model: an ordinary causal language model with its own weights and KV, drafting for all requests together.

The first pass of a step feeds, for each request, the committed tokens that the draft cache lacks (`num_drafted_context` says
how many it has: 1 or 2 are missing after a normal step, a chunk in prefill, everything after a swap or a pause). How the tree
grows after them is a spec of the policy, which the runner executes. In a review, the same pass says what the draft would have
proposed after each of these tokens: what was emitted since is known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.core.batch import QueryRow, build_batch
from titan.core.growth import Feed
from titan.core.kv_tensor import KVTensor
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.draft.base import DraftContext, Review, ReviewReport
from titan.draft.policy import DraftPolicy, score_temperature
from titan.draft.vocabulary import VocabularyMap
from titan.kernels.interfaces import Model, Runner

MAX_REVIEWED = 16
"""Tokens of a request that are compared with what the draft says of them, the last ones of those that it lacked."""


class DraftModelDrafter:
    """Drafts trees with a causal language model.

    Args:
        name: for display.
        model: same vocabulary as the target (a padded size may differ), or loaded in the order of ``vocabulary``.
        context: of the engine.
        vocabulary: the map to the target's; ``None`` = it is the same, which nobody checks.
    """

    def __init__(self, name: str, model: Model, context: DraftContext, vocabulary: VocabularyMap | None = None) -> None:
        self.name = name
        self.model = model
        self.kv = model.kv_layout.stored_as(context.kv_cache_dtype)
        self.max_draft_tokens = context.max_draft_tokens
        self.max_num_batched_tokens = context.max_num_batched_tokens
        self.vocab_size = model.config.vocab_size
        self.target_vocab_size = context.target_vocab_size
        self.vocabulary = vocabulary
        self.shared_vocabulary = None if vocabulary is None else vocabulary.share
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
        trees = self.runner.grow(feeds, num_rows, self._num_proposable)
        for feed in feeds:  # now that their KV is written
            plan.requests[feed.row].cover_draft(len(feed.token_ids))
        return trees if self.vocabulary is None else self.vocabulary.to_target(trees)

    def num_reviewable(self, request: Request) -> int | None:
        if self.policy.is_sampled(request):
            return None
        return len(self._reviewed(request, request.num_drafted_context, min(request.num_tokens - 1, self.max_len)))

    def review(self, requests: Sequence[Request]) -> ReviewReport:
        left, fed, rows, ranges = self.max_num_batched_tokens, list[tuple[Request, int]](), list[QueryRow](), list[range]()
        for request in requests:
            start = request.num_drafted_context
            end = min(request.num_tokens - 1, self.max_len, start + left)
            ranges.append(self._reviewed(request, start, end))
            if end > start:
                left -= end - start
                known, before = self._known(request.token_ids[start:end]), range(ranges[-1].start - start, end - start - 1)
                rows.append(QueryRow(request.block_ids, start, known, bool(ranges[-1]), before))
                fed.append((request, end - start))
        if not rows:
            return ReviewReport([Review((), None) for _ in requests])
        batch, start_s = build_batch(rows, block_size=self._block_size), time.perf_counter()
        logits = self.runner.forward(batch)
        seconds = time.perf_counter() - start_s
        for request, num_tokens in fed:  # now that their KV is written
            request.cover_draft(num_tokens)
        proposed, logprobs = self._first_children(logits, np.repeat([*map(score_temperature, requests)], [*map(len, ranges)]))
        reviews, first = list[Review](), 0
        for request, positions in zip(requests, ranges, strict=True):
            found = zip(positions, proposed[first:], logprobs[first:], strict=False)
            known_ones = [(request.token_ids[i + 1] == token, logprob) for i, token, logprob in found if isfinite(logprob)]
            has_scores = self.policy.stops_early(request)
            reviews.append(Review([each for each, _ in known_ones], [each for _, each in known_ones] if has_scores else None))
            first += len(positions)
        return ReviewReport(reviews, len(batch.token_ids), seconds if self.context.backend.is_host else 0.0)

    def _first_children(self, logits: Tensor, temperatures: NDArray[np.float64]) -> tuple[list[int], list[float]]:
        """Return the target's ids of the tokens that would be first children of roots, and their log-probabilities."""
        backend = self.context.backend
        uploaded = backend.upload([temperatures.astype(np.float32)])
        token_ids, logprobs = backend.sampling.top_candidates(logits[:, : self._num_proposable], 1, *uploaded)
        if self.vocabulary is not None:
            token_ids = self.vocabulary.target_ids[token_ids]
        tokens, scores = backend.download([token_ids[:, 0], logprobs[:, 0]])
        return tokens.tolist(), scores.tolist()

    @staticmethod
    def _reviewed(request: Request, start: int, end: int) -> range:
        """Return which of these positions, whose tokens are fed, come before tokens that the request has emitted: the last ones."""
        return range(max(start, request.num_prompt_tokens - 1, end - MAX_REVIEWED), end)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Do nothing: what verification says about the draft is in the requests' histories."""

    def _may_draft(self, request: Request) -> bool:
        """Whether a request may draft once its tokens are computed."""
        return self._budget(request, request.most_drafts(self.max_draft_tokens)) > 0

    def _budget(self, request: Request, budget: int) -> int:
        """Return the draft budget of a request, lowered to what the draft's own context length leaves."""
        num_left = self.max_len - len(request.token_ids)
        return budget if budget <= num_left else max(0, num_left)

    def _feeds(self, plan: StepPlan) -> list[Feed]:
        """Return the feeds of a step: the committed tokens that the draft lacks, first come, first served."""
        left, table, is_host = self.max_num_batched_tokens, plan.block_table, self.context.backend.is_host
        feeds = []
        for i, (request, num_tokens) in enumerate(zip(plan.requests, plan.num_tokens, strict=True)):
            budget, start = self._budget(request, plan.draft_budgets[i]), request.num_drafted_context
            is_wanted = budget > 0 or (plan.drafts_prompts and not plan.reaches_root(i) and self._may_draft(request))
            end = min(request.num_computed_tokens + num_tokens, start + left)
            if is_wanted and end > start:
                grows = budget > 0 and end == len(request.token_ids)
                # a device runs prefill chunks from a graph only if no tree behind them branches
                prefers_chain = num_tokens + budget > 1 + self.max_draft_tokens and not is_host
                options = request, budget, plan.num_slots[i], plan.worths.get(i)
                spec = self.policy.spec(*options, prefers_chain=prefers_chain) if grows else None
                feeds.append(Feed(i, request.block_ids, start, self._known(request.token_ids[start:end]), spec, table))
                left -= end - start
        return feeds

    def _known(self, token_ids: list[int]) -> list[int]:
        """Return the tokens by the draft's ids; those that only the target's embedding has, as padding, become its last id."""
        if self.vocabulary is not None:
            return self.vocabulary.to_draft(token_ids)
        if self.vocab_size >= self.target_vocab_size:
            return token_ids
        return [min(token_id, self.vocab_size - 1) for token_id in token_ids]
