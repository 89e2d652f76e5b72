"""The draft model: an ordinary causal language model with its own weights and KV, drafting for all requests together.

The first pass of a step feeds, for each request, the committed tokens that the draft cache lacks (`num_drafted_context` says
how many it has: 1 or 2 are missing after a normal step, a chunk in prefill, everything after a swap or a pause). How the tree
grows after them is a spec of the policy, which the runner executes.
"""

from __future__ import annotations

from titan.core.growth import Feed
from titan.core.kv_tensor import KVTensor
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.draft.base import DraftContext
from titan.draft.policy import DraftPolicy
from titan.draft.vocabulary import VocabularyMap
from titan.kernels.interfaces import Model, Runner


class DraftModelDrafter:
    """Drafts trees with a causal language model.

    Args:
        name: for display.
        model: same vocabulary as the target (a padded size may differ), or loaded in the order of ``vocabulary``.
        context: of the engine.
        vocabulary: the map to the target's; ``None`` = it is the same.
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
        self.shared_vocabulary = 1.0 if vocabulary is None else vocabulary.share
        self._num_proposable = context.target_vocab_size if vocabulary is None else vocabulary.num_shared
        self.max_len: int = model.config.max_position_embeddings
        self.policy = DraftPolicy(
            context.draft_tree,
            context.draft_sampling,
            context.max_draft_tokens,
            stops_early=context.is_adaptive and context.backend.is_host,
        )
        self.runner: Runner
        self._context = context

    def attach(self, kv: KVTensor) -> None:
        self.runner = self._context.prepare(self.model, kv, self.policy.largest_specs(), self._num_proposable)

    def lookahead(self, request: Request, budget: int) -> int:
        return self.policy.lookahead(request, self._budget(request, budget))

    def stops_early(self, request: Request) -> bool:
        return self.policy.stops_early(request)

    def propose(self, plan: StepPlan) -> DraftTrees:
        feeds = self._feeds(plan)
        num_rows = len(plan.requests)
        if not feeds:
            return DraftTrees.empty(num_rows, self._context.backend.device)
        trees = self.runner.grow(feeds, num_rows, self._num_proposable)
        for feed in feeds:  # now that their KV is written
            plan.requests[feed.row].cover_draft(len(feed.token_ids))
        return trees if self.vocabulary is None else self.vocabulary.to_target(trees)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Do nothing: what verification says about the draft is in the requests' histories."""

    def _budget(self, request: Request, budget: int) -> int:
        """Return the draft budget of a request, lowered to what the draft's own context length leaves."""
        return max(0, min(budget, self.max_len - request.num_tokens))

    def _feeds(self, plan: StepPlan) -> list[Feed]:
        """Return the feeds of a step: the committed tokens that the draft lacks, first come, first served."""
        left = self.max_num_batched_tokens
        feeds = []
        for i, request in enumerate(plan.requests):
            budget, start = self._budget(request, plan.draft_budgets[i]), request.num_drafted_context
            is_wanted = request.params.use_speculative and plan.feeds_draft(i) and (budget > 0 or not plan.reaches_root(i))
            end = min(request.num_computed_tokens + plan.num_tokens[i], self.max_len, start + left)
            if is_wanted and end > start:
                grows = budget > 0 and end == request.num_tokens
                spec = self.policy.spec(request, budget, plan.num_slots[i], plan.worths.get(i)) if grows else None
                feeds.append(Feed(i, request.block_ids, start, self._known(request.token_ids[start:end]), spec))
                left -= end - start
        return feeds

    def _known(self, token_ids: list[int]) -> list[int]:
        """Return the tokens by the draft's ids; those that only the target's embedding has, as padding, become its last id."""
        if self.vocabulary is not None:
            return self.vocabulary.to_draft(token_ids)
        if self.vocab_size >= self.target_vocab_size:
            return token_ids
        return [min(token_id, self.vocab_size - 1) for token_id in token_ids]
