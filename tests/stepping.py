"""Driving an engine by hand: requests, steps, and looking into its KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from text_tools import DigitTokenizer
from torch import Tensor
from zoo import VOCAB_SIZE

from titan.core.kv_tensor import KVTensor
from titan.core.limits import MAX_NODES
from titan.core.options import EngineConfig
from titan.core.outputs import RequestMetrics
from titan.core.proposals import TreeLimits, checked_trees
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.terms import RequestTerms
from titan.core.trees import DraftTree, DraftTrees
from titan.draft.registry import DraftSpec
from titan.engine import Engine
from titan.frontend.input_processor import InputProcessor
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend
from titan.models.files import ModelFiles
from titan.models.loader import open_model
from titan.models.tokenizer import choose_tokenizer

SCARCE: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk_size": 7, "block_size": 8, "num_kv_blocks": 14}
AMPLE: dict[str, Any] = {"max_batch_size": 32, "block_size": 16, "num_kv_blocks": 400}


# a proposal of the most likely tokens, so that a seed gives the same tokens with and without speculation
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "speculation": "fixed",  # what "adaptive" drafts depends on times
    "draft_tree": "chain",
    "draft_weight_bits": None,  # what is drafted is what transformers says of the same model
    "draft_sampling": "greedy",
    "warm_up": False,
}


def make_engine(model: str, draft: DraftSpec = None, *, backend: Backend | None = None, **options: Any) -> Engine:
    config = EngineConfig.of(**(DEFAULTS | options))
    checkpoint = open_model(ModelFiles(model), config.model.model_impl)
    return Engine(config, checkpoint, draft, choose_tokenizer(checkpoint.files, None), backend)


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def make_request(
    prompt_token_ids: Iterable[int] = (1,),
    params: SamplingParams | None = None,
    output_token_ids: Iterable[int] = (),
    **fields: Any,
) -> Request:
    """A request that no engine has made, with what it has emitted so far."""
    defaults: dict[str, Any] = {"request_id": "r", "prompt": None, "seed": 0, "max_tokens": 1000, "stop_token_ids": frozenset()}
    defaults |= {"metrics": RequestMetrics(0.0), "detokenizer": None}
    request = Request(prompt_token_ids=list(prompt_token_ids), params=params or SamplingParams(), **defaults | fields)
    request.token_ids += output_token_ids
    return request


def submit(
    engine: Engine, prompts: Iterable[Sequence[int]], params: Iterable[SamplingParams], terms: Sequence[RequestTerms] = ()
) -> list[Request]:
    inputs = InputProcessor(engine, DigitTokenizer())
    requests = [
        inputs.make_request(prompt, each, terms[i] if terms else RequestTerms())
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]
    for request in requests:
        engine.scheduler.add(request)
    return requests


def check_blocks(engine: Engine) -> None:
    engine.kv.check((*engine.scheduler.running, *engine.scheduler.waiting))


def run_all(
    engine: Engine,
    prompts: Iterable[Sequence[int]],
    params: Iterable[SamplingParams],
    *,
    before_step: Callable[[int], None] = lambda step: None,
    terms: Sequence[RequestTerms] = (),
) -> list[list[int]]:
    """Output tokens of each prompt."""
    requests = submit(engine, prompts, params, terms)
    drain(engine, before_step)
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.output_token_ids for request in requests]


def drain(engine: Engine, before_step: Callable[[int], None] = lambda step: None) -> None:
    """Run all steps; the block pool is checked after every one, and no block is left in use."""
    step = 0
    while engine.scheduler.has_unfinished:
        before_step(step)
        engine.step()
        check_blocks(engine)
        step += 1
        assert step < 10_000, "the engine does not get on"
    for pool in (engine.kv.pool, engine.kv.swap_space.pool):
        assert pool.num_free == pool.num_blocks


HOST = TorchBackend(torch.device("cpu"))


def host_trees(trees: Sequence[DraftTree]) -> DraftTrees:
    return trees_on(HOST, trees)


def trees_on(backend: Backend, trees: Sequence[DraftTree], vocab_size: int = VOCAB_SIZE) -> DraftTrees:
    """Trees as the rows of a plan, on a device."""
    most = [MAX_NODES] * len(trees)
    limits, options = TreeLimits(most, [True] * len(trees), most), {"upload": backend.upload, "device": backend.device}
    return checked_trees(trees, limits, drafter="test", vocab_size=vocab_size, **options)


def by_slot(kv: KVTensor) -> Tensor:
    """A copy of a cache of one group, [num_layers, 2, num_kv_heads, num_blocks * block_size, head_dim]."""
    [group] = kv.groups
    return slots_in_order(group)


def slots_in_order(group: Tensor) -> Tensor:
    """[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim] -> [num_layers, 2, num_kv_heads, slots, head_dim]."""
    return group.movedim(1, 3).flatten(3, 4)


def slots_of(engine: Engine, request: Request) -> Tensor:
    """The physical slots of a request's table, int64 [blocks * block_size]."""
    block_size = engine.kv.block_size
    block_ids = torch.tensor(request.block_ids, dtype=torch.int64)
    return (block_ids[:, None] * block_size + torch.arange(block_size)).flatten()
