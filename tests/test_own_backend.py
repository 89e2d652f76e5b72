"""Seams of the kernels: a back end of which no more is known than the protocols say, and a model with a trait of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from back_ends import make_back_end
from stepping import greedy, make_engine, run_all
from tiny_models import reference_logits
from torch import Tensor
from zoo import Zoo, random_prompts

from titan.bench.loading import load_decoder
from titan.core.kv_tensor import KVTensor
from titan.core.options import EngineConfig
from titan.core.random import Purpose
from titan.core.sampling_params import SamplingParams
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.runner import CompiledRunner
from titan.kernels.interfaces import Backend, CacheOps, KVMemory, LayerOps, PassCounts, PassLimits, Runner, SamplingOps, TreeOps
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.torch.layers import TorchOps
from titan.kernels.torch.runner import TorchRunner
from titan.kernels.torch.trees import Outcome, RuledTrees, TreeToVerify, lossless
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.runner import TritonRunner
from titan.models.decoder import Decoder

PROMPTS = random_prompts(6, seed=12, max_len=30)


class Only:
    """What a protocol names of an object, and nothing else; what is asked for is counted."""

    def __init__(self, protocol: type, whole: object, calls: Counter[str]) -> None:
        self.calls = calls
        self._protocol, self._whole = protocol, whole

    def __getattr__(self, name: str) -> Any:
        if name not in {*vars(self._protocol), *self._protocol.__annotations__}:
            raise AttributeError(f"{name} is not in {self._protocol.__name__}")
        self.calls[name] += 1
        return getattr(self._whole, name)


class OwnBackend(Only):
    """PyTorch's operations, of which engine, growth and models see what the protocols name."""

    KV_MEMORY = 2**19

    def __init__(self) -> None:
        whole = TorchBackend(torch.device("cpu"))
        super().__init__(Backend, whole, Counter())
        self.cache = Only(CacheOps, whole.cache, self.calls)
        self.sampling = Only(SamplingOps, whole.sampling, self.calls)
        self.trees = Only(TreeOps, whole.trees, self.calls)

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> Any:
        return Only(LayerOps, TorchOps(self.device), self.calls)

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Any:
        self.calls["prepare"] += 1
        return Only(Runner, TorchRunner(self, model, kv), self.calls)  # type: ignore[arg-type]

    def memory_for_kv(self, run_largest_passes: Callable[[], None]) -> KVMemory:
        run_largest_passes()
        return KVMemory(2**40, 2**40, self.KV_MEMORY)


GENERATIONS: dict[str, dict[str, Any]] = {
    "auto": {"draft_tree": "auto", "max_draft_tokens": 12},
    "dynamic": {"draft_tree": "dynamic"},
    "sampled": {"draft_tree": [-1, -1, 0, 0, 1, 2], "draft_sampling": "sampled"},
}
PARAMS = [
    greedy(12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=2, max_tokens=12, ignore_eos=True),
    greedy(12, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
    SamplingParams(temperature=0.7, seed=3, max_tokens=12, use_speculative=False),
    greedy(10, ignore_eos=True, min_tokens=4),
]


@pytest.mark.parametrize("name", GENERATIONS)
def test_an_engine_runs_on_a_back_end_of_ones_own(zoo: Zoo, name: str) -> None:
    """The same tokens as in C++, of greedy requests and of those that sample; the pool is sized by the back end."""
    own: Any = OwnBackend()
    target, draft, options = zoo.path("llama"), zoo.path("llama~"), GENERATIONS[name]
    engine = make_engine(target, backend=own, max_model_len=64, **options)
    engine.swap_draft(draft)
    outputs = run_all(engine, PROMPTS, PARAMS)
    assert outputs == run_all(make_engine(target, draft, backend=make_back_end("cpu"), **options), PROMPTS, PARAMS)
    assert own.calls["prepare"] == 3, "of the target and of the draft, and to see what the largest pass takes"
    assert {"active", "check_limits", "clear_blocks", "download", "select", "verify", "grow"} <= own.calls.keys()
    assert own.calls["sample_children"] > 0 or name != "sampled"
    assert own.calls["move_paths"] > 0 or name == "auto"
    bytes_per_block = 16 * 2 * 2 * 2 * 16 * 4
    assert engine.kv.num_blocks == OwnBackend.KV_MEMORY // bytes_per_block


# a trait that no fast path knows


class GeluOps(TorchOps):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate) * up


