"""How requests end: stop tokens, end of sequence, stop strings, lengths; alone, within an accepted run, and in a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from stepping import check_blocks, greedy, make_engine, make_request, submit
from text_tools import make_byte_tokenizer
from transformers import AutoTokenizer
from zoo import EOS_TOKEN_IDS, Zoo, random_prompts

from titan import LLM, RequestOutput, SamplingParams
from titan.core.request import FinishReason, Request
from titan.draft.draft_model import DraftModelDrafter
from titan.frontend.detokenizer import REPLACEMENT, IncrementalDetokenizer
from titan.schedule.stopping import append_tokens

PROMPT = random_prompts(2, seed=30, max_len=20)[1]
DRAFTS = ("none", "itself", "perturbed")
EOS = 2
Make = Callable[..., LLM]


def request_of(params: SamplingParams, *, max_tokens: int, tokenizer: Any = None) -> Request:
    detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, [5], skip_special_tokens=True)
    stop_token_ids = frozenset((*(() if params.ignore_eos else (EOS,)), *(params.stop_token_ids or ())))
    return make_request([5], params, max_tokens=max_tokens, stop_token_ids=stop_token_ids, detokenizer=detokenizer)


TOKENS = st.integers(1, 4)


@given(st.lists(TOKENS, max_size=7), st.lists(TOKENS, max_size=2), st.booleans(), st.integers(0, 3), st.integers(3, 6))
def test_tokens_are_appended_up_to_the_end(
    token_ids: list[int], stops: list[int], ignore_eos: bool, min_tokens: int, max_tokens: int
) -> None:
    options = {"stop_token_ids": stops, "ignore_eos": ignore_eos, "min_tokens": min_tokens}
    request = request_of(SamplingParams(max_tokens=max_tokens, **options), max_tokens=max_tokens)
    expected: Any = (token_ids[:max_tokens], "length" if len(token_ids) >= max_tokens else None, None)
    for count, token_id in enumerate(token_ids[:max_tokens], start=1):
        if count > min_tokens and (token_id in stops or (token_id == EOS and not ignore_eos)):
            expected = (token_ids[:count], "stop", token_id if token_id in stops else None)
            break
    assert append_tokens(request, token_ids) == len(expected[0])
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == expected
    assert request.is_finished == (expected[1] is not None)


@given(
    text=st.text(alphabet="abé😀\n", max_size=30),
    stops=st.lists(st.text(alphabet="abé😀\n", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.sampled_from((0, 0, 3, 8)),
)
@example(text="the quick fox", stops=["ick", "quick", "uick"], include=False, min_tokens=0)
@example(text="a quick fox", stops=["uick", "qui"], include=True, min_tokens=0)
@example(text="the the the", stops=["the"], include=False, min_tokens=2)
def test_a_stop_string_cuts_the_text_when_its_last_token_comes(text: str, stops: list[str], include: bool, min_tokens: int) -> None:
    """Of those that one token completes, the one that ends first; what min_tokens tokens complete stays in the text."""
    tokenizer = make_byte_tokenizer()
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=200)
    request = request_of(params, max_tokens=200, tokenizer=tokenizer)
    token_ids = tokenizer.encode(text)
    num_emitted = append_tokens(request, token_ids)
    expected: tuple[str, str | None, int] = (text, None, len(token_ids))
    decoded = [tokenizer.decode(token_ids[:end]) for end in range(len(token_ids) + 1)]
    texts = accumulate(decoded, lambda before, now: before if now.endswith(REPLACEMENT) else now)  # no half characters
    for num_tokens, (before, now) in enumerate(pairwise(texts), start=1):
        ends = [(place + len(stop), i) for i, stop in enumerate(stops) for place in range(len(now)) if now.startswith(stop, place)]
        completed = [(end, i) for end, i in ends if end > len(before)]
        if completed and num_tokens > min_tokens:
            end, i = min(completed)
            expected = now[: end if include else end - len(stops[i])], stops[i], num_tokens
            break
    assert request.detokenizer is not None
    assert (request.detokenizer.text, request.stop_reason, num_emitted) == expected
    assert request.finish_reason == (None if request.stop_reason is None else FinishReason.STOP)


class HalfCharacters:
    """A tokenizer, one of whose tokens is a letter and the beginning of a longer character."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return b"".join({1: b"a", 3: b"b\xf0"}.get(token_id, b"") for token_id in token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("stop", "min_tokens", "last", "text", "reason"),
    [
        ("b", 0, 3, "a", "stop"),
        ("c", 0, 3, "ab\ufffd", "length"),
        ("b", 3, 3, "ab\ufffd", "length"),
        ("b", 0, EOS, "a", "stop"),
        ("c", 0, EOS, "ab\ufffd", "stop"),
        ("b", 2, EOS, "ab\ufffd", "stop"),
    ],
)
def test_a_stop_string_is_found_in_what_was_held_back_to_the_end(
    stop: str, min_tokens: int, last: int, text: str, reason: str
) -> None:
    """By a length of two tokens, or an end of sequence after them."""
    token_ids = [1, 3] if last == 3 else [1, 3, EOS]
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=4)
    request = request_of(params, max_tokens=2 if last == 3 else 4, tokenizer=HalfCharacters())
    assert append_tokens(request, token_ids) == len(token_ids) and request.detokenizer is not None
    request.detokenizer.finish()
    assert (request.detokenizer.text, request.finish_reason) == (text, FinishReason(reason))
    assert request.stop_reason == (stop if text == "a" else None)


