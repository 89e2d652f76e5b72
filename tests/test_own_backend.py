"""Seams of the kernels: a back end that is written here, in a few obvious lines, and a model with a trait of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from back_ends import make_back_end
from exact_rules import Probs, children_of, inverse_cdf, reference_outcome
from numpy.typing import NDArray
from slow_logits import slow_probs
from stepping import AMPLE, greedy, make_engine, run_all
from tiny_models import make_model
from torch import Tensor
from transformers import PreTrainedModel
from zoo import Zoo, random_prompts

from titan.core.arrays import Ints
from titan.core.growth import main_path_order
from titan.core.kv_tensor import KVTensor
from titan.core.limits import MAX_NODES
from titan.core.options import EngineConfig
from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTree, DraftTrees, TreeLimits
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.runner import CompiledRunner
from titan.kernels.interfaces import Backend, Candidates, LayerOps, PassCounts, PassLimits, PathMove, Runner, Verified
from titan.kernels.torch.layers import TorchOps
from titan.kernels.torch.runner import TorchRunner
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.runner import TritonRunner
from titan.models.decoder import Decoder
from titan.models.loader import load_model

CPU = torch.device("cpu")
PROMPTS = random_prompts(6, seed=12, max_len=30)


class OwnCache:
    """Slot by slot."""

    def __init__(self, calls: Counter[str]) -> None:
        self.calls = calls

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        self.calls["move_paths"] += 1
        for group in kv.groups:
            slots = group.flatten(3, 4)
            for block_ids, first_slot, path in moves:
                for j, node in enumerate(path):  # ascending, so that what is read was not yet written
                    target, source = (
                        block_ids[slot // kv.block_size] * kv.block_size + slot % kv.block_size
                        for slot in (first_slot + j, first_slot + node)
                    )
                    slots[:, :, :, target] = slots[:, :, :, source]

    def copy_blocks(self, kv: KVTensor, sources: Ints, targets: Ints) -> None:
        for group in kv.groups:
            group[:, :, :, targets] = group[:, :, :, sources]

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        self.calls["clear_blocks"] += 1
        for group in kv.groups:
            group[:, :, :, block_ids] = 0


class OwnSampling:
    """Row by row, by transformers' processors."""

    def __init__(self, calls: Counter[str]) -> None:
        self.calls = calls

    def argmax(self, logits: Tensor) -> Tensor:
        self.calls["argmax"] += 1
        return logits.double().argmax(-1)

    def top_candidates(self, logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        self.calls["top_candidates"] += 1
        best = (logits.double() / temperatures[:, None].double()).log_softmax(-1).sort(dim=-1, descending=True, stable=True)
        return best.indices[:, :count], best.values[:, :count].float()

    def probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return torch.from_numpy(self.wide_probs(logits, rows)).float()

    def wide_probs(self, logits: Tensor, rows: SamplingRows) -> Probs:
        self.calls["probs"] += 1
        found = []
        for row, option in zip(logits.double(), rows.options, strict=True):
            temperature, top_k, top_p, min_p = (option[name].item() for name in ("temperature", "top_k", "top_p", "min_p"))
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            is_greedy = temperature == 0
            found.append(F.one_hot(row.argmax(), len(row)).double() if is_greedy else slow_probs(row, params))
        return torch.stack(found).numpy()  # type: ignore[no-any-return]

    def sample_children(
        self, logits: Tensor, rows: SamplingRows, num_children: Ints, places: Tensor, probs: Tensor, children: Tensor
    ) -> None:
        self.calls["sample_children"] += 1
        for i, left in enumerate(self.wide_probs(logits, rows)):
            probs[places[i]] = torch.from_numpy(left).float()
            for rank in range(num_children[i]):
                if left.sum() > 0:
                    height = philox_uniform(
                        int(rows.options["seed"][i]), int(rows.options["position"][i]), Purpose.DRAFT, sibling=rank
                    )
                    token, _ = inverse_cdf(left, float(height))
                    children[places[i], rank] = token
                    left[token] = 0


class OwnTrees:
    """Tree by tree; none has places that are empty."""

    def __init__(self, calls: Counter[str], sampling: OwnSampling) -> None:
        self.calls = calls
        self.sampling = sampling

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        self.calls["select"] += 1
        trees = [DraftTree.chain([])] * num_rows
        for each in found:
            for i, row in enumerate(each.rows.tolist()):
                trees[row] = self._tree(each, i)
        limits, vocab_size = [TreeLimits(MAX_NODES, may_sample=True)] * num_rows, 131
        return DraftTrees.of(trees, limits, drafter="own", vocab_size=vocab_size, upload=upload, device=torch.device("cpu"))

    def _tree(self, found: Candidates, i: int) -> DraftTree:
        columns = (found.token_ids, found.scores, found.parent_slots, found.slots)
        token_ids, scores, parent_slots, slots = (column[i].numpy() for column in columns)
        possible = [node for node in range(len(token_ids)) if np.isfinite(scores[node])]
        best = np.array(sorted(possible, key=lambda node: (-scores[node], node))[: found.num_nodes[i]], np.int64)
        node_of_slot = {-1: -1} | {slot: node for node, slot in enumerate(slots[best].tolist()) if slot >= 0}
        order, parents = main_path_order(np.array([node_of_slot[slot] for slot in parent_slots[best]], np.int32).tobytes())
        best = best[order]
        q = None
        if found.probs is not None and found.probs_rows is not None:
            inner = np.unique(parents)
            q = found.probs[found.probs_rows[i, 1 + np.where(inner < 0, -1, slots[best][inner])]]
        return DraftTree(
            token_ids[best], parents, q, slots[best].astype(np.int32), scores[best].astype(np.float32) if found.has_scores else None
        )

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        self.calls["verify"] += 1
        paths = torch.full((len(rows), MAX_NODES), -1, dtype=torch.int32)
        tokens, matches, start = [], torch.full((len(rows), 2), torch.nan), 0
        for i, row in enumerate(rows.tolist()):
            tree, seed, position = trees[row], *(int(sampling.options[name][i]) for name in ("seed", "position"))
            num_logits = 1 + tree.num_nodes
            p = self.sampling.wide_probs(logits[start : start + num_logits], sampling.take(np.full(num_logits, i)))
            start += num_logits
            if trees.is_sampled[row]:
                assert trees.draft_probs is not None and trees.draft_rows is not None
                first = int(trees.start_loc[row]) + row
                q = trees.draft_probs[trees.draft_rows[first : first + num_logits].long()].double().numpy()
                path, token, _ = reference_outcome(tree, p, q, seed, position)
                matches[i] = torch.tensor([p[0][q[0].argmax()], np.minimum(p[0], q[0]).sum()])
            else:
                path, token = self._match(tree, p, seed, position)
            paths[i, : len(path)] = torch.tensor(path, dtype=torch.int32)
            tokens.append(token)
        return Verified(paths, torch.tensor(tokens), matches)

    def _match(self, tree: DraftTree, p: Probs, seed: int, position: int) -> tuple[list[int], int]:
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            token, _ = inverse_cdf(p[1 + node], float(philox_uniform(seed, position + len(path), Purpose.SAMPLE)))
            matching = [child for child in children_of(tree, node) if tree.token_ids[child] == token]
            if not matching:
                return path, token
            path.append(matching[0])


def upload(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    return [torch.from_numpy(array.copy()) for array in arrays]


class OwnBackend:
    """Passes operation by operation, as there is no need for others here."""

    name = "own"
    device = CPU

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.cache = OwnCache(self.calls)
        self.sampling = OwnSampling(self.calls)
        self.trees = OwnTrees(self.calls, self.sampling)

    def activate(self) -> None:
        self.calls["activate"] += 1

    def check_limits(self, *, block_size: int, max_batch_size: int) -> None:
        self.calls["check_limits"] += 1

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> LayerOps:
        return TorchOps(self.device)

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Runner:
        self.calls["prepare"] += 1
        return TorchRunner(self, model, kv)

    def memory_for_kv(self, run_largest_passes: Callable[[], None]) -> int:
        run_largest_passes()
        return 2**22

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        return upload(arrays)

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        self.calls["download"] += 1
        return [tensor.numpy().copy() for tensor in tensors]

    def facts(self) -> dict[str, str]:
        return {}


GENERATIONS: dict[str, dict[str, Any]] = {
    "chain": {"draft_tree": "chain"},
    "auto": {"draft_tree": "auto", "max_draft_tokens": 12},
    "dynamic": {"draft_tree": "dynamic"},
    "parents": {"draft_tree": [-1, -1, 0, 0, 1, 2]},
    "sampled": {"draft_tree": [-1, -1, 0, 0, 1, 2], "draft_sampling": "sampled"},
    "sampled auto": {"draft_tree": "auto", "draft_sampling": "auto"},
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
    """The same tokens as in C++, of greedy requests and of those that sample."""
    models, options = (zoo.path("llama"), zoo.path("llama~")), AMPLE | GENERATIONS[name]
    own = OwnBackend()
    backend: Backend = own
    outputs = run_all(make_engine(*models, backend=backend, **options), PROMPTS, PARAMS)
    assert outputs == run_all(make_engine(*models, backend=make_back_end("cpu"), **options), PROMPTS, PARAMS)
    expected = {"activate", "check_limits", "prepare", "clear_blocks", "download", "select", "verify", "probs"}
    assert expected <= set(own.calls)
    assert own.calls["prepare"] == 2, "of the target and of the draft"
    assert own.calls["sample_children"] > 0 or not name.startswith("sampled")
    assert own.calls["move_paths"] > 0 or name in ("chain", "auto", "sampled auto")


def test_its_drafts_are_swapped_in_flight_and_its_pool_is_sized_by_itself(zoo: Zoo) -> None:
    own = OwnBackend()
    engine = make_engine(zoo.path("llama"), zoo.path("other"), backend=own, max_batch_size=3, max_model_len=64, draft_tree="auto")
    assert engine.kv.num_blocks == 12 and own.calls["prepare"] == 3, "one of them to see what the largest pass takes"
    swaps = {3: "ngram", 6: zoo.path("llama~"), 9: None, 11: zoo.path("llama~")}

    def before_step(step: int) -> None:
        if step in swaps:
            engine.swap_draft(swaps[step])

    outputs = run_all(engine, PROMPTS, [greedy(20, ignore_eos=True)] * len(PROMPTS), before_step=before_step)
    assert outputs == [zoo.greedy("llama", prompt, 20, ignore_eos=True) for prompt in PROMPTS]
    assert sum(engine.counters.accepted_per_depth) > 10


# a trait that no fast path knows


class GeluOps(TorchOps):
    """Another activation."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate) * up


class GeluDecoder(Decoder):
    """A decoder of a family of its own."""

    def __init__(self, plain: Decoder, backend: Backend) -> None:
        config = plain.config
        super().__init__(replace(config, traits=config.traits - {"silu"} | {"gelu"}), dtype=plain.dtype, backend=backend)
        assert type(self.ops) is TorchOps, "the fast operations do not know the trait"
        self.load_state_dict(plain.state_dict())
        self.ops = GeluOps(backend.device)
        self.prepare(pack=False)


FAST = {"cpu": (CompiledOps, CompiledRunner), "triton": (TritonOps, TritonRunner)}


@pytest.fixture(scope="module")
def gelu(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    """A folder of weights, and what transformers makes of them with the other activation."""
    folder = tmp_path_factory.mktemp("gelu")
    model = make_model(folder, "llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    return str(folder), model


def make_gelu(path: str, backend: Backend) -> GeluDecoder:
    return GeluDecoder(load_model(path, dtype="float32", backend=make_back_end("torch"), pack=False), backend)


@pytest.mark.parametrize("back_end", FAST)
def test_a_model_with_a_trait_of_its_own_takes_the_general_path(back_end: str, gelu: tuple[str, PreTrainedModel]) -> None:
    """As target and as draft, with trees; and the same model without the trait takes the fast one."""
    path, reference = gelu
    backend = make_back_end(back_end)
    ops, runner = FAST[back_end]
    fast = make_engine(path, backend=backend, num_kv_blocks=40)
    if back_end == "cpu" and not isinstance(fast.runner, CompiledRunner):
        pytest.skip("a layout of this processor that the library does not read")
    assert type(fast.runner.model.ops) is ops and type(fast.runner) is runner  # type: ignore[attr-defined]

    config = EngineConfig.of(num_kv_blocks=40, max_draft_tokens=4, draft_tree=[-1, -1, 0, 1])
    engine = Engine(config, make_gelu(path, backend), backend=backend)
    engine._use_drafter(DraftModelDrafter("gelu", make_gelu(path, backend), engine._draft_context()))
    assert isinstance(engine.drafter, DraftModelDrafter)
    assert type(engine.runner) is type(engine.drafter.runner) is TorchRunner
    prompts = [[5, 9, 3], [7] * 9]
    assert run_all(engine, prompts, [greedy(6, ignore_eos=True)] * 2) == [generated(reference, prompt, 6) for prompt in prompts]
    assert sum(engine.counters.accepted_per_depth) >= 6
    assert run_all(fast, prompts, [greedy(6, ignore_eos=True)] * 2) != [generated(reference, prompt, 6) for prompt in prompts]


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-4, "a near-tie: rounding could decide"
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]
