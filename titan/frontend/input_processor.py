"""The input processor: turns prompts into requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, count
from typing import Any

import numpy as np

from titan.core.checks import check_characters, shown
from titan.core.outputs import RequestMetrics
from titan.core.request import Request, make_siblings
from titan.core.sampling_params import SamplingParams
from titan.core.terms import RequestTerms
from titan.engine import Engine
from titan.frontend.detokenizer import IncrementalDetokenizer
from titan.frontend.prompts import Prompt, read_prompt
from titan.models.config import end_tokens
from titan.schedule.admission import check_request, check_token_ids
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.fcfs import FcfsPolicy

MAX_BAD_WORDS = 4096
"""Number of ``bad_words`` whose tokens are remembered."""
NOT_BY_PRIORITY = (FcfsPolicy, FairPolicy)
"""Policies of Titan that do not look at the priority and the deadline of a request."""


class InputProcessor:
    """Checks prompts and makes their requests; may be called from any thread.

    Args:
        engine: will run the requests; its limits, its end-of-sequence tokens and its seed apply to them.
        tokenizer: a transformers tokenizer; ``None``: prompts must be token ids.
    """

    def __init__(self, engine: Engine, tokenizer: Any | None = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._numbers = count()
        vocab_size = engine.limits.vocab_size
        # the cached function is no method: it would hold this object, in a cycle that keeps the engine's memory
        self._encode_bad_word = lru_cache(MAX_BAD_WORDS)(partial(_encode_bad_word, tokenizer, vocab_size))
        # chat models: a config's EOS may end only documents; the tokenizer's ends a turn
        turn_ends = end_tokens(getattr(tokenizer, "eos_token_id", None), None, vocab_size)
        self._eos_token_ids = (*engine.model_config.eos_token_ids, *turn_ends)

    def make_request(self, prompt: Prompt, params: SamplingParams, terms: RequestTerms, *, needs_text: bool = False) -> Request:
        """Check a prompt and return its request; for ``params.n`` completions, the first of that many siblings.

        Args:
            prompt: in any form that `titan.frontend.prompts.read_prompt` takes.
            params: sampling options.
            terms: its id, and how it is scheduled.
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
        self._check_terms(terms)
        prompt_token_ids = self._encode(text or "") if token_ids is None else token_ids
        max_tokens = check_request(text, prompt_token_ids, params, self._engine.limits)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self._tokenizer is None:
                raise ValueError(
                    f"{name}={shown(getattr(params, name))} needs a tokenizer, and the model has none: allowed is None"
                )
        bad_word_ids = tuple(chain.from_iterable(map(self._encode_bad_word, params.bad_words or ())))
        number = next(self._numbers)
        request_id = terms.request_id or str(number)
        is_text_needed = self._tokenizer is not None and params.detokenize and (needs_text or params.stop_strings)
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        stop_token_ids = frozenset((*eos_token_ids, *(params.stop_token_ids or ())))
        seed = self._derive_seed(number) if params.seed is None else params.seed
        now = self._engine.scheduler.clock()
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
                metrics=RequestMetrics(arrival_time=now),
                detokenizer=self._make_detokenizer(prompt_token_ids, params) if is_text_needed else None,
                index=index,
                terms=terms,
            )
            for index in range(params.n)
        )
        if len(family) > 1:
            make_siblings(*family)
        return family[0]

    def next_id(self) -> str:
        """Return an id that no request has, and that no call may give."""
        return str(next(self._numbers))

    def _check_terms(self, terms: RequestTerms) -> None:
        policy = self._engine.scheduler.policy
        if type(policy) not in NOT_BY_PRIORITY:  # a subclass may look at what it likes
            return
        for name, default in (("priority", "normal"), ("deadline_s", None)):
            if (value := getattr(terms, name)) != default:
                raise ValueError(
                    f"{name}={value!r} is for scheduling_policy='priority': with {policy.name!r}, {default!r} is allowed"
                )

    def _encode(self, prompt: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(
                f"prompt={shown(prompt)} is text, and the model has no tokenizer: allowed are token ids, or text with tokenizer=..."
            )
        check_characters("prompt", prompt)
        with _refusing("prompt", prompt):
            token_ids: list[int] = self._tokenizer.encode(prompt)
        return token_ids

    def _make_detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer:
        with _refusing("prompt", prompt_token_ids):
            return IncrementalDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def _derive_seed(self, number: int) -> int:
        """Return the seed of the ``number``-th request, where its params have none."""
        engine_seed = self._engine.config.model.seed
        assert engine_seed is not None, "the options have drawn one"
        return _draw_seed(np.random.SeedSequence([engine_seed, number]))


@contextmanager
def _refusing(name: str, value: str | Sequence[int]) -> Iterator[None]:
    """Refuse a prompt, and no other of the call, where the tokenizer fails at it or at its options."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}={shown(value)} cannot be read by the tokenizer: {type(error).__name__}: {error}") from error


def _encode_bad_word(tokenizer: Any, vocab_size: int, word: str) -> list[tuple[int, ...]]:
    """Return the tokens of a word: as it is, at the beginning of a text, and after a space."""
    check_characters("bad_words", word)
    bare = word.lstrip()
    forms = {word, bare, f" {bare}"} if bare else {word}
    with _refusing("bad_words", word):
        encoded = {tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms} - {()}
    if not encoded:
        raise ValueError(f"bad_words has {shown(word)}, which has no tokens: allowed are words of at least one token")
    for token_ids in encoded:
        check_token_ids("bad_words", token_ids, vocab_size)
    return sorted(encoded)


def _draw_seed(source: np.random.SeedSequence) -> int:
    return int(source.generate_state(1, np.uint64)[0]) >> 1  # seeds that may be given have 63 bits
