"""What the tokens of a tokenizer stand for, such that tokenizers of different kinds can be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are no whole character."""

FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""Names of single bytes where texts are split into pieces of characters (SentencePiece)."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The alphabet in which tokens of bytes are named (Radford et al., "Language models are unsupervised multitask learners", 2019)."""


class TokenMeaning(NamedTuple):
    """What a token adds to a text, in UTF-8, be it a part of a character; of a special token, its name."""

    content: bytes
    is_special: bool = False


def token_meanings(tokenizer: Any) -> dict[int, TokenMeaning]:
    """Return what the tokens stand for, by id; those that add nothing to a text are left out.

    A token is decoded after another one, so that a space at its beginning is told from none, however the tokenizer writes spaces,
    and whatever it strips from the beginning of a text. The bytes of a token that is no whole characters are taken from its name.

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
    """Return the token that stands for each meaning: of several, the one that the tokenizer itself would write.

    That is not the byte of a character that has a token of its own, and else the first of them.
    """
    names = dict(zip(meanings, tokenizer.convert_ids_to_tokens([*meanings]), strict=True))
    ids: dict[TokenMeaning, int] = {}
    for token_id in sorted(meanings, key=lambda each: (FALLBACK.fullmatch(names[each]) is not None, each)):
        ids.setdefault(meanings[token_id], token_id)
    return ids


def _texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of a token before it; nothing if it changes that."""
    [*_, anchor] = tokenizer.encode("a", add_special_tokens=False) or token_ids[:1]

    def decode(sequences: list[list[int]]) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return texts

    [before] = decode([[anchor]])
    texts = decode([[anchor, token_id] for token_id in token_ids])
    return [text[len(before) :] if text.startswith(before) else "" for text in texts]


def _bytes_of(name: str) -> bytes | None:
    """Return the bytes that a token's name says, if it is the name of bytes."""
    if found := FALLBACK.fullmatch(name):
        return bytes([int(found[1], 16)])
    return bytes(BYTES[character] for character in name) if all(character in BYTES for character in name) else None
