"""How requests end: stop tokens, end of sequence, stop strings, lengths; alone, within an accepted run, and in a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import check_blocks, greedy, make_engine, submit
from text_tools import make_byte_tokenizer, make_tokenizer
from zoo import EOS_TOKEN_IDS, Zoo, random_prompts

from titan import LLM, RequestOutput, SamplingParams
from titan.core.outputs import RequestMetrics
from titan.core.request import FinishReason, Request
from titan.detokenizer import IncrementalDetokenizer
from titan.schedule.stopping import append_tokens

PROMPT = random_prompts(2, seed=8, max_len=20)[1]
DRAFTS = ("none", "itself", "perturbed")
Make = Callable[..., LLM]


def make_request(params: SamplingParams, *, max_tokens: int = 100, tokenizer: Any = None, eos: Sequence[int] = (2,)) -> Request:
    detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, [5], skip_special_tokens=True)
    stop_token_ids = frozenset((*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())))
    return Request("r", None, [5], params, 0, max_tokens, stop_token_ids, RequestMetrics(0.0), detokenizer)


@pytest.mark.parametrize(
    ("options", "token_ids", "expected"),
    [
        ({}, [7, 8, 9], ([7, 8, 9], None, None)),
        ({}, [7, 2, 9], ([7, 2], "stop", None)),
        ({"ignore_eos": True}, [7, 2, 9], ([7, 2, 9], None, None)),
        ({"stop_token_ids": [9, 8]}, [7, 8, 9], ([7, 8], "stop", 8)),
        ({"stop_token_ids": [2]}, [7, 2, 9], ([7, 2], "stop", 2)),
        ({"stop_token_ids": [9], "ignore_eos": True}, [2, 9, 7], ([2, 9], "stop", 9)),
        ({"min_tokens": 3}, [2, 7, 2, 2], ([2, 7, 2], "stop", None)),
        ({"min_tokens": 3, "stop_token_ids": [7]}, [7, 8, 9, 7, 8], ([7, 8, 9, 7], "stop", 7)),
        ({"max_tokens": 2}, [7, 8, 9], ([7, 8], "length", None)),
        ({"max_tokens": 2}, [7, 2, 9], ([7, 2], "stop", None)),
        ({"max_tokens": 1, "min_tokens": 1}, [7, 8], ([7], "length", None)),
    ],
)
def test_tokens_are_appended_up_to_the_end(
    options: dict[str, Any], token_ids: list[int], expected: tuple[list[int], str | None, int | None]
) -> None:
    request = make_request(SamplingParams(**options), max_tokens=options.get("max_tokens", 100))
    num_emitted = append_tokens(request, token_ids)
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == expected
    assert num_emitted == len(expected[0])
    assert request.is_finished == (expected[1] is not None)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("the quick fox", {"stop": "quick"}, "the "),
        ("the quick fox", {"stop": "quick", "include_stop_str_in_output": True}, "the quick"),
        ("the quick fox", {"stop": ["fox", "ick", "nope"]}, "the qu"),
        ("the quick fox", {"stop": ["e q", "the"]}, ""),
        ("the the the", {"stop": "the", "min_tokens": 2}, "the "),
        ("the\n\nfox", {"stop": "\n\n"}, "the"),
        ("the fox", {"stop": "THE"}, None),
    ],
)
def test_a_stop_string_cuts_the_text_wherever_its_tokens_end(text: str, options: dict[str, Any], expected: str | None) -> None:
    tokenizer = make_tokenizer()
    request = make_request(SamplingParams(**options), tokenizer=tokenizer)
    token_ids = tokenizer.encode(text + " and more")
    num_emitted = append_tokens(request, token_ids)
    assert request.detokenizer is not None
    if expected is None:
        assert not request.is_finished and request.detokenizer.text == text + " and more"
        return
    assert request.detokenizer.text == expected
    assert request.finish_reason is FinishReason.STOP
    assert isinstance(request.stop_reason, str) and request.stop_reason in text
    assert request.stop_reason in tokenizer.decode(token_ids[:num_emitted])
    assert request.stop_reason not in tokenizer.decode(token_ids[: num_emitted - 1]) or "min_tokens" in options


def test_of_stop_strings_that_end_at_one_character_the_one_that_begins_first_ends_the_text() -> None:
    tokenizer = make_tokenizer()
    for stops in permutations(["quick", "ick", "uick"]):
        request = make_request(SamplingParams(stop=list(stops)), tokenizer=tokenizer)
        append_tokens(request, tokenizer.encode("the quick fox"))
        assert request.detokenizer is not None
        assert (request.stop_reason, request.detokenizer.text) == ("quick", "the ")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="abé😀\n", max_size=30),
    stops=st.lists(st.text(alphabet="abé😀\n", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_the_text_ends_at_the_first_stop_string_that_completes(text: str, stops: list[str], include: bool) -> None:
    tokenizer = make_byte_tokenizer()
    request = make_request(SamplingParams(stop=stops, include_stop_str_in_output=include), tokenizer=tokenizer)
    append_tokens(request, tokenizer.encode(text))
    assert request.detokenizer is not None
    shown = request.detokenizer.text
    if not request.is_finished:
        assert shown == text and not any(stop in text for stop in stops)
        return
    assert text.startswith(shown)
    assert request.stop_reason in stops
    assert isinstance(request.stop_reason, str)
    if include:
        assert shown.endswith(request.stop_reason)
    else:
        assert text.startswith(shown + request.stop_reason)
        assert not any(stop in shown for stop in stops)


@pytest.fixture(scope="module")
def make_llm(zoo: Zoo) -> Make:
    """An LLM with a tokenizer whose output is random ASCII, with this draft."""

    def make(draft: str = "none", **options: Any) -> LLM:
        specs = {"none": None, "itself": zoo.path("llama+text"), "perturbed": zoo.path("llama~")}
        return LLM(zoo.path("llama+text"), specs[draft], dtype="float32", device="cpu", num_kv_blocks=64, **options)

    return make


def run(llm: LLM, params: SamplingParams) -> RequestOutput:
    """One request; its metrics fit its output, and its blocks are free at the end."""
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    check_metrics(output)
    check_blocks(llm.engine)
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_blocks
    return output


def check_metrics(output: RequestOutput) -> None:
    metrics, completion = output.metrics, output.outputs[0]
    assert metrics.num_emitted_tokens == len(completion.token_ids)
    extra = metrics.num_accepted_tokens + metrics.num_sequence_steps - metrics.num_emitted_tokens
    assert extra in ((0, 1) if completion.finish_reason == "stop" else (0,)), (
        "1: the end was a draft token, and no final token followed"
    )
    assert metrics.num_accepted_tokens <= metrics.num_draft_tokens
    assert sorted(metrics.accepted_per_depth, reverse=True) == metrics.accepted_per_depth
    assert metrics.mean_acceptance_length == metrics.num_emitted_tokens / metrics.num_sequence_steps
    assert metrics.first_scheduled_time is not None and metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


@pytest.fixture(scope="module")
def free_running(zoo: Zoo, make_llm: Make) -> RequestOutput:
    """What the model writes when nothing stops it."""
    output = run(make_llm(), greedy(40, ignore_eos=True))
    assert output.outputs[0].token_ids == zoo.greedy("llama+text", PROMPT, 40, ignore_eos=True)
    return output


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_position_of_a_run_can_be_its_end(make_llm: Make, free_running: RequestOutput, draft: str) -> None:
    """Stop tokens at each of the first 16 tokens: what was accepted after them is dropped."""
    llm = make_llm(draft)
    tokens = free_running.outputs[0].token_ids
    for token in tokens[:16]:
        first = tokens.index(token)
        output = run(llm, greedy(40, ignore_eos=True, stop_token_ids=[token]))
        completion = output.outputs[0]
        assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (tokens[: first + 1], "stop", token)


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_length_ends_as_asked(make_llm: Make, free_running: RequestOutput, draft: str) -> None:
    llm = make_llm(draft)
    for length in range(1, 16):
        completion = run(llm, greedy(length, ignore_eos=True)).outputs[0]
        assert (completion.token_ids, completion.finish_reason) == (free_running.outputs[0].token_ids[:length], "length")
        assert completion.stop_reason is None


@pytest.mark.parametrize("draft", DRAFTS)
def test_stop_strings_end_the_text_wherever_they_lie(make_llm: Make, free_running: RequestOutput, draft: str) -> None:
    llm = make_llm(draft)
    text = free_running.outputs[0].text
    for start in range(1, 20, 3):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            place = text.index(stop)
            without = run(llm, greedy(40, ignore_eos=True, stop=["~never~", stop])).outputs[0]
            assert (without.text, without.finish_reason, without.stop_reason) == (text[:place], "stop", stop)
            inclusive = run(llm, greedy(40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)).outputs[0]
            assert inclusive.text == text[: place + length]
            assert inclusive.token_ids == without.token_ids == free_running.outputs[0].token_ids[: len(without.token_ids)]


@pytest.mark.parametrize("draft", DRAFTS)
def test_end_of_sequence_min_tokens_and_ignore_eos(zoo: Zoo, draft: str) -> None:
    """Held to transformers: min_tokens is its `min_new_tokens`."""
    import torch

    specs = {"none": None, "itself": zoo.path("llama"), "perturbed": zoo.path("llama~")}
    llm = LLM(zoo.path("llama"), specs[draft], dtype="float32", device="cpu", num_kv_blocks=64)
    model = zoo.model("llama")
    ended = 0
    for prompt in random_prompts(8, seed=21, max_len=30):
        for min_tokens in (0, 4, 12):
            prompts = torch.tensor([prompt])
            expected = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, min_new_tokens=min_tokens or None,
                eos_token_id=EOS_TOKEN_IDS, do_sample=False, pad_token_id=0,
            )[0, len(prompt) :].tolist()  # fmt: skip
            [output] = llm.generate([prompt], greedy(24, min_tokens=min_tokens), use_tqdm=False)
            completion = output.outputs[0]
            assert completion.token_ids == expected
            is_end = expected[-1] in EOS_TOKEN_IDS
            assert (completion.finish_reason, completion.stop_reason) == ("stop" if is_end else "length", None)
            assert len(expected) > min_tokens
            ended += is_end
            check_metrics(output)
        [ignoring] = llm.generate([prompt], greedy(24, ignore_eos=True), use_tqdm=False)
        assert ignoring.outputs[0].token_ids == zoo.greedy("llama", prompt, 24, ignore_eos=True)
    assert ended >= 3


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("max_tokens", [None, 1000, 12])
def test_nothing_is_written_past_the_models_length(
    make_llm: Make, free_running: RequestOutput, draft: str, max_tokens: int | None
) -> None:
    llm = make_llm(draft, max_model_len=len(PROMPT) + 12)
    completion = run(llm, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)).outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (free_running.outputs[0].token_ids[:12], "length")


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_models_last_position_can_be_reached(zoo: Zoo, make_llm: Make, draft: str) -> None:
    """256 positions: the last token is written, but its KV never is."""
    llm = make_llm(draft)
    prompt = random_prompts(2, seed=5, max_len=240)[1]
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == zoo.greedy("llama+text", prompt, 16, ignore_eos=True)
    assert output.outputs[0].finish_reason == "length"


def test_a_draft_with_fewer_positions_stops_drafting_where_they_end(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("short"), num_kv_blocks=64)
    [request] = submit(engine, [PROMPT], [greedy(60, ignore_eos=True)])
    while engine.scheduler.has_unfinished:
        engine.step()
        assert request.num_drafted_context <= 40
    assert request.output_token_ids == zoo.greedy("llama", PROMPT, 60, ignore_eos=True)
    assert request.metrics.num_draft_tokens > 0


def test_of_a_prompt_that_is_longer_than_the_drafts_positions_the_beginning_is_fed(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("short"), num_kv_blocks=64, prefill_chunk_size=16)
    prompt = list(range(5, 95))
    [request] = submit(engine, [prompt], [greedy(6, ignore_eos=True)])
    num_drafted = []
    while engine.scheduler.has_unfinished:
        num_drafted.append(request.num_drafted_context)
        engine.step()
    assert max(num_drafted) == 40
    assert request.output_token_ids == zoo.greedy("llama", prompt, 6, ignore_eos=True)
    assert request.metrics.num_draft_tokens == 0
