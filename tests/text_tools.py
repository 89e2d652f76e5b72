"""Small tokenizers, made in the tests."""

from __future__ import annotations

from string import ascii_letters, digits, punctuation

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the quick fox",
    "in the morning there is another thing in the house, and the thing is in the house in the evening",
] * 3
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]


def make_tokenizer(vocab_size: int = 131) -> PreTrainedTokenizerFast:
    """A byte-level BPE over ASCII whose special tokens are 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [*ascii_letters, *digits, *punctuation, "Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
