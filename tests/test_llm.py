"""What people call: generate, chat, stream, swap_draft, metrics, diagnose."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from string import punctuation
from typing import Any, Unpack, get_type_hints

import pytest
import torch
from stepping import check_blocks, greedy
from text_tools import make_piece_tokenizer, make_tokenizer
from tiny_models import make_model
from zoo import Zoo, random_prompts

import titan
from titan import LLM, RequestOutput, SamplingParams
from titan.core.options import EngineConfig, EngineOptions, MemoryOptions, ModelOptions, ScheduleOptions, SpeculationOptions
from titan.engine import choose_device

PROMPTS = ["the quick brown fox", "in the morning", "the", "dog jumps over the lazy dog"]
ASK = [{"role": "user", "content": "the dog?"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def llm(zoo: Zoo) -> LLM:
    return LLM(zoo.path("llama+text"), zoo.path("llama~+text"), dtype="float32", device="cpu", num_kv_blocks=64, max_batch_size=3)


@pytest.fixture(autouse=True)
def _engine_is_left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used it: nothing runs, nothing waits, every block is free."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert not llm.engine.scheduler.has_unfinished
        check_blocks(llm.engine)
        assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_blocks


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_the_public_names() -> None:
    assert sorted(titan.__all__) == [
        "CompletionOutput", "EngineMetrics", "LLM", "Logprob", "RequestMetrics", "RequestOutput", "SamplingParams", "__version__",
    ]  # fmt: skip
    assert all(hasattr(titan, name) for name in titan.__all__)
    with pytest.raises(AttributeError, match="module 'titan' has no attribute 'llama'"):
        titan.llama  # noqa: B018


def test_every_engine_option_is_an_argument() -> None:
    assert get_type_hints(LLM.__init__)["options"] == Unpack[EngineOptions]
    groups = get_type_hints(EngineConfig).values()
    assert get_type_hints(EngineOptions) == {name: kind for group in groups for name, kind in get_type_hints(group).items()}
    assert EngineConfig.of() == EngineConfig()
    config = EngineConfig.of(seed=3, draft_tree="chain", swap_space=0, max_batch_size=5, block_size=8)
    assert config == EngineConfig(
        ModelOptions(seed=3), SpeculationOptions(draft_tree="chain"), ScheduleOptions(max_batch_size=5), MemoryOptions(block_size=8)
    )


def test_an_option_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(TypeError, match=r"no option 'blocksize', 'sede'; allowed: dtype, device, seed, .*, block_size, "):
        LLM("demo", seed=3, blocksize=8, sede=3)  # type: ignore[call-arg]


def test_generate_takes_one_prompt_or_many_as_text_or_as_tokens(llm: LLM, zoo: Zoo) -> None:
    tokenizer = make_tokenizer()
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [zoo.greedy("llama+text", prompt, 12) for prompt in ids]
    params = greedy(12)
    by_text = llm.generate(PROMPTS, params, use_tqdm=False)
    by_tokens = llm.generate(ids, params, use_tqdm=False)
    one_text = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    one_tokens = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in ids]
    mixed = llm.generate([ids[0], PROMPTS[1], tuple(ids[2]), PROMPTS[3]], params, use_tqdm=False)
    for outputs in (by_text, by_tokens, one_text, one_tokens, mixed):
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.prompt_token_ids for output in outputs] == ids
        assert [len(output.outputs) for output in outputs] == [1] * 4
        assert all(output.finished and output.error is None and output.outputs[0].index == 0 for output in outputs)
    assert [output.prompt for output in by_text] == PROMPTS
    assert [output.prompt for output in by_tokens] == [None] * 4
    assert [output.prompt for output in mixed] == [None, PROMPTS[1], None, PROMPTS[3]]
    assert [prompt + text for prompt, text in zip(PROMPTS, texts(by_text), strict=True)] == [
        tokenizer.decode(prompt + output, skip_special_tokens=True) for prompt, output in zip(ids, expected, strict=True)
    ]
    assert len({output.request_id for outputs in (by_text, by_tokens, one_text) for output in outputs}) == 12


def test_generate_takes_one_set_of_options_or_one_per_prompt_or_none(llm: LLM) -> None:
    several = llm.generate(
        PROMPTS, [greedy(3, ignore_eos=True), greedy(5, ignore_eos=True), greedy(1), greedy(2, ignore_eos=True)], False
    )
    assert [len(output.outputs[0].token_ids) for output in several] == [3, 5, 1, 2]
    default = llm.generate("the", SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(default[0].outputs[0].token_ids) == 16
    assert len(llm.generate(PROMPTS, use_tqdm=False)) == 4


def test_more_prompts_than_may_wait_are_queued_in_turn(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), None, dtype="float32", device="cpu", num_kv_blocks=64, max_batch_size=2, max_waiting_requests=3)
    prompts = random_prompts(12, max_len=20)
    outputs = llm.generate(prompts, greedy(6, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [zoo.greedy("llama", p, 6, ignore_eos=True) for p in prompts]


def test_the_progress_bar_shows_speed_and_acceptance(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(8, ignore_eos=True))
    shown = capsys.readouterr().err
    assert "4/4" in shown and "tokens/s" in shown and "tokens/step" in shown
    llm.generate(PROMPTS, greedy(8), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_an_exception_in_a_step_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    forward = llm.engine.runner.forward

    def failing(batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("out of luck")
        return forward(batch)

    expected = texts(llm.generate(PROMPTS, greedy(20, ignore_eos=True), use_tqdm=False))
    monkeypatch.setattr(llm.engine.runner, "forward", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate(PROMPTS, greedy(20, ignore_eos=True), use_tqdm=False)
    assert not llm.engine.scheduler.has_unfinished
    assert texts(llm.generate(PROMPTS, greedy(20, ignore_eos=True), use_tqdm=False)) == expected


def test_a_step_of_an_idle_engine_does_nothing(llm: LLM) -> None:
    num_steps = llm.metrics().num_steps
    assert llm.engine.step() == []
    assert llm.metrics().num_steps == num_steps


@pytest.mark.parametrize("options", [{}, {"stop": "~never~"}, {"seed": 3, "temperature": 1.5}])
def test_a_stream_grows_to_what_generate_gives(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | options))
    for prompt in PROMPTS:
        [whole] = llm.generate(prompt, params, use_tqdm=False)
        pieces = list(llm.stream(prompt, params))
        completions = [piece.outputs[0] for piece in pieces]
        assert completions[-1] == whole.outputs[0]
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [completion.finish_reason for completion in completions[:-1]] == [None] * (len(pieces) - 1)
        for shorter, longer in pairwise(completions):
            assert longer.text.startswith(shorter.text)
            assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
            assert len(longer.token_ids) > len(shorter.token_ids)
        assert len(pieces) == whole.metrics.num_sequence_steps
        assert {piece.prompt for piece in pieces} == {prompt}


def test_a_stop_string_never_shows_in_a_stream_not_even_partly(llm: LLM) -> None:
    [free] = llm.generate("the dog", greedy(30, ignore_eos=True), use_tqdm=False)
    text = free.outputs[0].text
    absent = next(character for character in punctuation if character not in text)
    for start in range(2, len(text) - 8, 3):
        stop = text[start : start + 5]
        expected = text[: text.index(stop)]
        for stops in (stop, [absent, stop]):
            shown = [piece.outputs[0].text for piece in llm.stream("the dog", greedy(30, ignore_eos=True, stop=stops))]
            assert shown[-1] == expected
            assert all(expected.startswith(piece) for piece in shown)
        inclusive = greedy(30, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
        assert [piece.outputs[0].text for piece in llm.stream("the dog", inclusive)][-1] == expected + stop


def test_what_was_held_back_for_a_stop_string_that_does_not_come_is_shown_at_the_end(llm: LLM) -> None:
    [free] = llm.generate("the dog", greedy(10, ignore_eos=True), use_tqdm=False)
    stop = free.outputs[0].text[-1] + "~never~"
    assert [piece.outputs[0].text for piece in llm.stream("the dog", greedy(10, ignore_eos=True, stop=stop))][-1] == free.outputs[
        0
    ].text


def test_leaving_a_stream_ends_its_request_and_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream("the dog", greedy(50, ignore_eos=True)):
        assert llm.engine.scheduler.running
        break
    assert not llm.engine.scheduler.has_unfinished
    stream = llm.stream("the dog", greedy(50, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.scheduler.has_unfinished
    llm.stream("the dog", greedy(50))  # never looked at
    assert not llm.engine.scheduler.has_unfinished


def test_streams_may_run_side_by_side_and_beside_generate(llm: LLM) -> None:
    params = [greedy(length, ignore_eos=True) for length in (20, 3, 12, 7)]
    expected = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    streams = [llm.stream(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    rounds = []
    for i, pieces in enumerate(zip_longest(*streams)):
        rounds.append(pieces)
        if i == 1:
            [beside] = llm.generate(PROMPTS[1], params[1], use_tqdm=False)
            assert beside.outputs[0] == expected[1]
    for column, completion in zip(zip(*rounds, strict=True), expected, strict=True):
        pieces = [piece for piece in column if piece is not None]
        assert pieces[-1].outputs[0] == completion
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_stream_ends_even_if_others_did_all_its_steps(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], greedy(10, ignore_eos=True))
    first = next(stream)
    assert not first.finished
    llm.generate(PROMPTS, greedy(30, ignore_eos=True), use_tqdm=False)
    rest = list(stream)
    assert len(rest) == 1 and rest[0].finished
    assert len(rest[0].outputs[0].token_ids) == 10


def test_text_is_continued_with_its_space_whether_streamed_or_not(tmp_path: Path) -> None:
    """Where words are pieces with a space before them, the output's first word must not lose it."""
    tokenizer = make_piece_tokenizer()
    make_model(tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", num_kv_blocks=64)
    num_spaces = 0
    for seed in range(80):
        options: dict[str, Any] = {"temperature": 30.0, "max_tokens": 2, "seed": seed, "ignore_eos": True}
        [whole] = llm.generate("the", SamplingParams(**options), use_tqdm=False)
        *_, last = llm.stream("the", SamplingParams(**options))
        [searched] = llm.generate("the", SamplingParams(stop="~never~", **options), use_tqdm=False)
        expected = tokenizer.decode(whole.prompt_token_ids + whole.outputs[0].token_ids, skip_special_tokens=True)
        if "\ufffd" in expected:
            continue  # single bytes that are no text
        assert "the" + whole.outputs[0].text == expected
        assert last.outputs[0].text == searched.outputs[0].text == whole.outputs[0].text
        num_spaces += whole.outputs[0].text.startswith(" ")
    assert num_spaces > 0


def test_skip_special_tokens(llm: LLM) -> None:
    tokenizer = make_tokenizer()
    special = [1, 2]
    params = [greedy(25, ignore_eos=True, skip_special_tokens=skip) for skip in (True, False)]
    for prompt in random_prompts(12, seed=33, max_len=10):
        skipped, kept = llm.generate([prompt, prompt], params, use_tqdm=False)
        assert skipped.outputs[0].token_ids == kept.outputs[0].token_ids
        if set(special) & set(kept.outputs[0].token_ids):
            break
    assert "<s>" in kept.outputs[0].text or "</s>" in kept.outputs[0].text
    assert skipped.outputs[0].text == tokenizer.decode(skipped.outputs[0].token_ids, skip_special_tokens=True)
    assert kept.outputs[0].text == tokenizer.decode(kept.outputs[0].token_ids, skip_special_tokens=False)


def test_chat_generates_after_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.frontend.tokenizer, "chat_template", TEMPLATE)
    [expected] = llm.generate("user: the dog?\nassistant:", greedy(10), use_tqdm=False)
    [chatted] = llm.chat(ASK, greedy(10), use_tqdm=False)
    assert chatted.outputs[0] == expected.outputs[0]
    assert chatted.prompt_token_ids == expected.prompt_token_ids
    longer = [*ASK, {"role": "assistant", "content": "is lazy"}, {"role": "user", "content": "and the fox?"}]
    both = llm.chat([ASK, longer], [greedy(10), greedy(6, ignore_eos=True)], use_tqdm=False)
    assert both[0].outputs[0] == expected.outputs[0]
    tokenizer = make_tokenizer()
    assert both[1].prompt_token_ids == tokenizer.encode("user: the dog?\nassistant: is lazy\nuser: and the fox?\nassistant:")
    assert len(both[1].outputs[0].token_ids) == 6


