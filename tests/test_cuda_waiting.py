"""What a step does on the device between two looks at its results: it reads nothing back, and copies nothing there that waits.

The device is PyTorch's "meta", from which nothing can be read, since nothing is there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from stepping import make_request, submit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import Zoo

from titan.bench.gpu.interpreted import InterpretedBackend, capture_in_name
from titan.core.options import EngineConfig
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.policy import MAX_CHAIN_NODES
from titan.engine import Engine
from titan.kernels.interfaces import PassCounts, Verified
from titan.kernels.triton.tree_walk import _walk_kernel
from titan.models.config import DecoderConfig
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles
from titan.models.loader import open_model
from titan.verify.logprobs import emitted_logprobs
from titan.verify.transforms import TransformedRows, transform_logits

META = torch.device("meta")
VOCAB_SIZE = 96

NUM_COLUMNS = 6  # of trees on the device, the last that are fetched


class Uploads(TorchDispatchMode):
    """Counts the copies to the device; refuses those that wait, and operations that read the host's memory besides."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, operations that are made of others come as they are
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_mixed = {"cpu", "meta"} <= {each.device.type for each in tensors if each.dim()}
        if func is torch.ops.aten._to_copy.default and tensors[0].is_cpu and kwargs.get("device") == META:
            assert kwargs.get("non_blocking"), "a copy that waits for the device"
            self.count += 1
        elif func is torch.ops.aten.copy_.default and tensors[0].device == META and tensors[1].is_cpu:
            assert args[2:] == (True,), "a copy that waits for the device"
            self.count += 1
        else:
            assert not is_mixed, f"{func} reads the host's memory"
        return func(*args, **kwargs)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    """While a test runs; memory of the host counts as pinned."""
    make = torch.tensor

    def tensor(*args: Any, device: torch.device | None = None, **options: Any) -> Tensor:
        assert device != META, "torch.tensor copies from ordinary memory"
        return make(*args, device=device, **options)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    with Uploads() as mode:
        yield mode


class Device(InterpretedBackend):
    """A device on which kernels do nothing; a look at results finds what is made up here.

    Every tree that is not empty is a star, and its second node is accepted, so that KV is moved in both caches.
    """

    def __init__(self) -> None:
        super().__init__(lambda: capture_in_name, META)
        self.num_looks = 0
        self._verify = self.trees.verify
        self.trees.verify = self._noting_sizes  # type: ignore[method-assign]

    def free_memory(self) -> int:
        return 1 << 40

    def _noting_sizes(self, logits: Tensor, trees: DraftTrees, rows: NDArray[np.int64], sampling: SamplingRows) -> Verified:
        self._has_second = trees.counts[rows] > 1
        return self._verify(logits, trees, rows, sampling)

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        assert all(tensor.device == META for tensor in tensors)
        self.num_looks += 1
        arrays: list[NDArray[Any]] = [np.ones(tensor.shape, tensor.new_empty(0, device="cpu").numpy().dtype) for tensor in tensors]
        if len(arrays) >= NUM_COLUMNS:
            _, parents, *_, draft_slots = arrays[-NUM_COLUMNS:]
            parents[:], draft_slots[:] = -1, np.arange(len(draft_slots)) % 2
        if len(arrays) != NUM_COLUMNS and arrays[0].ndim == 2:  # not of a review
            paths = arrays[0]
            paths[:], paths[:, 0] = -1, np.where(self._has_second, 1, -1)
        return arrays


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr("titan.kernels.triton.tools.is_launchable", lambda device: True)
    monkeypatch.setattr(type(_walk_kernel), "run", lambda *_, **__: None)
    return Device()


