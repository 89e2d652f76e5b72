"""Bad input gets a ValueError that names the argument, the value and what is allowed, before any work is done."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stepping import greedy
from text_tools import make_letter_tokenizer
from tiny_models import make_model
from tqdm import tqdm
from zoo import Zoo, random_prompts

from titan import LLM, CompletionOutput, SamplingParams
from titan.core.kv_tensor import KVGroup, KVLayout
from titan.core.options import EngineConfig
from titan.core.terms import RequestTerms, as_terms
from titan.draft.base import NoDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.registry import register
from titan.draft.replay import ReplayDrafter
from titan.models.decoder import Decoder
from titan.models.loader import load_model
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.priority import PriorityPolicy

CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "speculation": "fixed"}
SEED = "an integer from 0 to 9223372036854775807"
NODES = "an integer from 0 to 63"
TRUTH = "True or False"


def raises(*parts: object) -> Any:
    return pytest.raises(ValueError, match=".*".join(re.escape(str(part)) for part in parts))


SAMPLING: dict[str, tuple[str, list[Any]]] = {
    "n": ("an integer from 1 to 16384", [0, 2.0, 16385]),
    "temperature": ("[0, inf)", [-0.1, nan, inf, 1e39, "hot", True]),
    "top_p": ("(0, 1]", [0.0, 1.5, 1e-46]),
    "min_p": ("[0, 1]", [-1, 1.01]),
    "top_k": ("an integer from -1 to 9223372036854775807", [-2, 1.5, 2**63]),
    "repetition_penalty": ("(0, inf)", [0, inf, 1e-46]),
    "presence_penalty": ("[-2, 2]", [2.1, None]),
    "frequency_penalty": ("[-2, 2]", [-2.5]),
    "logit_bias": ("a dict of token ids to numbers, or None", [[1, 2.0]]),
    "logits_processors": ("a sequence of callables, or None", [print, [print, 5], "ab"]),
    "allowed_token_ids": ("a list of token ids or None", [7]),
    "bad_words": ("a list of non-empty str, or None", ["ab", [""], [5]]),
    "logprobs": ("an integer from -1 to 20", [-2, 21, True]),
    "prompt_logprobs": ("an integer from -1 to 20", [-2, 21]),
    "seed": (SEED, [-1, 2**63]),
    "stop": ("a non-empty str, a list of such, or None", ["", ["a", ""], [1], 5]),
    "stop_token_ids": ("a list of token ids or None", [7, "7"]),
    "min_tokens": ("an integer >= 0", [-1]),
    "max_tokens": ("an integer >= 1", [0, 2.0]),
    "max_draft_tokens": (NODES, [-1, 64]),
    "include_stop_str_in_output": (TRUTH, [0]),
    "ignore_eos": (TRUTH, [1]),
    "detokenize": (TRUTH, [0]),
    "skip_special_tokens": (TRUTH, [None]),
    "use_speculative": (TRUTH, ["no"]),
}
ENGINE: dict[str, tuple[str, list[Any]]] = {
    "dtype": ("'auto', 'float32', 'bfloat16', 'float16'", ["int8", None, 5, []]),
    "device": ("'auto', 'cpu', 'cuda', 'cuda:N'", [None, 5]),
    "seed": (SEED, [-1, 1.5]),
    "generation_config": ("'auto', 'vllm'", ["none", None]),
    "num_threads": ("an integer from 1 to 1024", [0, 1025, 2.0]),
    "max_model_len": ("an integer >= 2", [0, 1]),
    "warm_up": (TRUTH, [1]),
    "speculation": ("'adaptive', 'fixed', 'off'", ["on", False, None]),
    "speculation_target": ("'throughput', 'latency'", ["cost", None]),
    "max_draft_tokens": ("an integer from 1 to 63", [0, 64, True]),
    "draft_sampling": ("'auto', 'greedy', 'sampled'", ["random"]),
    "max_batch_size": ("an integer >= 1", [0]),
    "max_num_batched_tokens": ("an integer >= 1", [0]),
    "prefill_chunk_size": ("an integer >= 1", [0]),
    "max_waiting_requests": ("an integer >= 1", [0]),
    "max_prefill_tokens": ("an integer >= 1", [0, 2.5]),
    "max_inter_token_s": ("(0, inf)", [0, -1, nan, "fast"]),
    "scheduling_policy": ("'fair', or an instance of a SchedulingPolicy", ["lifo", None, NoDrafter, FairPolicy]),
    "reservation": ("'on_demand', 'max_tokens'", ["all", None]),
    "preemption_mode": ("'auto', 'recompute', 'swap'", ["drop", None]),
    "swap_space": ("an integer >= 0", [-1, 1.5, "4GB"]),
    "revision": ("a non-empty str or None", ["", 5]),
    "download_dir": ("a non-empty str, a path or None", ["", 5]),
    "model_impl": ("'auto', 'native', 'transformers'", ["vllm", None]),
    "trust_remote_code": (TRUTH, [1, None]),
    "draft_dtype": ("'auto', 'float32', 'bfloat16', 'float16'", ["int8", 5]),
    "draft_weight_bits": ("'auto', None, 8", [4, "8", 16]),
    "block_size": ("8, 16, 32, 64, 128", [24]),
    "num_kv_blocks": ("an integer >= 1", [0]),
    "kv_cache_memory": ("an integer >= 1", [1.5]),
    "memory_utilization": ("(0, 1]", [0, 1.1, "half"]),
    "enable_prefix_caching": (TRUTH, [1]),
    "kv_cache_dtype": ("'auto', 'int8'", ["fp8", "fp8_e4m3", "int4", "bfloat16", None]),
    "draft_kv_cache_dtype": ("'auto', 'int8'", ["fp8_e5m2", 8]),
}
TERMS: dict[str, tuple[str, list[Any]]] = {
    "priority": ("'critical', 'normal', 'batch'", ["urgent", None, 1]),
    "deadline_s": ("(0, inf)", [0, -1.0, nan, inf, "soon"]),  # 0 and less are past
    "timeout_s": ("(0, inf)", [0, -1.0, True]),
    "user": ("a non-empty str or None", ["", 5]),
    "cache_salt": ("a non-empty str or None", ["", b"salt"]),
}


REPLAY = partial(ReplayDrafter, {}, max_draft_tokens=4)
OTHERS: list[tuple[Callable[..., Any], dict[str, Any], list[str]]] = [
    (SamplingParams, {"max_tokens": 3, "min_tokens": 4}, ["min_tokens=4", "max_tokens=3", "at most max_tokens"]),
    (SamplingParams, {"max_draft_tokens": 2, "use_speculative": False}, ["=2 contradicts use_speculative=False", "None and 0"]),
    (SamplingParams, {"stop_token_ids": [-1]}, ["stop_token_ids=-1", "an integer >= 0"]),
    (SamplingParams, {"stop_token_ids": [1.0]}, ["stop_token_ids=1.0", "an integer >= 0"]),
    (SamplingParams, {"logit_bias": {"-1": 2.0}}, ["logit_bias='-1'", "an integer >= 0"]),
    (SamplingParams, {"allowed_token_ids": []}, ["allowed_token_ids=[]", "at least one token id"]),
    (SamplingParams, {"stop": "a", "detokenize": False}, ["stop='a' contradicts detokenize=False", "None"]),
    (SamplingParams, {"logit_bias": {"9" * 5000: 1}}, ["logit_bias=", "an integer >= 0"]),
    (SamplingParams, {"logit_bias": {"5": 1, 5: 2}}, ["logit_bias has token id 5 twice"]),
    (SamplingParams, {"logit_bias": {-1: 2.0}}, ["logit_bias=-1", "an integer >= 0"]),
    (SamplingParams, {"logit_bias": {1: 100.5}}, ["logit_bias[1]=100.5", "[-100, 100]"]),
    (SamplingParams, {"logit_bias": {1: nan}}, ["logit_bias[1]=nan", "[-100, 100]"]),
    (SamplingParams, {"logit_bias": {1: "a"}}, ["logit_bias[1]='a'", "[-100, 100]"]),
    (EngineConfig.of, {"draft_tree": "bush"}, ["draft_tree='bush'", "'auto', 'dynamic', 'chain' or a list of parents"]),
    (EngineConfig.of, {"draft_tree": 3}, ["draft_tree=3", "'auto', 'dynamic', 'chain' or a list of parents"]),
    (EngineConfig.of, {"draft_tree": []}, ["draft_tree=[]", "a list of parents"]),
    (EngineConfig.of, {"draft_tree": [-1, 0.5]}, ["draft_tree=[-1, 0.5]", "a list of parents"]),
    (EngineConfig.of, {"draft_tree": [-1, 1]}, ["draft_tree=[-1, 1] is not topological", "node 1 is 1", "-1 (the root) to 0"]),
    (EngineConfig.of, {"draft_tree": [-2]}, ["draft_tree=[-2] is not topological", "node 0 is -2"]),
    (EngineConfig.of, {"draft_tree": [-1] * 7}, ["has 7 nodes", "at most max_draft_tokens=6"]),
    (EngineConfig.of, {"max_num_batched_tokens": 31}, ["max_num_batched_tokens=31", "max_batch_size=32", "at least one token"]),
    (
        EngineConfig.of,
        {"speculation": "fixed", "speculation_target": "latency"},
        ["speculation_target='latency' contradicts speculation='fixed'", "'adaptive'"],
    ),
    (EngineConfig.of, {"preemption_mode": "swap"}, ["preemption_mode='swap' contradicts swap_space=0", "in bytes"]),
    (
        partial(EngineConfig.of, preemption_mode="recompute", enable_prefix_caching=False),
        {"swap_space": 9},
        ["swap_space=9", "preemption_mode='recompute'", "enable_prefix_caching=False", "0, or another preemption mode"],
    ),
    (EngineConfig.of, {"num_kv_blocks": 3, "kv_cache_memory": 5}, ["num_kv_blocks=3", "kv_cache_memory=5", "at most one"]),
    (EngineConfig.of, {"num_kv_blocks": 3, "memory_utilization": 0.5}, ["=3", "memory_utilization=0.5", "at most one"]),
    (partial(NgramDrafter, 4), {"min_ngram": 0}, ["min_ngram=0", "an integer >= 1"]),
    (partial(NgramDrafter, 4), {"max_ngram": 2.5}, ["max_ngram=2.5", "an integer >= 1"]),
    (NgramDrafter, {"max_draft_tokens": 64}, ["max_draft_tokens=64", "an integer from 1 to 63"]),
    (partial(NgramDrafter, 4), {"min_ngram": 5}, ["min_ngram=5", "max_ngram=4"]),
    (REPLAY, {"acceptance": 1.1, "vocab_size": 10}, ["acceptance=1.1", "[0, 1]"]),
    (REPLAY, {"acceptance": 0.5, "vocab_size": 1}, ["vocab_size=1", "an integer >= 2"]),
    (FairPolicy, {"weights": {"a": 1, "b": 0}}, ["weights['b']=0", "(0, inf)"]),
    (FairPolicy, {"weights": {"": 1}}, ["user in weights=''", "a non-empty str"]),
    (FairPolicy, {"weights": ["a"]}, ["weights=['a']", "a dict of users to numbers, or None"]),
    (FairPolicy, {"output_weight": 0}, ["output_weight=0", "(0, inf)"]),
    (FairPolicy, {"prompt_weight": -1}, ["prompt_weight=-1", "[0, inf)"]),
    (PriorityPolicy, {"ageing_s": -1}, ["ageing_s=-1", "[0, inf)"]),
    (
        partial(as_terms, 2, LLM.generate),
        {"priority": ["batch", "urgent"]},
        ["prompt 1: priority='urgent'", "'critical', 'normal', 'batch'"],
    ),
    (partial(as_terms, 2, LLM.generate), {"user": ["a"] * 3}, ["user has 3 entries", "2 prompts"]),
    (register, {"name": "ngram", "factory": lambda _: NoDrafter()}, ["name='ngram'", "taken", "ngram"]),
]


@pytest.mark.parametrize(
    ("make", "options", "parts"),
    [
        (make, {name: value}, [f"{name}={value!r}", allowed])
        for make, table in (
            (SamplingParams, SAMPLING),
            (EngineConfig.of, ENGINE),
            (RequestTerms, TERMS),
            (partial(as_terms, 2, LLM.generate), TERMS),
        )
        for name, (allowed, values) in table.items()
        for value in values
    ]
    + OTHERS,
)
def test_options_that_are_not_allowed(make: Callable[..., Any], options: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        make(**options)


def test_an_option_that_there_is_not() -> None:
    said = r"no option 'blocksize' \(did you mean 'block_size'\?\), 'xyz'; allowed: model, draft_model, .*, block_size, .*, max_num"
    with pytest.raises(TypeError, match=said):
        LLM("demo", seed=3, blocksize=8, xyz=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no option 'draf_model' \(did you mean 'draft_model'\?\)$"):
        LLM("demo", draf_model="demo")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no option 'temprature' \(did you mean 'temperature'\?\)$"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no option 'best_of'; allowed: n, temperature, "):
        SamplingParams(best_of=5)  # type: ignore[call-arg]
    for make in (partial(LLM, "demo"), EngineConfig.of):  # its old name
        with pytest.raises(TypeError, match=r"no option 'use_speculative' \(did you mean 'speculation'\?\)$"):
            make(use_speculative=False)


HUGE: list[Any] = [
    "the " * 10**4, list(range(10**4)), np.zeros((90, 90)), 10**5000, {i: [i] * 99 for i in range(999)}, [["a" * 999] * 99] * 99
]  # fmt: skip


@pytest.mark.parametrize("value", HUGE, ids=lambda value: type(value).__name__)
def test_messages_are_short_and_one_line(llm: LLM, value: Any) -> None:
    tries: list[Callable[[], Any]] = [
        *(partial(SamplingParams, **{name: value}) for name in SAMPLING if name not in ("stop", "max_tokens", "n")),
        *(partial(EngineConfig.of, **{name: value}) for name in ("dtype", "device", "draft_tree", "block_size", "revision")),
        partial(LLM, "demo", speculative_config=value),
        *(partial(llm.generate, prompt) for prompt in (value, [value], [5, value], {"prompt": value}, {"a": value})),
        *(partial(llm.generate, "the", params) for params in (value, [value])),
        *(partial(llm.chat, messages) for messages in (value, [value], [{"role": "user", "content": [value, 5]}])),
    ]
    messages = []
    for each in tries:
        try:
            each()
        except ValueError as error:  # some take it
            messages.append(str(error))
    assert (
        len(messages) > len(tries) - 7
        and max(map(len, messages)) < 1000
        and "\n" not in "".join(messages)
        and not any("Exceeds" in each for each in messages)
    )


def changed(**members: Any) -> NoDrafter:
    drafter = NoDrafter()
    vars(drafter).update(members)
    return drafter


HALF = SimpleNamespace(name="half", propose=print)
OWN_CACHE = KVLayout((KVGroup(1, 1, 4),), torch.float32)
register("homeless", lambda _: changed(kv=OWN_CACHE))
register("nothing", lambda _: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tokenizer": 5}, ["tokenizer=5", "a non-empty str, a path or None"]),
        ({"model": 5}, ["model=5", "'demo'", "a folder", "hub id"]),
        ({"revision": "main"}, ["revision='main' contradicts model", "a folder", "None"]),
        ({"device": "tpu"}, ["device='tpu'", "'auto', 'cpu', 'cuda', 'cuda:N'"]),
        ({"device": "meta"}, ["device='meta'", "'auto', 'cpu', 'cuda', 'cuda:N'"]),
        ({"device": "cpu:3"}, ["device='cpu:3'", "'auto', 'cpu', 'cuda', 'cuda:N'"]),
        ({"device": "cuda:99"}, ["device='cuda:99'", "CUDA devices were found"]),
        ({"max_model_len": 257}, ["max_model_len=257", "at most 256"]),
        ({"kv_cache_memory": 100}, ["kv_cache_memory=100", "one block takes 8192 bytes"]),
        ({"kv_cache_memory": 10**15}, ["kv_cache_memory=1000000000000000 is more than the", "bytes that are free", "at most"]),
        ({"num_kv_blocks": 10**12}, ["num_kv_blocks=1000000000000 takes 8192000000000000 bytes", "are free: at most", "blocks"]),
        ({"tokenizer": "/no/such/folder"}, ["tokenizer='/no/such/folder'", "does not exist"]),
        ({"draft_model": "/no/such/folder"}, ["draft_model='/no/such/folder'", "'ngram'", "and None for no draft", "not exist"]),
        ({"draft_model": 5}, ["draft_model=5", "None, a name, a folder, a hub id, or a Drafter"]),
        ({"draft_model": "/no/such/folder", "speculation": "off"}, ["draft_model='/no/such/folder'", "not exist"]),
        ({"draft_model": HALF}, ["draft_model=", "or a Drafter, of which it lacks commit, kv, max_draft_tokens"]),
        ({"draft_model": changed(kv=OWN_CACHE)}, ["draft_model=", "or a CachingDrafter, of which it lacks attach, lookahead"]),
        ({"draft_model": NoDrafter}, ["draft_model=", "NoDrafter", "is not a drafter: allowed is an instance, not the class"]),
        ({"scheduling_policy": FairPolicy}, ["scheduling_policy=", "or an instance of a SchedulingPolicy, not the class"]),
        ({"scheduling_policy": HALF}, ["scheduling_policy=", "'fair', or", "of which it lacks add, displaceable, end, first"]),
        ({"draft_model": "homeless"}, ["draft_model='homeless', whose factory returned", "CachingDrafter"]),
        ({"draft_model": "nothing"}, ["draft_model='nothing', whose factory returned None, is not a drafter"]),
        ({"draft_model": changed(name="mistaken")}, ["'mistaken'.max_draft_tokens=0", "an integer >= 1"]),
        (
            {"draft_model": changed(name="unfinished", max_draft_tokens=1, model=None, runner=None, max_len=9)},
            ["'unfinished' has a model and a runner: allowed is a ModelDrafter, of which it lacks num_reviewable, review, shared_"],
        ),
        ({"draft_model": "ngram", "draft_sampling": "sampled"}, ["draft_sampling='sampled'", "'ngram'", "'auto' and 'greedy'"]),
        ({"draft_model": "ngram", "draft_tree": [-1, -1]}, ["draft_tree=", "'ngram'", "'auto' and 'chain'"]),
        ({"draft_model": NgramDrafter(3), "draft_tree": "dynamic"}, ["draft_tree='dynamic'", "'ngram'", "'auto' and 'chain'"]),
    ],
)
def test_options_that_the_model_and_the_machine_decide_on(zoo: Zoo, options: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        LLM(**{"model": zoo.path("llama")} | CPU | options)


@pytest.fixture(scope="module")
def llm(zoo: Zoo) -> LLM:
    llm = LLM(zoo.path("llama+text"), zoo.path("llama~"), num_kv_blocks=8, max_model_len=200, **CPU)
    refusing = "{% if m.content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
    llm.frontend.tokenizer.chat_template = "{% for m in messages %}" + refusing + "{{ m.content }}{% endfor %}"
    return llm


BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], list[object]]] = {
    "empty text": ("", {}, ["prompt='' has no tokens", "at least one"]),
    "empty list": ([], {"n": 3}, ["prompt=[] has no tokens", "at least one"]),
    "text and an empty list": ({"prompt": "the", "prompt_token_ids": []}, {}, ["prompt='the' has no tokens", "at least one"]),
    "too long": ([5] * 200, {}, ["200 tokens", "at most 199", "max_model_len=200"]),
    "token too large": ([5, 131], {}, ["token id 131", "0 to 130"]),
    "token negative": ([5, -1], {}, ["token id -1", "0 to 130"]),
    "token not whole": ([5, 1.5], {}, ["1.5", "not a token id", "list of int"]),
    "token a truth": ([5, True], {}, ["True", "not a token id", "list of int"]),
    "words in a list": (["the", "dog"], {}, ["'the'", "not a token id", "list of int"]),
    "an array of floats": (np.array([5.0, 6.0]), {}, ["5.0", "not a token id", "list of int"]),
    "a number": (5.5, {}, ["prompt=5.5", "a str or a list of int"]),
    "a dict of nothing": ({}, {}, ["prompt={}", "'prompt' or 'prompt_token_ids'"]),
    "a dict of more": (
        {"prompt": "the", "multi_modal_data": 5},
        {},
        ["prompt=", "there is no key 'multi_modal_data'", "allowed: prompt, prompt_token_ids"],
    ),
    "half a character": ("a\ud800", {}, ["'a\\ud800'", "surrogate", "UTF-8"]),
    "bytes": (b"the", {}, ["b'the'", "a str or a list of int"]),
    "a bytearray": (bytearray(b"the"), {}, ["prompt=", "bytearray", "a str or a list of int"]),
    "a memoryview": (memoryview(b"the"), {}, ["prompt=", "memory", "a str or a list of int"]),
    "never fits": ([5] * 120, {"n": 2}, ["max_tokens=16", "120 tokens", "at most 8 ", "128 tokens", "num_kv_blocks=8"]),
    "leaves no slot": ([5] * 128, {}, ["128 tokens", "at most 127 ", "num_kv_blocks=8"]),
    "stop token": ("the", {"stop_token_ids": [5, 131]}, ["stop_token_ids has token id 131", "0 to 130"]),
    "biased token": ("the", {"logit_bias": {131: 1}}, ["logit_bias has token id 131", "0 to 130"]),
    "allowed token": ("the", {"allowed_token_ids": [131]}, ["allowed_token_ids has token id 131", "0 to 130"]),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_one_bad_prompt_is_refused_and_the_others_keep_their_outputs(llm: LLM, name: str) -> None:
    prompt, options, parts = BAD_REQUESTS[name]
    good = ["the dog", [7, 8, 9]]
    params, bad_params = greedy(16, ignore_eos=True), greedy(16, **options)
    expected = llm.generate(good, params, use_tqdm=False)
    num_steps = llm.metrics().num_steps
    with raises(*parts):
        llm.generate([prompt], bad_params, use_tqdm=False)
    with raises(*parts):
        llm.stream(prompt, bad_params)
    assert llm.metrics().num_steps == num_steps
    with pytest.warns(UserWarning, match="prompt 1 was not run: .*" + re.escape(str(parts[0]))):
        first, refused, last = llm.generate([good[0], prompt, good[1]], [params, bad_params, params], use_tqdm=False)
    with pytest.warns(UserWarning, match="prompt 1 was not run: "):
        _, again = llm.generate([good[0], prompt], [replace(params, max_tokens=1), bad_params], use_tqdm=False)
    assert [first.outputs, last.outputs] == [output.outputs for output in expected]
    if isinstance(prompt, str | dict):
        assert (refused.prompt, refused.prompt_token_ids) == (prompt if isinstance(prompt, str) else prompt.get("prompt"), [])
    else:
        assert (refused.prompt, refused.prompt_token_ids) == (None, [] if isinstance(prompt, float) else list(prompt))
    assert refused.outputs == [CompletionOutput(i, "", [], finish_reason="error") for i in range(bad_params.n)]
    assert refused.finished and refused.metrics.num_emitted_tokens == 0 and refused.metrics.finished_time is not None
    assert len({output.request_id for output in (first, refused, last, again, *expected)}) == 6
    with raises(*parts):
        raise ValueError(refused.error)


NO_PROMPTS = "a str or a list of int, alone or in a dict as 'prompt' or 'prompt_token_ids', or a list of these"
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
BAD_MESSAGES: list[tuple[Any, list[str]]] = [
    ([5], ["messages has 5", "not a conversation"]),
    *((messages, ["messages=", "'the'", "a non-empty list of messages"]) for messages in ("the", {"role": "the"})),
    ([[{"role": "user"}]], ["messages[0]=", "has no content", "tool_calls"]),
    ([{"role": "user", "content": 5}], ["messages[0] has content 5", "a str or a list of text parts"]),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}], ["messages[0]", "'image_url'", "allowed: ", "text"]),
    *(
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": given}}]}], ["messages[0]", "tool call", "JSON of one"])
        for given in ("{", "[1]", "5", "null", [1], 5)
    ),
    ([{"role": "assistant", "tool_calls": 5}], ["messages[0]", "the tool call 5", "function"]),
    ([{"role": "user", "content": "a\ud800"}], ["messages=", "surrogate", "UTF-8"]),
    ([{"role": "user", "content": "refuse"}], ["messages=", "cannot be rendered by the chat template", "not this"]),
]
NO_PARAMS = "a SamplingParams, a list of them, or None"


@pytest.mark.parametrize(
    ("method", "arguments", "parts"),
    [
        *(
            ("generate", [prompts], ["prompts=", NO_PROMPTS])
            for prompts in (None, 5, {"a"}, b"abc", memoryview(b"abc"), iter(["a"]))
        ),
        ("generate", ["a", None, tqdm], ["use_tqdm=", "True or False"]),
        ("generate", [["a", "b"], [SamplingParams()] * 3], ["sampling_params", "3 entries", "2 prompts"]),
        *(("generate", ["a", params], ["sampling_params=", NO_PARAMS]) for params in (5, {"temperature": 0}, [5], "greedy")),
        *(("stream", ["a", params], ["sampling_params=", NO_PARAMS]) for params in (5, {"temperature": 0}, [5], "greedy")),
        *(("chat", [messages], ["messages"]) for messages in ([], "the dog", 5, [[]], [{"role": "user"}], [{"content": "a"}])),
        *(("chat", [messages], parts) for messages, parts in BAD_MESSAGES),
    ],
)
def test_arguments_of_another_kind(llm: LLM, method: str, arguments: list[Any], parts: list[str]) -> None:
    with raises(*parts):
        getattr(llm, method)(*arguments)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"chat_template": 5}, ["chat_template=5", "a non-empty str or None"]),
        ({"add_generation_prompt": "yes"}, ["add_generation_prompt='yes'", TRUTH]),
        ({"continue_final_message": 1}, ["continue_final_message=1", TRUTH]),
        ({"continue_final_message": True}, ["continue_final_message=True contradicts add_generation_prompt=True", "False"]),
        ({"tools": {"type": "function"}}, ["tools={'type': 'function'}", "a list of functions"]),
        ({"tools": ["f"]}, ["tools=['f']", "a list of functions"]),
        ({"chat_template_kwargs": ["a"]}, ["chat_template_kwargs=['a']", "a dict"]),
        ({"chat_template_kwargs": {"tokenize": False}}, ["chat_template_kwargs has tokenize", "besides"]),
        ({"chat_template_kwargs": {"tools": []}}, ["chat_template_kwargs has tools", "besides"]),
        *(
            ({"chat_template_kwargs": {name: True}}, [f"chat_template_kwargs has {name}", "besides"])
            for name in ("tokenizer_kwargs", "sanitize_control_tokens", "return_assistant_tokens_mask")
        ),
    ],
)
def test_arguments_of_chat(llm: LLM, options: dict[str, Any], parts: list[str]) -> None:
    with raises(*parts):
        llm.chat([{"role": "user", "content": "a"}], **options)


def test_requests_are_aborted_by_the_text_of_their_ids(llm: LLM) -> None:
    for request_id in (0, None, ["a", 0], b"a"):
        with raises(f"request_id={request_id}", "a str"):
            llm.abort(request_id)  # type: ignore[arg-type]


def test_policies_that_do_not_look_at_classes_refuse_them_as_objects_too() -> None:
    llm = LLM("demo", scheduling_policy=FairPolicy({"team": 2.0}))
    with raises("priority='critical'", "scheduling_policy='priority'", "with 'fair', 'normal' is allowed"):
        llm.generate("a", priority="critical")


def test_ids_are_text_and_different(llm: LLM) -> None:
    for request_id, allowed in [
        (5, "a non-empty str"),
        ("", "a non-empty str"),
        ("17", "numbers, and such as 3-1, are the ids of requests that are"),
        ("17-2", "numbers, and such as 3-1"),
    ]:
        with raises(f"request_id={request_id!r}", allowed):
            llm.generate("a", request_id=request_id)  # type: ignore[arg-type]
    for request_ids in ("a", ["a", "a"]):
        with raises(f"request_id={request_ids!r}", "names several prompts alike", "different ids"):
            llm.generate(["a", "b"], request_id=request_ids)


@pytest.mark.parametrize(("method", "prompt"), [("generate", "a"), ("stream", "a"), ("chat", [{"role": "user", "content": "a"}])])
def test_terms_that_are_not_allowed(llm: LLM, method: str, prompt: Any) -> None:
    with raises("timeout_s=-1", "(0, inf)"):
        getattr(llm, method)(prompt, timeout_s=-1)
    with raises("priority has 2 entries for 1 prompts"):
        getattr(llm, method)(prompt, priority=["batch", "batch"])
    for name, value, default in (("priority", "batch", "'normal'"), ("deadline_s", 2.5, "None")):
        with raises(f"{name}={value!r} is for scheduling_policy='priority'", f"with 'fcfs', {default} is allowed"):
            getattr(llm, method)(prompt, **{name: value})
    own = r"chat_template, .*, request_id" if method == "chat" else "sampling_params, .*request_id"
    with pytest.raises(TypeError, match=f"no option 'xyz'; allowed: .*{own}, priority"):
        getattr(llm, method)(prompt, xyz=5)
    with pytest.raises(TypeError, match=r"no option 'timeout' \(did you mean 'timeout_s'\?\)"):
        getattr(llm, method)(prompt, timeout=5)
    with pytest.raises(TypeError, match=r"max_tokens=..., top_k=... .*: give SamplingParams\(max_tokens=..., top_k=...\)"):
        getattr(llm, method)(prompt, max_tokens=4, top_k=2, user="me")


def test_text_needs_a_tokenizer(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), num_kv_blocks=8, **CPU)
    with raises("prompt='the'", "no tokenizer", "token ids"):
        llm.generate("the")
    with raises("stop='a'", "needs a tokenizer", "None"):
        llm.generate([[5]], SamplingParams(stop="a"))
    with raises("bad_words=['a']", "needs a tokenizer", "None"):
        llm.generate([[5]], SamplingParams(bad_words=["a"]))
    with raises("no tokenizer", "tokenizer=..."):
        llm.get_tokenizer()
    for each in (llm, LLM(zoo.path("llama+text"), num_kv_blocks=8, **CPU)):
        with raises("messages need a", "and the model has none", "a prompt is allowed"):
            each.chat([{"role": "user", "content": "a"}])
    [output] = llm.generate([[5, 6]], greedy(3, ignore_eos=True, logprobs=0), use_tqdm=False)
    [completion] = output.outputs
    assert completion.text == "" and len(completion.token_ids) == 3 and completion.logprobs is not None
    assert all(logprob.decoded_token is None for entry in completion.logprobs for logprob in entry.values())


def test_tokens_in_another_order_are_another_vocabulary(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    for name, order in (("target", letters), ("draft", letters[::-1])):
        make_model(tmp_path / name)
        make_letter_tokenizer(order, "bytes").save_pretrained(tmp_path / name)
    llm = LLM(str(tmp_path / "target"), str(tmp_path / "draft"), **CPU)
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftModelDrafter) and drafter.vocabulary is not None


def test_a_draft_of_another_vocabulary(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("draft_model=", "small_vocab", "another vocabulary", "120 tokens", "131", "the draft and the target has none"):
        LLM(zoo.path("llama"), zoo.path("small_vocab"), **CPU)
    make_model(tmp_path)
    make_letter_tokenizer("abcdäöüß", "bytes").save_pretrained(tmp_path)
    figures = "4 of the target's tokens", "3.1%", "at least 5%", "8 tokens", "llama+text, 131 tokens"
    with monkeypatch.context() as without_weights:
        without_weights.setattr("titan.engine.load_model", None)
        with raises("draft_model=", "another vocabulary", *figures):
            LLM(zoo.path("llama+text"), str(tmp_path), **CPU)
        with raises("draft_tree=", "needs a draft model"):
            LLM(zoo.path("llama+text"), "ngram", draft_tree="dynamic", **CPU)
        with raises("draft_sampling=", "needs a draft model", "a factory that register() is given may take it"):
            LLM(zoo.path("llama+text"), changed(), draft_sampling="sampled", **CPU)
        with raises("max_model_len=", "at most"):
            LLM(zoo.path("llama+text"), max_model_len=10**6, **CPU)
    llm = LLM(zoo.path("llama+text"), zoo.path("llama+text"), **CPU)
    with raises("draft_model=", "another vocabulary", *figures):
        llm.swap_draft(str(tmp_path))
    assert llm.metrics().draft == zoo.path("llama+text") and llm.metrics().draft_vocabulary == 1


def test_a_prompt_that_leaves_no_room_for_min_tokens(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama+text"), max_model_len=20, num_kv_blocks=8, **CPU)
    with raises("min_tokens=6", "15 tokens", "room for 5", "max_model_len=20"):
        llm.generate([[5] * 15], greedy(9, min_tokens=6), use_tqdm=False)
    [output] = llm.generate([[5] * 15], greedy(9, min_tokens=5), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_swapping_the_draft_of_an_engine_that_must_not_speculate(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), zoo.path("llama"), num_kv_blocks=8, **CPU | {"speculation": "off"})
    assert llm.metrics().draft == "none" and "draft" not in llm.engine.kv.tensors
    with raises("swap_draft()", "speculation='off'", "'adaptive' and 'fixed'"):
        llm.swap_draft("ngram")


@pytest.mark.parametrize("prefill_chunk_size", [8, 16])
def test_logits_that_are_not_finite_abort_the_request_that_met_them(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, prefill_chunk_size: int
) -> None:
    """The embedding of one token is NaN; others begin with the tokens before it, whose KV is NaN too if they were in its chunk."""

    def load(*args: Any, **options: Any) -> Decoder:
        model = load_model(*args, **options)
        model.embedding[unused] = torch.nan
        return model

    good = random_prompts(3, seed=9, max_len=30)
    expected = [zoo.greedy("llama", prompt, 10, ignore_eos=True) for prompt in good]
    unused = min(set(range(3, 131)) - {token for tokens in (*good, *expected) for token in tokens})
    for room in ("titan.engine", "titan.draft.registry"):
        monkeypatch.setattr(f"{room}.load_model", load)
    llm = LLM(
        zoo.path("llama"),
        zoo.path("llama"),
        num_kv_blocks=40,
        block_size=8,
        prefill_chunk_size=prefill_chunk_size,
        max_batch_size=2,
        **CPU,
    )
    bad = [*good[1][:9], unused, *good[1][9:]]
    outputs = llm.generate([good[0], bad, *good[1:], bad], greedy(10, ignore_eos=True), use_tqdm=False)
    assert [outputs.pop(i).error for i in (4, 1)] == ["the target's logits are not finite"] * 2
    assert [output.outputs[0].token_ids for output in outputs] == expected


UNSAMPLED: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": 1e-40}, "repetition_penalty=1e-40: no token can be sampled, for the largest logit becomes inf"),
    ({"min_tokens": 2, "stop_token_ids": list(range(131))}, "min_tokens=2 with 131 stop tokens: .* becomes -inf"),
    ({"logits_processors": [lambda _, logits: logits * nan]}, "logits_processors: .* becomes nan"),
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_options_that_leave_nothing_to_sample_are_named_and_cost_no_other(llm: LLM, temperature: float) -> None:
    good = SamplingParams(temperature=temperature, seed=3, ignore_eos=True, max_tokens=5)
    [expected] = llm.generate("the dog", good, use_tqdm=False)
    bad = [replace(good, **options) for options, _ in UNSAMPLED]
    *outputs, beside = llm.generate(["the dog"] * 4, [*bad, good], use_tqdm=False)
    assert beside.outputs == expected.outputs
    for output, (_, reason) in zip(outputs, UNSAMPLED, strict=True):
        assert output.outputs[0].finish_reason == "error" and re.match(f"{reason}; allowed is what keeps it finite", output.error)


def test_a_name_of_a_drafter_stands_for_a_function() -> None:
    for factory in (5, NoDrafter, lambda: NoDrafter()):
        with raises(f"factory={factory}", "must be a function of a DraftContext, such as lambda context: MyDrafter()"):
            register("five", factory)  # type: ignore[arg-type]