def test_swap_draft_and_metrics(llm: LLM, zoo: Zoo) -> None:
    expected = texts(llm.generate(PROMPTS, greedy(20, ignore_eos=True), use_tqdm=False))
    for draft, name, low, high in (("ngram", "ngram", 1, 3), (None, "none", 1, 1), (zoo.path("llama+text"), "llama", 3, 7)):
        llm.swap_draft(draft)
        before = llm.metrics()
        outputs = llm.generate(PROMPTS, greedy(20, ignore_eos=True), use_tqdm=False)
        after = llm.metrics()
        assert texts(outputs) == expected
        assert name in after.draft
        assert after.num_finished_requests - before.num_finished_requests == 4
        assert after.num_emitted_tokens - before.num_emitted_tokens == 80
        assert after.num_steps > before.num_steps
        steps = sum(output.metrics.num_sequence_steps for output in outputs)
        assert low <= 80 / steps <= high
        accepted = sum(after.accepted_per_depth) - sum(before.accepted_per_depth)
        assert accepted == sum(output.metrics.num_accepted_tokens for output in outputs) == 80 - steps
    assert (after.num_running, after.num_waiting, after.kv_usage, after.draft_coverage) == (0, 0, 0.0, None)
    assert 0 < after.acceptance_rate <= 1 and 0 < after.prefix_cache_hit_rate < 1
    llm.swap_draft(zoo.path("llama~+text"))


