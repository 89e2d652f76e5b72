"""Conditions that end a request: stop tokens, end of sequence, stop strings, length."""

from __future__ import annotations

from collections.abc import Sequence

from titan.core.request import FinishReason, Request


def append_tokens(request: Request, token_ids: Sequence[int]) -> int:
    """Append emitted tokens until one of them ends the request; the rest is dropped.

    Sets ``finish_reason`` and ``stop_reason`` of the request when it ends.

    Returns:
        How many tokens were appended.
    """
    num_left = request.num_remaining_tokens
    if request.detokenizer is None and request.stop_token_ids.isdisjoint(token_ids) and len(token_ids) < num_left:
        request.token_ids += token_ids  # none of them can end it
        return len(token_ids)
    num_until_stop = request.params.min_tokens - request.num_output_tokens
    for count, token_id in enumerate(token_ids, start=1):
        request.token_ids.append(token_id)
        num_old_characters = 0
        if request.detokenizer is not None:
            num_old_characters = len(request.detokenizer.text)
            request.detokenizer.append(token_id)
        if count >= num_until_stop and _is_stopped(request, token_id, num_old_characters):
            request.finish_reason = FinishReason.STOP
            return count
        if count == num_left:
            request.finish_reason = FinishReason.LENGTH
            return count
    return len(token_ids)


def _is_stopped(request: Request, token_id: int, num_old_characters: int) -> bool:
    """Check whether the token just appended stops the request, and truncate the text at a stop string that it completes.

    A stop string that was complete before, which only ``min_tokens`` can have let pass, stays in the text.
    """
    params = request.params
    if token_id in request.stop_token_ids:
        request.stop_reason = token_id if token_id in (params.stop_token_ids or ()) else None
        return True
    if request.detokenizer is None or not params.stop_strings:
        return False
    text = request.detokenizer.text
    places = [(text.find(stop, max(0, num_old_characters - len(stop) + 1)), stop) for stop in params.stop_strings]
    found = [(place, stop) for place, stop in places if place >= 0]
    if not found:
        return False
    place, stop = min(found)
    request.detokenizer.text = text[: place + len(stop) if params.include_stop_str_in_output else place]
    request.stop_reason = stop
    return True
