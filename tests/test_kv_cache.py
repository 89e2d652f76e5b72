"""The KV cache by itself: what it finds, counts and moves; tests/test_scheduler.py holds what is in it to a sequential fill."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from stepping import host_trees

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor
from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.interfaces import CacheOps, PathMove
from titan.memory.kv_cache import KVCache

CPU = torch.device("cpu")
LAYOUT = KVLayout((KVGroup(1, 1, 1),), torch.float32)


def make_request(token_ids: Sequence[int]) -> Request:
    return Request("r", None, list(token_ids), SamplingParams(), 0, 1000, frozenset(), RequestMetrics(0.0), detokenizer=None)


@pytest.fixture
def ops() -> Mock:
    return Mock(spec=CacheOps)


@pytest.fixture
def kv(ops: Mock) -> KVCache:
    kv = KVCache(8, 4, enable_prefix_caching=True, ops=ops)
    kv.attach("target", KVTensor(LAYOUT, 8, 4, CPU))
    kv.attach("draft", KVTensor(LAYOUT, 8, 4, CPU))
    return kv


def compute(kv: KVCache, num_tokens: int, num_drafted: int = 0) -> Request:
    """A request of the tokens 0, 1, ..., all of which but the root have been computed."""
    request = make_request(range(num_tokens))
    assert kv.reserve(request, num_tokens)
    request.commit(num_tokens)
    request.cover_draft(num_drafted)
    kv.cache_full_blocks(request)
    return request


def match(kv: KVCache, num_tokens: int) -> tuple[list[int], int, int]:
    request = make_request(range(num_tokens))
    kv.match_prefix(request)
    assert request.metrics.num_cached_tokens == request.num_computed_tokens
    return request.block_ids.tolist(), request.num_computed_tokens, request.num_drafted_context


def test_a_match_never_covers_the_root_and_counts_as_drafted_only_where_the_present_draft_was(kv: KVCache) -> None:
    request = compute(kv, 13, num_drafted=9)
    assert [match(kv, num_tokens) for num_tokens in (8, 9, 13)] == [([0], 4, 4), ([0, 1], 8, 8), ([0, 1, 2], 12, 8)]
    kv.new_draft_epoch([request])
    assert (request.num_drafted_context, request.num_computed_tokens) == (0, 12)
    assert match(kv, 13) == ([0, 1, 2], 12, 0)
    request.cover_draft(4)  # the new draft catches up
    kv.cache_full_blocks(request)
    assert match(kv, 13) == ([0, 1, 2], 12, 4)


def test_a_sibling_takes_only_what_is_computed_and_covered_by_the_draft(ops: Mock) -> None:
    kv = KVCache(8, 4, enable_prefix_caching=False, ops=ops)
    first, second = compute(kv, 15, num_drafted=7), make_request(range(15))
    second.siblings = (first, second)
    kv.match_prefix(second)
    assert (second.block_ids, second.num_computed_tokens, second.num_drafted_context) == (first.block_ids[:3], 12, 4)
    assert second.metrics.num_cached_tokens == 0


def test_missing_blocks_are_those_that_leave_the_free_queue(kv: KVCache) -> None:
    owner, other = compute(kv, 9), make_request(range(9))
    assert kv.num_missing_blocks(other, 10) == 1, "the two cached blocks are shared"
    kv.free(owner)
    assert kv.num_missing_blocks(other, 10) == 3, "now nobody else holds them"
    assert kv.reserve(other, 12)
    assert [kv.num_missing_blocks(other, num_slots) for num_slots in (12, 13, 17)] == [0, 1, 2]
    assert not kv.reserve(other, 33)
    assert (len(other.block_ids), kv.pool.num_free) == (3, 5), "a failed reservation changes nothing"


def test_free_evicts_tails_first_and_a_preempted_request_finds_its_blocks_again(kv: KVCache) -> None:
    request = compute(kv, 13)
    kv.free(request)
    assert kv.reserve(make_request([99] * 24), 24)  # the five unused blocks and the tail
    kv.match_prefix(request)
    assert (request.block_ids.tolist(), request.num_computed_tokens) == ([0, 1], 8)


def test_commit_moves_the_paths_of_all_requests_at_once_and_those_of_the_first_nodes_not_at_all(kv: KVCache, ops: Mock) -> None:
    requests = [make_request(range(3)), make_request(range(5))]
    for request in requests:
        assert kv.reserve(request, request.num_tokens + 5)
    plan = StepPlan(requests, [3, 5], [5, 5], [5, 5])
    tree = DraftTree(np.arange(5), np.array([-1, -1, 0, 1, 3], np.int32), draft_slots=np.array([1, 0, 3, 2, -1], np.int32))
    chain = DraftTree.chain(range(5), draft_slots=np.arange(5, dtype=np.int32))
    kv.commit(plan, Acceptance(host_trees([EMPTY_TREE, chain]), [[], [0, 1, 2]], [[9], [0, 1, 2, 9]], [None, None]))
    ops.move_paths.assert_not_called()
    kv.commit(plan, Acceptance(host_trees([tree, tree]), [[1, 3, 4], [0, 2]], [[1, 3, 4, 9], [0, 2, 9]], [None, None]))
    first, second = (request.block_ids for request in requests)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4])
    assert ops.move_paths.call_args_list == [
        call(kv.tensors["target"], [PathMove(first, 3, [1, 3, 4]), PathMove(second, 5, [0, 2])]),
        call(kv.tensors["draft"], [PathMove(first, 3, [0, 2]), PathMove(second, 5, [1, 3])]),
    ]


def test_compaction_renumbers_what_is_still_to_be_cleared(kv: KVCache, ops: Mock) -> None:
    """A step that fails between reserving and clearing leaves such blocks, and a draft that rests leaves more."""
    first, second, third = (make_request([i] * 9) for i in range(3))
    for request in (first, second):
        assert kv.reserve(request, 8)
    kv.clear_new_blocks()
    assert kv.reserve(third, 8)
    kv.free(first)
    ops.reset_mock()
    assert kv.compact([second, third]) == 4
    assert (second.block_ids.tolist(), third.block_ids.tolist()) == ([0, 1], [2, 3])
    caches = [(kv.tensors[role], kv.tensors[role]) for role in ("draft", "target")]
    assert [each.args[:2] for each in ops.gather_blocks.call_args_list] == caches
    assert [each.args[2].tolist() for each in ops.gather_blocks.call_args_list] == [[2, 3, 4, 5]] * 2
    kv.clear_new_blocks()
    kv.clear_draft_blocks([second, third])
    assert [each.args[1].tolist() for each in ops.clear_blocks.call_args_list] == [[2, 3], [0, 1, 2, 3]]
    assert kv.compact([second, third]) == 0
    kv.free(second)
    third.cover_draft(5)
    ops.gather_blocks.side_effect = [None, MemoryError]
    with pytest.raises(MemoryError):
        kv.compact([third])
    assert (third.block_ids.tolist(), third.num_drafted_context) == ([2, 3], 0), "the draft's have moved"


@pytest.mark.parametrize(("num_blocks", "block_size"), [(7, 4), (8, 8)])
def test_attach_refuses_a_tensor_of_another_pool(kv: KVCache, num_blocks: int, block_size: int) -> None:
    message = f"draft's KV tensor has {num_blocks} blocks of {block_size} slots: it must have 8 of 4"
    with pytest.raises(ValueError, match=message):
        kv.attach("draft", KVTensor(LAYOUT, num_blocks, block_size, CPU))
