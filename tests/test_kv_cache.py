"""The KV cache by itself: what it finds, counts and moves; tests/test_scheduler.py holds what is in it to a sequential fill."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
import torch
from stepping import make_request

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor
from titan.core.request import Request, make_siblings
from titan.kernels.interfaces import CacheOps
from titan.memory.kv_cache import KVCache

CPU = torch.device("cpu")
LAYOUT = KVLayout((KVGroup(1, 1, 1),), torch.float32)


@pytest.fixture
def ops() -> Mock:
    return Mock(spec=CacheOps)


@pytest.fixture
def kv(ops: Mock) -> KVCache:
    kv = KVCache(8, 4, enable_prefix_caching=True, ops=ops)
    kv.tensors = {"target": KVTensor(LAYOUT, 8, 4, CPU), "draft": KVTensor(LAYOUT, 8, 4, CPU)}
    return kv


def compute(kv: KVCache, num_tokens: int, num_drafted: int = 0, first_token: int = 0) -> Request:
    """A request of the tokens 0, 1, ..., or later ones, all of which but the root have been computed."""
    request = make_request(range(first_token, first_token + num_tokens))
    assert kv.reserve(request, num_tokens)
    request.commit(num_tokens)
    request.cover_draft(num_drafted)
    kv.roll_back(request)
    kv.cache_full_blocks(request)
    return request


def match(kv: KVCache, num_tokens: int) -> tuple[list[int], int, int]:
    request = make_request(range(num_tokens))
    kv.match_prefix(request)
    assert request.num_cached_blocks * 4 == request.num_computed_tokens
    return request.block_ids.tolist(), request.num_computed_tokens, request.num_drafted_context


@pytest.mark.parametrize(("num_drafted", "covered"), [(7, 4), (8, 16)])
def test_a_sibling_takes_blocks_of_its_sibling_then_cached_ones_then_those_of_the_swap_space(
    swapping: KVCache, ops: Mock, num_drafted: int, covered: int
) -> None:
    """The sibling's own blocks are not cached, since others hold the same; the draft's coverage ends where it ends there."""
    kv = swapping
    swapped = compute(kv, 17, num_drafted=16)
    assert kv.swap_out(swapped)
    kv.pool.forget_cached()
    cached = compute(kv, 13, num_drafted=12)
    first, second = make_request(range(18)), make_request(range(18))
    make_siblings(first, second)
    assert kv.reserve(first, 9)
    first.commit(9)
    first.cover_draft(num_drafted)
    kv.cache_full_blocks(first)
    kv.admit(second)
    assert second.block_ids[:3] == first.block_ids[:2] + cached.block_ids[2:]
    assert copies(ops.copy_in) == [(swapped.swapped_block_ids[3:].tolist(), second.block_ids[3:].tolist())]
    assert (second.num_computed_tokens, second.num_drafted_context, second.num_cached_blocks) == (16, covered, 4)
    kv.check((swapped, cached, first, second))


def test_who_needs_logits_of_the_prompt_awaits_no_sibling_for_it(kv: KVCache) -> None:
    """Such as one that has been preempted: what the sibling computes is of no use to it."""
    first, second, third = (make_request(range(15)) for _ in range(3))
    make_siblings(first, second, third)
    first.prompt_logprobs = [None]
    assert kv.reserve(second, 8)
    second.commit(8)
    assert third.awaits_sibling and not first.awaits_sibling


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "num_drafted", "computed", "drafted"),
    [(15, 15, 14, 14, 14), (15, 15, 13, 14, 13), (15, 15, 7, 14, 4), (13, 13, 12, 12, 12), (3, 3, 2, 2, 2), (3, 2, 0, 2, 0)],
)
@pytest.mark.parametrize("caching", [True, False])
def test_a_sibling_gets_a_copy_of_the_last_block_of_the_prompt(
    ops: Mock, caching: bool, num_tokens: int, num_computed: int, num_drafted: int, computed: int, drafted: int
) -> None:
    kv = KVCache(9, 4, caching, ops)
    kv.tensors = {"target": KVTensor(LAYOUT, 9, 4, CPU), "draft": KVTensor(LAYOUT, 9, 4, CPU)}
    first, second, third = (make_request(range(num_tokens)) for _ in range(3))
    make_siblings(first, second)
    first.token_ids.append(99)  # else the prompt's last token cannot be computed
    assert kv.reserve(first, num_tokens + 3)
    first.commit(num_tokens - 2)
    assert second.awaits_sibling
    first.commit(num_computed - num_tokens + 2)
    first.cover_draft(num_drafted)
    kv.clear_new_blocks()
    kv.cache_full_blocks(first)
    assert kv.reserve(third, kv.pool.num_free * kv.block_size)
    kv.free(third)  # a step that failed leaves blocks that are still to be cleared
    ops.reset_mock()
    assert not second.awaits_sibling
    num_missing, num_free = kv.num_missing_blocks(second, num_tokens), kv.pool.num_free
    kv.admit(second)
    assert (second.num_computed_tokens, second.num_drafted_context) == (computed, drafted)
    assert kv.reserve(second, num_tokens) and num_free - kv.pool.num_free == num_missing
    num_full = computed // 4
    assert second.block_ids[:num_full] == first.block_ids[:num_full]
    if computed % 4:
        pairs = [(each.args[1].tolist(), each.args[2].tolist()) for each in ops.copy_blocks.call_args_list]
        assert pairs == [([first.block_ids[num_full]], [second.block_ids[num_full]])] * 2, "in both caches"
        kv.clear_new_blocks()
        cleared = set(range(9)) - {*first.block_ids, second.block_ids[-1]}
        assert [set(each.args[1]) for each in ops.clear_blocks.call_args_list] == [cleared] * 2
    else:
        ops.copy_blocks.assert_not_called()
    kv.admit(third)
    assert third.num_computed_tokens == (num_full * 4 if caching else 0), "who is no sibling gets whole blocks"
    kv.check((first, second, third))


def copies(method: Mock) -> list[tuple[list[int], list[int]]]:
    """Sources and targets of the calls, of the target's cache."""
    calls = [(each.args[2].tolist(), each.args[3].tolist()) for each in method.call_args_list]
    assert calls[::2] == calls[1::2], "in both caches"
    method.reset_mock()
    return calls[::2]


