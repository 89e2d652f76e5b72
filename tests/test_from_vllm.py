"""What code written for vLLM does here: a typical script, the rows of docs/from-vllm.md, and what the names and values mean."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from machines import Machine
from stepping import greedy
from text_tools import make_tokenizer
from tiny_models import make_model
from torch import Tensor
from zoo import Zoo

from titan import LLM, SamplingParams
from titan.core.options import EngineConfig
from titan.draft.ngram import NgramDrafter
from titan.frontend.chat import ChatTemplate
from titan.vllm_names import LLMOptions, translate

PAGE = Path(__file__).parents[1] / "docs" / "from-vllm.md"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.x }}"
    "{% endfor %}{{ '\n' }}{% endfor %}{{ tools | length if tools }}{{ mood }}{% if add_generation_prompt %}assistant:{% endif %}"
)
CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "speculation": "fixed", "num_kv_blocks": 64}
SCRIPT = """
from vllm import LLM, SamplingParams

llm = LLM(
    model=model,
    dtype="bfloat16",
    max_num_seqs=16,
    max_model_len=200,
    gpu_memory_utilization=0.9,
    trust_remote_code=False,
    seed=0,
    speculative_config={"model": draft, "num_speculative_tokens": 4},
)
params = SamplingParams(
    n=2,
    temperature=0.8,
    top_p=0.95,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    max_tokens=12,
    stop=["~~"],
    seed=7,
    logprobs=1,
)
prompts = [{"prompt": "the quick"}, {"prompt_token_ids": [5, 6, 7]}, "in the morning"]
outputs = llm.generate(prompts, params)
for output in outputs:
    for completion in output.outputs:
        print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason}, {completion.cumulative_logprob:.2f})")
messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "the dog?"}]}]
[answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(answer.outputs[0].text, len(llm.get_tokenizer().encode(answer.prompt or "")), answer.num_cached_tokens)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the vocabulary of the zoo's; its tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    make_model(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, model, **CPU)


def test_a_typical_script_runs_after_changing_its_import_alone(
    model: str, zoo: Zoo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch)  # on which drafts pay
    names: dict[str, Any] = {"model": model, "draft": zoo.path("llama~+text")}
    exec(SCRIPT.replace("from vllm import", "from titan import"), names)
    config = names["llm"].engine.config
    assert (config.schedule.max_batch_size, config.memory.memory_utilization) == (16, 0.9)
    assert (config.model.dtype, config.model.max_model_len, config.speculation.max_draft_tokens) == ("bfloat16", 200, 4)
    assert "llama~" in names["llm"].metrics().draft and names["llm"].metrics().proposed_per_depth[0] > 0
    assert [len(output.outputs) for output in names["outputs"]] == [2, 2, 2]
    assert capsys.readouterr().out.count(" -> ") == 6


def rows() -> Iterator[tuple[str, str]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            code, answer, _ = re.fullmatch(r"\| `(.*?)` \| (.*?) \|(.*)\|", line).groups()  # type: ignore[union-attr]
            yield code, answer.strip("`")


@pytest.mark.parametrize(("code", "answer"), list(rows()), ids=lambda text: text[:60])
def test_each_row_of_the_page(model: str, llm: LLM, code: str, answer: str) -> None:
    params = greedy(2)
    [output] = llm.generate("the", greedy(2, logprobs=1), use_tqdm=False)
    names = {"LLM": LLM, "SamplingParams": SamplingParams, "replace": replace, "model": model, "draft": model}
    names |= {"llm": llm, "params": params, "output": output}
    if answer == "same":
        exec(code, names)
        return
    with pytest.raises((ValueError, TypeError, AttributeError)) as refusal:
        exec(code, names)
    names_in_code = set(re.findall(r"[a-z_]{4,}", code)) - {"model", "draft", "params", "output", "generate", "chat", "user"}
    assert any(name in str(refusal.value) for name in names_in_code)
    if answer != "refused":
        exec(answer, names)


def as_options(config: EngineConfig) -> dict[str, Any]:
    groups = [getattr(config, group.name) for group in fields(config)]
    return {option.name: getattr(group, option.name) for group in groups for option in fields(group)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_num_seqs": 5, "gpu_memory_utilization": 0.5}, {"max_batch_size": 5, "memory_utilization": 0.5}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"device": torch.device("cuda:0"), "download_dir": Path("a")}, {"device": "cuda:0", "download_dir": "a"}),
        ({"speculative_config": {"model": Path("m")}}, {"draft_model": "m"}),
        ({"speculative_config": {"model": "m", "num_speculative_tokens": 3}}, {"draft_model": "m", "max_draft_tokens": 3}),
        ({"speculative_config": {"model": "[ngram]"}}, {"draft_model": "ngram"}),
        ({"speculative_config": None, "tensor_parallel_size": 1}, {}),
        (
            {"seed": np.int64(4), "max_draft_tokens": np.int32(5), "draft_tree": np.array([-1, 0]), "block_size": np.int8(8)},
            {"seed": 4, "max_draft_tokens": 5, "draft_tree": [-1, 0], "block_size": 8},
        ),
        ({"enable_prefix_caching": np.bool_(False)}, {"enable_prefix_caching": False}),
    ],
)
def test_names_and_values_are_translated(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config, draft = translate(given, None)
    assert as_options(config) | {"draft_model": draft} == as_options(EngineConfig()) | {"draft_model": None} | expected
    assert all(type(value).__module__ != "numpy" for value in as_options(config).values())


def test_what_has_no_single_translation() -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    drafter = translate({"speculative_config": lookup}, None).draft_model
    assert isinstance(drafter, NgramDrafter) and (drafter.min_ngram, drafter.max_ngram) == (3, 3)
    seeds = {translate({"seed": None}, None).config.model.seed for _ in range(3)}
    assert len(seeds) == 3


def test_what_titan_has_not_may_be_asked_for_by_its_neutral_value_alone() -> None:
    types = get_type_hints(LLMOptions)
    allowed = {name: get_args(hint) or (None,) for name, hint in types.items() if hint is NoneType or get_origin(hint) is Literal}
    assert len(allowed) > 15 and {"enforce_eager": (False,), "quantization": (None,)}.items() <= allowed.items()
    for name, values in allowed.items():
        for value in values:
            assert translate({name: value}, None) == translate({"seed": 0}, None)
        with pytest.raises(ValueError, match=f"{name}=7 is not supported; allowed: {', '.join(map(repr, values))}, since "):
            translate({name: 7}, None)


def test_prompt_lookup_drafts_as_many_tokens_as_the_engine_allows(zoo: Zoo) -> None:
    options = {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}, "max_draft_tokens": 12}
    llm = LLM(zoo.path("llama"), **CPU | options)

    def go_round(token_ids: list[int], logits: Tensor) -> Tensor:
        logits[5 + (token_ids[-1] - 4) % 20] += 1000
        return logits

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logits_processors=[go_round])
    llm.generate([[*range(5, 25)] * 2], params, use_tqdm=False)
    assert len(llm.metrics().proposed_per_depth) == 12


def lookup(**lengths: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "ngram"} | {f"prompt_lookup_{key}": value for key, value in lengths.items()}}


