"""What people call: generate, chat, stream, swap_draft, metrics, diagnose."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, zip_longest
from os import PathLike
from typing import Any, Unpack, get_type_hints
from unittest.mock import Mock
from weakref import ref

import numpy as np
import pytest
import torch
from stepping import check_blocks, greedy
from text_tools import make_tokenizer
from zoo import EOS_TOKEN_IDS, Zoo, random_prompts

from titan import LLM, RequestOutput, SamplingParams
from titan.core.metrics import DraftMetrics, TierMetrics
from titan.core.options import EngineConfig, EngineOptions, MemoryOptions, ModelOptions, ScheduleOptions, SpeculationOptions
from titan.diagnosis import faults
from titan.draft.ngram import NgramDrafter
from titan.draft.replay import ReplayDrafter
from titan.engine import choose_device
from titan.vllm_names import TRANSLATIONS, LLMOptions

CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "speculation": "fixed", "num_kv_blocks": 64}
NEVER = "\0"
PROMPTS = ["the quick brown fox", "in the morning", "the", "dog jumps over the lazy dog"]
ASK = [{"role": "user", "content": "the dog?"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
OF_PARTS = (
    "{% for message in messages %}{{ message.role }}: "
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '\n' }}{% endfor %}assistant:"
)
OF_BOTH = OF_PARTS.replace("{% for part", "{% if message.content is string %}{{ message.content }}{% else %}{% for part").replace(
    "{% endfor %}{{", "{% endfor %}{% endif %}{{"
)
REFUSING = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def llm(zoo: Zoo) -> LLM:
    return LLM(zoo.path("llama+text"), zoo.path("llama~+text"), max_batch_size=3, **CPU)


@pytest.fixture(autouse=True)
def _engine_is_left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used it: nothing runs, nothing waits, every block is free."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert not llm.engine.scheduler.has_unfinished and llm.engine.step() == []
        check_blocks(llm.engine)
        assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_blocks


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_every_engine_option_is_an_argument() -> None:
    assert get_type_hints(LLM.__init__)["options"] == Unpack[LLMOptions]
    assert set(get_type_hints(LLMOptions)) == {*get_type_hints(EngineOptions), *TRANSLATIONS}
    groups = get_type_hints(EngineConfig).values()
    stored = {name: kind for group in groups for name, kind in get_type_hints(group).items()}
    taken = {"device": str | torch.device, "download_dir": str | PathLike[str] | None}  # more kinds than are stored
    assert get_type_hints(EngineOptions) == stored | taken
    assert EngineConfig.of() == EngineConfig()
    config = EngineConfig.of(seed=3, draft_tree="chain", swap_space=0, max_batch_size=5, block_size=8)
    assert config == EngineConfig(
        ModelOptions(seed=3), SpeculationOptions(draft_tree="chain"), ScheduleOptions(max_batch_size=5), MemoryOptions(block_size=8)
    )


def test_generate_takes_one_prompt_or_many_as_text_or_as_tokens(llm: LLM, zoo: Zoo) -> None:
    tokenizer = make_tokenizer()
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [zoo.greedy("llama+text", prompt, 12) for prompt in ids]
    shown = [tokens[: -1 if tokens[-1] in EOS_TOKEN_IDS else None] for tokens in expected]
    params = greedy(12)
    by_text = llm.generate(PROMPTS, params, use_tqdm=False)
    by_tokens = llm.generate(ids, params, use_tqdm=False)
    one_by_one = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in (PROMPTS[0], *ids[1:])]
    mixed = llm.generate([ids[0], PROMPTS[1], tuple(ids[2]), PROMPTS[3]], params, use_tqdm=False)
    for outputs in (by_text, by_tokens, one_by_one, mixed):
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.prompt_token_ids for output in outputs] == ids
        assert all(output.finished and output.error is None for output in outputs)
        assert texts(outputs) == [
            tokenizer.decode(prompt + output, skip_special_tokens=True).removeprefix(text)
            for text, prompt, output in zip(PROMPTS, ids, shown, strict=True)
        ]
    assert shown != expected
    assert [output.prompt for output in by_text + by_tokens] == [*PROMPTS, None, None, None, None]
    assert [output.prompt for output in mixed] == [None, PROMPTS[1], None, PROMPTS[3]]
    assert len({output.request_id for outputs in (by_text, by_tokens, one_by_one, mixed) for output in outputs}) == 16


def test_generate_takes_one_set_of_options_or_one_per_prompt_or_none(llm: LLM) -> None:
    params = [greedy(length, ignore_eos=True) for length in (3, 5, 1, 2)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, False)] == [3, 5, 1, 2]
    [default] = llm.generate("the", SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(default.outputs[0].token_ids) == 16
    assert len(llm.generate(PROMPTS, use_tqdm=False)) == 4


def test_the_progress_bar_shows_speed_and_acceptance(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(8, ignore_eos=True))
    shown = capsys.readouterr().err
    assert "4/4" in shown and "tokens/s" in shown and "tokens/step" in shown
    llm.generate(PROMPTS, greedy(8), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_the_progress_bar_of_a_call_counts_nobody_elses_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    stream = llm.stream(PROMPTS[0], greedy(60, ignore_eos=True))
    next(stream)
    llm.generate(PROMPTS[1], greedy(8, ignore_eos=True, use_speculative=False))
    assert next(stream).metrics.mean_acceptance_length > 1
    stream.close()
    assert " 1.00 tokens/step" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"seed": 3, "temperature": 1.5, "n": 3}])
def test_a_stream_grows_to_what_generate_gives(llm: LLM, options: dict[str, Any]) -> None:
    """Hence nothing of a stop string ever shows, and what was held back for one that does not come shows at the end."""
    common = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | options
    for prompt in PROMPTS[:2]:
        text = llm.generate(prompt, SamplingParams(**common), use_tqdm=False)[0].outputs[0].text
        for stop in (None, text[-1] + NEVER, text[3:8], [NEVER, text[6:11]], ["a", text[9:14]]):
            params = SamplingParams(stop=stop, include_stop_str_in_output=stop == text[3:8], **common)
            [whole] = llm.generate(prompt, params, use_tqdm=False)
            pieces = list(llm.stream(prompt, params))
            assert pieces[-1].outputs == whole.outputs
            assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            assert {piece.prompt for piece in pieces} == {prompt}
            for shorter, longer in pairwise(pieces):
                for before, after in zip(shorter.outputs, longer.outputs, strict=True):
                    assert after.text.startswith(before.text)
                    assert after.token_ids[: len(before.token_ids)] == before.token_ids
                    assert before.finish_reason is None or before == after
                assert longer.outputs != shorter.outputs
            assert params.n > 1 or len(pieces) == whole.metrics.num_sequence_steps


def test_a_stream_waits_for_no_stop_string_that_would_stay(llm: LLM) -> None:
    def shown(**options: Any) -> list[str]:
        return texts(list(llm.stream(PROMPTS[0], greedy(12, ignore_eos=True, **options))))

    stop = 5 * NEVER
    assert shown(stop=stop, include_stop_str_in_output=True) == shown() != shown(stop=stop)


@pytest.mark.parametrize("num_shown", [0, 1, 2, 4])
@pytest.mark.parametrize("n", [1, 5])
def test_leaving_a_stream_ends_its_request_and_frees_its_blocks(llm: LLM, n: int, num_shown: int) -> None:
    stream = llm.stream("the dog", greedy(50, ignore_eos=True, n=n))
    for _ in range(num_shown):
        next(stream)
    assert llm.engine.scheduler.has_unfinished == (num_shown > 0)
    del stream


class Clock:
    """A clock that the engine's steps move on."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(llm.engine.scheduler.queues, "clock", lambda: self.now)
        monkeypatch.setattr(llm.engine, "observers", [self.tick])

    def tick(self, *_: object) -> None:
        self.now += 1


