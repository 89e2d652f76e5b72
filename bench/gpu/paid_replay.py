"""A draft whose acceptance is dialled and whose cost is real: a draft model runs, and a recording takes the place of its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from titan.core.step import StepPlan
from titan.core.trees import DraftTrees
from titan.draft.base import DraftContext
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.replay import ReplayDrafter
from titan.models.decoder import Decoder


class PaidReplayDrafter(DraftModelDrafter):
    """Proposes what `ReplayDrafter` proposes, after all the passes that a draft model takes for as many tokens.

    The draft model drafts greedy chains (so the engine's ``draft_tree`` must be "chain"), writes their KV and hears what was
    accepted; what it would have proposed does not matter. Its trees stay on the device, as they do without a recording: one more
    copy brings the recorded tokens there.

    Args:
        model: of the draft.
        replay: whose tokens are proposed; its ``acceptance`` may be changed between steps.
        context: of the engine.
    """

    def __init__(self, model: Decoder, replay: ReplayDrafter, context: DraftContext) -> None:
        super().__init__("replay, paid", model, context)
        self.replay = replay

    def propose(self, plan: StepPlan) -> DraftTrees:
        recordings = self.replay.propose(plan)
        # no more is drafted than was recorded; it may be less
        drafted = super().propose(replace(plan, draft_budgets=[recording.num_nodes for recording in recordings]))
        pairs = zip(recordings, drafted.counts.tolist(), strict=True)
        [token_ids] = self._context.backend.upload([np.concatenate([recording.token_ids[:count] for recording, count in pairs])])
        return replace(drafted, nodes=drafted.nodes._replace(token_ids=token_ids))
