"""Text grows token by token to what decoding all tokens at once gives, and never shows half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_tools import WORLD_CORPUS, make_byte_tokenizer, make_piece_tokenizer, make_word_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from titan.frontend.detokenizer import REPLACEMENT, IncrementalDetokenizer

TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {"byte_level": make_byte_tokenizer, "pieces": make_piece_tokenizer}
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="é語😀👩‍👧 a", max_size=60),
    st.lists(st.sampled_from(WORLD_CORPUS), max_size=2).map(" ".join),
)


def grow(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    """The text after each token and after the end; nothing that was shown is taken back."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    texts = []
    for token_id in token_ids:
        detokenizer.append(token_id)
        texts.append(detokenizer.text)
    detokenizer.finish()
    texts.append(detokenizer.text)
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    return texts


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.binary(max_size=40), prompt=st.binary(max_size=8))
def test_bytes_that_are_no_text_still_grow_and_end(name: str, data: bytes, prompt: bytes) -> None:
    tokenizer = TOKENIZERS[name]()
    assert len(grow(tokenizer, byte_tokens(tokenizer, prompt), byte_tokens(tokenizer, data))) == len(data) + 1


def byte_tokens(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """The data as one token for every byte."""
    vocab, names = tokenizer.get_vocab(), bytes_to_unicode()
    return [vocab.get(f"<0x{byte:02X}>", vocab.get(names[byte])) for byte in data]


def test_spaces_are_not_cleaned_up() -> None:
    tokenizer = make_word_tokenizer(["the", "dog", ".", "n't"])
    assert tokenizer.decode([0, 1, 2, 3]) == "the dog.n't"
    texts = grow(tokenizer, [0], [1, 2, 3])
    assert texts == [" dog", " dog .", " dog . n't", " dog . n't"]
    detokenizer = IncrementalDetokenizer(tokenizer, [0], skip_special_tokens=True)
    detokenizer.finish([1, 2, 3])
    assert detokenizer.text == texts[-1], "all at once"


@given(gaps=st.lists(st.integers(0, 12), min_size=1, max_size=4), cut=st.integers(0, 50))
@example(gaps=[0, 6], cut=1)
@example(gaps=[0, 9], cut=10)  # all in the prompt
def test_skipped_special_tokens_leave_the_spaces_around_them(gaps: list[int], cut: int) -> None:
    tokenizer = make_piece_tokenizer()
    special, word = tokenizer.convert_tokens_to_ids(["</s>", "▁the"])
    token_ids = [token_id for gap in gaps for token_id in [*[special] * gap, word]]
    prompt, output = token_ids[:cut], token_ids[cut:]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    detokenizer.finish(output)
    assert detokenizer.text == grow(tokenizer, prompt, output)[-1]
    assert tokenizer.decode(prompt, skip_special_tokens=True) + detokenizer.text == " ".join(["the"] * len(gaps))


@settings(max_examples=40)
@given(pieces=st.lists(st.one_of(st.text(max_size=3), st.sampled_from([b"\xff", b"\xc3", b"\xe2\x82"])), max_size=8))
def test_stray_bytes_do_not_swallow_the_text_around_them(pieces: list[str | bytes]) -> None:
    """Fewer stray bytes in a row than are held back: the text is that of decoding everything at once."""
    tokenizer = make_byte_tokenizer()
    data = b".".join(piece.encode("utf-8") if isinstance(piece, str) else piece for piece in pieces)
    token_ids = byte_tokens(tokenizer, data)
    assert grow(tokenizer, [], token_ids)[-1] == tokenizer.decode(token_ids) == data.decode(errors="replace")


@pytest.mark.parametrize("text", ["\ufffd\ufffd😀 ok", "\ufffd\ufffd\ufffdé", "\ufffd" * 5 + "語\ufffd\ufffd\ufffd"])
def test_replacement_characters_that_are_text_do_not_split_the_character_after_them(text: str) -> None:
    """More tokens than are held back seem to be none; of the last of them a character may come yet."""
    tokenizer = make_byte_tokenizer()
    texts = grow(tokenizer, [], byte_tokens(tokenizer, text.encode()))
    assert texts[-1] == text and all(text.startswith(each) for each in texts)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50)
@given(text=TEXTS, num_cut=st.integers(0, 3), prompt=st.text(max_size=3))
@example(text="ភាសាខ្មែរ🤗", num_cut=2, prompt="")
def test_all_at_once_or_one_by_one_tokens_give_the_same_text(name: str, text: str, num_cut: int, prompt: str) -> None:
    """Whole characters stay, even if the last one is cut."""
    tokenizer = TOKENIZERS[name]()
    data, before = text.encode(), byte_tokens(tokenizer, prompt.encode())
    cut = data[: len(data) - num_cut]
    token_ids, detokenizer = byte_tokens(tokenizer, cut), IncrementalDetokenizer(tokenizer, before, skip_special_tokens=True)
    detokenizer.finish(token_ids)
    assert detokenizer.text == grow(tokenizer, before, token_ids)[-1]
    if not prompt:  # else a space after it counts
        assert detokenizer.text.rstrip(REPLACEMENT).lstrip(" ") == cut.decode(errors="ignore").rstrip(REPLACEMENT).lstrip(" ")


@pytest.mark.parametrize("is_bytes", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50)
@given(text=TEXTS, cut=st.integers(0, 80))
@example(text="👩‍👩‍👧 語é", cut=0)
@example(text="x😀!", cut=3)  # half of a character is in the prompt, after a whole one
@example(text="語😀😀👩a語語😀x", cut=17)
@example(text="xaïx", cut=2)  # the token of a letter and half of the next
def test_text_is_at_every_step_that_of_all_tokens_so_far(name: str, is_bytes: bool, text: str, cut: int) -> None:
    """Less the complete characters of the prompt; what transformers decodes is the oracle, wherever the prompt ends."""
    tokenizer = TOKENIZERS[name]()
    token_ids = byte_tokens(tokenizer, text.encode()) if is_bytes else tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    wholes = [tokenizer.decode(token_ids[:end]) for end in range(len(token_ids) + 1)]
    start = max((whole.rstrip(REPLACEMENT) for whole in wholes[: cut + 1]), key=len)
    if REPLACEMENT in wholes[-1] or not wholes[-1].startswith(start):
        return
    texts = grow(tokenizer, prompt, output)
    assert not any(REPLACEMENT in grown for grown in texts)
    for grown, whole in zip(texts, wholes[cut + 1 :], strict=False):
        assert REPLACEMENT in whole or start + grown == whole
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    detokenizer.finish()
    assert detokenizer.text == "", "without output there is none"
    detokenizer.finish(output)
    assert start + detokenizer.text == start + texts[-1] == (wholes[-1] if output else start)
