"""Prompts: every source, at the lengths asked for, and what is refused."""

from __future__ import annotations

import inspect
import json
import sched
from itertools import islice
from pathlib import Path

import pytest
from zoo import Zoo

from titan.bench.prompts import SOURCES, chat_prompts, file_prompts, prompt_stream, text_prompts
from titan.bench.workloads import Lengths
from titan.models.loader import DEMO

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


def test_texts_come_from_the_documentation_and_the_functions_of_a_file() -> None:
    source, doc = inspect.getsource(sched), inspect.getdoc(sched.scheduler.enterabs)
    assert doc is not None
    assert any(
        each.startswith(doc) and len(each) > 3 * len(doc) for each in SOURCES["prose"](source)
    )  # it runs on into the next ones
    assert any(each.startswith("What does enterabs do") and doc in each for each in SOURCES["chat"](source))
    assert any(each.lstrip().startswith("def enterabs(") and "heapq.heappush" in each for each in SOURCES["code"](source))
    assert {"enterabs", "cancel"} < {record["name"] for record in json.loads(SOURCES["json"](source)[0])}


def test_a_message_is_framed_by_the_template_and_cut_to_fit() -> None:
    prompt = next(chat_prompts(Characters(), ["abcdefghijklmnopqrstuvwxyz"], Lengths(25, 25), 0))
    assert text(prompt) == "<user>abcdefghijk</><bot>"
    with pytest.raises(ValueError, match="prompts of 14-99 tokens have no room for the 14 tokens around a message"):
        chat_prompts(Characters(), ["abc"], Lengths(14, 99), 0)


def test_texts_that_are_too_short_are_left_out_and_none_left_is_an_error() -> None:
    assert {text(each) for each in islice(text_prompts(Characters(), ["ab", "abcdef"], Lengths(4, 4), 0), 6)} == {"abcd"}
    with pytest.raises(ValueError, match="a prompt of 7 tokens is longer than any of the 2 texts"):
        next(text_prompts(Characters(), ["ab", "abcdef"], Lengths(7, 7), 0))


def test_prompts_of_a_file_come_in_order_are_cut_and_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("abc\n\ndefghijkl\nabc\n")
    stream = file_prompts(Characters(), tmp_path / "prompts.txt", Lengths(5, 8))
    assert [text(prompt) for prompt in islice(stream, 5)] == ["\0abc", "\0defghij", "\0abc", "\0abc", "\0defghij"]
    assert "2 different ones, 2 of fewer than 5 tokens; they repeat if more are needed" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x\\ny"}\n')
    assert text(next(file_prompts(Characters(), tmp_path / "prompts.jsonl", SIXTEEN))) == "\0x\ny"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "is empty: it must have a prompt per line"),
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