@pytest.fixture(scope="module")
def make_llm(zoo: Zoo) -> Make:
    """An LLM with a tokenizer whose output is random ASCII, with this draft."""

    def make(draft: str = "none", **options: Any) -> LLM:
        specs = {"none": None, "itself": zoo.path("llama+text"), "perturbed": zoo.path("llama~")}
        pool: dict[str, Any] = {"dtype": "float32", "device": "cpu", "speculation": "fixed", "num_kv_blocks": 64}
        return LLM(zoo.path("llama+text"), specs[draft], **pool | options)

    return make


def run(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> RequestOutput:
    """One request; its metrics fit its output, and its blocks are free at the end."""
    [output] = llm.generate(prompt, params, use_tqdm=False)
    check_metrics(output)
    check_blocks(llm.engine)
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_blocks
    return output


def check_metrics(output: RequestOutput) -> None:
    metrics, completion = output.metrics, output.outputs[0]
    assert metrics.num_emitted_tokens == len(completion.token_ids)
    assert metrics.mean_acceptance_length == metrics.num_emitted_tokens / metrics.num_sequence_steps
    assert sorted(metrics.accepted_per_depth, reverse=True) == metrics.accepted_per_depth
    assert metrics.first_scheduled_time is not None and metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


def test_the_tokenizers_end_of_sequence_ends_an_output_too(zoo: Zoo, tmp_path: Path) -> None:
    """As in vLLM; configs of models made from base models may name only what ends a document."""
    tokens = zoo.greedy("llama+text", PROMPT, 12, ignore_eos=True)
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("llama+text"))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens[5])
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(zoo.path("llama+text"), tokenizer=tmp_path, dtype="float32", device="cpu", num_kv_blocks=16)
    completion = run(llm, greedy(12)).outputs[0]
    assert tokens[5] not in EOS_TOKEN_IDS and tokens[5] not in tokens[:5]
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (tokens[:6], "stop", None)
    assert run(llm, greedy(12, ignore_eos=True)).outputs[0].token_ids == tokens


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_position_of_a_run_can_be_its_end(zoo: Zoo, make_llm: Make, draft: str) -> None:
    """By its length, by a stop token, by a stop string: what was accepted after it is dropped."""
    llm = make_llm(draft)
    decode = llm.get_tokenizer().decode
    endless = run(llm, greedy(40, ignore_eos=True)).outputs[0]
    tokens, text = endless.token_ids, endless.text
    assert tokens == zoo.greedy("llama+text", PROMPT, 40, ignore_eos=True)
    for i in range(11):
        by_length = run(llm, greedy(1 + i, ignore_eos=True)).outputs[0]
        assert (by_length.token_ids, by_length.finish_reason, by_length.stop_reason) == (tokens[: 1 + i], "length", None)
        by_token = run(llm, greedy(40, ignore_eos=True, stop_token_ids=[tokens[i]])).outputs[0]
        end = 1 + tokens.index(tokens[i])
        assert (by_token.token_ids, by_token.finish_reason, by_token.stop_reason) == (tokens[:end], "stop", tokens[i])
        with_it = greedy(40, ignore_eos=True, stop_token_ids=[tokens[i]], include_stop_str_in_output=True)
        assert by_token.text == decode(tokens[: end - 1]) and run(llm, with_it).outputs[0].text == decode(tokens[:end])
        for params, num_shown in ((with_it, end), (replace(with_it, include_stop_str_in_output=False), end - 1)):
            assert [*llm.stream(PROMPT, params)][-1].outputs[0].text == decode(tokens[:num_shown])
        stop = text[i : i + 1 + i % 5]
        place = text.index(stop)
        by_text = run(llm, greedy(40, ignore_eos=True, stop=["~never~", stop])).outputs[0]
        assert (by_text.text, by_text.finish_reason, by_text.stop_reason) == (text[:place], "stop", stop)
        inclusive = run(llm, greedy(40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)).outputs[0]
        assert (inclusive.text, inclusive.token_ids) == (text[: place + len(stop)], by_text.token_ids)
        assert by_text.token_ids == tokens[: len(by_text.token_ids)]


