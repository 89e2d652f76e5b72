"""Prompts as users give them: text, token ids, or vLLM's dicts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan.core.checks import as_list, is_integer, shown, unknown_names

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids, also as an array or a tensor; or ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or both.

A dict may have "cache_salt" as well, which is that of `titan.core.terms.RequestTerms`.
"""

KEYS = ("prompt", "prompt_token_ids", "cache_salt")
BYTES = bytes | bytearray | memoryview
"""Sequences of integers that are not taken for token ids."""
FORMS = "a str or a list of int, alone or in a dict as 'prompt' or 'prompt_token_ids'"
HINTS = {"input_ids": "give its input_ids alone", "role": "messages are for chat(), or chat_prompt(), which makes a prompt of them"}
"""What to do with a dict that is no prompt, by a key by which it is told: the output of a tokenizer, and a message."""


class ReadPrompt(NamedTuple):
    """A prompt as text, as token ids, or as both, which are then the same."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: Any = None  # not checked yet


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a prompt of a call is not run, as text: an exception has a traceback, which would keep the engine alive."""

    reason: str


def read_prompt(prompt: object) -> ReadPrompt:
    """Read a prompt in any of its forms.

    Raises:
        ValueError: it is in none of them.
    """
    if isinstance(prompt, str):
        return ReadPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ReadPrompt(None, _read_token_ids(prompt))
    if unknown := [key for key in prompt if key not in KEYS]:
        reason = unknown_names(map(str, unknown), KEYS, "key")
        raise ValueError(f"prompt={shown(prompt)} is not allowed: {reason}{_hint(prompt)}")
    text, token_ids, cache_salt = map(prompt.get, KEYS)
    if not isinstance(text, str | None) or (text is None and token_ids is None):
        raise ValueError(f"prompt={shown(prompt)} is not allowed: a prompt is {FORMS}")
    return ReadPrompt(text, None if token_ids is None else _read_token_ids(token_ids), cache_salt)


def as_prompts(prompts: Any) -> list[Any]:
    """Return the prompts of a call, one or a sequence of them, as a list; `read_prompt` checks each of them later.

    Raises:
        ValueError: it is neither a prompt nor a sequence.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = as_list(prompts)
    if not isinstance(listed, Sequence) or isinstance(prompts, BYTES):
        raise ValueError(f"prompts={shown(prompts)} is not allowed: give {FORMS}, or a list of these")
    return [listed] if len(listed) and all(map(is_integer, listed)) else list(listed)


def shown_prompt(prompt: Any) -> ReadPrompt:
    """Return a refused prompt as its output shows it, as far as it can be read."""
    if isinstance(prompt, str):
        return ReadPrompt(prompt, [])
    text, token_ids = map(prompt.get, KEYS[:2]) if isinstance(prompt, Mapping) else (None, prompt)
    listed = as_list(token_ids)
    return ReadPrompt(text, list(listed) if isinstance(listed, Sequence) else [])


def _read_token_ids(prompt: object) -> list[int]:
    listed = as_list(prompt)
    if not isinstance(listed, Sequence) or isinstance(prompt, str | BYTES):
        raise ValueError(f"prompt={shown(prompt)} is not allowed: a prompt is {FORMS}")
    for token_id in listed:
        if not is_integer(token_id):
            raise ValueError(f"prompt has {shown(token_id)}, which is not a token id: a prompt is {FORMS}{_hint(token_id)}")
    return list(map(int, listed))


def _hint(value: object) -> str:
    """Return what to do with the output of a tokenizer, or with a message, given in place of a prompt."""
    return "".join(f"; {hint}" for key, hint in HINTS.items() if isinstance(value, Mapping) and key in value)
