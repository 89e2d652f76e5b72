"""`SamplingParams`: a user's options for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan.core.checks import (
    as_float32,
    as_list,
    check_bool,
    check_integer,
    check_number,
    check_options,
    option,
    optional,
    shown,
    unknown_names,
)
from titan.core.limits import MAX_NODES

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]
"""A user's function that changes logits: (token ids so far, logits float32 [vocab]) -> logits [vocab]."""

MAX_LOGPROBS = 20
MAX_DIGITS = 20
"""Most digits of a token id in text: Python itself refuses to read more than some thousands."""

MAX_COMPLETIONS = 16384
"""Maximum completions of a prompt, as in vLLM: each is a request of its own from the start."""


def _check_temperature(name: str, value: object) -> float:
    temperature = check_number(name, value, low=0.0)
    return temperature if as_float32(temperature) else 0.0  # as the engine uses it


def _check_logit_bias(name: str, bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise ValueError(f"{name}={shown(bias)} is not allowed: it must be a dict of token ids to numbers, or None")
    checked = {}
    for key, value in bias.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < MAX_DIGITS
        token_id = check_integer(name, int(key) if is_digits else key, 0)
        if token_id in checked:
            raise ValueError(f"{name} has token id {token_id} twice: allowed is once, as an int or a str")
        checked[token_id] = check_number(f"{name}[{token_id}]", value, low=-100.0, high=100.0)
    return checked


def _check_token_ids(name: str, token_ids: object) -> list[int] | None:
    token_ids = as_list(token_ids)
    if not isinstance(token_ids, list | tuple | None):
        raise ValueError(f"{name}={shown(token_ids)} is not allowed: it must be a list of token ids or None")
    return None if token_ids is None else [check_integer(name, token_id, 0) for token_id in token_ids]


def _check_processors(name: str, processors: Any) -> Any:
    if processors is not None and not (isinstance(processors, Sequence) and all(map(callable, processors))):
        raise ValueError(f"{name}={shown(processors)} is not allowed: it must be a sequence of callables, or None")
    return processors


def _check_stop(name: str, stop: Any) -> Any:
    if not _are_strings([stop] if isinstance(stop, str) else stop):
        raise ValueError(f"{name}={shown(stop)} is not allowed: it must be a non-empty str, a list of such, or None")
    return stop if isinstance(stop, str) else stop and list(stop)


def _check_words(name: str, words: Any) -> Any:
    if not _are_strings(words):
        raise ValueError(f"{name}={shown(words)} is not allowed: it must be a list of non-empty str, or None")
    return words and list(words)


def _are_strings(values: object) -> bool:
    return isinstance(values, list | tuple | None) and all(isinstance(each, str) and each for each in values or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and speculation options of one request; names and meanings follow vLLM where it has the option.

    Logits get ``logit_bias``, then go through ``logits_processors``, then tokens are masked for ``allowed_token_ids``,
    ``bad_words`` and ``min_tokens``, then the penalties apply. They are divided by ``temperature`` (0 = greedy), then restricted
    by ``top_k``, then ``top_p`` (on the renormalised distribution, the token that crosses the threshold is kept), then ``min_p``
    (relative to the largest remaining probability; in vLLM before ``top_k``). Options that look back at tokens treat draft tokens
    as if they had been generated. NumPy's numbers are taken as well.

    Args:
        n: completions of the prompt; the prompt is computed once. With a seed, they use seeds derived from it.
        temperature: 0 is greedy; otherwise > 0.
        top_p: in (0, 1].
        top_k: 0 or -1 keeps every token.
        min_p: in [0, 1].
        repetition_penalty: > 0; logits of tokens in the prompt or the output are divided by it if positive, else multiplied.
        presence_penalty: in [-2, 2]; subtracted from logits of tokens in the output.
        frequency_penalty: in [-2, 2]; the same, times the number of their occurrences.
        logit_bias: token id -> value added to its logit, in [-100, 100]; ids may be strings of digits, as in JSON.
        allowed_token_ids: the only tokens that may be generated; ``None`` = all.
        bad_words: words that are not generated, neither at the beginning of a text nor after a space: where the output ends with
            all tokens of a word but the last, this one is masked. They need a tokenizer.
        logits_processors: functions of (prompt and output token ids, logits float32 [vocab]) that return logits [vocab]; called
            in order, once per sampled token and per verified draft token. They must depend only on their arguments. One that
            raises, or returns another shape, ends its request with an error.
        logprobs: number of most likely tokens reported with each output token, 0 to 20, or -1 for the whole vocabulary; ``None`` =
            no logprobs at all. They are the model's own, computed from the logits before any of these options.
        prompt_logprobs: the same for the tokens of the prompt but the first. The prompt is then computed in full, whatever the
            prefix cache holds.
        seed: random streams are keyed by (seed, position), so a seed fixes the output, up to rounding, in any batch and whatever is
            drafted, unless drafts are sampled (``draft_sampling="sampled"``): tokens then depend on what is drafted, and how much.
            ``None`` = derived from the engine's seed and the request's number; drafts are then sampled with "auto" as well.
        stop: string(s) that end the text, which is cut before the one that is complete first.
        stop_token_ids: tokens that end the output, as the model's end-of-sequence tokens do; the last of ``token_ids``.
        include_stop_str_in_output: leave the stop string, or what a stop token says, in the text.
        min_tokens: number of tokens none of which ends the output, as a stop token or as the last of a stop string.
        max_tokens: maximum tokens to generate, by default 16, as in vLLM; ``None`` = as many as ``max_model_len`` and the KV cache
            allow. More than ``max_model_len`` leaves is lowered to that; what the whole KV cache could not hold is refused.
        ignore_eos: continue after an end-of-sequence token.
        detokenize: convert the output to text; without it, the text is empty, and ``stop`` is not allowed.
        skip_special_tokens: leave special tokens out of the text.
        use_speculative: draft for this request (when the engine has a drafter).
        max_draft_tokens: maximum draft tokens per step for this request, if the engine's are more; ``None`` = as many; 0 = none.

    Raises:
        TypeError: there is no option of a name.
        ValueError: a value is not allowed; the message names the argument, the value and what is allowed.
    """

    n: int = option(1, check_integer, low=1, high=MAX_COMPLETIONS)
    temperature: float = option(1.0, _check_temperature)
    top_p: float = option(1.0, check_number, low=0.0, high=1.0, open_low=True)
    top_k: int = option(0, check_integer, low=-1, high=2**63 - 1)
    min_p: float = option(0.0, check_number, low=0.0, high=1.0)
    repetition_penalty: float = option(1.0, check_number, low=0.0, open_low=True)
    presence_penalty: float = option(0.0, check_number, low=-2.0, high=2.0)
    frequency_penalty: float = option(0.0, check_number, low=-2.0, high=2.0)
    logit_bias: dict[int, float] | None = option(None, _check_logit_bias)
    allowed_token_ids: list[int] | None = option(None, _check_token_ids)
    bad_words: list[str] | None = option(None, _check_words)
    logits_processors: Sequence[LogitsProcessor] | None = option(None, _check_processors)
    logprobs: int | None = option(None, optional(check_integer), low=-1, high=MAX_LOGPROBS)
    prompt_logprobs: int | None = option(None, optional(check_integer), low=-1, high=MAX_LOGPROBS)
    seed: int | None = option(None, optional(check_integer), low=0, high=2**63 - 1)
    stop: str | list[str] | None = option(None, _check_stop)
    stop_token_ids: list[int] | None = option(None, _check_token_ids)
    include_stop_str_in_output: bool = option(False, check_bool)
    min_tokens: int = option(0, check_integer, low=0)
    max_tokens: int | None = option(16, optional(check_integer), low=1)
    ignore_eos: bool = option(False, check_bool)
    detokenize: bool = option(True, check_bool)
    skip_special_tokens: bool = option(True, check_bool)
    use_speculative: bool = option(True, check_bool)
    max_draft_tokens: int | None = option(None, optional(check_integer), low=0, high=MAX_NODES)

    def __new__(cls, **options: Any) -> SamplingParams:
        """Refuse unknown names before `__init__`, whose own message would not say what is allowed."""
        names = cls.__dataclass_fields__
        if unknown := options.keys() - names.keys():
            raise TypeError(unknown_names(sorted(unknown), list(names)))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={shown(self.min_tokens)} contradicts max_tokens={self.max_tokens}: "
                f"min_tokens must be at most max_tokens"
            )
        if self.max_draft_tokens and not self.use_speculative:
            raise ValueError(
                f"max_draft_tokens={self.max_draft_tokens} contradicts use_speculative=False: allowed with it are None and 0"
            )
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids=[] is not allowed: it must have at least one token id, or be None")
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop={shown(self.stop)} contradicts detokenize=False: allowed with it is None")

    def clone(self) -> SamplingParams:
        """Return a copy; `dataclasses.replace` makes one with other values."""
        return replace(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature == 0.0

    @property
    def may_draft(self) -> bool:
        return self.use_speculative and self.max_draft_tokens != 0

    @property
    def has_penalties(self) -> bool:
        """Whether penalties change the logits of tokens that occurred before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_transforms(self) -> bool:
        """Whether logits are changed beyond masking stop tokens."""
        return bool(self.logit_bias or self.logits_processors or self.allowed_token_ids or self.bad_words) or self.has_penalties

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
