"""Conditions that end a request: stop tokens, end of sequence, stop strings, length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from titan.core.request import Detokenizer, FinishReason, Request


def append_tokens(request: Request, token_ids: Sequence[int]) -> int:
    """Append emitted tokens until one of them ends the request; the rest is dropped.

    Sets ``finish_reason`` and ``stop_reason`` of the request when it ends, or ``error`` if its tokenizer fails.

    Returns:
        How many tokens were appended.
    """
    num_left = request.num_remaining_tokens
    if request.detokenizer is None and request.stop_token_ids.isdisjoint(token_ids) and len(token_ids) < num_left:
        request.token_ids += token_ids  # none of them can end it
        return len(token_ids)
    num_before_stop = request.params.min_tokens - request.num_output_tokens
    for count, token_id in enumerate(token_ids, start=1):
        request.token_ids.append(token_id)
        may_stop, detokenizer = count > num_before_stop, request.detokenizer
        if may_stop and token_id in request.stop_token_ids:
            if detokenizer is not None:  # text of earlier tokens that it holds back may have a stop string
                _extend_text(request, detokenizer, detokenizer.finish, count - 1 > num_before_stop)
            if not request.is_finished:
                _stop_at_token(request, token_id)
        elif detokenizer is not None:
            _extend_text(request, detokenizer, partial(detokenizer.append, token_id), may_stop)
        if count == num_left and not request.is_finished:
            request.finish_reason = FinishReason.LENGTH
            if detokenizer is not None:
                _extend_text(request, detokenizer, detokenizer.finish, may_stop)
        if request.is_finished:
            return count
    return len(token_ids)


def mark_failed(request: Request, error: str) -> None:
    """Mark a request as ended by an error, unless it has one already; releasing its blocks is left to the caller."""
    if request.error is None:
        request.finish_reason, request.stop_reason, request.error = FinishReason.ERROR, None, error


@contextmanager
def fail_if_unreadable(request: Request, fail: Callable[[Request, str], None] = mark_failed) -> Iterator[None]:
    """End a request, and no other, if its tokenizer fails within the context; its text stays as it was."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a tokenizer may be code of the model's
        fail(request, f"the tokenizer cannot decode its tokens: {type(error).__name__}: {error}")


def _extend_text(request: Request, detokenizer: Detokenizer, extend: Callable[[], None], may_stop: bool) -> None:
    """Extend the text of a request, and end it at a stop string in the new text if ``may_stop``."""
    num_old_characters = len(detokenizer.text)
    with fail_if_unreadable(request):
        extend()
    if may_stop and request.error is None:
        _stop_at_string(request, detokenizer, num_old_characters)


def _stop_at_token(request: Request, token_id: int) -> None:
    """End a request at a stop token, whose text is kept or dropped as that of a stop string."""
    params = request.params
    request.finish_reason = FinishReason.STOP
    request.stop_reason = token_id if token_id in (params.stop_token_ids or ()) else None
    if request.detokenizer is not None and params.include_stop_str_in_output:
        with fail_if_unreadable(request):
            request.detokenizer.append(token_id)


def _stop_at_string(request: Request, detokenizer: Detokenizer, num_old_characters: int) -> None:
    """End a request, and cut its text, at a stop string that its last token completes: of several, at the one that ends first.

    A stop string that was complete before, which only ``min_tokens`` can have let pass, stays in the text.
    """
    text, stops = detokenizer.text, request.params.stop_strings
    ends = [text.find(stop, max(0, num_old_characters - len(stop) + 1)) + len(stop) for stop in stops]
    found = [(end, i) for i, end in enumerate(ends) if end >= len(stops[i])]
    if not found:
        return
    end, i = min(found)
    stop = stops[i]
    detokenizer.text = text[: end if request.params.include_stop_str_in_output else end - len(stop)]
    request.finish_reason, request.stop_reason = FinishReason.STOP, stop
