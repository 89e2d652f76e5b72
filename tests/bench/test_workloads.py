"""Lengths and requests of a workload."""

from __future__ import annotations

from itertools import count, islice, repeat

import pytest

from titan.bench.workloads import Lengths, Workload, take_workload


def test_lengths_are_read_and_written() -> None:
    assert Lengths.parse("128") == Lengths(128, 128) and str(Lengths(128, 128)) == "128"
    assert Lengths.parse("16-512") == Lengths(16, 512) and str(Lengths(16, 512)) == "16-512"
    assert Lengths(16, 512).is_mixed and not Lengths(16, 16).is_mixed


@pytest.mark.parametrize("text", ["", "0", "-3", "8-4", "x", "4-", "1-2-3", "1.5"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length: allowed are 128, or 16-512 for a mix"):
        Lengths.parse(text)


def test_lengths_are_uniform_between_their_ends_and_come_back_with_their_seed() -> None:
    first, second, other = (list(islice(Lengths(3, 7).stream(seed), 500)) for seed in (0, 0, 1))
    assert first == second != other
    assert {length: 60 < first.count(length) < 140 for length in range(3, 8)} == dict.fromkeys(range(3, 8), True)
    assert len(set(first)) == 5


def test_a_workload_takes_the_next_of_its_streams() -> None:
    prompts, output_lens = ([number] for number in count()), Lengths(4, 4).stream(0)
    first = take_workload(prompts, 2, output_lens)
    assert first == Workload([[0], [1]], [4, 4]) and len(first) == 2 and first.num_output_tokens == 8
    assert take_workload(prompts, 1, repeat(9)) == Workload([[2]], [9])
