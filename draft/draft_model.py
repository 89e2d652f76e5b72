"""The draft model: an ordinary causal language model with its own weights and KV, drafting for all requests together.

The first pass of a step feeds each request the committed tokens that its draft cache lacks (`num_drafted_context` says
how many it has: 1 or 2 are missing after a normal step, a chunk in prefill, everything after a swap or a pause). Each
further depth is one small pass over the newest node of every request. Tokens stay on the device until the loop ends.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.batch import Segment, build_batch, build_chain_batches
from titan.draft.base import DraftContext
from titan.kv_cache import allocate_kv
from titan.models.decoder import Decoder
from titan.step import Acceptance, StepPlan
from titan.tree import EMPTY_TREE, DraftTree


class DraftModelDrafter:
    """Drafts greedy chains with a causal language model.

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
        self.vocab_size = min(context.target_vocab_size, model.config.vocab_size)
        self.lacks_tokens = model.config.vocab_size < context.target_vocab_size
        self.max_len = model.config.max_position_embeddings
        self.device = context.device
        self.block_size = context.kv.block_size
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

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        num_fed = self._feed_lengths(plan)
        fed = [i for i, count in enumerate(num_fed) if count > 0]
        trees = [EMPTY_TREE] * len(plan.requests)
        if not fed:
            return trees
        segments = []
        for i in fed:
            request = plan.requests[i]
            start, end = request.num_drafted_context, request.num_drafted_context + num_fed[i]
            drafts = self._budget(plan, i) > 0 and end == request.num_tokens
            segments.append(Segment(request.block_ids, start, self._known(request.token_ids[start:end]), needs_logits=drafts))
        batch = build_batch(segments, block_size=self.block_size, windows=self.model.config.windows, device=self.device)
        drafting = [i for i, segment in zip(fed, segments, strict=True) if segment.needs_logits]
        logits = self.model(batch, self.kv)
        for i in fed:  # now that it is written
            plan.requests[i].num_drafted_context += num_fed[i]
        if drafting:
            budgets = np.array([self._budget(plan, i) for i in drafting])
            tokens = self._draft_chains(plan, drafting, budgets, self._best(logits))
            for row, i in enumerate(drafting):
                trees[i] = DraftTree.chain(tokens[row, : budgets[row]])
        return trees

    def _draft_chains(self, plan: StepPlan, drafting: list[int], budgets: NDArray[np.int64], first: Tensor) -> NDArray[np.int64]:
        """Run the passes after the first one: int64 [drafting, largest budget], entries past a row's budget unset."""
        depths = [first]  # tokens by depth, int64 [drafting] each
        while len(depths) < budgets.max():
            rows = np.flatnonzero(budgets > len(depths))
            requests = [plan.requests[drafting[row]] for row in rows]
            batches = build_chain_batches(
                [request.block_ids for request in requests],
                np.array([request.num_tokens - 1 for request in requests]),
                first_depth=len(depths),
                last_depth=int(budgets[rows].min()) - 1,
                block_size=self.block_size,
                windows=self.model.config.windows,
                device=self.device,
            )
            index = torch.from_numpy(rows).to(self.device)
            for chain_batch in batches:
                tokens = depths[-1] if len(rows) == len(drafting) else depths[-1].index_select(0, index)
                best = self._best(self.model(chain_batch.with_tokens(tokens), self.kv))
                depths.append(best if len(rows) == len(drafting) else depths[-1].index_copy(0, index, best))
        result: NDArray[np.int64] = torch.stack(depths, dim=1).cpu().numpy()
        return result

    def commit(self, plan: StepPlan, trees: list[DraftTree], acceptance: Acceptance) -> None:
        for request, tree, path in zip(plan.requests, trees, acceptance.paths, strict=True):
            # the last node of a chain is proposed but never fed, so its KV is missing
            num_written = max(tree.num_nodes - 1, 0)
            if request.num_drafted_context == request.num_tokens:
                request.num_drafted_context += min(len(path), num_written)

    def _budget(self, plan: StepPlan, i: int) -> int:
        """Draft tokens for row ``i``, lowered to what the draft's own context length leaves."""
        return max(0, min(plan.draft_budgets[i], self.max_len - plan.requests[i].num_tokens))

    def _feed_lengths(self, plan: StepPlan) -> list[int]:
        """How many committed tokens each row feeds the draft: what it lacks, first come first served."""
        left = self.max_num_batched_tokens
        lengths = []
        for i, request in enumerate(plan.requests):
            end = min(request.num_computed_tokens + plan.num_tokens[i], self.max_len)
            is_wanted = request.params.use_speculative and (self._budget(plan, i) > 0 or not plan.reaches_root(i))
            length = min(end - request.num_drafted_context, left) if is_wanted else 0
            lengths.append(max(length, 0))
            left -= lengths[-1]
        return lengths

    def _known(self, token_ids: list[int]) -> list[int]:
        """The tokens; those that only the target's embedding has rows for, which are padding, become the draft's last one."""
        return [min(token_id, self.vocab_size - 1) for token_id in token_ids] if self.lacks_tokens else token_ids

    def _best(self, logits: Tensor) -> Tensor:
        """Most likely token of each row, int64 [rows], within the vocabulary that both models share."""
        return logits[:, : self.vocab_size].max(-1).indices  # on a CPU five times as fast as argmax in bfloat16