@pytest.mark.parametrize(
    ("options", "draft", "parts"),
    [
        ({"max_num_seqs": 0}, None, "max_batch_size=0 .*integer >= 1.*given as max_num_seqs"),
        ({"max_num_seqs": 4, "max_batch_size": 4}, None, "max_num_seqs and max_batch_size are the same option"),
        ({"gpu_memory_utilization": 1.5}, None, r"memory_utilization=1.5.*\(0, 1\].*given as gpu_memory_utilization"),
        ({"speculative_config": {"model": "m"}}, "n", "speculative_config and draft_model are the same option"),
        (
            {"speculative_config": {"model": "m", "num_speculative_tokens": 99}},
            None,
            r"speculative_config\['num_speculative_tokens'\]=99 .* from 1 to 63",
        ),
        (lookup(max=2.5), None, r"speculative_config\['prompt_lookup_max'\]=2.5 is not allowed: it must be an integer >= 1"),
        (lookup(min=True), None, r"speculative_config\['prompt_lookup_min'\]=True is not allowed: it must be an integer >= 1"),
        (lookup(min=3, max=2), None, r"speculative_config\['prompt_lookup_min'\]=3 .*prompt_lookup_max'\]=2.* at most"),
        ({"speculative_config": {"method": "eagle"}}, None, r"speculative_config\['method'\]='eagle' .*'draft_model', 'ngram'"),
        ({"speculative_config": {"model": 5}}, None, r"speculative_config\['model'\]=5 is not allowed: .*a path"),
        ({"speculative_config": {"num_spec_tokens": 2}}, None, "'num_spec_tokens' .did you mean 'num_speculative_tokens'"),
        ({"speculative_config": {}}, None, "'model' is missing"),
        ({"speculative_config": {"method": "ngram", "model": "m"}}, None, "'model'.='m' contradicts method='ngram'.* None or"),
        ({"speculative_config": {"method": "draft_model", "model": "ngram"}}, None, "'ngram' contradicts method='draft_model'"),
        ({"speculative_config": {"model": "m", "prompt_lookup_min": 2}}, None, "prompt_lookup_min .* are for 'ngram'"),
        ({"quantization": "awq"}, None, "quantization='awq' is not supported; allowed: None, since the config of a checkpoint"),
        ({"speculative_config": "m"}, None, "speculative_config='m' is not allowed: it must be a dict"),
    ],
)
def test_what_is_refused_is_told_by_the_name_that_was_given(options: dict[str, Any], draft: str | None, parts: str) -> None:
    with pytest.raises(ValueError, match=parts):
        translate(options, draft)


def test_numbers_and_ids_may_be_numpys() -> None:
    ours = {"temperature": 0.5, "top_k": 4, "max_tokens": 9, "logit_bias": {3: 2.0}, "stop_token_ids": [5, 6], "ignore_eos": True}
    theirs = {"temperature": np.float32(0.5), "top_k": np.int64(4), "max_tokens": np.uint8(9), "logit_bias": {"3": np.float64(2)}}
    theirs |= {"stop_token_ids": np.array([5, 6]), "ignore_eos": np.bool_(True)}
    params = SamplingParams(**theirs)  # type: ignore[arg-type]
    assert params == SamplingParams(**ours) == params.clone() and params.clone() is not params  # type: ignore[arg-type]
    assert {type(getattr(params, name)) for name in theirs} == {float, int, bool, dict, list}
    assert type(params.stop_token_ids[0]) is int and SamplingParams(allowed_token_ids=torch.tensor([1, 2])).allowed_token_ids == [
        1,
        2,
    ]  # type: ignore[index,arg-type]


def test_prompts_are_the_same_in_all_their_forms(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the dog")
    forms: list[Any] = [
        ids,
        tuple(ids),
        np.array(ids),
        torch.tensor(ids),
        [np.int64(i) for i in ids],
        {"prompt_token_ids": np.array(ids)},
    ]
    texts: list[Any] = ["the dog", np.str_("the dog"), {"prompt": "the dog"}, {"prompt": "the dog", "prompt_token_ids": ids}]
    outputs = llm.generate([*forms, *texts], greedy(6), use_tqdm=False)
    outputs += [llm.generate(form, greedy(6), use_tqdm=False)[0] for form in forms + texts]
    outputs += llm.generate(np.array([ids, ids]), greedy(6), use_tqdm=False)  # type: ignore[arg-type]
    assert all(output.outputs == outputs[0].outputs and output.prompt_token_ids == ids for output in outputs)
    assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}
    assert [output.prompt for output in outputs[: len(forms) + 4]] == [None] * len(forms) + ["the dog"] * 4
    assert llm.generate([]) == llm.generate([], []) == []