def test_metrics_of_what_is_in_flight(llm: LLM) -> None:
    streams = [llm.stream(prompt, greedy(60, ignore_eos=True)) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    metrics = llm.metrics()
    assert (metrics.num_running, metrics.num_waiting) == (3, 0)
    assert metrics.draft_coverage is not None and 0.5 < metrics.draft_coverage <= 1
    held = sum(len(request.block_ids) for request in llm.engine.scheduler.running)
    assert metrics.kv_usage == pytest.approx(held / metrics.num_kv_blocks)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]


def test_diagnose_names_what_is_slow(zoo: Zoo) -> None:
    healthy = LLM(zoo.path("llama"), zoo.path("llama"), dtype="float32", device="cpu", num_kv_blocks=64)
    healthy.generate(random_prompts(4), greedy(10), use_tqdm=False)
    assert healthy.diagnose() == []
    sick = LLM(
        zoo.path("llama"), zoo.path("useless"), dtype="float32", device="cpu", num_kv_blocks=10, block_size=8, max_batch_size=4
    )
    sick.generate(random_prompts(8, max_len=40), greedy(20, ignore_eos=True), use_tqdm=False)
    findings = sick.diagnose()
    assert any("preemptions" in finding and "kv_cache_memory" in finding for finding in findings)
    assert any("tokens per request" in finding and "useless" in finding for finding in findings)


