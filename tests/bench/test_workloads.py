"""Lengths and requests of a workload."""

from __future__ import annotations

from argparse import ArgumentTypeError
from itertools import count, islice, repeat

import pytest

from titan.bench.workloads import Lengths, Workload, take_workload


def test_lengths_are_read_written_and_uniform_between_their_ends() -> None:
    assert Lengths.parse("128") == Lengths(128, 128) and str(Lengths(128, 128)) == "128" and not Lengths(128, 128).is_mixed
    assert Lengths.parse("3-7") == Lengths(3, 7) and str(Lengths(3, 7)) == "3-7" and Lengths(3, 7).is_mixed
    first, second, other = (list(islice(Lengths(3, 7).stream(seed), 500)) for seed in (0, 0, 1))
    assert first == second != other and set(first) == set(range(3, 8))
    assert all(60 < first.count(length) < 140 for length in range(3, 8))
    for text in ("", "0", "-3", "8-4", "x", "4-", "1-2-3", "1.5"):
        with pytest.raises(ArgumentTypeError, match=f"'{text}' is not a length: allowed are 128, or 16-512 for a mix"):
            Lengths.parse(text)


def test_a_workload_takes_the_next_of_its_streams_and_all_arrives_at_once() -> None:
    prompts = ([number] for number in count())
    assert take_workload(prompts, 2, repeat(4)) == Workload([[0], [1]], [4, 4], [0.0, 0.0])
    next_ones = take_workload(prompts, 1, repeat(9))
    assert next_ones == Workload([[2]], [9]) and len(next_ones) == 1 and next_ones.max_len == 10
