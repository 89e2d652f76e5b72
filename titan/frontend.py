"""The front end: prompts in, text and outputs out."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, count
from math import inf
from typing import Any

import numpy as np
from tqdm import tqdm

from titan.core.checks import shown
from titan.core.metrics import ratio
from titan.core.outputs import CompletionOutput, RequestMetrics, RequestOutput, merge_metrics
from titan.core.request import FinishReason, Request, make_siblings
from titan.core.sampling_params import SamplingParams
from titan.core.terms import RequestTerms
from titan.detokenizer import IncrementalDetokenizer
from titan.engine import Engine
from titan.models.config import end_tokens
from titan.models.files import ModelFiles
from titan.models.loader import load_tokenizer, resolve_model
from titan.prompts import Prompt, Refusal, read_prompt, shown_prompt
from titan.schedule.admission import check_request, check_token_ids
from titan.schedule.stopping import fail_if_unreadable, mark_failed
from titan.step_loop import StepLoop

LOG = logging.getLogger(__name__)

BAR_INTERVAL_S = 0.1
"""Seconds between updates of a progress bar."""

MAX_BAD_WORDS = 4096
"""Words of ``bad_words`` of which the tokens are kept."""


class FrontEnd:
    """Turns prompts into requests, runs them, and builds their outputs; the methods may be called from any thread.

    Args:
        engine: runs the requests.
        tokenizer: a transformers tokenizer; ``None``: prompts must be token ids, and outputs have no text.
    """

    def __init__(self, engine: Engine, tokenizer: Any | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.loop = StepLoop(engine)
        self._numbers = count()
        vocab_size = engine.limits.vocab_size
        # kept by functions that do not hold the front end, which would then be in a cycle, and with it the engine
        self._token_text = cache(partial(_token_text, tokenizer))
        self._encode_bad_word = lru_cache(MAX_BAD_WORDS)(partial(_encode_bad_word, tokenizer, vocab_size))
        # the tokenizer's ends an answer, where a config names only what ends a document
        of_text = end_tokens(getattr(tokenizer, "eos_token_id", None), None, vocab_size)
        self._eos_token_ids = (*engine.model_config.eos_token_ids, *of_text)

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
            self.output(request)
            if isinstance(request, Request)
            else _refused_output(terms[i].request_id or f"refused-{i}", prompts[i], params[i], request.reason)
            for i, request in enumerate(made)
        ]
        _say_what_failed(completions)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams, terms: RequestTerms) -> Iterator[RequestOutput]:
        """Check the prompt now and run it lazily, with an output whenever a completion has grown, whoever stepped the engine.

        Raises:
            ValueError: the prompt is not allowed.
        """
        self.loop.check_caller()
        return self._stream(self.make_request(prompt, params, terms, needs_text=True))

    def make_request(self, prompt: Prompt, params: SamplingParams, terms: RequestTerms, *, needs_text: bool = False) -> Request:
        """Check a prompt and return its request; for ``params.n`` completions, the first of that many siblings.

        Args:
            prompt: in any form that `titan.prompts.read_prompt` takes.
            params: options.
            terms: how it is scheduled.
            needs_text: keep the text up to date while the request runs.

        Raises:
            ValueError: the prompt is none, is empty, too long, has tokens outside the vocabulary, or could never fit the KV cache;
                or it or its options need a tokenizer, and there is none, or it fails.
        """
        text, token_ids, cache_salt = read_prompt(prompt)
        if cache_salt is not None:
            if terms.cache_salt not in (None, cache_salt):
                raise ValueError(
                    f"prompt has cache_salt={shown(cache_salt)}, and its call cache_salt={terms.cache_salt!r}: give one of them"
                )
            terms = replace(terms, cache_salt=cache_salt)
        prompt_token_ids = self._encode(text or "") if token_ids is None else token_ids
        max_tokens = check_request(text, prompt_token_ids, params, self.engine.limits)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(
                    f"{name}={shown(getattr(params, name))} needs a tokenizer, and the model has none: allowed is None"
                )
        bad_word_ids = tuple(chain.from_iterable(map(self._encode_bad_word, params.bad_words or ())))
        number = next(self._numbers)
        request_id = terms.request_id or str(number)
        is_text_needed = self.tokenizer is not None and params.detokenize and (needs_text or params.stop_strings)
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        stop_token_ids = frozenset((*eos_token_ids, *(params.stop_token_ids or ())))
        seed = params.seed
        if seed is None:
            engine_seed = self.engine.config.model.seed
            assert engine_seed is not None, "the options have drawn one"
            seed = _draw_seed(np.random.SeedSequence([engine_seed, number]))
        family = tuple(
            Request(
                request_id=f"{request_id}-{index}" if index else request_id,
                prompt=text,
                prompt_token_ids=prompt_token_ids,
                params=params,
                seed=_draw_seed(np.random.SeedSequence(seed, spawn_key=(index,))) if index else seed,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                bad_word_ids=bad_word_ids,
                metrics=RequestMetrics(arrival_time=self.engine.scheduler.clock()),
                detokenizer=self._make_detokenizer(prompt_token_ids, params) if is_text_needed else None,
                index=index,
                terms=terms,
            )
            for index in range(params.n)
        )
        if len(family) > 1:
            make_siblings(*family)
        return family[0]

    def output(self, request: Request) -> RequestOutput:
        """Return the current output of a request and its siblings."""
        family = request.family
        for each in family:
            self._decode_logprobs(each)  # first, since it may end the request with an error
        prompt_logprobs = family[0].prompt_logprobs
        return RequestOutput(
            family[0].request_id,
            request.prompt,
            list(request.prompt_token_ids),  # the request goes by its own
            [self._completion(each) for each in family],
            all(each.is_finished for each in family),
            merge_metrics([each.metrics for each in family]),
            next((each.error for each in family if each.error is not None), None),
            None if prompt_logprobs is None else list(prompt_logprobs),
        )

    def _run_all(self, requests: Sequence[Request], use_tqdm: bool) -> None:
        """Run requests to completion, with a progress bar if ``use_tqdm``."""
        counters, unfinished = self.engine.counters, deque(requests)
        start, num_tokens, num_sequences = time.monotonic(), counters.num_emitted_tokens, counters.num_sequence_steps
        due = start + BAR_INTERVAL_S if use_tqdm else inf

        def count_finished() -> int | None:
            while unfinished and unfinished[0].is_finished:
                unfinished.popleft()
            return sum(request.is_finished for request in requests) if not unfinished or time.monotonic() >= due else None

        with (  # no bar that is disabled: that would take the lock of all bars as well
            tqdm(total=len(requests), desc="Generating", unit="request", dynamic_ncols=True) if use_tqdm else nullcontext() as bar,
            closing(self.loop.run(requests, count_finished)) as counts,
        ):
            for num_finished in counts:
                if bar is not None:
                    emitted = counters.num_emitted_tokens - num_tokens
                    rate = ratio(emitted, time.monotonic() - start)
                    per_sequence = ratio(emitted, counters.num_sequence_steps - num_sequences)
                    bar.n = num_finished
                    bar.set_postfix_str(f"{rate:.0f} tokens/s, {per_sequence:.2f} tokens/step")
                    due = time.monotonic() + BAR_INTERVAL_S
                if num_finished == len(requests):
                    return

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        now = self.engine.scheduler.clock()
        for each in request.family:
            each.metrics.arrival_time = now  # not earlier: a time-out must not run before anybody asks for the output
        # text that could be the start of a stop string, which would not stay, is held back until that is decided
        cut_strings = () if request.params.include_stop_str_in_output else request.params.stop_strings
        num_held = max(map(len, cut_strings), default=1) - 1
        shown = (0, False)

        def find_output() -> RequestOutput | None:
            nonlocal shown
            before, shown = shown, _progress(request)
            return self.output(request) if shown != before else None

        with closing(self.loop.run(request.family, find_output)) as outputs:
            for output in outputs:
                yield _hold_back(output, num_held) if num_held else output
                if output.finished:
                    return

    def _try_request(self, prompt: Prompt | Refusal, params: SamplingParams, terms: RequestTerms) -> Request | Refusal:
        """Return a request, or why the prompt is refused: one bad prompt must not cost the others their output."""
        if isinstance(prompt, Refusal):
            return prompt
        try:
            return self.make_request(prompt, params, terms)
        except ValueError as error:
            return Refusal(str(error))

    def _encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"prompt={shown(prompt)} is text, and the model has no tokenizer: allowed are token ids")
        _check_characters("prompt", prompt)
        with _refusing("prompt", prompt):
            token_ids: list[int] = self.tokenizer.encode(prompt)
        return token_ids

    def _make_detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer:
        with _refusing("prompt", prompt_token_ids):
            return IncrementalDetokenizer(self.tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def _completion(self, request: Request) -> CompletionOutput:
        token_ids = request.output_token_ids
        detokenizer = request.detokenizer
        if detokenizer is None and self.tokenizer is not None and request.params.detokenize:
            with fail_if_unreadable(request):
                detokenizer = self._make_detokenizer(request.prompt_token_ids, request.params)
                detokenizer.finish(request.text_token_ids)
        logprobs, reason = request.logprobs, request.finish_reason
        return CompletionOutput(
            request.index,
            "" if detokenizer is None else detokenizer.text,
            token_ids,
            None if logprobs is None else request.cumulative_logprob,
            None if logprobs is None else list(logprobs),  # the entries are the same in all outputs of a stream
            None if reason is None else reason.value,
            request.stop_reason,
        )

    def _fail(self, request: Request, error: str) -> None:
        """End a request with an error; of one that still runs, outputs are made between steps."""
        if request.is_finished:
            mark_failed(request, error)
        else:
            self.engine.scheduler.fail(request, error)

    def _decode_logprobs(self, request: Request) -> None:
        """Fill in the token text of the logprobs added since the last call."""
        new = request.new_logprobs()
        if self.tokenizer is None or not request.params.detokenize:
            return
        with fail_if_unreadable(request, self._fail):
            for entry in new:
                for token_id, logprob in entry.items():
                    logprob.decoded_token = self._token_text(token_id)


def choose_tokenizer(files: ModelFiles, tokenizer: str | None, *, trust_remote_code: bool = False) -> Any | None:
    """Load the requested tokenizer, or else the target model's; return ``None`` if it has none.

    Args:
        files: of the target model.
        tokenizer: "demo", a folder or a hub id, of which its main branch is read; ``None`` = the model's.
        trust_remote_code: as of `titan.core.options.ModelOptions`.

    Raises:
        ValueError: the tokenizer cannot be used, or the requested one does not exist.
    """
    if tokenizer is None:
        return load_tokenizer(files, trust_remote_code=trust_remote_code)
    try:
        requested = ModelFiles(resolve_model(tokenizer, "target"), download_dir=files.download_dir)
        loaded = load_tokenizer(requested, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(f"tokenizer={tokenizer!r} cannot be used: {error}") from error
    if loaded is None:
        raise ValueError(f"tokenizer={tokenizer!r} has no tokenizer: it must be a folder or hub id with tokenizer.json")
    return loaded


@contextmanager
def _refusing(name: str, value: str | Sequence[int]) -> Iterator[None]:
    """Refuse a prompt, and no other of the call, where the tokenizer fails at it or at its options."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}={shown(value)} cannot be read by the tokenizer: {type(error).__name__}: {error}") from error


