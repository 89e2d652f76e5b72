"""Prompts: every source, at the lengths asked for, and what is refused."""

from __future__ import annotations

import inspect
import json
import sched
from argparse import ArgumentTypeError
from itertools import count, islice, repeat

import pytest
from zoo import Zoo

from titan.bench.prompts import SOURCES, chat_prompts, prompt_stream, text_prompts
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.models.files import DEMO

SIXTEEN = Lengths(16, 16)


class Characters:
    """A tokenizer of one token per character, with a chat template."""

    chat_template = "{}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *map(ord, text)]

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **_: object) -> str:
        return "".join(f"<{message['role']}>{message['content']}</>" for message in messages) + "<bot>" * add_generation_prompt


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
    assert any(each.startswith(f"{doc}\n\n") for each in SOURCES["prose"](source))  # it runs on into the next ones
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


def test_an_unknown_source_and_a_model_without_a_tokenizer_are_refused(zoo: Zoo) -> None:
    model = zoo.path("llama")
    with pytest.raises(ValueError, match="'poetry' are unknown: allowed are auto, synthetic, code, prose, chat, json"):
        prompt_stream(DEMO, "poetry", SIXTEEN, seed=0)
    with pytest.raises(ValueError, match=r"are text, and .* has no tokenizer"):
        prompt_stream(model, "prose", SIXTEEN, seed=0)
    assert next(prompt_stream(model, "auto", SIXTEEN, 5)) == next(prompt_stream(model, "synthetic", SIXTEEN, 5))


def test_lengths_are_read_and_written_and_keep_between_their_ends() -> None:
    assert Lengths.parse("128") == Lengths(128, 128) and str(Lengths(128, 128)) == "128" and not Lengths(128, 128).is_mixed
    assert Lengths.parse("3-7") == Lengths(3, 7) and str(Lengths(3, 7)) == "3-7" and Lengths(3, 7).is_mixed
    first, second, other = (list(islice(Lengths(3, 7).stream(seed), 100)) for seed in (0, 0, 1))
    assert first == second != other and set(first) == set(range(3, 8))
    for text in ("", "0", "-3", "8-4", "x", "4-", "1-2-3", "1.5"):
        with pytest.raises(ArgumentTypeError, match=f"'{text}' is not a length: allowed are 128, or 16-512 for a mix"):
            Lengths.parse(text)


def test_a_workload_takes_the_next_of_its_streams_and_all_arrives_at_once() -> None:
    prompts = ([number] for number in count())
    assert take_workload(prompts, 2, repeat(4)) == Workload([[0], [1]], [4, 4], [0.0, 0.0])
    next_ones = take_workload(prompts, 1, repeat(9))
    assert next_ones == Workload([[2]], [9]) and len(next_ones) == 1 and next_ones.max_len == 10


def test_a_warm_up_has_the_first_requests_with_few_tokens_each_and_none_later() -> None:
    workload = Workload([[1], [2], [3]], [5, 128, 7], [0.0, 1.0, 2.0])
    assert workload.warm_up(2) == Workload([[1], [2]], [5, 16]) and workload.warm_up(9).arrivals == [0.0] * 3
