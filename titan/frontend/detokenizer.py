"""Incremental detokenization: token ids to text, never splitting a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Tokens decoded before the new ones, so that the tokenizer joins words as it would in the whole text."""
MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes
MAX_HELD_TOKENS = 8
"""Tokens that are held back at most: if they are still no character then, they never will be."""


class IncrementalDetokenizer:
    """Converts one request's output to text, token by token.

    A tail that decodes to an incomplete character is held back until the bytes that complete it arrive. The context that tokens
    are decoded with never starts inside a character: where bytes are tokens, one partial character garbles all bytes beside it. Nor
    is it skipped special tokens alone: a tokenizer that leaves out the first space of a text would leave out that of the next word.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt that the output continues.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.text = ""
        num_tokens = len(prompt_token_ids)
        for num_context in (*range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CHARACTER_TOKENS), num_tokens):
            context = list(prompt_token_ids[max(num_tokens - num_context, 0) :])
            num_complete, text = self._find_complete(context)
            if text and not text.startswith(REPLACEMENT):
                break
        self._token_ids = context  # and after it the tokens that are not in the text yet
        self._num_seen = len(context)  # of these, those that are in the prompt or in the text
        self._ends = [num_complete]  # numbers of tokens after which all characters were complete
        self._shown = text.rstrip(REPLACEMENT)  # text of the context; a character that starts in the prompt counts as output

    def append(self, token_id: int) -> None:
        """Add one output token; ``text`` grows by the characters that are complete."""
        self._token_ids.append(token_id)
        token_ids, num_tokens, text = self._token_ids, len(self._token_ids), self._decode(self._token_ids)
        if num_tokens - self._ends[-1] <= MAX_HELD_TOKENS or not text.endswith(REPLACEMENT):
            self._release(text, hold_incomplete=True)
            return
        ends = range(num_tokens - MAX_CHARACTER_TOKENS + 1, num_tokens + 1)
        end = next(end for end in ends if self._decode(token_ids[:end]) + self._decode(token_ids[end:]) == text)
        self._token_ids, tail = token_ids[:end], token_ids[end:]  # what may be a character yet is held back further
        self._release(self._decode(self._token_ids), hold_incomplete=False)
        self._token_ids += tail

    def finish(self, token_ids: Sequence[int] = ()) -> None:
        """Add the last output tokens and release the text that is held back."""
        all_token_ids = [*self._token_ids, *token_ids]
        text = self._decode(all_token_ids)
        if token_ids and REPLACEMENT in text:  # it may have garbled whole characters beside it
            for token_id in token_ids:
                self.append(token_id)
            text = self._decode(self._token_ids)
        else:
            self._token_ids = all_token_ids
        self._release(text, hold_incomplete=False)

    def _release(self, text: str, *, hold_incomplete: bool) -> None:
        """Add what is new in the text of all these tokens to the output's."""
        if len(self._token_ids) == self._num_seen or (hold_incomplete and text.endswith(REPLACEMENT)):
            return
        if text and text == self._shown and not self._decode(self._token_ids[-CONTEXT_TOKENS:]):
            del self._token_ids[self._num_seen :]  # skipped special tokens: the context stays that of before
            return
        is_text = text.startswith(self._shown)  # else bytes that are no text have garbled the context
        self.text += text[len(self._shown) :] if is_text else self._decode(self._token_ids[self._ends[-1] :])
        self._ends.append(len(self._token_ids))
        start = max((end for end in self._ends if end <= len(self._token_ids) - CONTEXT_TOKENS), default=0)
        self._token_ids = self._token_ids[start:]
        self._num_seen = len(self._token_ids)
        self._ends = [end - start for end in self._ends if end > start]
        self._shown = self._decode(self._token_ids)

    def _find_complete(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Return the number of leading tokens that decode to the most complete characters, and their text."""
        num_tokens, text = len(token_ids), self._decode(token_ids)
        best = num_tokens, text
        if text.endswith(REPLACEMENT):
            for end in range(num_tokens - 1, max(num_tokens - MAX_CHARACTER_TOKENS, -1), -1):
                text = self._decode(token_ids[:end])
                if len(text.rstrip(REPLACEMENT)) >= len(best[1].rstrip(REPLACEMENT)):
                    best = end, text
        return best

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            token_ids,
            skip_special_tokens=self.skip_special_tokens,
            clean_up_tokenization_spaces=False,  # else a token could change the text before it
        )
        return text
