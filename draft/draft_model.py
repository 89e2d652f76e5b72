"""The draft model: an ordinary causal language model with its own weights and KV, drafting for all requests together.

The first pass of a step feeds each request the committed tokens that its draft cache lacks (`num_drafted_context` says
how many it has: 1 or 2 are missing after a normal step, a chunk in prefill, everything after a swap or a pause). Each
further depth is one small pass over the frontier nodes of every request's tree. Tokens stay on the device until the loop ends; on
CUDA until the target has verified them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from titan.core.device_trees import Proposal
from titan.core.draft_history import DraftHistory
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.draft.base import DraftContext
from titan.draft.compiled_growth import CompiledGrower
from titan.draft.device_growth import device_trees
from titan.draft.policy import DraftPolicy, score_temperature
from titan.draft.tree_builder import Growth
from titan.execute.batch import RaggedBatch, Segment, build_batch, build_draft_passes
from titan.kernels import backend
from titan.kernels.cpu.runner import CompiledRunner
from titan.kernels.upload import to_device
from titan.memory.kv_cache import allocate_kv
from titan.models.decoder import Decoder


class DraftModelDrafter:
    """Drafts trees with a causal language model.

    Args:
        name: for people.
        model: same vocabulary as the target (a padded size may differ).
        context: the engine; the draft's KV tensor is attached to its cache.
    """

    def __init__(self, name: str, model: Decoder, context: DraftContext) -> None:
        self.name = name
        self.model = model
        self.max_draft_tokens = context.max_draft_tokens
        self.max_num_batched_tokens = context.max_num_batched_tokens
        self.vocab_size = model.config.vocab_size
        self.target_vocab_size = context.target_vocab_size
        self.max_len = model.config.max_position_embeddings
        self.device = context.device
        self.block_size = context.kv.block_size
        self.cache = context.kv
        self.policy = DraftPolicy(context.draft_tree, context.draft_sampling, context.max_draft_tokens)
        config = model.config
        self.kv = allocate_kv(
            config.num_layers,
            context.kv.num_blocks,
            config.num_kv_heads,
            self.block_size,
            config.head_dim,
            dtype=model.dtype,
            device=context.device,
        )
        self.runner = context.make_runner(model, self.kv)
        self._compiled = None
        if isinstance(self.runner, CompiledRunner):
            self._compiled = CompiledGrower(self.runner, context.target_vocab_size)

    def propose(self, plan: StepPlan) -> Proposal:
        feeds = self._feeds(plan)
        proposal = self._draft(feeds, len(plan.requests))
        for feed in feeds:  # now that it is written
            feed.request.cover_draft(len(feed.token_ids))
        return proposal

    def _draft(self, feeds: list[_Feed], num_rows: int) -> Proposal:
        """Feed the draft and grow the trees of a plan of so many rows."""
        trees = [EMPTY_TREE] * num_rows
        if not feeds:
            return trees
        drafting = [feed for feed in feeds if feed.budget > 0]
        requests = [feed.request for feed in drafting]
        # fed at once, or in one call with what grows behind them
        roots = [feed.token_ids for feed in drafting] if self._are_few_roots(feeds) else self._feed(feeds)
        growths = self.policy.growths(requests, [feed.budget for feed in drafting], self._reserve)
        if not growths:
            return trees
        self.cache.clear_new_blocks()
        if self._compiled is not None and self._compiled.can_grow(growths):
            for feed, tree in zip(drafting, self._compiled.grow(requests, growths, roots), strict=True):
                trees[feed.row] = tree
            return trees
        self._grow(requests, growths, roots if isinstance(roots, Tensor) else self._feed(feeds))
        in_plan = [([drafting[i].row for i in members], growth) for members, growth in growths]
        if backend.takes_triton(self.device):
            return device_trees(in_plan, num_rows, self.device)
        for rows, growth in in_plan:
            for row, tree in zip(rows, growth.harvest(), strict=True):
                trees[row] = tree
        return trees

    def _are_few_roots(self, feeds: list[_Feed]) -> bool:
        """Whether all that is fed ends in roots that draft, and is short."""
        if self._compiled is None or not all(feed.budget > 0 for feed in feeds):
            return False
        return sum(len(feed.token_ids) for feed in feeds) <= self._compiled.max_rows

    def _feed(self, feeds: list[_Feed]) -> Tensor:
        """Feed committed tokens; the logits of those that draft."""
        segments = [
            Segment(feed.request.block_ids, feed.request.num_drafted_context, feed.token_ids, needs_logits=feed.budget > 0)
            for feed in feeds
        ]
        return self._forward(build_batch(segments, block_size=self.block_size))

    def _grow(self, requests: list[Request], growths: list[tuple[list[int], Growth]], root_logits: Tensor) -> None:
        """Grow the requests' trees depth by depth."""
        for rows, growth in growths:
            is_all = len(rows) == len(requests)
            growth.plant(root_logits if is_all else root_logits.index_select(0, to_device(np.array(rows), self.device)))
        self._feed_frontiers([requests[row] for rows, _ in growths for row in rows], [growth for _, growth in growths])

    def _feed_frontiers(self, requests: list[Request], growths: list[Growth]) -> None:
        """Grow trees of any kind, each depth one pass over the frontier of them all."""
        passes = build_draft_passes(
            [request.block_ids for request in requests],
            np.array([request.num_tokens - 1 for request in requests]),
            [feed for growth in growths for feed in growth.feeds],
            block_size=self.block_size,
        )
        for depth, draft_pass in enumerate(passes, start=1):
            growing = [growth for growth in growths if any(len(feed) >= depth for feed in growth.feeds)]
            frontiers = [growth.frontier(depth) for growth in growing]
            token_ids = _cat([frontier.token_ids for frontier in frontiers])
            if self.vocab_size < self.target_vocab_size:
                token_ids = token_ids.clamp(max=self.vocab_size - 1)  # a shape may have more children than the draft has tokens
            batch = draft_pass.with_nodes(token_ids, _cat([frontier.ancestor_bits for frontier in frontiers]))
            logits = self._forward(batch).split([len(frontier.token_ids) for frontier in frontiers])
            for growth, rows_logits in zip(growing, logits, strict=True):
                growth.grow(depth, rows_logits)

    def _forward(self, batch: RaggedBatch) -> Tensor:
        """Logits of one pass over the target's vocabulary: [L, target vocabulary]."""
        return self._padded(self.runner.forward(batch))

    def _padded(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, -inf where only the target has tokens: [..., target vocabulary]."""
        num_missing = self.target_vocab_size - logits.shape[-1]
        return pad(logits, (0, num_missing), value=float("-inf")) if num_missing else logits

    def _reserve(self, request: Request, num_nodes: int) -> bool:
        return self.cache.reserve(request, request.num_tokens + num_nodes)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        for i, (request, tree, path) in enumerate(zip(plan.requests, acceptance.trees, acceptance.paths, strict=True)):
            if tree.num_nodes:
                request.draft_history.note_draft(tree.topology.max_depth)
            if i in acceptance.matches:
                request.draft_history.note_match(*acceptance.matches[i])
                _note_children(request.draft_history, tree, path)
            elif tree.scores is not None:
                _note_confidence(request, tree, path)

    def _budget(self, plan: StepPlan, i: int) -> int:
        """Draft tokens for row ``i``, lowered to what the draft's own context length leaves."""
        return max(0, min(plan.draft_budgets[i], self.max_len - plan.requests[i].num_tokens))

    def _feeds(self, plan: StepPlan) -> list[_Feed]:
        """The committed tokens that the draft lacks, first come first served."""
        left = self.max_num_batched_tokens
        feeds = []
        for i, request in enumerate(plan.requests):
            budget, start = self._budget(plan, i), request.num_drafted_context
            is_wanted = request.params.use_speculative and (budget > 0 or not plan.reaches_root(i))
            end = min(request.num_computed_tokens + plan.num_tokens[i], self.max_len, start + left)
            if is_wanted and end > start:
                token_ids = self._known(request.token_ids[start:end])
                feeds.append(_Feed(i, request, token_ids, budget if end == request.num_tokens else 0))
                left -= end - start
        return feeds

    def _known(self, token_ids: list[int]) -> list[int]:
        """The tokens; those that only the target's embedding has rows for, which are padding, become the draft's last one."""
        if self.vocab_size >= self.target_vocab_size:
            return token_ids
        return [min(token_id, self.vocab_size - 1) for token_id in token_ids]


class _Feed(NamedTuple):
    """What a request feeds the draft before anything grows."""

    row: int  # of the plan
    request: Request
    token_ids: list[int]
    budget: int  # nodes that may grow behind the last of them; 0 if it is not the root


def _note_children(history: DraftHistory, tree: DraftTree, path: list[int]) -> None:
    """Tell what became of the children of the nodes that verification reached."""
    num_children = Counter(tree.parents.tolist())
    for node, child in zip([-1, *path], [*path, None], strict=True):
        if num_children[node]:
            history.note_children(num_children[node], None if child is None else int(tree.topology.child_ranks[child]))


def _note_confidence(request: Request, tree: DraftTree, path: list[int]) -> None:
    """Tell whether the most likely children of the nodes that verification reached were accepted."""
    assert tree.scores is not None
    start, scores, parents = score_temperature(request), tree.scores.tolist(), tree.parents.tolist()
    for node, child in zip([-1, *path], [*path, -1], strict=True):
        if node in parents:
            first = parents.index(node)
            logprob = scores[first] - (scores[node] if node >= 0 else 0.0)
            request.draft_history.note_confidence(start, logprob, first == child)


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
