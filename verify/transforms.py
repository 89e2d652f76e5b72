"""Logits transforms: change each row of logits by the tokens before it, before it becomes a distribution.

A row of logits predicts the token after its prefix: prompt, output, and the draft tokens from the root down to the row's node.
Transforms that look back use this prefix, so that a draft token counts for the rows below it as if it had been committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
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
    scores = logits.new_empty(len(logits) + 1, logits.shape[1], dtype=torch.float32)  # one more, of which nothing is used
    scores[:-1] = logits
    _add_bias(scores, requests, upload)
    errors = _process(scores, requests)
    _allow(scores, [each for each in requests if each.params.allowed_token_ids], upload)
    if forbidden:
        scores[tuple(upload(_entries([(row, list(token_ids)) for row, token_ids in forbidden.items()])))] = float("-inf")
    _penalize(scores, [each for each in requests if each.params.has_penalties], upload)
    return TransformResult(scores[:-1], errors)


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
    """Apply repetition penalties over prompt, output and path, presence and frequency penalties over output and path.

    Only the scores of these tokens are read and written, few of a large vocabulary. The last row of ``scores`` is nobody's.
    """
    if not requests:
        return
    has_repetition = any(each.params.repetition_penalty != 1.0 for each in requests)
    strengths = [(each.params.repetition_penalty, each.params.frequency_penalty, each.params.presence_penalty) for each in requests]
    paths = [path for each in requests for path in each.paths.values()]
    seen = [
        np.unique(np.concatenate([each.output_ids, np.array([*chain(*each.paths.values())], np.int64)]), return_inverse=True)
        for each in requests
    ]  # distinct tokens, and the places among them of those of the output, then of the paths
    lengths = [len(each.output_ids) for each in requests]
    in_output = [np.bincount(places[:end], minlength=len(ids)) for (ids, places), end in zip(seen, lengths, strict=True)]
    rows, owners, penalties, token_ids, counts, path_rows, path_places, prompts = upload(
        [
            *_rows(requests),
            np.array(strengths, np.float32),
            _padded([ids for ids, _ in seen], 0),
            _padded(in_output, 0).astype(np.float32),
            np.repeat(np.arange(len(paths)), [len(path) for path in paths]),
            np.concatenate([places[end:] for (_, places), end in zip(seen, lengths, strict=True)]),
            _padded([each.distinct_prompt_ids for each in requests], -1),
        ]
    )
    repetition, frequency, presence = penalties[owners].T[:, :, None]
    # tokens that the rows of a request share are counted once, then each row adds its path
    counts = counts[owners].index_put_((path_rows, path_places), counts.new_ones(()), accumulate=True)
    token_ids, others = token_ids[owners], len(scores) - 1  # what a row has not seen is looked up in the last one
    places = rows[:, None].where(counts > 0, others), token_ids
    if has_repetition:
        in_prompt = prompts[owners]
        prompt_places = rows[:, None].where(in_prompt >= 0, others), in_prompt.clamp(min=0)
        each_place = [torch.cat(columns, 1) for columns in zip(places, prompt_places, strict=True)]
        values = scores[tuple(each_place)]
        scores[tuple(each_place)] = torch.where(values > 0, values / repetition, values * repetition)
    scores[places] = scores[places] - frequency * counts - presence * (counts > 0)


def _padded(rows: Sequence[Ints], padding: int) -> Ints:
    """Return rows of any lengths as a matrix."""
    matrix = np.full((len(rows), max(map(len, rows))), padding, np.int64)
    for padded, row in zip(matrix, rows, strict=True):
        padded[: len(row)] = row
    return matrix


def _rows(requests: list[TransformedRows]) -> tuple[Ints, Ints]:
    """Return the rows of all requests, and the indices of their requests."""
    owners = np.repeat(np.arange(len(requests)), [len(each.paths) for each in requests])
    return np.array([row for each in requests for row in each.paths], np.int64), owners


def _entries(token_ids: Iterable[tuple[int, Sequence[int] | Ints]]) -> tuple[Ints, Ints]:
    """Convert (row, token ids) pairs to an index into a matrix [rows, vocab]: two arrays [entries]."""
    rows, ids = zip(*token_ids, strict=True)
    row_of = np.repeat(np.array(rows, np.int64), [len(each) for each in ids])
    return row_of, np.concatenate([np.asarray(each, np.int64) for each in ids])