@pytest.fixture
def swapping(ops: Mock) -> KVCache:
    kv = KVCache(8, 4, enable_prefix_caching=True, ops=ops)
    kv.tensors = {"target": KVTensor(LAYOUT, 8, 4, CPU), "draft": KVTensor(LAYOUT, 8, 4, CPU)}
    kv.resize_swap_space(5, ())
    return kv


def test_only_what_the_other_pool_does_not_hold_is_copied(swapping: KVCache, ops: Mock) -> None:
    kv = swapping
    first, second = compute(kv, 13, num_drafted=12), make_request(range(15))
    kv.match_prefix(second)
    assert kv.reserve(second, 15)
    second.commit(2)
    kv.clear_new_blocks()
    assert kv.swap_out(first) and copies(ops.copy_out) == [([0, 1, 2], [0, 1, 2])]
    assert (first.is_swapped, len(first.block_ids), first.num_computed_tokens, first.num_drafted_context) == (True, 0, 12, 12)
    assert kv.swap_out(second) and copies(ops.copy_out) == [([3], [3])], "they share the others there as well"
    kv.check((first, second))
    assert (kv.pool.num_free, kv.swap_space.pool.num_free, kv.num_missing_blocks(second, 16)) == (8, 1, 4)
    failed = make_request(range(20))
    assert kv.reserve(failed, 20)
    kv.free(failed)  # a step that failed leaves blocks that are still to be cleared
    ops.reset_mock()
    kv.admit(second)
    assert copies(ops.copy_in) == [([3], [3])], "what is still cached comes back by itself"
    kv.clear_new_blocks()
    assert [each.args[1].tolist() for each in ops.clear_blocks.call_args_list] == [[4, 5, 6, 7]] * 2, "and is not cleared"
    assert (second.block_ids.tolist(), second.num_computed_tokens, second.num_drafted_context) == ([0, 1, 2, 3], 14, 12)
    assert kv.num_missing_blocks(first, 16) == 1
    kv.check((first, second))
    kv.free(second)
    kv.free(first)
    assert (kv.pool.num_free, kv.swap_space.pool.num_free) == (8, 5)
    large = compute(kv, 25)
    assert not kv.swap_out(large) and (len(large.block_ids), kv.swap_space.pool.num_free) == (6, 5), "no room"


def test_a_sibling_gets_nothing_from_one_that_is_swapped_out(ops: Mock) -> None:
    kv = KVCache(8, 4, enable_prefix_caching=False, ops=ops)
    kv.resize_swap_space(8, ())
    first, second = compute(kv, 15, num_drafted=11), make_request(range(15))
    make_siblings(first, second)
    assert kv.swap_out(first)
    kv.admit(second)
    assert (second.block_ids.tolist(), second.num_computed_tokens, second.num_drafted_context) == ([], 0, 0)


