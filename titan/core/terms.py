"""The terms of a request: what it is called, how urgent it is, whose it is, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, TypedDict, Unpack

from titan.core.checks import as_list, check_choice, check_number, check_options, check_text, option, optional, shown, unknown_names
from titan.core.sampling_params import SamplingParams

PRIORITIES = ("critical", "normal", "batch")
"""Classes of requests, the most important first."""


def _check_request_id(name: str, request_id: object) -> str | None:
    text = check_text(name, request_id)
    if text is not None and text.replace("-", "", 1).isdecimal():
        raise ValueError(f"{name}={text!r} is not allowed: numbers, and such as 3-1, are the ids of requests that are given none")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """How a request is called and scheduled; none of it changes its tokens.

    Args:
        request_id: of its `RequestOutput`; `LLM.abort` ends it by this. No request or completion in flight may have the same,
            and it must be no number, nor one like 3-1, as the ids of requests are that are given none (``None``).
        priority: class of the request, "critical", "normal" or "batch"; the policy "priority" reads it, and "fcfs" and "fair"
            refuse another than "normal".
        deadline_s: seconds after its arrival by which the request should be finished; the policy "priority" reads it, "fcfs" and
            "fair" refuse it, and a request goes on after its deadline. ``None`` = after all that have one.
        timeout_s: seconds after its arrival at which the request is aborted if it has not finished, with the output that it has;
            ``None`` = never.
        user: whose request it is, for the policy "fair"; ``None`` = of one user who has no name.
        cache_salt: requests share cached prefixes only with those of the same salt; ``None`` = with those that have none.

    Raises:
        ValueError: a value is not allowed; the message names the argument, the value and what is allowed.
    """

    request_id: str | None = option(None, _check_request_id)
    priority: str = option("normal", check_choice, allowed=PRIORITIES)
    deadline_s: float | None = option(None, optional(check_number), low=0.0, open_low=True)
    timeout_s: float | None = option(None, optional(check_number), low=0.0, open_low=True)
    user: str | None = option(None, check_text)
    cache_salt: str | None = option(None, check_text)

    def __post_init__(self) -> None:
        check_options(self)


class TermOptions(TypedDict, total=False):
    """The fields of `RequestTerms` by name, for type checkers: one value for all prompts, or one per prompt."""

    request_id: str | Sequence[str | None] | None
    priority: str | Sequence[str]
    deadline_s: float | Sequence[float | None] | None
    timeout_s: float | Sequence[float | None] | None
    user: str | Sequence[str | None] | None
    cache_salt: str | Sequence[str | None] | None


def as_terms(num_prompts: int, method: Callable[..., object], /, **options: Unpack[TermOptions]) -> list[RequestTerms]:
    """Return the terms of each prompt of a call.

    Args:
        num_prompts: of the call.
        method: that was called; an error about a name lists its other arguments, too.
        options: the terms.

    Raises:
        TypeError: there is no term of a name.
        ValueError: a value is not allowed, there are values for another number of prompts, or several of these have one id.
    """
    names = tuple(RequestTerms.__dataclass_fields__)
    if unknown := [name for name in options if name not in names]:
        if sampling := [f"{name}=..." for name in unknown if name in SamplingParams.__dataclass_fields__]:
            raise TypeError(f"{', '.join(sampling)} is for sampling: give SamplingParams({', '.join(sampling)})")
        others = [each.name for each in signature(method).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        raise TypeError(unknown_names(unknown, (*others, *names)))
    values: dict[str, Any] = {name: as_list(value) for name, value in options.items()}
    each = {name: value for name, value in values.items() if isinstance(value, Sequence) and not isinstance(value, str | bytes)}
    for name, value in each.items():
        if len(value) != num_prompts:
            raise ValueError(f"{name} has {len(value)} entries for {num_prompts} prompts: give one value, or one per prompt")
    common = {name: value for name, value in values.items() if name not in each}
    if each:
        terms = [_terms_of(i, common | {name: value[i] for name, value in each.items()}) for i in range(num_prompts)]
    else:
        terms = [RequestTerms(**common)] * num_prompts
    ids = [each.request_id for each in terms if each.request_id is not None]
    if len(set(ids)) < len(ids):
        raise ValueError(f"request_id={shown(values['request_id'])} names several prompts alike: give a list of different ids")
    return terms


def _terms_of(index: int, values: dict[str, Any]) -> RequestTerms:
    try:
        return RequestTerms(**values)
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from error
