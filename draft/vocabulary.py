"""Drafts of another vocabulary: the tokens that draft and target share, and the map between their ids.

Token-level intersection, of Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies", 2025: the draft proposes only tokens that both vocabularies have, and q is its distribution over these,
renormalised. The output is lossless whatever q is; the more tokens are shared, the more of it can be proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.trees import DraftTrees
from titan.draft.token_meanings import TokenMeaning, ids_by_meaning, token_meanings
from titan.models.token_order import TokenOrder

ROLES = ("eos_token_id", "bos_token_id")
"""Special tokens that are matched by their role if they are not matched by name."""


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """A map between the ids of a target and those of a draft whose tokens are loaded in the order `order`.

    The I shared tokens come first in it, and only these have logits. So the draft's runner needs no map: trees grow over the
    vocabulary 0 to I - 1, and `to_target` renames their tokens.
    """

    order: TokenOrder  # order of the draft's tokens
    target_ids: Tensor  # int64 [I + 1], ids of the shared tokens, on the device; the last one is -1, for empty places
    fed_ids: Ints  # int64 [tokens of the target], the draft's token that is fed for each
    share: float  # share of the target's tokens that the draft can propose

    @classmethod
    def of(cls, target: Any, draft: Any, target_size: int, draft_size: int, device: torch.device) -> VocabularyMap:
        """Match the tokens of two tokenizers.

        Tokens match if they stand for the same bytes, or are special tokens of the same name. Tokens that end, or begin, a text
        match even if their names differ.

        Where the draft lacks a token, it is fed its longest token with which the text of the missing one ends, so that it sees the
        same text right before the next token. For a special token, or if there is none, it is fed its unknown token, else its end
        of text. One token always becomes one token, so that both caches have the same positions. All this affects how well the
        draft guesses, never the output.

        Args:
            target: a transformers tokenizer.
            draft: a transformers tokenizer.
            target_size: tokens in the embedding of the target.
            draft_size: tokens in the embedding of the draft.
            device: where trees are verified.
        """
        meanings, of_draft = (
            {token_id: meaning for token_id, meaning in token_meanings(tokenizer).items() if token_id < size}
            for tokenizer, size in ((target, target_size), (draft, draft_size))
        )
        draft_ids = ids_by_meaning(draft, of_draft)
        target_ids = ids_by_meaning(target, meanings)
        pairs = {draft_ids[meaning]: token_id for meaning, token_id in target_ids.items() if meaning in draft_ids}
        for role in ROLES:
            ours, theirs = getattr(target, role), getattr(draft, role)
            if ours in meanings and theirs in of_draft and ours not in pairs.values() and theirs not in pairs:
                pairs[theirs] = ours
        shared = sorted(pairs)
        places = np.full(draft_size, -1)
        order = np.array([*shared, *(token_id for token_id in range(draft_size) if token_id not in pairs)])
        places[order] = np.arange(draft_size)
        filler = next(token_id for token_id in (draft.unk_token_id, draft.eos_token_id, 0) if token_id in {*of_draft, 0})
        fed = np.full(target_size, filler)
        for token_id, meaning in meanings.items():
            fed[token_id] = _closest(meaning, draft_ids, filler)
        fed[[pairs[token_id] for token_id in shared]] = shared
        renamed = torch.tensor([*(pairs[token_id] for token_id in shared), -1], device=device)
        return cls(TokenOrder(torch.from_numpy(order), len(shared)), renamed, places[fed], len(shared) / len(meanings))

    @property
    def num_shared(self) -> int:
        """Number of shared tokens, I."""
        return self.order.num_outputs

    def to_draft(self, token_ids: Sequence[int]) -> list[int]:
        """Return the draft's token for each of the target's tokens."""
        fed: list[int] = self.fed_ids[token_ids].tolist()
        return fed

    def to_target(self, trees: DraftTrees) -> DraftTrees:
        """Return trees with the target's ids, and with q over its vocabulary: 0 at tokens that the draft lacks."""
        probs = trees.draft_probs
        if probs is not None:
            widened = probs.new_zeros(len(probs), len(self.fed_ids))
            probs = widened.index_copy_(1, self.target_ids[:-1], probs)
        return replace(trees, nodes=trees.nodes._replace(token_ids=self.target_ids[trees.nodes.token_ids]), draft_probs=probs)


def _closest(meaning: TokenMeaning, draft_ids: dict[TokenMeaning, int], filler: int) -> int:
    """Return the draft's token for a meaning, or the closest one."""
    if meaning.is_special:
        return draft_ids.get(meaning, filler)
    content = meaning.content
    ends = (TokenMeaning(content[start:]) for start in range(len(content)))
    return next((draft_ids[end] for end in ends if end in draft_ids), filler)
