"""A draft whose acceptance is dialled and whose cost is real: a draft model runs, and a recording takes the place of its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from titan.core.device_trees import DeviceTrees, Proposal, outlines_of
from titan.core.step import Acceptance, StepPlan
from titan.draft.base import DraftContext
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.replay import ReplayDrafter
from titan.kernels.upload import to_device
from titan.models.decoder import Decoder


class PaidReplayDrafter:
    """Proposes what `ReplayDrafter` proposes, after all the passes that a draft model takes for as many tokens.

    The draft model drafts greedy chains (so the engine's ``draft_tree`` must be "chain"), writes their KV and hears what was
    accepted; what it would have proposed does not matter. On CUDA its trees stay on the device, as they do without a recording:
    one more copy brings the recorded tokens there.

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

    def propose(self, plan: StepPlan) -> Proposal:
        recordings = self.replay.propose(plan)
        # no more is drafted than was recorded; it may be less
        drafted = self.draft.propose(replace(plan, draft_budgets=[recording.num_nodes for recording in recordings]))
        pairs = zip(recordings, outlines_of(drafted), strict=True)
        token_ids = [recording.token_ids[: outline.num_nodes] for recording, outline in pairs]
        if isinstance(drafted, DeviceTrees):
            of_all = to_device(np.concatenate(token_ids), drafted.nodes.token_ids.device)
            return replace(drafted, nodes=drafted.nodes._replace(token_ids=of_all))
        return [replace(tree, token_ids=tokens) for tree, tokens in zip(drafted, token_ids, strict=True)]

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        self.draft.commit(plan, acceptance)
