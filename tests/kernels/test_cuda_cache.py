"""What copies of KV blocks between a CUDA device and the host ask of memory, as far as it shows without a device."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch

from titan.kernels.torch.cache import runs
from titan.kernels.triton.cache import page_locked

CPU = torch.device("cpu")


@pytest.mark.parametrize("longest", [None, 1, 2, 5])
def test_runs_follow_each_other_on_both_sides_and_none_is_longer_than_asked_for(longest: int | None) -> None:
    sources, targets = np.array([4, 5, 6, 7, 9, 10, 2, 3]), np.array([0, 1, 2, 3, 4, 5, 6, 8])
    found = [*runs(sources, targets, longest)]
    for i, column in enumerate((sources, targets)):
        assert [block for run in found for block in range(run[i].start, run[i].stop)] == column.tolist()
    lengths = [run[0].stop - run[0].start for run in found]
    assert lengths == {None: [4, 2, 1, 1], 1: [1] * 8, 2: [2, 2, 2, 1, 1], 5: [4, 2, 1, 1]}[longest]


def test_pages_of_a_tensor_are_locked_once_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = MagicMock()
    calls.cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.synchronize)
    tensor = page_locked(torch.zeros(3, 1000, dtype=torch.bfloat16), CPU)
    address = tensor.data_ptr()
    calls.cudaHostRegister.assert_called_once_with(address, 6000, 0)
    calls.cudaHostUnregister.assert_not_called()
    del tensor
    assert calls.mock_calls[1:] == [call.synchronize(CPU), call.cudaHostUnregister(address)]
    assert not page_locked(torch.zeros(0, 1000), CPU).nbytes and calls.cudaHostRegister.call_count == 1


def test_pages_that_the_system_does_not_lock_are_told_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refused)
    with pytest.raises(MemoryError, match="4000 bytes of the host cannot be page-locked: CUDA error 2"):
        page_locked(torch.zeros(1000), CPU)
