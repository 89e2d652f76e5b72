"""Turns: a variant that fails is left out, and the others go on."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest

from titan.bench.peers.client import PeerError
from titan.bench.turns import Turns


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (LookupError("no\n room"), "b ended in round 1: LookupError: no room"),
        (ValueError("no room"), "b ended in round 1: no room"),
        (PeerError("no room"), "b ended in round 1: no room"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_variant_that_fails_is_named_once_and_left_out(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    problems, failed = list[str](), list[str]()
    ran = list[tuple[str, int]]()

    def work(variant: str, round_id: int) -> str:
        ran.append((variant, round_id))
        if ran[-1] == ("b", 1):
            raise error
        return f"{variant}{round_id}"

    with Turns(9, problems, failed.append) as turns:
        found = [turns.take(each, f"in round {i}", partial(work, each, i)) for i in range(3) for each in "abc"]
    assert found == ["a0", "b0", "c0", "a1", None, "c1", "a2", None, "c2"]
    assert problems == [line] and failed == ["b"] and ("b", 2) not in ran
    assert "9/9" in capsys.readouterr().err


def test_an_interrupt_ends_all_turns() -> None:
    problems, recover = list[str](), Mock()
    with pytest.raises(KeyboardInterrupt), Turns(2, problems, recover) as turns:
        turns.take("a", "", Mock(side_effect=KeyboardInterrupt))
    assert not problems and not recover.called
