"""Drafts of no use that cost what drafting costs: a model with shuffled weights, and one that is wrong for every second request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from titan.bench.loading import load_decoder
from titan.core.request import Request
from titan.core.step import StepPlan
from titan.core.trees import DraftTrees
from titan.draft.base import ReviewReport
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import choose_weight_bits
from titan.kernels.interfaces import Backend
from titan.models.decoder import Decoder
from titan.models.files import resolve_model


def load_shuffled(name: str, dtype: str, weight_bits: int | str | None, backend: Backend, seed: int) -> Decoder:
    """Load a draft model and shuffle the rows of its matrices.

    It knows nothing any more, and takes as long as before: its weights are packed the same way, for they are the same numbers.

    Raises:
        ValueError: it is not a model that can be loaded.
    """
    model = load_decoder(resolve_model(name, "draft"), dtype=dtype, backend=backend, pack=False)
    bits = choose_weight_bits(weight_bits, model.config, model.dtype, backend)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(weight[torch.randperm(len(weight), generator=generator).to(weight.device)])
    model.prepare(weight_bits=bits)
    return model


class HalfHopelessDrafter(DraftModelDrafter):
    """Drafts with a model, then puts other tokens into the trees of requests with odd numbers.

    Each token becomes the next of the vocabulary, so that siblings stay different; the target hardly ever chooses one. The scores
    stay as they are: the draft is as sure of itself as before.
    """

    def propose(self, plan: StepPlan) -> DraftTrees:
        trees = super().propose(plan)
        is_odd = np.array([_is_odd(request) for request in plan.requests])
        token_ids = trees.nodes.token_ids
        is_wrong = torch.from_numpy(np.repeat(is_odd, trees.counts)).to(token_ids.device) & (token_ids >= 0)
        wrong = torch.where(is_wrong, (token_ids + 1) % self.target_vocab_size, token_ids)
        return replace(trees, nodes=trees.nodes._replace(token_ids=wrong))

    def review(self, requests: Sequence[Request]) -> ReviewReport:
        report = super().review(requests)
        pairs = zip(requests, report.reviews, strict=True)
        return report._replace(
            reviews=[each._replace(is_right=[False] * len(each.is_right)) if _is_odd(request) else each for request, each in pairs]
        )


def _is_odd(request: Request) -> bool:
    return int(request.request_id) % 2 == 1
