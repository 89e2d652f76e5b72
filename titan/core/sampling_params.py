"""`SamplingParams`: a user's options for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan.core.checks import as_float32, as_list, check_bool, check_integer, check_number, shown, store, unknown_names
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
OPTIONAL_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("logprobs", -1, MAX_LOGPROBS),
    ("prompt_logprobs", -1, MAX_LOGPROBS),
    ("max_tokens", 1, None),
    ("seed", 0, 2**63 - 1),
    ("max_draft_tokens", 0, MAX_NODES),
)
"""Options that are ``None`` or integers, with their bounds."""


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
            allow.
        ignore_eos: continue after an end-of-sequence token.
        detokenize: convert the output to text; without it, the text is empty, and ``stop`` is not allowed.
        skip_special_tokens: leave special tokens out of the text.
        use_speculative: draft for this request (when the engine has a drafter).
        max_draft_tokens: maximum draft tokens per step for this request, if the engine's are more; ``None`` = as many; 0 = none.

    Raises:
        TypeError: there is no option of a name.
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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    use_speculative: bool = True
    max_draft_tokens: int | None = None

    def __new__(cls, **options: Any) -> SamplingParams:
        """Refuse unknown names before `__init__`, whose own message would not say what is allowed."""
        names = cls.__dataclass_fields__
        if unknown := options.keys() - names.keys():
            raise TypeError(unknown_names(sorted(unknown), list(names)))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        temperature = check_number("temperature", self.temperature, low=0.0)
        store(
            self,
            n=check_integer("n", self.n, 1, MAX_COMPLETIONS),
            temperature=temperature if as_float32(temperature) else 0.0,  # as the engine uses it
            top_p=check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True),
            top_k=check_integer("top_k", self.top_k, -1, 2**63 - 1),
            min_p=check_number("min_p", self.min_p, low=0.0, high=1.0),
            repetition_penalty=check_number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True),
            presence_penalty=check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0),
            frequency_penalty=check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0),
            logit_bias=_check_logit_bias(self.logit_bias),
            min_tokens=check_integer("min_tokens", self.min_tokens, 0),
        )
        for name, low, high in OPTIONAL_INTEGERS:
            if getattr(self, name) is not None:
                store(self, **{name: check_integer(name, getattr(self, name), low, high)})
        for name in ("stop_token_ids", "allowed_token_ids"):
            store(self, **{name: _check_token_ids(name, getattr(self, name))})
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "use_speculative"):
            store(self, **{name: check_bool(name, getattr(self, name))})
        self._check_the_rest()

    def _check_the_rest(self) -> None:
        """Check strings and functions, and that options do not contradict each other."""
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
        processors, words = self.logits_processors, self.bad_words
        if processors is not None and not (isinstance(processors, Sequence) and all(map(callable, processors))):
            raise ValueError(f"logits_processors={shown(processors)} is not allowed: it must be a sequence of callables, or None")
        if not isinstance(self.stop, str | list | tuple | None) or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"stop={shown(self.stop)} is not allowed: it must be a non-empty str, a list of such, or None")
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop={shown(self.stop)} contradicts detokenize=False: allowed with it is None")
        if not isinstance(words, list | tuple | None) or not all(isinstance(word, str) and word for word in words or ()):
            raise ValueError(f"bad_words={shown(words)} is not allowed: it must be a list of non-empty str, or None")
        store(
            self, bad_words=words and list(words), stop=self.stop if isinstance(self.stop, str) else self.stop and list(self.stop)
        )

    def clone(self) -> SamplingParams:
        """Return a copy; `dataclasses.replace` makes one with other values."""
        return replace(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature == 0.0

    @property
    def may_draft(self) -> bool:
        """Whether drafts are allowed."""
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
    def has_cuts(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise ValueError(f"logit_bias={shown(bias)} is not allowed: it must be a dict of token ids to numbers, or None")
    checked = {}
    for key, value in bias.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < MAX_DIGITS
        token_id = check_integer("logit_bias", int(key) if is_digits else key, 0)
        if token_id in checked:
            raise ValueError(f"logit_bias has token id {token_id} twice: allowed is once, as an int or a str")
        checked[token_id] = check_number(f"logit_bias[{token_id}]", value, low=-100.0, high=100.0)
    return checked


def _check_token_ids(name: str, token_ids: object) -> list[int] | None:
    token_ids = as_list(token_ids)
    if not isinstance(token_ids, list | tuple | None):
        raise ValueError(f"{name}={shown(token_ids)} is not allowed: it must be a list of token ids or None")
    return None if token_ids is None else [check_integer(name, token_id, 0) for token_id in token_ids]