@pytest.mark.parametrize("is_swapped_draft", [False, True])
def test_a_swapped_request_takes_no_blocks_that_lack_the_drafts_kv_it_counts_on(
    swapping: KVCache, ops: Mock, is_swapped_draft: bool
) -> None:
    kv = swapping
    request = compute(kv, 13, num_drafted=9)
    assert kv.swap_out(request)
    kv.forget_cached()
    other = compute(kv, 13)  # the same tokens, which no draft has seen
    if is_swapped_draft:
        kv.forget_draft([request, other])
    copies(ops.copy_out)
    kv.admit(request)
    assert (request.block_ids == other.block_ids) == is_swapped_draft
    assert copies(ops.copy_in) == ([] if is_swapped_draft else [([0, 1, 2], request.block_ids.tolist())])
    assert (request.num_computed_tokens, request.num_drafted_context) == (12, 0 if is_swapped_draft else 9)
    kv.check((request, other))


def test_evicted_prefixes_are_hit_in_the_swap_space(swapping: KVCache, ops: Mock) -> None:
    kv = swapping
    for first_token, places in ((0, [0, 1, 2]), (100, [3, 4, 0])):  # what was used least recently makes room
        request = make_request(range(first_token, first_token + 13))
        assert kv.reserve(request, 13)
        request.commit(12)
        request.cover_draft(8)
        kv.cache_full_blocks(request)
        kv.free(request)
        assert kv.reserve(request, 32), "which takes all blocks"
        [(sources, targets)] = copies(ops.copy_out)
        assert targets == places and len(sources) == 3
        kv.free(request)
    request = make_request(range(13))
    assert kv.num_missing_blocks(request, 13) == 4
    kv.admit(request)
    assert copies(ops.copy_in) == [([2, 1], request.block_ids.tolist())] and kv.pool.num_references(request.block_ids[0]) == 1
    assert (request.num_computed_tokens, request.num_drafted_context, request.num_cached_blocks) == (8, 8, 2)
    assert (kv.swap_space.num_hits, kv.pool.num_evicted) == (2, 6)
    kv.check([request])
    kv.forget_draft([])
    assert match(kv, 13)[1:] == (8, 0)
    kv.forget_cached()
    assert match(kv, 13) == ([], 0, 0)


@pytest.mark.parametrize("is_swapped", [True, False])
def test_what_was_forgotten_is_not_found_again_because_a_request_is_swapped(swapping: KVCache, is_swapped: bool) -> None:
    request = compute(swapping, 13)
    assert swapping.swap_out(request)
    assert match(swapping, 13)[1] == 12
    if not is_swapped:
        swapping.admit(request)
    swapping.forget_cached()
    for move in (swapping.admit, swapping.swap_out) if is_swapped else (swapping.swap_out, swapping.admit):
        move(request)
        assert match(swapping, 13)[1] == 0
    swapping.free(request)
    assert match(swapping, 13)[1] == 0


def test_a_prefix_that_is_forgotten_stays_with_those_that_hold_it_and_is_found_nowhere(swapping: KVCache, ops: Mock) -> None:
    kv = swapping
    evict(kv, compute(kv, 13))  # into the swap space
    first = make_request([*range(13), 50])
    kv.match_prefix(first)  # now it is on both sides
    sharing, other = make_request([*range(12), 60]), compute(kv, 9, first_token=100)
    kv.match_prefix(sharing)
    kv.forget_prefix(first)
    kv.free(first)
    assert match(kv, 13) == ([], 0, 0) and len(sharing.block_ids) == 3
    found = make_request(range(100, 109))
    kv.match_prefix(found)
    assert found.block_ids == other.block_ids, "those of other tokens are still found"
    assert kv.swap_out(sharing)
    assert match(kv, 13) == ([], 0, 0)
    kv.check((sharing, other, found))


def evict(kv: KVCache, request: Request) -> None:
    """Release a request's blocks, and all blocks to somebody else."""
    kv.free(request)
    other = make_request([99] * 32)
    assert kv.reserve(other, 32)
    kv.free(other)


def test_what_the_draft_has_written_since_is_copied_onto_what_the_swap_space_has(swapping: KVCache, ops: Mock) -> None:
    evict(swapping, compute(swapping, 13))
    assert copies(ops.copy_out) == [([2, 1, 0], [0, 1, 2])]
    for expected in ([([1, 0], [1, 2])], []):
        evict(swapping, compute(swapping, 13, num_drafted=8))
        assert copies(ops.copy_out) == expected
    swapping.check(())
    assert match(swapping, 13)[1:] == (12, 8)


def test_what_is_evicted_again_has_been_used_in_the_swap_space(swapping: KVCache) -> None:
    for num_tokens, first_token in ((13, 0), (9, 100), (13, 0), (9, 200)):
        evict(swapping, compute(swapping, num_tokens, first_token=first_token))
    assert match(swapping, 13)[1:] == (12, 0) and swapping.swap_space.num_hits == 3


