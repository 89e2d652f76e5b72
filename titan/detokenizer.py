"""From tokens to text, piece by piece, never splitting a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Tokens decoded ahead of the new ones, so that the tokenizer joins words as it would in the whole text."""
MAX_HELD_TOKENS = 8
"""A UTF-8 character has at most 4 bytes; a tail that stays undecodable for longer is not a character."""


class IncrementalDetokenizer:
    """The text of one request's output, grown token by token.

    A tail that decodes to an incomplete character is held back until the bytes that complete it arrive.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.text = ""
        self._token_ids = list(prompt_token_ids[-CONTEXT_TOKENS:])  # context, then what is not yet in the text
        self._num_context = len(self._token_ids)
        self._context_text = self._decode(self._token_ids)

    def append(self, token_id: int) -> None:
        """Take one more output token; ``text`` grows by what is complete."""
        self._token_ids.append(token_id)
        self._release(hold_incomplete=len(self._token_ids) - self._num_context <= MAX_HELD_TOKENS)

    def finish(self) -> None:
        """Release what is still held back: no more tokens come."""
        self._release(hold_incomplete=False)

    def _release(self, *, hold_incomplete: bool) -> None:
        text = self._decode(self._token_ids)
        if len(self._token_ids) == self._num_context or (hold_incomplete and text.endswith(REPLACEMENT)):
            return
        self.text += text[len(self._context_text) :]
        self._token_ids = self._token_ids[-CONTEXT_TOKENS:]
        self._num_context = len(self._token_ids)
        self._context_text = self._decode(self._token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
        return text
