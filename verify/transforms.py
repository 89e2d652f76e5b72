"""Logits transforms: change each row of logits by the tokens before it, before it becomes a distribution.

A row of logits predicts the token after its prefix: prompt, output, and the draft tokens from the root down to the row's node.
Transforms that look back use this prefix, so that a draft token counts for the rows below it as if it had been committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.checks import shown
from titan.core.sampling_params import SamplingParams
from titan.core.trees import Upload


@dataclass(frozen=True, slots=True, eq=False)
class TransformedRows:
    """The rows of logits of one request whose options transform them."""

    params: SamplingParams
    token_ids: list[int]  # prompt and output
    output_ids: Ints  # int64, the output alone
    distinct_prompt_ids: Ints  # int64, distinct tokens of the prompt; may be empty without a repetition penalty
    paths: Mapping[int, list[int]]  # row -> draft tokens after the output, down to the row's node; empty at the root


class TransformResult(NamedTuple):
    """Transformed logits, and errors."""

    logits: Tensor  # float32 [L, vocab]; NaN in the rows that have an error
    errors: dict[int, str]  # raised by users' processors, by row


def transform_logits(
    logits: Tensor, requests: Sequence[TransformedRows], forbidden: Mapping[int, Set[int]], upload: Upload
) -> TransformResult:
    """Apply logit bias, the users' processors, allowed and forbidden tokens, and penalties, in this order.

    The result may have rows from which nothing can be sampled.

    Args:
        logits: [L, vocab], any float dtype; not changed.
        requests: the requests whose options change logits, with their rows.
        forbidden: by row, token ids that must not be sampled.
        upload: uploads arrays to the device of the logits.
    """
    scores = logits.to(torch.float32, copy=True)
    _add_bias(scores, requests, upload)
    errors = _process(scores, requests)
    _allow(scores, [each for each in requests if each.params.allowed_token_ids], upload)
    if forbidden:
        scores[tuple(upload(_entries([(row, list(token_ids)) for row, token_ids in forbidden.items()])))] = float("-inf")
    _penalize(scores, [each for each in requests if each.params.has_penalties], upload)
    return TransformResult(scores, errors)


def _add_bias(scores: Tensor, requests: Sequence[TransformedRows], upload: Upload) -> None:
    biases = [(row, each.params.logit_bias) for each in requests for row in each.paths if each.params.logit_bias]
    if biases:
        added = np.array([value for _, bias in biases for value in bias.values()], np.float32)
        rows, columns, values = upload([*_entries([(row, list(bias)) for row, bias in biases]), added])
        scores[rows, columns] += values


def _process(scores: Tensor, requests: Sequence[TransformedRows]) -> dict[int, str]:
    """Apply the users' processors to their rows; return their errors by row."""
    errors = {}
    for each in requests:
        for row, path in each.paths.items():
            try:
                for processor in each.params.logits_processors or ():
                    result = processor([*each.token_ids, *path], scores[row])
                    _check_result(result, scores[row])
                    scores[row] = result
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and must not cost others their step
                errors[row] = f"logits_processors: {type(error).__name__}: {error}"
                scores[row] = torch.nan
    return errors


def _allow(scores: Tensor, requests: list[TransformedRows], upload: Upload) -> None:
    """Mask all tokens but the allowed ones."""
    if not requests:
        return
    allowed = [each.params.allowed_token_ids or [] for each in requests]
    rows, owners, *entries = upload([*_rows(requests), *_entries(enumerate(allowed))])
    is_masked = torch.ones(len(requests), scores.shape[-1], dtype=torch.bool, device=scores.device)
    is_masked[tuple(entries)] = False
    scores[rows] = scores[rows].masked_fill(is_masked[owners], float("-inf"))


def _check_result(result: object, logits: Tensor) -> None:
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        found = f"shape {list(result.shape)}" if isinstance(result, Tensor) else shown(result)
        raise ValueError(f"a processor returned {found}: it must be a tensor of shape {list(logits.shape)}")


def _penalize(scores: Tensor, requests: list[TransformedRows], upload: Upload) -> None:
    """Apply repetition penalties over prompt, output and path, presence and frequency penalties over output and path."""
    if not requests:
        return
    params = [each.params for each in requests]
    has_repetition = any(each.repetition_penalty != 1.0 for each in params)
    strengths = [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params]
    rows, owners, penalties, *entries = upload(
        [
            *_rows(requests),
            np.array(strengths, np.float32),
            *_entries(enumerate(each.output_ids for each in requests)),
            *_entries(enumerate(path for each in requests for path in each.paths.values())),
            *_entries(enumerate(each.distinct_prompt_ids for each in requests)),
        ]
    )
    outputs, paths, prompts = (entries[i : i + 2] for i in (0, 2, 4))
    repetition, frequency, presence = penalties[owners].T[:, :, None]

    # tokens that the rows of a request share are counted once, then each row adds its path
    shape = len(requests), scores.shape[-1]
    counts = _count(scores.new_zeros(shape), outputs)[owners]
    counts = _count(counts, paths)

    selected = scores[rows]
    if has_repetition:
        is_seen = _count(scores.new_zeros(shape), prompts)[owners] + counts > 0
        penalty = repetition.where(is_seen, 1.0)
        selected = torch.where(selected > 0, selected / penalty, selected * penalty)
    selected -= frequency * counts
    selected -= presence * (counts > 0)
    scores[rows] = selected


def _rows(requests: list[TransformedRows]) -> tuple[Ints, Ints]:
    """Return the rows of all requests, and the indices of their requests."""
    owners = np.repeat(np.arange(len(requests)), [len(each.paths) for each in requests])
    return np.array([row for each in requests for row in each.paths], np.int64), owners


def _count(counts: Tensor, entries: Sequence[Tensor]) -> Tensor:
    """Add 1 to ``counts`` at each entry, (row, column), as often as it occurs; in place."""
    return counts.index_put_(tuple(entries), counts.new_ones(()), accumulate=True)


def _entries(token_ids: Iterable[tuple[int, Sequence[int] | Ints]]) -> tuple[Ints, Ints]:
    """Convert (row, token ids) pairs to an index into a matrix [rows, vocab]: two arrays [entries]."""
    rows, ids = zip(*token_ids, strict=True)
    row_of = np.repeat(np.array(rows, np.int64), [len(each) for each in ids])
    return row_of, np.concatenate([np.asarray(each, np.int64) for each in ids])