@pytest.fixture(scope="module")
def ends(zoo: Zoo) -> list[tuple[list[int], int, list[int]]]:
    """Prompts, min_tokens, and what transformers writes, whose name for it is `min_new_tokens`."""
    cases = []
    for prompt, min_tokens in product(random_prompts(5, seed=28, max_len=30), (0, 4, 12)):
        tokens = zoo.model("llama").generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False,
            min_new_tokens=min_tokens or None, eos_token_id=EOS_TOKEN_IDS, pad_token_id=0,
        )  # fmt: skip
        cases.append((prompt, min_tokens, tokens[0, len(prompt) :].tolist()))
    assert sum(tokens[-1] in EOS_TOKEN_IDS for *_, tokens in cases) >= 3
    return cases


@pytest.mark.parametrize("draft", DRAFTS)
def test_end_of_sequence_and_min_tokens(make_llm: Make, ends: list[tuple[list[int], int, list[int]]], draft: str) -> None:
    prompts, min_tokens, expected = zip(*ends, strict=True)
    outputs = make_llm(draft).generate(prompts, [greedy(24, min_tokens=each) for each in min_tokens], use_tqdm=False)
    for output, tokens in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == tokens
        is_end = tokens[-1] in EOS_TOKEN_IDS
        assert (completion.finish_reason, completion.stop_reason) == ("stop" if is_end else "length", None)
        check_metrics(output)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("max_model_len", "max_tokens"), [(None, None), (252, 1000)])
def test_the_last_position_can_be_reached_and_nothing_is_written_past_it(
    zoo: Zoo, make_llm: Make, max_model_len: int | None, max_tokens: int | None, draft: str
) -> None:
    """The model has 256; the last token is written, but its KV never is."""
    llm = make_llm(draft, max_model_len=max_model_len)
    prompt = random_prompts(2, seed=5, max_len=240)[1]
    completion = run(llm, greedy(max_tokens, ignore_eos=True), prompt).outputs[0]
    expected = zoo.greedy("llama+text", prompt, (max_model_len or 256) - 240, ignore_eos=True)
    assert (completion.token_ids, completion.finish_reason) == (expected, "length")


