"""Prompts as token ids: endless streams, by the name of their source, reproducible from a seed."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from textwrap import indent
from typing import Any

from titan.bench.workloads import Lengths
from titan.frontend.chat import ChatTemplate
from titan.models.files import ModelFiles, resolve_model
from titan.models.loader import open_model
from titan.models.tokenizer import load_tokenizer

DEFINITION = re.compile(r"^ *(?:async def|def|class) ", re.MULTILINE)
CHARACTERS_PER_TOKEN = 12
"""More than a token of source code has on average, so that a cut text still holds enough tokens."""
MAX_CHARACTERS = 4096 * 6
"""Texts are cut there, which leaves 4,096 tokens of source code: the longest prompts that a bench asks for by itself."""
SYNTHETIC = "synthetic"
EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
MARK = "<the message>"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prompt_stream(
    model: str, source: str, lengths: Lengths, seed: int, *, model_impl: str = "auto", trust_remote_code: bool = False
) -> Iterator[list[int]]:
    """Yield prompts for a model.

    Args:
        model: "demo", folder or hub id.
        source: "auto" (code if the model has a tokenizer, synthetic otherwise), "synthetic" (uniformly random token ids), a name
            in `SOURCES`.
        lengths: of the prompts in tokens.
        seed: of what is drawn: order, lengths, token ids.
        model_impl: as of `LLM`.
        trust_remote_code: likewise.

    Raises:
        ValueError: the source is unknown, or needs a tokenizer that the model lacks.
    """
    files = ModelFiles(resolve_model(model, "target"))
    tokenizer = load_tokenizer(files, trust_remote_code=trust_remote_code)
    if source == "auto":
        source = SYNTHETIC if tokenizer is None else "code"
    if source == SYNTHETIC:
        config = open_model(files, model_impl, trust_remote_code=trust_remote_code).config
        return random_prompts(lengths, config.vocab_size, seed)
    if source not in SOURCES:
        raise ValueError(f"prompts {source!r} are unknown: allowed are auto, {SYNTHETIC}, {', '.join(SOURCES)}")
    if tokenizer is None:
        raise ValueError(f"prompts {source!r} are text, and {model} has no tokenizer: allowed are auto and {SYNTHETIC}")
    make_prompts = chat_prompts if source == "chat" else text_prompts
    return make_prompts(tokenizer, builtin_texts(source), lengths, seed)


def random_prompts(lengths: Lengths, vocab_size: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts of uniformly random token ids, for models without a tokenizer."""
    generator = random.Random(seed)
    for length in lengths.stream(seed):
        yield [generator.randrange(vocab_size) for _ in range(length)]


def chat_prompts(tokenizer: Any, texts: Sequence[str], lengths: Lengths, seed: int) -> Iterator[list[int]]:
    """Return prompts whose text is a user's message in the tokenizer's chat template, or after a plain "User:" without one.

    Raises:
        ValueError: what stands around the message leaves no room for it.
    """
    rendered = f"User: {MARK}\n\nAssistant:"
    if tokenizer.chat_template:
        rendered = ChatTemplate(tokenizer).render([{"role": "user", "content": MARK}])["prompt"]
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in rendered.split(MARK))
    num_around = len(before) + len(after)
    if lengths.low <= num_around:
        raise ValueError(f"prompts of {lengths} tokens have no room for the {num_around} tokens around a message")
    messages = text_prompts(tokenizer, texts, Lengths(lengths.low - num_around, lengths.high - num_around), seed)
    return ([*before, *token_ids, *after] for token_ids in messages)


def text_prompts(tokenizer: Any, texts: Sequence[str], lengths: Lengths, seed: int) -> Iterator[list[int]]:
    """Yield the beginnings of ``texts`` in random order, from the first again after the last; too short ones are left out.

    Raises:
        ValueError: no text is long enough.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)
    endless = cycle(order)
    for length in lengths.stream(seed):
        for text in islice(endless, len(order)):
            token_ids = tokenizer.encode(text[: length * CHARACTERS_PER_TOKEN], add_special_tokens=False)[:length]
            if len(token_ids) == length:
                yield token_ids
                break
        else:
            raise ValueError(f"a prompt of {length} tokens is longer than any of the {len(order)} texts")


def code_texts(source: str) -> list[str]:
    """Functions and classes of a source file, and what follows them."""
    return [source[match.start() :][:MAX_CHARACTERS] for match in DEFINITION.finditer(source)]


def prose_texts(source: str) -> list[str]:
    """Documentation strings of a source file, and those that follow them."""
    return [docs for _, docs in _documented(source)]


def chat_texts(source: str) -> list[str]:
    """Questions about a module, its functions and classes, with their documentation."""
    question = "What does {} do, and when would I use it? Its documentation says: {}"
    return [question.format(name, docs) for name, docs in _documented(source)]


def json_texts(source: str) -> list[str]:
    """Lists of JSON objects that describe the functions of a source file, each beginning at another one."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    records = [indent(json.dumps(_describe_function(node), indent=2), "  ") for node in functions]
    return ["[\n" + ",\n".join(records[first : first + 100]) + "\n]" for first in range(len(records))]


SOURCES: dict[str, Callable[[str], list[str]]] = {"code": code_texts, "prose": prose_texts, "chat": chat_texts, "json": json_texts}
"""What makes texts of a file of the standard library that the demo pair never saw; prompts are the beginnings of texts."""


@cache
def builtin_texts(name: str) -> list[str]:
    """The texts of a source in `SOURCES`."""
    files = [path.read_text(encoding="utf-8", errors="replace") for path in source_files() if is_held_out(path)]
    return [text for source in files for text in SOURCES[name](source)]


def source_files() -> list[Path]:
    """Return the standard library's source files, sorted, without tests and code-page tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in root.rglob("*.py") if not EXCLUDED_FOLDERS & set(path.relative_to(root).parts))


def is_held_out(path: Path) -> bool:
    """Choose the held-out files by a hash of their name, so that the split never depends on order."""
    digest = hashlib.sha256(path.name.encode()).digest()
    return digest[0] / 256 < 0.06


def _documented(source: str) -> list[tuple[str, str]]:
    """Names of what has a documentation string in a source file, each with this string and those that follow it."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    docs = [ast.get_docstring(node) or "" for node in nodes]
    return [(getattr(node, "name", "this module"), "\n\n".join(docs[first:])[:MAX_CHARACTERS]) for first, node in enumerate(nodes)]


def _describe_function(node: ast.FunctionDef) -> dict[str, object]:
    return {
        "name": node.name,
        "line": node.lineno,
        "arguments": [argument.arg for argument in node.args.args],
        "returns": None if node.returns is None else ast.unparse(node.returns),
        "is_public": not node.name.startswith("_"),
        "summary": (ast.get_docstring(node) or "").partition("\n")[0],
    }
