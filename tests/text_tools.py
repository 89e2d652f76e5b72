"""Small tokenizers, made in the tests."""

from __future__ import annotations

from functools import cache
from string import ascii_letters, digits, punctuation

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the quick fox",
    "in the morning there is another thing in the house, and the thing is in the house in the evening",
] * 3
WORLD_CORPUS = [
    "naïve café, façade; größer als Äpfel",
    "привет мир, как дела",
    "日本語の文字列と漢字",
    "😀😃 fine 👍🏽👩‍👩‍👧 ok 😀",
    *CORPUS,
] * 2
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]


@cache
def make_tokenizer(vocab_size: int = 131) -> PreTrainedTokenizerFast:
    """A byte-level BPE over ASCII, whose special tokens are 0, 1 and 2."""
    alphabet = [*ascii_letters, *digits, *punctuation, "Ġ", "Ċ"]
    return _byte_level(vocab_size, alphabet, CORPUS)


@cache
def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over all bytes, some of whose merges end within a character."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _byte_level(len(alphabet) + 80, alphabet, WORLD_CORPUS)


@cache
def make_piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: spaces are pieces, a space is put before the text, and unknown characters fall back to bytes."""
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *ascii_letters, "é", "語"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "f")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return _wrap(tokenizer)


def make_letter_tokenizer(letters: str, style: str) -> PreTrainedTokenizerFast:
    """Single letters, by id; "bytes" or "pieces" says how they are written."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    if style == "bytes":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Whole words, by id, with spaces between them; those before punctuation go where nobody asks for them."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


class DigitTokenizer:
    """Each digit is the token of its value; nothing else is a token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(character) for character in text if character.isdigit()]


def _byte_level(vocab_size: int, alphabet: list[str], corpus: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
