"""Logits transforms: what changes logits before they are a distribution, each row with the tokens that come before it.

A row of logits predicts the token after its prefix: prompt, output, and the draft tokens from the root down to the row's node.
Transforms that look back look at this prefix, so that a draft token counts for the rows below it as if it had been committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from titan.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class TransformedRows:
    """The rows of logits of one request whose options change them."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    paths: Mapping[int, list[int]]  # row -> draft tokens behind the output, down to the row's node; none at the root

    def moved(self, places: Mapping[int, int]) -> TransformedRows:
        """The same with row ``r`` at ``places[r]``; rows without a place are left out."""
        return replace(self, paths={places[row]: path for row, path in self.paths.items() if row in places})


@dataclass(frozen=True, slots=True, eq=False)
class TransformResult:
    """Logits after their transforms, and what went wrong in them."""

    logits: Tensor  # float32 [L, vocab]; NaN in the rows that have an error
    errors: dict[int, str]  # by row


def transform_logits(
    logits: Tensor, requests: Sequence[TransformedRows], forbidden: Sequence[tuple[int, list[int]]]
) -> TransformResult:
    """Apply logit bias, the users' processors, forbidden tokens and penalties, in this order.

    Args:
        logits: [L, vocab], any float dtype; not changed.
        requests: those whose options change logits, with their rows.
        forbidden: (row, token ids) that must not come out.
    """
    scores = logits.to(torch.float32, copy=True)
    _add_bias(scores, [each for each in requests if each.params.logit_bias])
    processed = [each for each in requests if each.params.logits_processors]
    errors = _process(scores, processed)
    if forbidden:
        scores[_entries(forbidden, scores.device)] = float("-inf")
    _penalize(scores, [each for each in requests if each.params.has_penalties])
    if processed:
        rows = [row for each in processed for row in each.paths]
        is_possible = scores[rows].amax(-1).isfinite().tolist()
        for row, possible in zip(rows, is_possible, strict=True):
            if not possible:
                errors.setdefault(row, "logits_processors and min_tokens leave no token that can be drawn")
    return TransformResult(scores, errors)


def _add_bias(scores: Tensor, requests: list[TransformedRows]) -> None:
    biases = [(row, each.params.logit_bias) for each in requests for row in each.paths if each.params.logit_bias]
    if biases:
        index = _entries([(row, list(bias)) for row, bias in biases], scores.device)
        values = [value for _, bias in biases for value in bias.values()]
        scores[index] += torch.tensor(values, dtype=torch.float32, device=scores.device)


def _process(scores: Tensor, requests: list[TransformedRows]) -> dict[int, str]:
    """Let the users' processors change their rows; returns what they did wrong, by row."""
    errors = {}
    for each in requests:
        for row, path in each.paths.items():
            try:
                for processor in each.params.logits_processors or ():
                    result = processor([*each.prompt_token_ids, *each.output_token_ids, *path], scores[row])
                    _check_result(result, scores[row])
                    scores[row] = result
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and must not cost others their step
                errors[row] = f"logits_processors: {type(error).__name__}: {error}"
                scores[row] = torch.nan
    return errors


def _check_result(result: object, logits: Tensor) -> None:
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        found = f"shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise ValueError(f"a processor returned {found}: it must be a tensor of shape {list(logits.shape)}")


def _penalize(scores: Tensor, requests: list[TransformedRows]) -> None:
    """Repetition penalty over prompt, output and path; presence and frequency penalty over output and path."""
    if not requests:
        return
    device, vocab_size = scores.device, scores.shape[-1]
    num_rows = [len(each.paths) for each in requests]
    rows = torch.tensor([row for each in requests for row in each.paths], device=device)
    owners = torch.from_numpy(np.repeat(np.arange(len(requests)), num_rows)).to(device)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[owners, None]

    # what the rows of a request have in common is counted once, then each adds its path
    outputs = _entries(enumerate(each.output_token_ids for each in requests), device)
    paths = _entries(enumerate(path for each in requests for path in each.paths.values()), device)
    counts = _count(scores.new_zeros(len(requests), vocab_size), outputs)[owners]
    counts = _count(counts, paths)

    selected = scores[rows]
    if any(each.params.repetition_penalty != 1.0 for each in requests):
        prompts = _entries(enumerate(each.prompt_token_ids for each in requests), device)
        is_seen = _count(scores.new_zeros(len(requests), vocab_size), prompts)[owners] + counts > 0
        penalty = column([each.params.repetition_penalty for each in requests])
        penalty = penalty.where(is_seen, 1.0)
        selected = torch.where(selected > 0, selected / penalty, selected * penalty)
    selected -= column([each.params.frequency_penalty for each in requests]) * counts
    selected -= column([each.params.presence_penalty for each in requests]) * (counts > 0)
    scores[rows] = selected


def _count(counts: Tensor, entries: tuple[Tensor, Tensor]) -> Tensor:
    """Add 1 to ``counts`` at each entry, as often as it occurs; in place."""
    return counts.index_put_(entries, counts.new_ones(()), accumulate=True)


def _entries(token_ids: Iterable[tuple[int, Sequence[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, token ids) as an index of a matrix [rows, vocab]: two int64 tensors [entries]."""
    rows, ids = zip(*token_ids, strict=True)
    row_of = np.repeat(np.array(rows, np.int64), [len(each) for each in ids])
    columns = np.concatenate([np.asarray(each, np.int64) for each in ids])
    return torch.from_numpy(row_of).to(device), torch.from_numpy(columns).to(device)