@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_without_memory_for_the_copy_what_is_evicted_is_forgotten(swapping: KVCache, ops: Mock, error: type[Exception]) -> None:
    swapping.free(compute(swapping, 29))
    ops.copy_out.side_effect = error
    request = make_request([99] * 32)
    if error is KeyError:  # anything else is no reason to go on
        with pytest.raises(KeyError):
            swapping.reserve(request, 32)
    else:
        assert swapping.reserve(request, 32)
        assert match(swapping, 29) == ([], 0, 0)
    assert swapping.swap_space.pool.num_free == swapping.swap_space.pool.num_blocks
    swapping.check([request])


@pytest.mark.parametrize("is_swapped", [True, False])
def test_copies_of_a_start_that_failed_are_waited_for_before_others_get_its_blocks(
    swapping: KVCache, ops: Mock, is_swapped: bool
) -> None:
    first = compute(swapping, 13)
    assert swapping.swap_out(first)
    swapping.pool.forget_cached()
    request = first if is_swapped else make_request(range(13))
    ops.reset_mock()
    ops.copy_in.side_effect = [None, MemoryError]  # of the target, of the draft
    with pytest.raises(MemoryError):
        swapping.admit(request)
    names = [each[0] for each in ops.mock_calls]
    assert names.count("copy_in") == 2 and names[-1] == "await_copies"
    assert not request.block_ids and not request.is_swapped
    swapping.check([first])


@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_a_tail_that_cannot_be_copied_is_computed_and_the_full_blocks_stay_shared(
    kv: KVCache, ops: Mock, error: type[Exception]
) -> None:
    first, second = make_request(range(11)), make_request(range(11))
    make_siblings(first, second)
    assert kv.reserve(first, 11)
    first.commit(10)
    ops.copy_blocks.side_effect = error
    if error is KeyError:
        with pytest.raises(KeyError):
            kv.admit(second)
        assert not second.block_ids
    else:
        kv.admit(second)
        assert (second.block_ids.tolist(), second.num_computed_tokens) == (first.block_ids.tolist()[:2], 8)
    kv.check([first, second])


def test_the_beginnings_of_what_is_evicted_have_precedence_in_the_swap_space(swapping: KVCache, ops: Mock) -> None:
    swapping.free(compute(swapping, 29))
    assert swapping.reserve(make_request([99] * 32), 32)
    assert copies(ops.copy_out) == [([4, 3, 2, 1, 0], [0, 1, 2, 3, 4])]


def test_what_is_evicted_next_is_copied_at_once_and_found_on_the_side_that_has_it(swapping: KVCache, ops: Mock) -> None:
    swapping.resize_swap_space(32, ())
    swapping.free(compute(swapping, 29))
    other, found = make_request([99] * 32), []
    for num_tokens in range(4, 21, 4):
        assert swapping.reserve(other, num_tokens)
        found.append(copies(ops.copy_out))
    assert found == [[], [([6, 5, 4, 3], [0, 1, 2, 3])], [], [], []]
    swapping.free(other)
    assert match(swapping, 29)[1] == 28 and copies(ops.copy_in) == [([3, 2, 1, 0], [3, 4, 5, 6])]


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


def test_compaction_renumbers_what_is_still_to_be_cleared(kv: KVCache, ops: Mock) -> None:
    """A step that fails between reserving and clearing leaves such blocks."""
    first, second, third = (make_request([i] * 9) for i in range(3))
    for request in (first, second):
        assert kv.reserve(request, 8)
    kv.clear_new_blocks()
    assert kv.reserve(third, 8)
    kv.free(first)
    ops.reset_mock()
    assert kv.compact([second, third]) == 4
    assert ops.method_calls[0] == call.await_copies(), "blocks that are still on their way here move, too"
    assert (second.block_ids.tolist(), third.block_ids.tolist()) == ([0, 1], [2, 3])
    caches = [(kv.tensors[role], kv.tensors[role]) for role in ("draft", "target")]
    assert [each.args[:2] for each in ops.gather_blocks.call_args_list] == caches
    assert [each.args[2].tolist() for each in ops.gather_blocks.call_args_list] == [[2, 3, 4, 5]] * 2
    kv.clear_new_blocks()
    cleared = [(each.args[0], each.args[1].tolist()) for each in ops.clear_blocks.call_args_list]
    assert cleared == [(kv.tensors[role], [2, 3]) for role in ("target", "draft")]
    assert kv.compact([second, third]) == 0
    kv.free(second)
    third.cover_draft(5)
    ops.gather_blocks.side_effect = [None, MemoryError]
    with pytest.raises(MemoryError):
        kv.compact([third])
    assert (third.block_ids.tolist(), third.num_drafted_context) == ([2, 3], 0), "the draft's have moved"