class GeluDecoder(Decoder):
    def __init__(self, path: str, backend: Backend) -> None:
        plain = load_decoder(path, dtype="float32", backend=make_back_end("torch"), pack=False)
        config = plain.config
        super().__init__(replace(config, traits=config.traits - {"silu"} | {"gelu"}), dtype=plain.dtype, backend=backend)
        assert type(self.ops) is TorchOps, "the fast operations do not know the trait"
        self.load_state_dict(plain.state_dict(), assign=True)
        self.ops = GeluOps(backend.device)
        self.prepare(pack=False)


FAST = {"cpu": (CompiledOps, CompiledRunner), "triton": (TritonOps, TritonRunner)}


def accept_nothing(tree: TreeToVerify) -> Outcome:
    return Outcome([], tree.sample(tree.p(-1), 0, Purpose.SAMPLE))


def test_a_rule_of_acceptance_is_tried_with_compiled_passes(zoo: Zoo) -> None:
    """One that accepts nothing accepts nothing, and neither changes the tokens."""
    outputs, lengths = [], []
    for rule in (lossless, accept_nothing):
        engine = make_engine(zoo.path("llama"), zoo.path("llama"), backend=make_back_end("cpu"), num_kv_blocks=64)
        engine.backend.trees = RuledTrees(engine.backend, rule)
        outputs.append(run_all(engine, PROMPTS, [greedy(20, ignore_eos=True)] * len(PROMPTS)))
        lengths.append(engine.metrics().mean_acceptance_length)
        assert isinstance(engine.runner, CompiledRunner)
    assert outputs[0] == outputs[1] == [zoo.greedy("llama", prompt, 20, ignore_eos=True) for prompt in PROMPTS]
    assert lengths[0] > 3 and lengths[1] == 1


def test_a_rule_is_told_what_cannot_be_sampled_from_a_tree() -> None:
    probs = torch.full((2, 4), 0.25)
    tree = TreeToVerify(probs.log(), probs, None, [], token_ids=[3], parents=[-1], scores=[], seed=0, position=1)
    assert tree.sample(torch.tensor([0.5, float("nan"), 0.5, 0.0]), 0, Purpose.SAMPLE) == -1
    assert tree.sample(torch.tensor([0.0, 0.0, 7.0, 0.0]), 0, Purpose.SAMPLE) == 2
    with pytest.raises(ValueError, match="adds up to 0"):
        tree.sample(torch.zeros(4), 0, Purpose.SAMPLE)
    with pytest.raises(ValueError, match=r"was not sampled: match\(\) is the rule for it"):
        tree.reject()


@pytest.mark.parametrize("back_end", FAST)
def test_a_model_with_a_trait_of_its_own_takes_the_general_path(back_end: str, zoo: Zoo) -> None:
    """As target and as draft, with trees; and the same model without the trait takes the fast one."""
    path, reference = zoo.path("other"), deepcopy(zoo.model("other"))
    for layer in reference.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    backend = make_back_end(back_end)
    ops, runner = FAST[back_end]
    fast = make_engine(path, backend=backend, num_kv_blocks=40)
    assert type(fast.runner.model.ops) is ops and type(fast.runner) is runner  # type: ignore[attr-defined]

    config = EngineConfig.of(num_kv_blocks=40, speculation="fixed", max_draft_tokens=4, draft_tree=[-1, -1, 0, 1])
    engine = Engine(config, GeluDecoder(path, backend), backend=backend)
    engine.swap_draft(DraftModelDrafter("gelu", GeluDecoder(path, backend), engine.draft_context()))
    assert isinstance(engine.drafter, DraftModelDrafter)
    assert type(engine.runner) is type(engine.drafter.runner) is TorchRunner
    prompts, params = [[5, 9, 3], [7] * 9], [greedy(6, ignore_eos=True)] * 2
    outputs = run_all(engine, prompts, params)
    assert sum(engine.counters.accepted_per_depth) >= 6
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_logits(reference, [*prompt, *output])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output
    assert run_all(fast, prompts, params) != outputs
