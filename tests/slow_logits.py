"""Logits transforms one row at a time, by transformers' own processors and by counting: what the engine is held to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from titan.core.sampling_params import SamplingParams


def slow_transform(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_token_ids: Iterable[int] = ()
) -> Tensor:
    """Logits of one row, [vocab], after all transforms that come before the temperature; the bad words are digits, a token each."""
    scores = logits.clone()
    prefix = [*prompt, *output]
    if params.logit_bias:
        bias = SequenceBiasLogitsProcessor({(token_id,): float(value) for token_id, value in params.logit_bias.items()})
        scores = bias(torch.tensor([prefix]), scores[None])[0]
    for processor in params.logits_processors or ():
        scores = processor(list(prefix), scores).to(logits.dtype)
    if params.allowed_token_ids is not None:
        scores[[token_id for token_id in range(len(scores)) if token_id not in params.allowed_token_ids]] = -torch.inf
    if params.bad_words:
        banned = NoBadWordsLogitsProcessor([[int(digit) for digit in word] for word in params.bad_words])
        scores = banned(torch.tensor([output], dtype=torch.int64), scores[None])[0]
    if len(output) < params.min_tokens:
        scores[list(stop_token_ids)] = -torch.inf
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(torch.tensor([prefix]), scores[None])[0]
    for token_id, count in Counter(output).items():
        scores[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def by_last_token(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits + bonus(len(logits), token_ids[-1] % 2)


@cache
def bonus(num_tokens: int, parity: int) -> Tensor:
    return 1.5 * (torch.arange(num_tokens) % 2 == parity)


def slow_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    prefix = torch.zeros(1, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(params.temperature)(prefix, logits[None])
    for warper in (
        *([TopKLogitsWarper(params.top_k)] if params.top_k > 0 else []),
        *([TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []),
        *([MinPLogitsWarper(params.min_p)] if params.min_p > 0 else []),
    ):
        scores = warper(prefix, scores)
    return scores[0].softmax(-1)