USER = {"role": "user", "content": "the dog?"}
PART = {"type": "text", "text": "the"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 41}'}}


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([USER | {"content": [PART, PART]}], {}, "user: the\nthe\nassistant:"),
        ([{"role": "assistant", "tool_calls": [CALL]}], {}, "assistant: 41\nassistant:"),
        ([{"role": "assistant", "content": None, "tool_calls": [CALL]}], {}, "assistant: 41\nassistant:"),
        ([USER], {"tools": [{"type": "function"}], "chat_template_kwargs": {"mood": "glad "}}, "user: the dog?\n1glad assistant:"),
        ([USER], {"add_generation_prompt": False}, "user: the dog?\n"),
        ([USER], {"add_generation_prompt": False, "continue_final_message": True}, "user: the dog?"),
        ([USER], {"chat_template": "{{ messages[0].content }}!"}, "the dog?!"),
        ([{"role": "assistant", "tool_calls": [CALL]}], {"chat_template": "{{ 'the ' + messages[0].content }}!"}, "the !"),
    ],
)
def test_conversations(llm: LLM, messages: Any, options: dict[str, Any], expected: str) -> None:
    [output] = llm.chat(messages, greedy(2), use_tqdm=False, **options)
    assert output.prompt_token_ids == llm.get_tokenizer().encode(expected)
    *_, streamed = llm.stream(llm.chat_prompt(messages, **options), greedy(2))
    assert (streamed.prompt, streamed.outputs) == (output.prompt, output.outputs)


def test_what_is_no_prompt_but_nearly_one_is_refused_with_what_to_do(llm: LLM) -> None:
    for prompt, hint in (
        (llm.get_tokenizer()("the dog"), "no key 'input_ids'.*; give its input_ids alone"),
        (USER, "no key 'role'.*; messages are for chat"),
        ([USER], "'user'.*, which is not a token id.*; messages are for chat"),
    ):
        with pytest.raises(ValueError, match=hint):
            llm.stream(prompt)
    with pytest.raises(ValueError, match=r"messages\[0\]=\{'role': 'user'\} has no content"):
        llm.chat_prompt([{"role": "user"}])


def test_the_tokens_of_a_conversation_are_those_of_its_text_though_a_template_may_render_other_text_each_time(llm: LLM) -> None:
    [output] = llm.chat([USER], greedy(2), use_tqdm=False, chat_template="{{ messages[0].content }} {{ strftime_now('%f') }}")
    assert output.prompt is not None and output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)


def test_the_tokens_of_a_tokenizer_with_a_chat_template_in_code_are_its_own(llm: LLM) -> None:
    tokenizer: Any = llm.get_tokenizer()
    method = lambda self, conversation, *, tokenize, **_: [7, 8, 9] if tokenize else "the dog"  # noqa: E731
    tokenizer.__class__ = type("Own", (type(tokenizer),), {"apply_chat_template": method})
    assert ChatTemplate(tokenizer).render([USER]) == {"prompt": "the dog", "prompt_token_ids": [7, 8, 9]}


def test_one_bad_conversation_leaves_the_others_their_outputs(llm: LLM) -> None:
    image = USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.warns(UserWarning, match="prompt 1 was not run: .*'image_url'") as warned:
        first, refused, last = llm.chat([[USER], [image], [USER]], greedy(4), use_tqdm=False)
    assert first.outputs == last.outputs == llm.chat([USER], greedy(4), use_tqdm=False)[0].outputs
    assert [each.filename for each in warned] == [__file__], "where the user called"
    assert refused.outputs[0].finish_reason == "error" and "'image_url'" in (refused.error or "")
    with pytest.raises(ValueError, match="continue_final_message=True contradicts add_generation_prompt=True"):
        llm.chat([USER], greedy(4), continue_final_message=True)


