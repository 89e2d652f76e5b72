"""The front end: runs prompts for the callers of all threads."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from math import inf
from typing import Any

from tqdm import tqdm

from titan.core.metrics import ratio
from titan.core.outputs import RequestOutput
from titan.core.request import FinishReason, Request
from titan.core.sampling_params import SamplingParams
from titan.core.terms import RequestTerms
from titan.engine import Engine
from titan.frontend.input_processor import InputProcessor
from titan.frontend.output_processor import OutputProcessor, refused_output
from titan.frontend.prompts import Prompt, Refusal
from titan.frontend.step_loop import StepLoop

LOG = logging.getLogger("titan.frontend")

BAR_INTERVAL_S = 0.1
"""Seconds between updates of a progress bar."""


class FrontEnd:
    """Runs prompts to completion or as streams; the methods may be called from any thread.

    Args:
        engine: runs the requests.
        tokenizer: a transformers tokenizer; ``None``: prompts must be token ids, and outputs have no text.
    """

    def __init__(self, engine: Engine, tokenizer: Any | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.loop = StepLoop(engine)
        self._inputs = InputProcessor(engine, tokenizer)
        self._outputs = OutputProcessor(engine.scheduler, tokenizer)

    def generate(
        self,
        prompts: Sequence[Prompt | Refusal],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        terms: Sequence[RequestTerms],
    ) -> list[RequestOutput]:
        """Run prompts to completion, each with its own options; `titan.LLM.generate` says how refused prompts are handled."""
        self.loop.check_caller()
        made = [self._try_request(*each) for each in zip(prompts, params, terms, strict=True)]
        requests = [request for request in made if isinstance(request, Request)]
        for i, refusal in enumerate(made):
            if isinstance(refusal, Refusal):
                if not requests:
                    raise ValueError(refusal.reason)
                warnings.warn(f"prompt {i} was not run: {refusal.reason}", stacklevel=4)  # at the caller of the LLM
        completions = [each for request in requests for each in request.family]
        self._run_all(completions, use_tqdm)
        outputs = [
            self._outputs.make_output(request, list(request.prompt_token_ids))
            if isinstance(request, Request)
            else refused_output(terms[i].request_id or self._inputs.next_id(), prompts[i], params[i], request.reason)
            for i, request in enumerate(made)
        ]
        _say_what_failed(completions)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams, terms: RequestTerms) -> Generator[RequestOutput]:
        """Check the prompt now and run it lazily, with an output whenever a completion has grown, whoever stepped the engine.

        Raises:
            ValueError: the prompt is not allowed.
        """
        self.loop.check_caller()
        return self._stream(self._inputs.make_request(prompt, params, terms, needs_text=True))

    def _try_request(self, prompt: Prompt | Refusal, params: SamplingParams, terms: RequestTerms) -> Request | Refusal:
        """Return a request, or why the prompt is refused: one bad prompt must not cost the others their output."""
        if isinstance(prompt, Refusal):
            return prompt
        try:
            return self._inputs.make_request(prompt, params, terms)
        except ValueError as error:
            return Refusal(str(error))

    def _run_all(self, requests: Sequence[Request], use_tqdm: bool) -> None:
        """Run requests to completion, with a progress bar if ``use_tqdm``."""
        unfinished, start = deque(requests), time.monotonic()
        due = start + BAR_INTERVAL_S if use_tqdm else inf

        def count_finished() -> int | None:
            while unfinished and unfinished[0].is_finished:
                unfinished.popleft()
            return sum(request.is_finished for request in requests) if not unfinished or time.monotonic() >= due else None

        with (  # no bar that is disabled: that would take the lock of all bars as well
            tqdm(total=len(requests), desc="Generating", unit="request", dynamic_ncols=True, leave=False)
            if use_tqdm
            else nullcontext() as bar,
            closing(self.loop.run(requests, count_finished)) as counts,
        ):
            for num_finished in counts:
                if bar is not None:
                    num_tokens = sum([each.metrics.num_emitted_tokens for each in requests])
                    num_steps = sum([each.metrics.num_sequence_steps for each in requests])
                    rate, per_step = ratio(num_tokens, time.monotonic() - start), ratio(num_tokens, num_steps)
                    bar.leave = True  # from now on: where an id was refused, an empty bar would stay
                    bar.n = num_finished
                    bar.set_postfix_str(f"{rate:.0f} tokens/s, {per_step:.2f} tokens/step")
                    due = time.monotonic() + BAR_INTERVAL_S
                if num_finished == len(requests):
                    return

    def _stream(self, request: Request) -> Generator[RequestOutput]:
        now = self.engine.scheduler.clock()
        for each in request.family:
            each.metrics.arrival_time = now  # not earlier: a time-out must not run before anybody asks for the output
        prompt_token_ids = list(request.prompt_token_ids)  # one copy for all outputs; the engine reads the original
        shown = (0, False)

        def find_output() -> tuple[tuple[int, bool], RequestOutput] | None:
            progress = _progress(request)
            return (progress, self._outputs.make_output(request, prompt_token_ids)) if progress != shown else None

        with closing(self.loop.run(request.family, find_output)) as outputs:
            for shown, output in outputs:  # noqa: B007 - which `find_output` reads; its output may get lost by an interrupt
                yield output
                if output.finished:
                    return


def _progress(request: Request) -> tuple[int, bool]:
    """Return the number of output tokens of all completions, and whether all have finished."""
    return sum(each.num_output_tokens for each in request.family), all(each.is_finished for each in request.family)


def _say_what_failed(requests: Sequence[Request]) -> None:
    """Log in one line that some requests ended with errors of their own, of which their texts show nothing."""
    if failed := [request for request in requests if request.finish_reason is FinishReason.ERROR]:
        LOG.warning(
            "%d of %d completions ended with an error, which is in their outputs; the first, of request %s: %s",
            *(len(failed), len(requests), failed[0].family[0].request_id, failed[0].error),
        )
