"""`SamplingParams`: a user's options for one request."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import TYPE_CHECKING

from titan.core.checks import check_bool, check_integer
from titan.core.limits import MAX_NODES

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]
"""A user's function that changes logits: (token ids so far, logits float32 [vocab]) -> logits [vocab]."""

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and speculation options of one request; names and meanings follow vLLM where it has the option.

    Logits get ``logit_bias``, then go through ``logits_processors``, then stop tokens are masked for ``min_tokens``, then
    the penalties apply. They are divided by ``temperature`` (0 = greedy), then restricted by ``top_k``, then ``top_p`` (on
    the renormalised distribution, the token that crosses the threshold is kept), then ``min_p`` (relative to the largest
    remaining probability). Options that look back at tokens treat draft tokens as if they had been generated.

    Args:
        n: completions of the prompt; the prompt is computed once. With a seed, they use seeds derived from it.
        temperature: 0 is greedy; otherwise > 0.
        top_p: in (0, 1].
        top_k: 0 or -1 keeps every token.
        min_p: in [0, 1].
        repetition_penalty: > 0; logits of tokens in the prompt or the output are divided by it if positive, else multiplied.
        presence_penalty: in [-2, 2]; subtracted from logits of tokens in the output.
        frequency_penalty: in [-2, 2]; the same, times the number of their occurrences.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        logits_processors: functions of (prompt and output token ids, logits float32 [vocab]) that return logits [vocab]; called
            in order, once per sampled token and per verified draft token. They must depend only on their arguments. One that
            raises, or returns another shape, aborts its request.
        logprobs: number of most likely tokens reported with each output token, 0 to 20; ``None`` = no logprobs at all. They
            are the model's own, computed from the logits before any of these options.
        seed: random streams are keyed by (seed, position), so a seed fixes the output in any batch, except where sampled drafts
            are cut short for lack of room in the batch; ``None`` = derived from the engine's seed and the request's number.
        stop: string(s) that end the text; not part of the output unless ``include_stop_str_in_output``.
        stop_token_ids: tokens that end the output, as the model's end-of-sequence tokens do.
        min_tokens: stop tokens, end of sequence and stop strings are suppressed before this many tokens.
        max_tokens: maximum tokens to generate; ``None`` = as many as ``max_model_len`` and the KV cache allow.
        ignore_eos: continue after an end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        use_speculative: draft for this request (when the engine has a drafter).
        max_draft_tokens: maximum draft tokens per step for this request; ``None`` = the engine's; 0 = none.

    Raises:
        ValueError: a value is not allowed; the message names the argument, the value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    use_speculative: bool = True
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1)
        _check_number("temperature", self.temperature, low=0.0)
        if _as_float32(self.temperature) == 0.0:  # as the engine uses it
            object.__setattr__(self, "temperature", 0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        check_integer("top_k", self.top_k, -1, 2**63 - 1)
        _check_number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        self._check_logit_bias()
        processors = self.logits_processors
        if processors is not None and not (isinstance(processors, Sequence) and all(map(callable, processors))):
            raise ValueError(f"logits_processors={processors!r} is not allowed: it must be a sequence of callables, or None")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens={self.min_tokens} contradicts max_tokens={self.max_tokens}: min_tokens must be at most max_tokens"
                )
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**63 - 1)
        if self.max_draft_tokens is not None:
            check_integer("max_draft_tokens", self.max_draft_tokens, 0, MAX_NODES)
            if self.max_draft_tokens > 0 and not self.use_speculative:
                raise ValueError(
                    f"max_draft_tokens={self.max_draft_tokens} contradicts use_speculative=False: allowed with it are None and 0"
                )
        if not isinstance(self.stop, str | list | tuple | None) or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"stop={self.stop!r} is not allowed: it must be a non-empty str, a list of such, or None")
        if not isinstance(self.stop_token_ids, list | tuple | None):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} is not allowed: it must be a list of token ids or None")
        for token_id in self.stop_token_ids or ():
            check_integer("stop_token_ids", token_id, 0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_speculative"):
            check_bool(name, getattr(self, name))

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, dict | None):
            raise ValueError(f"logit_bias={self.logit_bias!r} is not allowed: it must be a dict of token ids to numbers, or None")
        for token_id, bias in (self.logit_bias or {}).items():
            check_integer("logit_bias", token_id, 0)
            _check_number(f"logit_bias[{token_id}]", bias, low=-100.0, high=100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether penalties change the logits of tokens that occurred before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_transforms(self) -> bool:
        """Whether logits are changed beyond masking stop tokens."""
        return bool(self.logit_bias or self.logits_processors) or self.has_penalties

    @property
    def has_cuts(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_number(name: str, value: float, *, low: float, high: float | None = None, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    used = _as_float32(value) if is_number else nan
    if not isfinite(used) or value < low or (open_low and used == low) or (high is not None and value > high):
        bounds = f"{'(' if open_low else '['}{low:g}, {'inf)' if high is None else f'{high:g}]'}"
        raise ValueError(f"{name}={value!r} is outside the allowed range {bounds}")


def _as_float32(value: float) -> float:
    """Round a number to float32, as the engine uses it."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return inf
