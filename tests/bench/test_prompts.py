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
    Frame,
    chat_frame,
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
    lengths = Lengths(12, 40)
    prompts = list(islice(prompt_stream(DEMO, source, lengths, seed=1), 12))
    assert [len(prompt) for prompt in prompts] == list(islice(lengths.stream(1), 12))
    assert len(set(map(tuple, prompts))) == 12
    assert prompts == list(islice(prompt_stream(DEMO, source, lengths, seed=1), 12))
    assert prompts != list(islice(prompt_stream(DEMO, source, lengths, seed=2), 12))


def test_sources_are_what_they_are_called() -> None:
    tokenizer: Any = load_tokenizer(resolve_model(DEMO, "target"))

    def first(source: str) -> list[str]:
        return [tokenizer.decode(prompt) for prompt in islice(prompt_stream(DEMO, source, SIXTEEN, seed=0), 8)]

    assert all(each.lstrip().startswith(("def ", "class ", "async def ")) for each in first("code"))
    assert all(each.startswith("User: What does ") and each.endswith("\n\nAssistant:") for each in first("chat"))
    assert all(each.startswith("[\n") for each in first("json"))


def test_texts_come_from_the_documentation_and_the_objects_of_the_standard_library() -> None:
    doc = inspect.getdoc(sched.scheduler.enterabs)  # a file that the demo pair never saw
    assert doc is not None
    assert any(each.startswith(doc) for each in prose_texts())
    assert any(each.startswith("What does enterabs do") and doc in each for each in chat_texts())
    assert max(map(len, prose_texts())) > 10 * len(doc)  # they run on into the next ones
    records = json.loads(max((each for each in json_texts() if '"arguments"' in each and each.endswith("]")), key=len))
    assert len(records) > 3 and all(record["arguments"] is not None for record in records)


def test_a_conversation_is_framed_by_the_template_and_the_text_is_cut_to_fit() -> None:
    tokenizer = Characters()
    frame = chat_frame(tokenizer)
    [prompt] = islice(text_prompts(tokenizer, ["abcdefghijklmnopqrstuvwxyz"], Lengths(25, 25), 0, frame), 1)
    num_framing = len("<user></><bot>")
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abcdefghijklmnopqrstuvwxyz"[: 25 - num_framing]}], add_generation_prompt=True, tokenize=False
    )
    assert text(prompt) == expected and len(prompt) == 25
    with pytest.raises(ValueError, match="a prompt of 14 tokens has no room for the 14 tokens of its frame"):
        next(text_prompts(tokenizer, ["abc"], Lengths(14, 14), 0, frame))


def test_texts_that_are_too_short_are_left_out_and_none_left_is_an_error() -> None:
    texts = ["ab", "abcdef"]
    assert {text(each) for each in islice(text_prompts(Characters(), texts, Lengths(4, 4), 0), 6)} == {"abcd"}
    with pytest.raises(ValueError, match="a prompt of 7 tokens is longer than any of the 2 texts"):
        next(text_prompts(Characters(), texts, Lengths(7, 7), 0))
    assert Frame() == Frame((), ())


def test_prompts_of_a_file_come_in_order_again_and_again_and_are_cut(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("abc\n\ndefghi\n")
    found = [text(prompt) for prompt in islice(file_prompts(Characters(), tmp_path / "prompts.txt", Lengths(1, 5)), 3)]
    assert found == ["\0abc", "\0defg", "\0abc"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x\\ny"}\n')
    assert text(next(file_prompts(Characters(), tmp_path / "prompts.jsonl", SIXTEEN))) == "\0x\ny"


def test_prompts_of_a_file_that_repeat_or_are_too_short_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("abc\ndefghi\nabc\n")
    stream = file_prompts(Characters(), tmp_path / "prompts.txt", Lengths(5, 9))
    list(islice(stream, 3))
    said = capsys.readouterr().err
    assert "2 of 3 have fewer than the 5 tokens asked for" in said and "repeat" not in said
    list(islice(stream, 9))
    assert capsys.readouterr().err.count("it has 2 different prompts, fewer than needed, so that they repeat") == 1


def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff\xfe\x80")
    with pytest.raises(ValueError, match=r"^prompts '.*binary' are not allowed: the file is no text in UTF-8"):
        prompt_stream(DEMO, str(tmp_path / "binary"), SIXTEEN, seed=0)
    with pytest.raises(ValueError, match=r"^prompts '.*' cannot be read: Is a directory"):
        file_prompts(Characters(), tmp_path, SIXTEEN)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.txt", "\n \n", "is empty"), ("a.jsonl", '{"text": "x"}\n', "has the line"), ("b.jsonl", "plain\n", "has the line")],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        prompt_stream(DEMO, str(tmp_path / name), SIXTEEN, seed=0)


def test_an_unknown_source_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ValueError, match="prompts 'poetry' are unknown: allowed are auto, synthetic, code, prose, chat, json, or a file"
    ):
        prompt_stream(DEMO, "poetry", SIXTEEN, seed=0)


def test_a_model_without_a_tokenizer_gets_token_ids_and_no_text(zoo: Zoo) -> None:
    model = zoo.path("llama")
    assert next(prompt_stream(model, "auto", SIXTEEN, 5)) == next(prompt_stream(model, "synthetic", SIXTEEN, 5))
    with pytest.raises(ValueError, match=r"are text, and .* has no tokenizer"):
        prompt_stream(model, "prose", SIXTEEN, seed=0)
