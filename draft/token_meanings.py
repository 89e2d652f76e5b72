"""Meanings of tokens, by which tokenizers of different kinds can be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"
"""Written by tokenizers for bytes that are not a whole character."""

FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""Names of single bytes in SentencePiece vocabularies."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The alphabet of token names in byte-level BPE (Radford et al., "Language models are unsupervised multitask learners", 2019)."""


class TokenMeaning(NamedTuple):
    """The bytes that a token adds to a text, in UTF-8, possibly a part of a character; for a special token, its name."""

    content: bytes
    is_special: bool = False


def token_meanings(tokenizer: Any) -> dict[int, TokenMeaning]:
    """Return the meanings of a tokenizer's tokens by id; tokens that add nothing to a text are left out.

    Each token is decoded after another one: this keeps a space at its beginning, however the tokenizer writes spaces and whatever
    it strips from the beginning of a text. If a token is not made of whole characters, its bytes are taken from its name.

    Args:
        tokenizer: a transformers tokenizer.
    """
    names = {token_id: name for name, token_id in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    special_ids = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
    meanings = {token_id: TokenMeaning(names[token_id].encode(), True) for token_id in special_ids & names.keys()}
    others = sorted(names.keys() - special_ids)
    for token_id, text in zip(others, _texts(tokenizer, others), strict=True):
        content = _bytes_of(names[token_id]) if NOT_UTF8 in text else None
        if content is None or content.decode(errors="replace") != text:
            content = text.encode(errors="replace")
        if content:
            meanings[token_id] = TokenMeaning(content)
    return meanings


def ids_by_meaning(tokenizer: Any, meanings: dict[int, TokenMeaning]) -> dict[TokenMeaning, int]:
    """Return the token of each meaning: of several, the one that the tokenizer itself would write.

    This is the first one; a byte such as `<0x41>` only if its character has no token of its own.
    """
    names = dict(zip(meanings, tokenizer.convert_ids_to_tokens([*meanings]), strict=True))
    ids: dict[TokenMeaning, int] = {}
    for token_id in sorted(meanings, key=lambda each: (FALLBACK.fullmatch(names[each]) is not None, each)):
        ids.setdefault(meanings[token_id], token_id)
    return ids


def _texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds after another token; an empty one if it changes the text of that token."""
    [*_, anchor] = tokenizer.encode("a", add_special_tokens=False) or token_ids[:1]

    def decode(sequences: list[list[int]]) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return texts

    [before] = decode([[anchor]])
    texts = decode([[anchor, token_id] for token_id in token_ids])
    return [text[len(before) :] if text.startswith(before) else "" for text in texts]


def _bytes_of(name: str) -> bytes | None:
    """Return the bytes that a token's name spells; ``None`` if it spells none."""
    if found := FALLBACK.fullmatch(name):
        return bytes([int(found[1], 16)])
    return bytes(BYTES[character] for character in name) if all(character in BYTES for character in name) else None
