"""Prompts: every source, at the lengths asked for, and what is refused."""

from __future__ import annotations

import inspect
import json
import sched
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from zoo import Zoo

from titan.bench.prompts import (
    SOURCES,
    chat_prompts,
    chat_texts,
    file_prompts,
    json_texts,
    prompt_stream,
    prose_texts,
    text_prompts,
)
from titan.bench.workloads import Lengths
from titan.models.loader import DEMO, load_tokenizer, resolve_model

SIXTEEN = Lengths(16, 16)


class Characters:
    """A tokenizer of one token per character, with a chat template."""

    chat_template = "{}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *map(ord, text)]

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{message['role']}>{message['content']}</>" for message in messages) + "<bot>"


def text(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


@pytest.mark.parametrize("source", [*SOURCES, "synthetic", "auto"])
def test_every_source_has_prompts_of_the_lengths_asked_for(source: str) -> None:
    first, second, other = (list(islice(prompt_stream(DEMO, source, Lengths(12, 40), seed), 12)) for seed in (1, 1, 2))
    assert [len(prompt) for prompt in first] == list(islice(Lengths(12, 40).stream(1), 12))
    assert first == second != other and len(set(map(tuple, first))) == 12


def test_sources_are_what_they_are_called() -> None:
    tokenizer: Any = load_tokenizer(resolve_model(DEMO, "target"))
    starts = {"code": ("def ", "class ", "async def "), "chat": "User: What does ", "json": "[\n"}
    for source, start in starts.items():
        for prompt in islice(prompt_stream(DEMO, source, SIXTEEN, seed=0), 8):
            assert tokenizer.decode(prompt).lstrip(" ").startswith(start)


def test_texts_come_from_the_documentation_and_the_objects_of_the_standard_library() -> None:
    doc = inspect.getdoc(sched.scheduler.enterabs)  # a file that the demo pair never saw
    assert doc is not None
    assert any(each.startswith(doc) and len(each) > 3 * len(doc) for each in prose_texts())  # it runs on into the next ones
    assert any(each.startswith("What does enterabs do") and doc in each for each in chat_texts())
    records = json.loads(max((each for each in json_texts() if '"arguments"' in each), key=len))
    assert len(records) > 3 and all(record["arguments"] is not None for record in records)


def test_a_message_is_framed_by_the_template_and_cut_to_fit() -> None:
    prompt = next(chat_prompts(Characters(), ["abcdefghijklmnopqrstuvwxyz"], Lengths(25, 25), 0))
    assert text(prompt) == "<user>abcdefghijk</><bot>"
    with pytest.raises(ValueError, match="prompts of 14-99 tokens have no room for the 14 tokens around a message"):
        chat_prompts(Characters(), ["abc"], Lengths(14, 99), 0)


def test_texts_that_are_too_short_are_left_out_and_none_left_is_an_error() -> None:
    assert {text(each) for each in islice(text_prompts(Characters(), ["ab", "abcdef"], Lengths(4, 4), 0), 6)} == {"abcd"}
    with pytest.raises(ValueError, match="a prompt of 7 tokens is longer than any of the 2 texts"):
        next(text_prompts(Characters(), ["ab", "abcdef"], Lengths(7, 7), 0))


def test_prompts_of_a_file_come_in_order_and_are_cut_and_repeats_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("abc\n\ndefghijkl\nabc\n")
    stream = file_prompts(Characters(), tmp_path / "prompts.txt", Lengths(5, 8))
    assert [text(prompt) for prompt in islice(stream, 3)] == ["\0abc", "\0defghij"[:8], "\0abc"]
    said = capsys.readouterr().err
    assert "2 of 3 have fewer than the 5 tokens asked for" in said and "repeat" not in said
    assert text(list(islice(stream, 7))[-1]) == "\0abc"
    assert capsys.readouterr().err.count("it has 2 different prompts, fewer than needed, so that they repeat") == 1
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x\\ny"}\n')
    assert text(next(file_prompts(Characters(), tmp_path / "prompts.jsonl", SIXTEEN))) == "\0x\ny"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "is empty: it must have a prompt per line"),
        ("a.jsonl", b'{"text": "x"}\n', "has the line"),
        ("b.jsonl", b"plain\n", "has the line 'plain': each must be a JSON object"),
        ("binary", b"\x7fELF\xff\xfe\x80", "cannot be read as text in UTF-8"),
    ],
)
def test_a_file_without_prompts_is_refused_by_its_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^prompts '.*{name}' {message}"):
        prompt_stream(DEMO, str(tmp_path / name), SIXTEEN, seed=0)


def test_an_unknown_source_and_a_model_without_a_tokenizer_are_refused(zoo: Zoo) -> None:
    model = zoo.path("llama")
    with pytest.raises(ValueError, match="'poetry' are unknown: allowed are auto, synthetic, code, prose, chat, json, or a file"):
        prompt_stream(DEMO, "poetry", SIXTEEN, seed=0)
    with pytest.raises(ValueError, match=r"are text, and .* has no tokenizer"):
        prompt_stream(model, "prose", SIXTEEN, seed=0)
    assert next(prompt_stream(model, "auto", SIXTEEN, 5)) == next(prompt_stream(model, "synthetic", SIXTEEN, 5))