def test_a_request_may_draft_less_or_not_at_all(llm: LLM) -> None:
    prompts = ["the dog"] * 4
    params = [greedy(20, ignore_eos=True, **options) for options in (
        {}, {"use_speculative": False}, {"max_draft_tokens": 0}, {"max_draft_tokens": 2}
    )]  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(set(texts(outputs))) == 1
    depths = [len(output.metrics.proposed_per_depth) for output in outputs]
    assert 2 < depths[0] <= 6 and depths[1:] == [0, 0, 2]


def test_an_engine_without_speculation_never_drafts(zoo: Zoo) -> None:
    for options in ({"use_speculative": False}, {"max_draft_tokens": 0}):
        llm = LLM(zoo.path("llama"), zoo.path("llama"), dtype="float32", device="cpu", num_kv_blocks=32, **options)
        llm.generate(random_prompts(3), greedy(8), use_tqdm=False)
        metrics = llm.metrics()
        assert metrics.draft == "none" and metrics.proposed_per_depth == []
        assert "draft" not in llm.engine.kv.tensors


def test_the_engines_limit_holds_for_every_drafter(zoo: Zoo) -> None:
    from titan.draft.ngram import NgramDrafter

    llm = LLM(zoo.path("llama"), NgramDrafter(12, min_ngram=1), dtype="float32", device="cpu", num_kv_blocks=32, max_draft_tokens=3)
    llm.generate([[5, 6, 7, 8] * 10], greedy(20, ignore_eos=True), use_tqdm=False)
    assert len(llm.metrics().proposed_per_depth) == 3


def test_the_size_of_the_pool_follows_from_the_memory(zoo: Zoo) -> None:
    """Per token, target: 3 layers, draft: 2 layers, each 2 * 2 heads * 16 * 4 bytes."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 16 * 256 * 3 * 10}
    assert LLM(zoo.path("llama"), **options).metrics().num_kv_blocks == 10
    assert LLM(zoo.path("llama"), zoo.path("other"), **options).metrics().num_kv_blocks == 6
    assert LLM(zoo.path("llama"), max_batch_size=5, device="cpu").metrics().num_kv_blocks == 5 * 256 // 16


@pytest.mark.parametrize(("name", "expected"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")])
def test_a_cuda_device_has_its_index(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device` refuses one without, and it equals no tensor's device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert str(choose_device(name)) == expected