def test_a_request_that_takes_too_long_ends_with_what_it_has_and_the_others_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = greedy(40, ignore_eos=True, use_speculative=False)
    expected = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    Clock(llm, monkeypatch)
    outputs = llm.generate(PROMPTS, params, False, timeout_s=[None, 9.5, None, 20])  # the last waits for ten steps
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 10, 40, 10]
    for output, whole in zip(outputs, expected, strict=True):
        [completion] = output.outputs
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)] and whole.text.startswith(completion.text)
        assert output.finished and (completion.finish_reason == "abort") == (output.error is not None)
    assert (outputs[1].error or "").startswith("timeout_s=9.5 is over: the request has 10 tokens of output and was running")
    assert (outputs[1].metrics.arrival_time, outputs[1].metrics.finished_time) == (0.0, 10.0)
    assert not caplog.records, "it was asked for"


def test_the_time_of_a_stream_counts_from_when_its_first_output_is_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(llm, monkeypatch)
    stream = llm.stream(PROMPTS[0], greedy(40, ignore_eos=True, use_speculative=False, n=2), timeout_s=9.5)
    clock.now = 100.0
    *_, last = stream
    assert [(len(each.token_ids), each.finish_reason) for each in last.outputs] == [(10, "abort"), (9, "abort")]
    assert (last.metrics.arrival_time, last.metrics.first_scheduled_time, last.metrics.finished_time) == (100.0, 100.0, 110.0)


