"""A draft whose acceptance is dialled and whose cost is real: a draft model runs, and a recording takes the place of its tokens."""

from __future__ import annotations

from torch import Tensor

from titan.device_trees import outlines_of
from titan.draft.base import DraftContext
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.replay import ReplayDrafter
from titan.draft.shapes import chain_slots
from titan.models.decoder import Decoder
from titan.step import Acceptance, StepPlan
from titan.tree import EMPTY_TREE, DraftTree


class PaidReplayDrafter:
    """Proposes what `ReplayDrafter` proposes, after all the passes that a draft model takes for as many tokens.

    The draft model drafts greedy chains (so the engine's ``draft_tree`` must be "chain"), writes their KV and hears what was
    accepted; what it would have proposed does not matter.

    Args:
        model: of the draft.
        replay: whose tokens are proposed; its ``acceptance`` may be changed between steps.
        context: of the engine.
    """

    def __init__(self, model: Decoder, replay: ReplayDrafter, context: DraftContext) -> None:
        self.name = "replay, paid"
        self.replay = replay
        self.draft = DraftModelDrafter(self.name, model, context)

    @property
    def max_draft_tokens(self) -> int:
        return self.draft.max_draft_tokens

    @property
    def kv(self) -> Tensor | None:
        return self.draft.kv

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        drafted, replayed = self.draft.propose(plan), self.replay.propose(plan)
        lengths = [tree.num_nodes for tree in outlines_of(drafted)]
        return [_with_tokens(recording, length) for recording, length in zip(replayed, lengths, strict=True)]

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        self.draft.commit(plan, acceptance)


def _with_tokens(recording: DraftTree, num_drafted: int) -> DraftTree:
    """A chain that was drafted, with the tokens of a recording, as many as both have."""
    length = min(num_drafted, recording.num_nodes)
    return DraftTree.chain(recording.token_ids[:length], draft_slots=chain_slots(num_drafted)[:length]) if length else EMPTY_TREE