@pytest.mark.parametrize(("num_prompt_tokens", "drafts"), [(20, True), (90, False)])
def test_a_draft_with_fewer_positions_is_fed_and_asked_up_to_its_last(zoo: Zoo, num_prompt_tokens: int, drafts: bool) -> None:
    """And not at all with a prompt that has as many; nothing is reserved for drafts that it could not make."""
    engine = make_engine(zoo.path("llama"), zoo.path("short"), num_kv_blocks=64, prefill_chunk_size=16)
    drafter, budgets = engine.drafter, list[int]()
    assert isinstance(drafter, DraftModelDrafter)
    engine.observers.append(lambda plan, _: budgets.append(plan.draft_budgets[0]))
    prompt = random_prompts(2, seed=8, max_len=num_prompt_tokens)[1]
    [request] = submit(engine, [prompt], [greedy(60, ignore_eos=True)])
    num_drafted = []
    while engine.scheduler.has_unfinished:
        num_drafted.append(request.num_drafted_context)
        most = max(0, 40 - request.num_tokens)
        engine.step()
        assert budgets[-1] <= most
        assert drafter.lookahead(request, 6) == max(0, min(6, 40 - request.num_tokens)), "whoever asks"
    assert max(num_drafted) in ((39, 40) if drafts else (0,))
    assert request.output_token_ids == zoo.greedy("llama", prompt, 60, ignore_eos=True)
    assert (request.metrics.num_draft_tokens > 0) == drafts


@pytest.mark.parametrize("stop", [None, "~never~"], ids=["at the end", "token by token"])
def test_a_tokenizer_that_fails_costs_its_request(
    zoo: Zoo, make_llm: Make, stop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompts = make_llm("itself"), random_prompts(4, seed=8, max_len=20)
    params = greedy(24, ignore_eos=True, stop=stop, logprobs=1)
    expected = llm.generate(prompts, params, use_tqdm=False)
    tokens = [set(output.outputs[0].token_ids) | set(output.prompt_token_ids) for output in expected]
    bad = next(iter(tokens[1] - set(prompts[1]) - tokens[0] - tokens[2] - tokens[3]))
    decode = IncrementalDetokenizer._decode

    def fail(own: IncrementalDetokenizer, token_ids: Any) -> str:
        if bad in token_ids:
            raise OverflowError("no such piece")
        return decode(own, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "_decode", fail)
    with pytest.warns(UserWarning, match="prompt 0 was not run: .*OverflowError: no such piece"):
        refused, output = llm.generate([[bad], prompts[0]], greedy(24, ignore_eos=True, stop="~never~", logprobs=1), use_tqdm=False)
    assert "cannot be read by the tokenizer" in (refused.error or "") and output.outputs == expected[0].outputs
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [outputs[i].outputs for i in (0, 2, 3)] == [expected[i].outputs for i in (0, 2, 3)]
    [found] = outputs[1].outputs
    assert (
        found.finish_reason == "error"
        and outputs[1].error == "the tokenizer cannot decode its tokens: OverflowError: no such piece"
    )
    whole = expected[1].outputs[0].token_ids
    assert found.token_ids == (whole if stop is None else whole[: whole.index(bad) + 1]) and bad in found.token_ids
    check_blocks(llm.engine)
    [streamed] = [*llm.stream(prompts[1], greedy(24, ignore_eos=True))][-1].outputs
    assert streamed.finish_reason == "error" and streamed.token_ids == whole[: whole.index(bad) + 1]
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_blocks


@pytest.mark.parametrize("kind", ["logprobs", "prompt_logprobs"])
def test_a_token_of_the_logprobs_that_cannot_be_decoded_costs_its_request(
    make_llm: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompts = make_llm(), random_prompts(2, seed=8, max_len=20)[::-1]
    params = [greedy(6, ignore_eos=True, **{kind: 5}), greedy(6, ignore_eos=True)]
    expected = llm.generate(prompts, params[1], use_tqdm=False)
    decode = llm.frontend.tokenizer.decode

    def fail(token_ids: Any, **options: Any) -> str:
        if "skip_special_tokens" not in options:  # of a logprob
            raise OverflowError("no such piece")
        return str(decode(token_ids, **options))

    monkeypatch.setattr(llm.frontend.tokenizer, "decode", fail)
    failed, fine = llm.generate(prompts, params, use_tqdm=False)
    assert "OverflowError: no such piece" in (failed.error or "")
    assert failed.outputs[0].token_ids == expected[0].outputs[0].token_ids and fine.outputs == expected[1].outputs
    *_, last = llm.stream(prompts[0], params[0], timeout_s=100)
    assert last.finished and last.outputs[0].finish_reason == "error" and "no such piece" in (last.error or "")
    assert not llm.engine.scheduler.has_unfinished and not llm.engine.scheduler._expiries
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_blocks