@pytest.mark.parametrize("draft", ["llama+text", "ngram", None])
def test_bad_words_and_allowed_tokens_hold_in_text(zoo: Zoo, draft: str | None) -> None:
    llm = LLM(zoo.path("llama+text"), zoo.path(draft) if draft and "llama" in draft else draft, **CPU)
    encode = llm.get_tokenizer().encode
    free = llm.generate(["the dog", "in the"], greedy(40, ignore_eos=True), use_tqdm=False)
    words = [free[0].outputs[0].text[4:6].strip(), free[1].outputs[0].text[10:13].strip()]
    banned = llm.generate(["the dog", "in the"], greedy(40, ignore_eos=True, bad_words=words), use_tqdm=False)
    for one, other in zip(free, banned, strict=True):
        assert one.outputs[0].text != other.outputs[0].text
        for word in words:
            for form in (word, f" {word}"):
                ids = encode(form)
                tokens = other.outputs[0].token_ids
                assert ids not in [tokens[i : i + len(ids)] for i in range(len(tokens))]
    allowed = [5, 9, 77, *encode(" the")]
    [output] = llm.generate("the dog", greedy(20, ignore_eos=True, allowed_token_ids=allowed), use_tqdm=False)
    assert set(output.outputs[0].token_ids) <= set(allowed)


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    params = greedy(6, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    [plain] = llm.generate("the dog", params, use_tqdm=False)
    [bare] = llm.generate("the dog", replace(params, detokenize=False), use_tqdm=False)
    *_, streamed = llm.stream("the dog", replace(params, detokenize=False))
    assert bare.outputs[0].token_ids == plain.outputs[0].token_ids and plain.outputs[0].text
    assert bare.outputs[0].text == streamed.outputs[0].text == ""
    for output, has_text in ((plain, True), (bare, False)):
        entries = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]
        texts = {logprob.decoded_token is not None for entry in entries if entry for logprob in entry.values()}
        assert texts == {has_text} and len(entries) == 5 + len(plain.prompt_token_ids)


def test_cached_tokens_are_counted_until_the_cache_is_reset(llm: LLM) -> None:
    prompt = list(range(3, 60))
    counts = []
    for reset in (True, False, True):
        if reset:
            assert llm.reset_prefix_cache() is True
        [output] = llm.generate([prompt], greedy(2), use_tqdm=False)
        counts.append(output.num_cached_tokens)
    assert counts == [0, 48, 0]
    running = llm.stream(prompt, greedy(30, ignore_eos=True))
    next(running)
    llm.reset_prefix_cache()
    *_, last = running
    assert last.outputs == llm.generate([prompt], greedy(30, ignore_eos=True), use_tqdm=False)[0].outputs


def test_defaults_of_the_generation_config_apply_where_no_params_are_given(tmp_path: Path) -> None:
    make_model(tmp_path)
    file = tmp_path / "generation_config.json"
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    content = {
        "temperature": 0.0,
        "top_k": 7,
        "top_p": None,
        "max_new_tokens": 5,
        "do_sample": True,
        "eos_token_id": 2,
        **penalties,
    }
    file.write_text(json.dumps(content))
    llm = LLM(tmp_path, **CPU)
    assert llm.get_default_sampling_params() == greedy(5, top_k=7, **penalties)
    expected = llm.generate([[5, 6]], greedy(5, **penalties), use_tqdm=False)[0].outputs
    *_, streamed = llm.stream([5, 6])
    assert expected == llm.generate([[5, 6]], use_tqdm=False)[0].outputs == streamed.outputs
    neutral = LLM(tmp_path, generation_config="vllm", **CPU)
    assert neutral.get_default_sampling_params() == SamplingParams()
    file.write_text(json.dumps(content | {"top_p": 1.5}))
    with pytest.raises(ValueError, match=r"generation_config.json that cannot be used: top_p=1.5 .*generation_config='vllm'"):
        LLM(tmp_path, **CPU)


@pytest.mark.parametrize(("share", "expected"), [(0.9, 4), (None, 8)])
def test_the_share_of_memory_that_may_be_in_use(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, share: float | None, expected: int
) -> None:
    """The machine holds 1000 blocks, of which 104 or 20 are free: 0.9 leaves 100 of them to others; by default 40 % are taken."""
    make_host_memory(monkeypatch, 104 if share else 20)
    assert LLM(zoo.path("llama"), gpu_memory_utilization=share, **BY_MEMORY).metrics().num_kv_blocks == expected


BY_MEMORY: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
BLOCK = 16 * 512
"""Bytes of a block of such a model."""


def make_host_memory(monkeypatch: pytest.MonkeyPatch, num_free: int) -> None:
    """Let the machine have memory for 1000 blocks, of which some are free."""
    monkeypatch.setattr(psutil, "virtual_memory", Mock(return_value=Mock(available=num_free * BLOCK, total=1000 * BLOCK)))