def test_a_request_times_out_that_has_no_room_to_wait_in(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that waits keep its room for longer."""
    Clock(llm, monkeypatch)
    scheduler = llm.engine.scheduler
    monkeypatch.setattr(scheduler, "options", replace(scheduler.options, max_waiting_requests=1))
    params = greedy(40, ignore_eos=True, use_speculative=False)
    outputs = llm.generate([PROMPTS[0]] * 8, params, False, timeout_s=[*[None] * 3, 2.5, None, None, 7.5, 3.5])
    assert [i for i, output in enumerate(outputs) if output.error] == [3, 6, 7]
    assert [outputs[i].metrics.finished_time for i in (3, 6, 7)] == [3.0, 8.0, 4.0]
    assert outputs[3].error == "timeout_s=2.5 is over: the request has 0 tokens of output and was waiting"


def test_abort_ends_all_completions_of_a_request_and_no_other(llm: LLM) -> None:
    streams = [llm.stream(prompt, greedy(40, ignore_eos=True, n=2)) for prompt in PROMPTS[:2]]
    first, other = (next(stream) for stream in streams)
    assert llm.abort("no such") == 0
    assert (llm.abort(["no such", f"{first.request_id}-1", first.request_id]), llm.abort(first.request_id)) == (1, 0)
    [last] = streams[0]
    assert [each.finish_reason for each in last.outputs] == ["abort"] * 2 and "was called" in (last.error or "")
    assert [each.token_ids[: len(old.token_ids)] for each, old in zip(last.outputs, first.outputs, strict=True)] == [
        old.token_ids for old in first.outputs
    ]
    *_, last = streams[1]
    assert [each.finish_reason for each in last.outputs] == ["length"] * 2 and last.request_id == other.request_id


def test_an_id_is_that_of_one_request_in_flight(llm: LLM) -> None:
    params = greedy(40, ignore_eos=True, n=2)
    expected = llm.generate(PROMPTS[0], params, False)[0].outputs
    stream = llm.stream(PROMPTS[0], params, request_id="mine")
    assert next(stream).request_id == "mine"
    before = llm.metrics()
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match="request_id='mine' is that of a request in flight"):
            list(call(PROMPTS[1], params, request_id="mine"))
    with pytest.raises(ValueError, match="request_id='mine' is that of a request in flight"):
        llm.generate(PROMPTS[1:3], params, False, request_id=["other", "mine"])
    after = llm.metrics()
    assert (after.num_steps, after.num_finished_requests) == (before.num_steps, before.num_finished_requests)
    assert llm.abort("other") == 0
    *_, last = stream
    assert (last.request_id, last.outputs) == ("mine", expected)
    with pytest.warns(UserWarning, match="prompt 1 was not run"):
        outputs = llm.generate([PROMPTS[0], ""], params, False, request_id=["mine", "other"])
    assert [output.request_id for output in outputs] == ["mine", "other"] and outputs[0].outputs == expected
    ended, aborted = (llm.stream(PROMPTS[0], greedy(count, ignore_eos=True), request_id="mine") for count in (1, 40))
    for stream, is_ended in ((ended, True), (aborted, False)):  # neither has been asked for all that it has
        assert next(stream).finished == is_ended != (llm.abort("mine") == 1)
        assert llm.generate(PROMPTS[0], params, False, request_id="mine")[0].outputs == expected


def test_an_id_is_that_of_one_completion_in_flight(llm: LLM) -> None:
    """Those of a request are called "mine", "mine-1" and "mine-2"; each of these names ends all of them."""
    params, alone = greedy(40, ignore_eos=True, n=3), greedy(40, ignore_eos=True)
    for ids in (["mine", "mine-1"], ["mine-2", "mine"]):
        each = [alone if request_id != "mine" else params for request_id in ids]
        with pytest.raises(ValueError, match=r"request_id='mine-[12]' names two completions of the call"):
            llm.generate(PROMPTS[:2], each, False, request_id=ids)
    for first, second in ((params, alone), (alone, params)):
        ids = ("mine", "mine-1") if first is params else ("mine-1", "mine")
        stream = llm.stream(PROMPTS[0], first, request_id=ids[0])
        next(stream)
        with pytest.raises(ValueError, match="request_id='mine-1' is that of a request in flight"):
            llm.generate(PROMPTS[1], second, False, request_id=ids[1])
        assert (llm.abort("mine-2"), llm.abort("mine-1")) == ((1, 0) if first is params else (0, 1))
        *_, last = stream
        assert {each.finish_reason for each in last.outputs} == {"abort"}
    assert [each.finish_reason for each in llm.generate(PROMPTS[0], params, False, request_id="mine-1")[0].outputs] == [
        "length"
    ] * 3


def test_all_requests_are_aborted_at_once(llm: LLM) -> None:
    streams = [llm.stream(prompt, greedy(40, ignore_eos=True, n=2)) for prompt in PROMPTS[:3]]
    for stream in streams[:2]:
        next(stream)
    assert (llm.abort_all(), llm.abort_all()) == (2, 0)
    assert [[each.finish_reason for each in last.outputs] for (*_, last) in streams] == [["abort"] * 2] * 2 + [["length"] * 2]


def test_abort_ends_the_completions_that_are_not_even_queued(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama+text"), max_batch_size=1, max_waiting_requests=1, **CPU)
    stream = llm.stream(PROMPTS[0], greedy(40, ignore_eos=True, n=4))
    first = next(stream)
    before = llm.metrics()
    assert (before.num_running, before.num_waiting, before.num_finished_requests) == (1, 3, 0)
    assert llm.abort(first.request_id) and not llm.abort(first.request_id)
    [last] = stream
    after = llm.metrics()
    assert (after.num_running, after.num_waiting, after.num_finished_requests) == (0, 0, 4)
    assert [each.finish_reason for each in last.outputs] == ["abort"] * 4 and last.finished
    assert [len(each.token_ids) for each in last.outputs] == [len(first.outputs[0].token_ids), 0, 0, 0]
    stream = llm.stream(PROMPTS[0], greedy(40, ignore_eos=True, n=4))
    next(stream)
    stream.close()
    assert llm.metrics().num_finished_requests == 8, "those of a caller that leaves are aborted as well"
    assert len(llm.generate([PROMPTS[0]], greedy(3, ignore_eos=True), False)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("caching", [True, False])
def test_completions_that_are_not_even_queued_hold_no_blocks(zoo: Zoo, caching: bool) -> None:
    """When a sibling finishes, those that run get what is computed of the prompt; others might never run."""
    llm = LLM(zoo.path("llama+text"), max_batch_size=1, max_waiting_requests=1, enable_prefix_caching=caching, **CPU)
    stream = llm.stream([9, 8, 7, 6, 5, 4, 3] * 6, greedy(3, ignore_eos=True, n=5))
    for output in stream:
        assert llm.diagnose() is not None  # looks at all blocks
        if [each.finish_reason for each in output.outputs].count("length") == 2 and not output.finished:
            assert llm.abort(output.request_id)
    assert [each.finish_reason for each in output.outputs] == ["length"] * 2 + ["abort"] * 3
    check_blocks(llm.engine)


def test_a_prompt_brings_a_salt_of_its_own(llm: LLM) -> None:
    [first] = llm.generate("the dog " * 12, greedy(1), False, cache_salt="d")
    text, token_ids = {"prompt": first.prompt}, {"prompt_token_ids": first.prompt_token_ids}
    prompts = [{**prompt, "cache_salt": salt} for prompt, salt in [(text, "e"), (text, "d"), (token_ids, "f"), (token_ids, "d")]]
    prompts.append(text | {"cache_salt": None})
    for salts, are_hit in ((None, [False, True, False, True, False]), (["e", "d", None, None, "d"], [True] * 5)):
        outputs = llm.generate(prompts, greedy(1), False, cache_salt=salts)
        assert [output.num_cached_tokens > 0 for output in outputs] == are_hit
    with pytest.raises(ValueError, match="prompt has cache_salt='d', and its call cache_salt='e': give one of them"):
        llm.stream(prompts[1], greedy(1), cache_salt="e")
    with pytest.raises(ValueError, match="cache_salt=5 is not allowed: it must be a non-empty str"):
        llm.stream(text | {"cache_salt": 5}, greedy(1))


def test_outputs_are_the_callers_own(zoo: Zoo) -> None:
    """Whatever is done to one, the request goes on, and what an earlier one says does not change."""
    llm = LLM(zoo.path("llama+text"), **CPU)
    prompt, outputs = [9, 8, 7, 6], list[RequestOutput]()
    for output in llm.stream(prompt, greedy(4, ignore_eos=True, logprobs=1, prompt_logprobs=1)):
        output.prompt_token_ids.extend(output.outputs[0].token_ids)
        outputs.append(output)
        for logprobs in (output.outputs[0].logprobs, output.prompt_logprobs):
            assert logprobs is not None
            (logprobs[-1] or {}).clear()
            logprobs.append(None)  # type: ignore[arg-type]
    [expected] = llm.generate([prompt], greedy(4, ignore_eos=True, logprobs=1))
    assert outputs[-1].outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob
    assert [(len(output.outputs[0].logprobs or ()), len(output.prompt_logprobs or ())) for output in outputs] == [
        (i + 1, len(prompt) + 1) for i in (1, 2, 3, 4)
    ]
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids and len(prompt) == 4
    assert all(output.prompt_token_ids is outputs[0].prompt_token_ids for output in outputs), "which may be long"
    assert [output.metrics.num_emitted_tokens for output in outputs] == [1, 2, 3, 4]


def test_texts_of_logprobs_are_filled_in_once(zoo: Zoo) -> None:
    llm, num_seen = LLM(zoo.path("llama+text"), **CPU), 0
    for output in llm.stream([9, 8, 7, 6], greedy(4, ignore_eos=True, logprobs=1, prompt_logprobs=1)):
        entries = [*filter(None, output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        logprobs = [each for entry in entries for each in entry.values()]
        texts = [each.decoded_token for each in logprobs]
        assert texts.count("seen") == num_seen < len(texts) and None not in texts
        for each in logprobs:
            each.decoded_token = "seen"
        num_seen = len(texts)


def test_the_tokenizer_is_asked_once_for_a_word_or_a_token(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(zoo.path("llama+text"), **CPU)
    asked = {name: Mock(wraps=getattr(llm.frontend.tokenizer, name)) for name in ("encode", "decode")}
    for name, mock in asked.items():
        monkeypatch.setattr(llm.frontend.tokenizer, name, mock)
    params = greedy(4, bad_words=["dog", "fox"], logprobs=3, ignore_eos=True)
    first, second = (llm.generate([[5, 6], [7, 8]], params, use_tqdm=False) for _ in range(2))
    assert [output.outputs for output in first] == [output.outputs for output in second]
    words = [call.args[0] for call in asked["encode"].call_args_list]
    assert sorted(words) == [" dog", " fox", "dog", "fox"]
    of_tokens = [call.args[0] for call in asked["decode"].call_args_list if "skip_special_tokens" not in call.kwargs]
    shown = {token_id for output in first for entry in output.outputs[0].logprobs or () for token_id in entry}
    assert sorted(of_tokens) == sorted([token_id] for token_id in shown)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("", use_tqdm=False),
        lambda llm: llm.generate([[], PROMPTS[0]], greedy(2), use_tqdm=False),
        lambda llm: llm.generate([PROMPTS[0], PROMPTS[1]], greedy(2, bad_words=["~"]), use_tqdm=False),  # the tokenizer fails
        lambda llm: llm.chat([{"role": "user"}], use_tqdm=False, chat_template=TEMPLATE),
        lambda llm: llm.chat([[{"role": "user"}], ASK], greedy(2), use_tqdm=False, chat_template=TEMPLATE),
        lambda llm: llm.stream("", greedy(2)),
        lambda llm: llm.resize_kv_cache(0),
    ],
)
@pytest.mark.filterwarnings("ignore:prompt . was not run")
def test_an_engine_is_freed_at_once_whatever_was_refused(zoo: Zoo, call: Callable[[LLM], Any]) -> None:
    """An error's traceback holds the frames of the calls: where one of these holds the error, only the collector frees them."""
    llm = LLM(zoo.path("llama+text"), **CPU)
    encode = llm.frontend.tokenizer.encode
    llm.frontend.tokenizer.encode = lambda text, **options: 1 // 0 if "~" in text else encode(text, **options)
    parts = ref(llm.engine), ref(llm.engine.backend)  # the latter has the threads
    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            call(llm)
        del llm
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("make_copy", [pickle.dumps, copy, deepcopy])
def test_an_llm_is_that_of_one_process(llm: LLM, make_copy: Callable[[LLM], Any]) -> None:
    with pytest.raises(TypeError, match="make an LLM in each process"):
        make_copy(llm)


def test_an_error_leads_to_the_call(llm: LLM) -> None:
    for call in (partial(llm.generate, ""), partial(llm.resize_kv_cache, 0), partial(llm.chat, ASK, chat_template=REFUSING)):
        with pytest.raises(ValueError, match=r"no tokens|num_blocks=0|no system") as error:
            call()
        assert error.traceback[0].name == "test_an_error_leads_to_the_call" and error.traceback[1].name == call.func.__name__


def test_the_terms_of_a_call_reach_the_policy(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama+text"), scheduling_policy="priority", max_batch_size=1, **CPU)
    outputs = llm.generate(
        PROMPTS, greedy(3), False, priority=["batch", "critical", "normal", "normal"], deadline_s=[9, None, 5, 2]
    )
    starts = [output.metrics.first_scheduled_time or 0.0 for output in outputs]
    assert sorted(range(4), key=starts.__getitem__) == [1, 3, 2, 0]


def test_a_target_for_the_time_between_tokens_bounds_prompts_only_while_others_decode(zoo: Zoo) -> None:
    """Whatever the machine: a step within a nanosecond takes no prompt tokens but the least number, one of an hour takes all."""
    for seconds, expected in ((1e-9, [100, 16, 16, 16]), (3600.0, [100, 50, 1, 1])):
        llm = LLM(zoo.path("llama"), max_inter_token_s=seconds, **CPU)
        chunks: list[int] = []
        llm.engine.observers.append(lambda plan, _, chunks=chunks: chunks.append(max(plan.num_tokens)))
        first = llm.stream([5] * 100, greedy(30, ignore_eos=True))
        next(first)
        [output] = llm.generate([[6] * 50], greedy(5, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 5 and chunks[:4] == expected
        assert len([*first][-1].outputs[0].token_ids) == 30


def test_skip_special_tokens(llm: LLM) -> None:
    params = [greedy(2, logit_bias={1: 100.0}, ignore_eos=True, skip_special_tokens=skip) for skip in (True, False)]
    assert texts(llm.generate(["the", "the"], params, use_tqdm=False)) == ["", "<s><s>"]


def test_chat_generates_after_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.frontend.tokenizer, "chat_template", TEMPLATE)
    longer = [*ASK, {"role": "assistant", "content": "is lazy"}, {"role": "user", "content": "and the fox?"}]
    prompts = ["user: the dog?\nassistant:", "user: the dog?\nassistant: is lazy\nuser: and the fox?\nassistant:"]
    params = [greedy(10), greedy(6, ignore_eos=True)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    chatted = llm.chat(ASK, params[0], use_tqdm=False) + llm.chat([ASK, longer], params, use_tqdm=False)
    for output, written in zip(chatted, [expected[0], *expected], strict=True):
        assert (output.outputs, output.prompt) == (written.outputs, written.prompt)
        assert output.prompt_token_ids == written.prompt_token_ids


@pytest.mark.parametrize(
    ("template", "between"),
    [(TEMPLATE, "\n"), (OF_PARTS, ""), (OF_BOTH, ""), (REFUSING, "\n")],
    ids=["text", "parts", "both", "system"],
)
def test_content_reaches_a_template_as_it_takes_it(llm: LLM, template: str, between: str) -> None:
    """One that loops over parts would show nothing of text, and one that does not would show parts as Python does."""
    parts = [{"type": "text", "text": "the dog"}, {"type": "input_text", "text": " is lazy"}, "?"]
    messages = [{"role": "system", "content": ["in", "brief"]}, {"role": "user", "content": parts}]
    messages.append({"role": "tool", "content": "so"})
    [output] = llm.chat(messages, greedy(1), use_tqdm=False, chat_template=template)
    system = "inbrief" if template == OF_PARTS else "in\nbrief"  # a template may render it otherwise than what a user says
    assert output.prompt == f"system: {system}\nuser: {between.join(('the dog', ' is lazy', '?'))}\ntool: so\nassistant:"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)


def test_swap_draft_and_metrics(llm: LLM, zoo: Zoo) -> None:
    prompts = [*PROMPTS[:3], " ".join(PROMPTS)]
    expected = texts(llm.generate(prompts, greedy(20, ignore_eos=True), use_tqdm=False))
    for draft, name in (("ngram", "ngram"), (None, "none"), (zoo.path("llama+text"), "llama")):
        llm.swap_draft(draft)
        before = llm.metrics()
        outputs = llm.generate(prompts, greedy(20, ignore_eos=True), use_tqdm=False)
        after = llm.metrics()
        assert texts(outputs) == expected and name in after.draft
        assert after.num_finished_requests - before.num_finished_requests == 4
        assert after.num_emitted_tokens - before.num_emitted_tokens == 80
        accepted = sum(after.accepted_per_depth) - sum(before.accepted_per_depth)
        assert accepted == sum(output.metrics.num_accepted_tokens for output in outputs)
        assert accepted == 80 - sum(output.metrics.num_sequence_steps for output in outputs)
        assert (accepted > 0) == (draft is not None)
        admitted, cached = (getattr(after, name) - getattr(before, name) for name in ("num_admitted_tokens", "num_cached_tokens"))
        lengths = [len(output.prompt_token_ids) for output in outputs]
        assert admitted == sum(lengths) and cached == sum((length - 1) // 16 * 16 for length in lengths) > 0, "full blocks of 16"
        assert after.prefix_cache_hit_rate == after.num_cached_tokens / after.num_admitted_tokens
    assert (after.num_running, after.num_waiting, after.kv_usage, after.draft_coverage) == (0, 0, 0.0, None)
    assert 0 < after.acceptance_rate <= 1 and 0 < after.prefix_cache_hit_rate < 1
    llm.swap_draft(zoo.path("llama~+text"))


def test_metrics_of_what_is_in_flight(llm: LLM, zoo: Zoo) -> None:
    streams = [llm.stream(prompt, greedy(60, ignore_eos=True)) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    metrics = llm.metrics()
    assert (metrics.num_running, metrics.num_waiting) == (3, 0)
    assert metrics.draft_coverage is not None and 0.5 < metrics.draft_coverage <= 1
    held = sum(len(request.block_ids) for request in llm.engine.scheduler.running)
    assert metrics.kv_usage == pytest.approx(held / metrics.num_kv_blocks)
    num_bytes = sum(group.nbytes for tensor in llm.engine.kv.tensors.values() for group in tensor.groups)
    expected = TierMetrics(metrics.num_kv_blocks, held, num_bytes, num_bytes * held // metrics.num_kv_blocks)
    assert (metrics.kv_cache, metrics.swap_space, faults(metrics)) == (expected, TierMetrics(0, 0, 0, 0), [])
    llm.swap_draft("ngram")
    assert llm.metrics().draft_coverage is None and faults(llm.metrics()) == [], "it has no cache"
    llm.swap_draft(zoo.path("llama~+text"))
    assert any("covers 0% of the running requests" in finding for finding in llm.diagnose())
    for stream in streams:
        stream.close()


def test_diagnose_names_what_is_slow(zoo: Zoo) -> None:
    healthy = LLM(zoo.path("llama"), zoo.path("llama"), **CPU)
    healthy.generate(random_prompts(4), greedy(10), use_tqdm=False)
    assert faults(healthy.metrics()) == []
    sick = LLM(zoo.path("llama"), zoo.path("useless"), block_size=8, max_batch_size=4, **CPU | {"num_kv_blocks": 10})
    sick.generate(random_prompts(8, max_len=40), greedy(20, ignore_eos=True), use_tqdm=False)
    findings = sick.diagnose()
    assert any("preemptions" in finding and "KV cache more memory" in finding for finding in findings)
    assert any("tokens per request" in finding and "useless" in finding for finding in findings)
    sick.swap_draft(None)
    assert not faults(sick.metrics()), "there is no draft that could be blamed"


def test_a_stop_among_accepted_drafts_makes_them_no_longer(zoo: Zoo) -> None:
    llm, prompts = LLM(zoo.path("llama"), zoo.path("llama"), **CPU), random_prompts(1)
    token_ids = llm.generate(prompts, greedy(20, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids
    for last in [i for i in range(20) if token_ids[i] not in token_ids[:i]]:
        llm.swap_draft(zoo.path("llama"))
        llm.generate(prompts, greedy(20, stop_token_ids=[token_ids[last]]), use_tqdm=False)
        own = llm.metrics().current_draft
        if own.num_sequence_steps + own.num_accepted_tokens > last + 1:  # such a step has no token of the target's own
            break
    assert own.num_sequence_steps + own.num_accepted_tokens == last + 2
    num_plain = own.num_sequence_steps - own.num_drafted_steps
    assert own.mean_drafted_length * own.num_drafted_steps + num_plain == pytest.approx(last + 1)


def test_a_draft_is_judged_by_what_came_since_it_was_put_to_use(zoo: Zoo) -> None:
    """A good one after a bad one is not blamed, and a bad one after a good one is."""
    llm = LLM(zoo.path("llama"), zoo.path("useless"), **CPU)
    run = lambda: llm.generate(random_prompts(4), greedy(40, ignore_eos=True), use_tqdm=False)  # noqa: E731
    run()
    assert any("useless" in finding for finding in faults(llm.metrics()))
    totals = llm.metrics()
    llm.swap_draft(zoo.path("llama"))
    assert faults(llm.metrics()) == [] and llm.metrics().current_draft == DraftMetrics(0, 0, [], [], 0, 0, 0.0, 0.0)
    metrics = [each.metrics for each in run()]
    own, after = llm.metrics().current_draft, llm.metrics()
    assert own.mean_acceptance_length == 160 / sum(each.num_sequence_steps for each in metrics) > 2
    assert own.num_proposed_tokens == sum(sum(each.proposed_per_depth) for each in metrics)
    for name in ("proposed_per_depth", "accepted_per_depth"):
        assert getattr(own, name) == [*map(sum, zip_longest(*(getattr(each, name) for each in metrics), fillvalue=0))]
    assert own.num_sequence_steps == sum(each.num_sequence_steps for each in metrics) >= own.num_drafted_steps > 0
    llm.generate(random_prompts(8), greedy(60, ignore_eos=True, use_speculative=False), use_tqdm=False)
    assert faults(llm.metrics()) == [], "what did not draft says nothing of the draft"
    assert llm.metrics().current_draft.mean_acceptance_length < 1.3 < 2 < llm.metrics().current_draft.mean_drafted_length
    assert own.num_accepted_tokens == sum(each.num_accepted_tokens for each in metrics)
    assert sum(after.proposed_per_depth) == sum(totals.proposed_per_depth) + own.num_proposed_tokens, "metrics keep totals"
    llm.swap_draft(zoo.path("useless"))
    run()
    assert any("useless" in finding for finding in faults(llm.metrics()))


def test_the_engines_limit_holds_for_every_drafter(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), NgramDrafter(12, min_ngram=1), max_draft_tokens=3, **CPU)
    llm.generate([[5, 6, 7, 8] * 10], greedy(20, ignore_eos=True), use_tqdm=False)
    assert len(llm.metrics().proposed_per_depth) == 3


def test_the_size_of_the_pool_follows_from_the_memory(zoo: Zoo) -> None:
    """Per token, target: 2 layers, draft: one, each 2 * 2 heads * 16 * 4 bytes."""
    by_memory = CPU | {"num_kv_blocks": None, "kv_cache_memory": 16 * 256 * 2 * 10}
    assert LLM(zoo.path("llama"), **by_memory).metrics().num_kv_blocks == 10
    assert LLM(zoo.path("llama"), zoo.path("thin"), **by_memory).metrics().num_kv_blocks == 6
    assert LLM(zoo.path("llama"), max_batch_size=5, device="cpu").metrics().num_kv_blocks == 5 * 256 // 16


@pytest.mark.parametrize(("name", "expected"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")])
def test_a_cuda_device_has_its_index(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device` refuses one without, and it equals no tensor's device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert str(choose_device(name)) == expected
    monkeypatch.setattr("titan.kernels.backend.find_spec", {}.get)  # as on Windows, where there is no triton
    if name == "auto":
        with pytest.warns(UserWarning, match="not the package triton: device='auto' is the CPU"):
            assert str(choose_device(name)) == "cpu"
    elif name != "cpu":
        with pytest.raises(ValueError, match=f"device='{name}' is not possible: the package triton is not installed"):
            choose_device(name)


def test_the_caller_s_default_device_is_none_of_the_engine_s(zoo: Zoo) -> None:
    """With it, arrays of the host would be made where C++ cannot read them."""
    llm = LLM(zoo.path("llama"), zoo.path("llama~"), **CPU)
    params = [SamplingParams(temperature=each, seed=3, top_p=0.9, max_tokens=12, ignore_eos=True) for each in (0.0, 1.0)]
    alone = [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7]] * 2, params, use_tqdm=False)]
    with torch.device("meta"):
        found = [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7]] * 2, params, use_tqdm=False)]
    assert found == alone


def test_without_a_bar_nothing_waits_for_those_of_others(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(zoo.path("llama"), **CPU)
    monkeypatch.setattr("titan.frontend.front_end.tqdm", Mock(side_effect=AssertionError("a bar takes the lock of all bars")))
    assert len(llm.generate([5, 6, 7], greedy(4, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_dtype_for_which_nothing_is_compiled_is_told_once(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    for dtype, num_told in (("float32", 0), ("float16", 1)):
        caplog.clear()
        LLM(zoo.path("llama"), zoo.path("llama~"), **CPU | {"dtype": dtype})
        assert caplog.text.count("many times slower") == num_told


def test_a_numpy_integer_serves_as_a_number_of_draft_tokens_and_of_blocks() -> None:
    llm = LLM("demo", ReplayDrafter({}, acceptance=1, vocab_size=4096, max_draft_tokens=np.int32(3)), num_kv_blocks=30)
    llm.resize_kv_cache(np.int64(20))
    assert json.loads(json.dumps(asdict(llm.metrics())))["num_kv_blocks"] == 20
