"""Prompts for the benches: endless streams of distinct ones, reproducible from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from titan.models.loader import load_config, load_tokenizer, resolve_model

DEFINITION = re.compile(r"^ *(?:async def|def|class) ", re.MULTILINE)
CHARACTERS_PER_TOKEN = 12
"""More than a token of source code has on average, so that a cut text still holds enough tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive together; all prompts have the same length."""

    prompts: list[list[int]]
    output_len: int  # tokens that each request generates

    @property
    def num_output_tokens(self) -> int:
        """Tokens that all requests generate together."""
        return len(self.prompts) * self.output_len


def take_workload(prompts: Iterator[list[int]], num_prompts: int, output_len: int) -> Workload:
    """Make a workload of the next prompts of a stream."""
    return Workload(list(islice(prompts, num_prompts)), output_len)


def random_prompts(prompt_len: int, vocab_size: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts of uniformly random token ids, for models without a tokenizer."""
    generator = random.Random(seed)
    while True:
        yield [generator.randrange(vocab_size) for _ in range(prompt_len)]


def source_prompts(tokenizer: Any, prompt_len: int, seed: int) -> Iterator[list[int]]:
    """Yield the beginnings of functions and classes of the standard library, in the files that the demo pair never saw.

    After the last one it starts again from the first.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_len: tokens; shorter definitions run on into what follows them in the file.
        seed: of the order.

    Raises:
        ValueError: no file is long enough for such a prompt.
    """
    from titan.bench.train_demo import is_held_out, source_files

    texts = [path.read_text(encoding="utf-8", errors="replace") for path in source_files() if is_held_out(path)]
    starts = [(text, match.start()) for text in texts for match in DEFINITION.finditer(text)]
    random.Random(seed).shuffle(starts)
    num_found = -1
    while num_found:
        num_found = 0
        for text, start in starts:
            end = start + prompt_len * CHARACTERS_PER_TOKEN
            token_ids = tokenizer.encode(text[start:end], add_special_tokens=False)[:prompt_len]
            if len(token_ids) == prompt_len:
                num_found += 1
                yield token_ids
    raise ValueError(f"prompt_len={prompt_len} is more than a held-out file of the standard library has")


def prompt_stream(model: str, prompt_len: int, seed: int) -> Iterator[list[int]]:
    """Source code if the model has a tokenizer, random tokens otherwise."""
    folder = resolve_model(model, "target")
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError:
        return random_prompts(prompt_len, load_config(folder).vocab_size, seed)
    return source_prompts(tokenizer, prompt_len, seed)
