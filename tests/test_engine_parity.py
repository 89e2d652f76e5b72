"""What the engine writes is what transformers writes, whatever drafts; test_engine_machine has all that may happen meanwhile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from back_ends import make_back_end
from stepping import AMPLE, SCARCE, greedy, make_engine, run_all, slots_of
from zoo import FAMILIES, VOCAB_SIZE, Zoo, random_prompts

from titan.core.sampling_params import SamplingParams
from titan.draft.registry import DraftSpec
from titan.draft.replay import ReplayDrafter
from titan.engine import Engine

PROMPTS = random_prompts(18)
LIMITS = [1 + (i * 11) % 34 for i in range(len(PROMPTS))]
IGNORE_EOS = [i % 3 > 0 for i in range(len(PROMPTS))]
GREEDY = [greedy(limit, ignore_eos=ignore) for limit, ignore in zip(LIMITS, IGNORE_EOS, strict=True)]


def draft_spec(zoo: Zoo, family: str, draft: str) -> DraftSpec:
    match draft:
        case "none":
            return None
        case "ngram":
            return "ngram"
        case "replay":
            recordings = {tuple(prompt): zoo.greedy(family, prompt, max(LIMITS), ignore_eos=True) for prompt in PROMPTS}
            return ReplayDrafter(recordings, acceptance=0.7, vocab_size=VOCAB_SIZE, max_draft_tokens=6)
        case _:
            return zoo.path({"itself": family, "perturbed": f"{family}~", "useless": "useless"}[draft])


def poison(engine: Engine, _: int) -> None:
    """NaN where nothing valid is: free blocks that are not cached. Garbage where it may be read, but must not be seen."""
    pool, block_size = engine.kv.pool, engine.kv.block_size
    free = [block for block in range(pool.num_blocks) if not pool.num_references(block) and block not in pool._hash_of]
    shared = [block for block in range(pool.num_blocks) if pool._ref_counts[block] > 1]  # another's draft may know them
    for role, kv in engine.kv.tensors.items():
        [group] = kv.groups
        group[:, free] = torch.nan
        for request in engine.scheduler.running:
            length = request.num_computed_tokens if role == "target" else request.num_drafted_context
            stale = slots_of(engine, request)[length:]
            stale = stale[~torch.isin(stale // block_size, torch.tensor(shared, dtype=torch.int64))]
            group.movedim(1, 3)[:, :, :, stale // block_size, stale % block_size] = 1e4


@pytest.mark.long_where("llama3_rope", "qwen2", "itself", "useless")
@pytest.mark.parametrize(
    ("family", "draft"),
    [*((each, "perturbed") for each in FAMILIES), *(("llama", each) for each in ("none", "itself", "useless", "ngram", "replay"))],
)
def test_greedy_output_is_that_of_transformers_whatever_is_in_slots_without_valid_kv(zoo: Zoo, family: str, draft: str) -> None:
    drafts: dict[bool, list[list[int]]] = {}
    rows = zip(PROMPTS, LIMITS, IGNORE_EOS, strict=True)
    expected = [zoo.greedy(family, prompt, limit, ignore_eos=ignore) for prompt, limit, ignore in rows]
    for is_poisoned in (False, True):
        engine = make_engine(zoo.path(family), draft_spec(zoo, family, draft), max_num_batched_tokens=40, **SCARCE)
        proposed = drafts[is_poisoned] = []
        engine.observers.append(lambda _, acceptance, to=proposed: to.append(acceptance.trees.nodes.token_ids.tolist()))
        options = {"before_step": partial(poison, engine)} if is_poisoned else {}
        assert run_all(engine, PROMPTS, GREEDY, **options) == expected
    assert drafts[True] == drafts[False]
    metrics = engine.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.prefix_cache_hit_rate > 0
    least = {"none": 1.0, "useless": 1.0, "itself": 3.0, "perturbed": 1.3, "ngram": 1.0, "replay": 1.8}[draft]
    assert metrics.mean_acceptance_length >= least
    assert (sum(metrics.proposed_per_depth) > 0) == (draft != "none")


@pytest.mark.parametrize("draft", ["none", "perturbed", "ngram"])
def test_requests_without_a_seed_depend_on_the_engines_seed_and_their_number_alone(zoo: Zoo, draft: str) -> None:
    params = [SamplingParams(max_tokens=12, ignore_eos=True)] * 6
    prompts = [PROMPTS[1]] * 6
    plain = run_all(make_engine(zoo.path("llama"), seed=3, **AMPLE), prompts, params)
    drafted = run_all(make_engine(zoo.path("llama"), draft_spec(zoo, "llama", draft), seed=3, **SCARCE), prompts, params)
    assert drafted == plain
    assert len(set(map(tuple, plain))) == 6
    assert run_all(make_engine(zoo.path("llama"), seed=4, **AMPLE), prompts, params) != plain


@pytest.mark.parametrize("draft", ["none", "itself", "perturbed"])
def test_a_request_may_fill_the_pool_to_the_last_slot(zoo: Zoo, draft: str) -> None:
    engine = make_engine(zoo.path("llama"), draft_spec(zoo, "llama", draft), block_size=8, num_kv_blocks=3)
    prompts = [PROMPTS[1][:10], PROMPTS[1][:20], PROMPTS[1][:23]]
    params = [greedy(max_tokens, ignore_eos=True) for max_tokens in (14, None, 1)]  # None: as many as there is room for
    outputs = run_all(engine, prompts, params)
    assert outputs == [zoo.greedy("llama", prompt, 24 - len(prompt), ignore_eos=True) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_bfloat16_too_compiled_kernels_verify_what_they_would_have_decoded(zoo: Zoo, family: str) -> None:
    params = [greedy(limit + 10, ignore_eos=True) for limit in LIMITS]
    options = AMPLE | {"dtype": "bfloat16", "backend": make_back_end("cpu")}
    plain = run_all(make_engine(zoo.path(family), **options), PROMPTS, params)
    engine = make_engine(zoo.path(family), zoo.path(f"{family}~"), **options)
    assert run_all(engine, PROMPTS, params) == plain and engine.metrics().mean_acceptance_length > 1.3