def _check_characters(name: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{name}={shown(text)} has a surrogate, which is half a character: allowed is what UTF-8 can hold")


def _encode_bad_word(tokenizer: Any, vocab_size: int, word: str) -> list[tuple[int, ...]]:
    """Return the tokens of a word: as it is, at the beginning of a text, and after a space."""
    _check_characters("bad_words", word)
    bare = word.lstrip()
    forms = {word, bare, f" {bare}"} if bare else {word}
    with _refusing("bad_words", word):
        encoded = {tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms} - {()}
    if not encoded:
        raise ValueError(f"bad_words has {shown(word)}, which has no tokens: allowed are words of at least one token")
    for token_ids in encoded:
        check_token_ids("bad_words", token_ids, vocab_size)
    return sorted(encoded)


def _token_text(tokenizer: Any, token_id: int) -> str:
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text


def _draw_seed(source: np.random.SeedSequence) -> int:
    return int(source.generate_state(1, np.uint64)[0])


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


def _refused_output(request_id: str, prompt: Prompt | Refusal, params: SamplingParams, reason: str) -> RequestOutput:
    """Return the output of a prompt that was not run."""
    now = time.monotonic()
    text, token_ids, _ = shown_prompt(prompt)
    completions = [CompletionOutput(i, "", [], finish_reason=FinishReason.ERROR.value) for i in range(params.n)]
    metrics = RequestMetrics(arrival_time=now, finished_time=now)
    return RequestOutput(request_id, text, token_ids or [], completions, True, metrics, reason)


def _hold_back(output: RequestOutput, num_characters: int) -> RequestOutput:
    """Return the output without the last ``num_characters`` of text of its unfinished completions."""
    completions = [
        replace(completion, text=completion.text[:-num_characters]) if completion.finish_reason is None else completion
        for completion in output.outputs
    ]
    return replace(output, outputs=completions)