def test_what_is_forbidden_here_is_found(uploads: Uploads) -> None:
    x = torch.empty(3, 4, device=META)
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode(), pytest.raises(AssertionError, match="waits"):
            torch.from_numpy(np.arange(3)).to(META)
        with mode(), pytest.raises(AssertionError, match="waits"):
            x[0].copy_(torch.ones(4))
    with pytest.raises(AssertionError, match=r"torch\.tensor"):
        torch.tensor([1], device=META)
    with pytest.raises(AssertionError, match="reads the host's memory"):
        x[torch.from_numpy(np.arange(2))]
    for read in (x.tolist, x.cpu, x.any().item, lambda: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()


def test_transforms_of_many_requests_take_three_copies(device: Device, uploads: Uploads) -> None:
    """One of the biases, one of what is forbidden, one of the penalties; however many requests there are."""
    options: list[dict[str, Any]] = [
        {"logit_bias": {3: 1.0, 4: -100.0}, "presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: 2.0}},
        {"frequency_penalty": 0.1, "repetition_penalty": 0.9},
    ]
    requests = [
        TransformedRows(SamplingParams(**each), [1, 2] + [3] * i, np.full(i, 3), np.array([1, 2]), {2 * i: [], 2 * i + 1: [4]})
        for i, each in enumerate(options)
    ]
    logits = torch.empty(8, VOCAB_SIZE, dtype=torch.bfloat16, device=META)
    result = transform_logits(logits, requests, {0: {7, 8}, 3: {7}}, device.upload)
    assert result.logits.device == META and result.errors == {} and uploads.count == 3


def test_logprobs_take_one_copy_there_and_one_back(device: Device, uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []

    def zeros(tensor: Tensor) -> Any:
        read.append(tensor)
        return np.zeros(tensor.shape).tolist()

    monkeypatch.setattr(Tensor, "tolist", zeros)
    params = [SamplingParams(logprobs=count) for count in (2, None, 0, 20)]
    requests = [make_request(params=each) for each in params]
    logits = torch.empty(7, VOCAB_SIZE, dtype=torch.bfloat16, device=META)
    start_loc = np.array([0, 3, 4, 6, 7])
    paths, token_ids = [[0, 1], [], [0], []], [[5, 6, 7], [1], [2, 3], [4]]
    result = emitted_logprobs(requests, start_loc, paths, token_ids, logits, device.upload)
    assert sorted(result) == [0, 2, 3] and [len(each) for each in result.values()] == [3, 2, 1]
    assert uploads.count == 1 and [each.shape for each in read] == [(6, 2 + 2 * 20)]


def one_layer_of(zoo: Zoo, name: str) -> DecoderConfig:
    """As all layers launch the same."""
    config = open_model(ModelFiles(zoo.path(name))).config
    return replace(config, layers=config.layers[:1], ropes=config.ropes[:1])


def make_meta_engine(
    zoo: Zoo, device: Device, name: str = "llama", vocab_size: int = VOCAB_SIZE, draft_vocab_size: int | None = None, **options: Any
) -> Engine:
    """A target and a draft without weights."""
    sizes = vocab_size, draft_vocab_size or vocab_size
    configs = [replace(one_layer_of(zoo, each), vocab_size=size) for each, size in zip((name, f"{name}~"), sizes, strict=True)]
    dtypes = torch.bfloat16, options.pop("draft_dtype", torch.bfloat16)
    target, draft = (Decoder(config, dtype=dtype, backend=device) for config, dtype in zip(configs, dtypes, strict=True))
    target.prepare()
    draft.prepare(weight_bits=options.pop("draft_weight_bits", None))
    engine = Engine(
        EngineConfig.of(**{"prefill_chunk_size": 16, "num_kv_blocks": 60, "speculation": "fixed"} | options), target, backend=device
    )
    if engine.config.speculation.speculation != "off":
        engine.swap_draft(DraftModelDrafter("draft", draft, engine.draft_context()))
    return engine


def test_an_engine_that_is_done_with_keeps_no_stream(device: Device, zoo: Zoo) -> None:
    """Nor that of its draft, though no cycle is collected."""
    captures = list[ref[Any]]()

    def make_capture() -> Any:
        captures.append(ref(capture := partial(capture_in_name)))
        return capture

    device._capture = make_capture
    gc.disable()
    try:
        engine = make_meta_engine(zoo, device, warm_up=False)
        assert [capture() is None for capture in captures] == [False, False]
        del engine
        assert [capture() is None for capture in captures] == [True, True]
    finally:
        gc.enable()


LOOKING_BACK: dict[str, Any] = {"min_tokens": 30, "stop_token_ids": [9]}
UNDRAFTED: dict[str, Any] = {"repetition_penalty": 1.1, "use_speculative": False}


@pytest.mark.long_where("dynamic-greedy-0.8-others2")
@pytest.mark.parametrize(
    ("draft_tree", "draft_sampling", "temperature", "others", "max_copies"),
    [
        ("chain", "greedy", 0.0, {}, 10),
        ("auto", "greedy", 0.0, {}, 10),
        ("dynamic", "greedy", 0.8, {}, 20),
        ([-1, -1, 0, 0, 1, 2], "greedy", 0.0, {}, 14),
        ([-1, -1, 0, 0, 1, 2], "sampled", 0.8, {}, 26),
        ("chain", "auto", 0.8, {}, 10),
        ("auto", "sampled", 0.8, {"repetition_penalty": 1.1}, 15),
        ("auto", "sampled", 0.8, UNDRAFTED, 13),
        ("chain", "greedy", 0.0, LOOKING_BACK | UNDRAFTED, 12),
        ("dynamic", "greedy", 0.8, LOOKING_BACK, 21),
    ],
)
def test_a_step_looks_at_the_device_once(
    draft_tree: str | list[int],
    draft_sampling: str,
    temperature: float,
    others: dict[str, Any],
    max_copies: int,
    device: Device,
    zoo: Zoo,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Drafting, the target's pass, acceptance, the commit of both caches; beside prefill chunks and a greedy, smaller tree.

    Copies to the device wait for nothing, but each takes the host's time.
    """
    options = {"draft_tree": draft_tree, "draft_sampling": draft_sampling, "max_num_batched_tokens": 200, "max_batch_size": 4}
    engine = make_meta_engine(zoo, device, max_draft_tokens=16 if draft_tree == "dynamic" else 6, warm_up=False, **options)
    hot, cold = ({"temperature": each, "max_tokens": 30, "ignore_eos": True} for each in (temperature, 0.0))
    params = [SamplingParams(**hot), SamplingParams(**hot, **others), SamplingParams(**cold, max_draft_tokens=4)]
    requests = submit(engine, [[5] * 40, [6] * 3, [7] * 5], params)
    moves: list[int] = []
    move_paths = device.cache.move_paths
    monkeypatch.setattr(device.cache, "move_paths", lambda *args: (moves.append(device.num_looks), move_paths(*args)))
    uploads = request.getfixturevalue("uploads")
    num_steps = 6
    for _ in range(num_steps):
        num_before = uploads.count
        engine.step()
        assert uploads.count - num_before <= max_copies
    drafted = [each for each in requests if each.params.use_speculative]
    # options that look at drafted prefixes need the trees before, where there is one
    num_looks = 2 if others and len(drafted) == len(requests) else 1
    assert device.num_looks == num_steps * num_looks
    assert all(each.metrics.num_accepted_tokens > 2 for each in drafted)
    assert num_steps < len(moves) <= 2 * num_steps, "the paths of all requests are moved at once, in both caches"
    assert engine.passes.num_replayed > num_steps


def test_prompts_of_greedy_requests_are_replayed_with_trees_that_branch_later(device: Device, zoo: Zoo) -> None:
    engine = make_meta_engine(zoo, device, draft_tree="auto", max_draft_tokens=6, max_batch_size=2)
    num_eager, params = list[int](), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    requests = submit(engine, [[5] * 40, [6] * 9], [params] * 2)
    while engine.scheduler.has_unfinished:
        engine.step()
        num_eager.append(engine.passes.num_eager)
    assert set(num_eager) == {0} and all(each.metrics.num_accepted_tokens for each in requests)
    counters = engine.counters
    assert sum(counters.proposed_per_depth) > MAX_CHAIN_NODES * counters.num_sequence_steps, "that of chains is 4"


class Kernels:
    """Receives launches; tells them apart as far as Triton compiles them apart."""

    def __init__(self) -> None:
        self.found: set[Any] = set()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found = vars(kernel)  # the interpreter's functions keep what was given to @triton.jit as it was given
        free, kinds = found.get("kwargs", found).get("do_not_specialize") or (), list[Any]()
        for name, each in zip(kernel.arg_names, args, strict=False):
            is_number = isinstance(each, int) and name not in free
            if isinstance(each, Tensor):
                kinds.append((each.dtype, each.data_ptr() % 16 == 0))
            else:
                kinds.append((each == 1, each % 16 == 0) if is_number else type(each))
        self.found.add((kernel.fn.__name__, *kinds, *sorted(options.items())))


SERVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"draft_tree": "chain", "draft_sampling": "greedy"}),
    ("llama", {"draft_tree": "auto", "draft_sampling": "auto"}),
    ("llama", {"draft_tree": "dynamic", "draft_sampling": "sampled"}),
    (  # passes larger than any that are recorded
        "llama",
        {
            "draft_tree": "dynamic",
            "draft_sampling": "greedy",
            "max_draft_tokens": 32,
            "prefill_chunk_size": 40,
            "max_batch_size": 12,
        },
    ),
    ("llama", {"draft_tree": [-1, -1, 0, 0, 1], "max_draft_tokens": 5, "draft_dtype": torch.float16}),
    *(("llama", {"draft_tree": "dynamic", "draft_vocab_size": size}) for size in (VOCAB_SIZE - 5, VOCAB_SIZE + 3)),
    ("llama", {"draft_tree": "dynamic", "draft_sampling": "auto", "vocab_size": 91}),  # rows begin at any address
    ("llama", {"speculation": "off"}),
    ("qwen3", {"draft_tree": "chain", "draft_sampling": "greedy"}),  # with as many KV heads as query heads
    ("llama", {"draft_tree": "dynamic", "draft_vocab_size": 91, "draft_weight_bits": 8, "max_batch_size": 8}),  # a head of its own
    ("llama", {"draft_tree": "dynamic", "max_batch_size": 1}),
    ("llama", {"draft_tree": "chain", "draft_sampling": "sampled"}),
    ("llama", {"draft_tree": "chain", "draft_sampling": "sampled", "max_draft_tokens": 1, "draft_vocab_size": VOCAB_SIZE - 5}),
    ("llama", {"draft_tree": "auto", "draft_sampling": "sampled", "max_draft_tokens": 8}),  # with siblings along chains
]


@pytest.mark.long_where(
    *(f"options{i}-chunked_tokens1" for i in (*range(1, 8), *range(10, 15))),
    *(f"options{i}-chunked_tokens0" for i in (2, 3, 5, 7, 12)),
)
@pytest.mark.parametrize("chunked_tokens", [(16, 32), ()])
@pytest.mark.parametrize(("model", "options"), SERVED)
def test_nothing_is_compiled_or_recorded_while_an_engine_serves(
    model: str,
    options: dict[str, Any],
    chunked_tokens: Sequence[int],
    device: Device,
    zoo: Zoo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches that grow and shrink, sampled and greedy, with chunks, replayed or not, and without; none before them is counted.

    One request drafts nothing, and is reviewed.
    """
    kernels, captures = Kernels(), list[object]()
    num_requests = max(8, options.get("max_batch_size", 0))
    monkeypatch.setattr(type(_walk_kernel), "run", lambda kernel, *args, **options: kernels.run(kernel, *args, **options))
    monkeypatch.setattr("titan.kernels.triton.cuda_graphs.CHUNKED_TOKENS", chunked_tokens)
    device._capture = lambda: lambda passes: (captures.append(passes), capture_in_name(passes))[1]
    engine = make_meta_engine(zoo, device, model, **({"max_batch_size": 6, "max_draft_tokens": 6} | options))
    warm, num_captures = set(kernels.found), len(captures)
    assert engine.passes == PassCounts() and not engine.runner.kv.groups[0].is_inference()
    kernels.found.clear()
    params = [
        SamplingParams(temperature=0.7 * (i % 3), top_k=5 * (i % 2), max_tokens=4 + i // 2, ignore_eos=True)
        for i in range(num_requests)
    ]
    params[-1] = replace(params[-1], presence_penalty=0.5)  # the longest: with it, all logits are float32
    params[-2] = replace(params[-2], use_speculative=False)
    *_, reviewed, _ = submit(engine, [[5] * (1 + 5 * i) for i in range(num_requests)], params)
    while engine.scheduler.has_unfinished:
        engine.step()
        if reviewed.num_output_tokens == 3 and isinstance(engine.drafter, DraftModelDrafter):
            assert engine.drafter.review([reviewed]).num_rows > 3
    assert kernels.found <= warm and len(kernels.found) > (3 if options.get("speculation") == "off" else 9)
    assert len(captures) == num_captures and min(engine.passes.num_replayed, engine.passes.num_eager) > 0
