"""The output processor: builds the outputs of requests, with their text and the text of their logprobs."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

from titan.core.outputs import CompletionOutput, RequestMetrics, RequestOutput, merge_metrics
from titan.core.request import FinishReason, Request
from titan.core.sampling_params import SamplingParams
from titan.frontend.detokenizer import IncrementalDetokenizer
from titan.frontend.prompts import Prompt, Refusal, shown_prompt
from titan.schedule.scheduler import Scheduler
from titan.schedule.stopping import fail_if_unreadable


class OutputProcessor:
    """Builds the outputs of requests.

    Args:
        scheduler: ends a running request whose tokens cannot be decoded.
        tokenizer: a transformers tokenizer; ``None``: outputs have no text.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Any | None = None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        # the cached function is no method: it would hold this object, in a cycle that keeps the engine's memory
        self._token_text = cache(partial(_token_text, tokenizer))

    def make_output(self, request: Request, prompt_token_ids: list[int]) -> RequestOutput:
        """Return the current output of a request and its siblings; of requests that run, between steps only.

        Args:
            request: one of them.
            prompt_token_ids: a copy of the request's: callers may change it, and the engine reads the original.
        """
        family = request.family
        for each in family:
            self._decode_logprobs(each)  # first, since it may end the request with an error
        prompt_logprobs = family[0].prompt_logprobs
        return RequestOutput(
            request_id=family[0].request_id,
            prompt=request.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[self._make_completion(each) for each in family],
            finished=all(each.is_finished for each in family),
            metrics=merge_metrics([each.metrics for each in family]),
            error=next((each.error for each in family if each.error is not None), None),
            prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
        )

    def _make_completion(self, request: Request) -> CompletionOutput:
        text = self._shown_text(request)  # first, since it may end the request with an error
        logprobs, reason = request.logprobs, request.finish_reason
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=request.output_token_ids,
            cumulative_logprob=None if logprobs is None else request.cumulative_logprob,
            logprobs=None if logprobs is None else list(logprobs),  # the entries are the same in all outputs of a stream
            finish_reason=None if reason is None else reason.value,
            stop_reason=request.stop_reason,
        )

    def _shown_text(self, request: Request) -> str:
        """Return the text so far, without the last characters while these may begin a stop string, which is not to be shown."""
        params, detokenizer = request.params, request.detokenizer
        if detokenizer is None and self._tokenizer is not None and params.detokenize:
            with fail_if_unreadable(request):
                detokenizer = IncrementalDetokenizer(
                    self._tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
                )
                detokenizer.finish(request.text_token_ids)
        text = "" if detokenizer is None else detokenizer.text
        if request.is_finished or not params.stop or params.include_stop_str_in_output:
            return text
        num_held = max(map(len, params.stop_strings)) - 1
        return text[: max(len(text) - num_held, 0)]

    def _decode_logprobs(self, request: Request) -> None:
        """Fill in the token text of the logprobs added since the last call."""
        of_prompt, of_output, first = request.prompt_logprobs or [], request.logprobs or [], request.num_decoded_logprobs
        new = [*of_prompt[first:], *of_output[max(first - len(of_prompt), 0) :]]
        if self._tokenizer is not None and request.params.detokenize:
            with fail_if_unreadable(request, self._scheduler.fail):
                for entry in filter(None, new):
                    for token_id, logprob in entry.items():
                        logprob.decoded_token = self._token_text(token_id)
        request.num_decoded_logprobs += len(new)  # last: if this is interrupted, the next output has them


def refused_output(request_id: str, prompt: Prompt | Refusal, params: SamplingParams, reason: str) -> RequestOutput:
    """Return the output of a prompt that was not run."""
    now = time.monotonic()
    text, token_ids, _ = shown_prompt(prompt)
    error = FinishReason.ERROR.value
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=token_ids or [],
        outputs=[CompletionOutput(index=i, text="", token_ids=[], finish_reason=error) for i in range(params.n)],
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
        error=reason,
    )


def _token_text(tokenizer: Any, token_id: int) -> str:
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text
