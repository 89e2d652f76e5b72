"""What copies of KV blocks between a CUDA device and the host ask of memory, as far as it shows without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch

from titan.kernels.torch.cache import runs
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.cache import CudaCache, page_locked

CPU = torch.device("cpu")


def test_runs_follow_each_other_on_both_sides() -> None:
    sources, targets = np.array([4, 5, 6, 7, 9, 10, 2, 3]), np.array([0, 1, 2, 3, 4, 5, 6, 8])
    found = [*runs(sources, targets)]
    for i, column in enumerate((sources, targets)):
        assert [block for run in found for block in range(run[i].start, run[i].stop)] == column.tolist()
    assert [run[0].stop - run[0].start for run in found] == [4, 2, 1, 1]


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


def test_blocks_on_their_way_in_are_waited_for_although_others_could_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, current, full = MagicMock(), MagicMock(), MagicMock(shape=(2, 4, 3))
    monkeypatch.setattr(CudaCache, "_stream", stream)
    monkeypatch.setattr(CudaCache, "_after_passes", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    full.new_empty.side_effect = torch.OutOfMemoryError("out of memory")
    group, host = torch.zeros(2, 4, 3), torch.arange(24.0).view(4, 2, 3)
    cache = CudaCache(lambda arrays: [torch.from_numpy(each) for each in arrays], CPU)
    with pytest.raises(torch.OutOfMemoryError):
        cache.copy_in(SimpleNamespace(groups=[group, full]), [host, host], np.array([3, 1]), np.array([2, 3]))  # type: ignore[arg-type]
    assert torch.equal(group[:, 2:], host[[3, 1]].transpose(0, 1)) and not group[:, :2].any()
    cache.await_copies()
    current.wait_event.assert_called_once_with(stream.record_event.return_value)


def test_blocks_on_their_way_in_are_waited_for_by_what_goes_out_only_if_it_is_they(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, current, group, host = MagicMock(), MagicMock(), torch.zeros(2, 6, 3), torch.ones(5, 2, 3)
    monkeypatch.setattr(CudaCache, "_stream", stream)
    monkeypatch.setattr(CudaCache, "_after_passes", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    cache, kv = CudaCache(lambda arrays: [torch.from_numpy(each) for each in arrays], CPU), SimpleNamespace(groups=[group])

    def num_waits(sources: list[int]) -> int:
        cache.copy_out(kv, [host], np.array(sources), np.array([3, 4]))  # type: ignore[arg-type]
        return current.wait_event.call_count

    for targets in ([1, 2], [0, 5]):
        cache.copy_in(kv, [host], np.array([0, 1]), np.array(targets))  # type: ignore[arg-type]
    assert [num_waits(sources) for sources in ([3, 4], [4, 2], [2, 1])] == [0, 1, 1]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_blocks_on_their_way_out_take_little_memory_at_a_time(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes wait before the memory of a piece is used again; the last pieces keep theirs until they are sent."""
    stream, current, log, events = MagicMock(), MagicMock(), list[object](), count()

    @contextmanager
    def after_passes(_: CudaCache) -> Iterator[None]:
        log.append("copies wait")
        yield
        log.append("passes go on")

    def gather(tensor: torch.Tensor, dim: int, ids: torch.Tensor) -> torch.Tensor:
        log.append(("gather", len(ids)))
        if len(ids) == fails_at:
            raise torch.OutOfMemoryError
        return tensor[ids]

    stream.record_event.side_effect = lambda: next(events)
    current.wait_event.side_effect = lambda event: log.append(("passes wait for", event))
    monkeypatch.setattr(CudaCache, "_stream", stream)
    monkeypatch.setattr(CudaCache, "_after_passes", after_passes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.Tensor, "index_select", gather)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, _: log.append(("keep", len(tensor))))
    monkeypatch.setattr("titan.kernels.triton.cache.STAGED_BYTES", 48)  # two blocks of 24 bytes
    monkeypatch.setattr("titan.kernels.triton.cache.MAX_PIECES_OUT", 2)
    group, host = torch.arange(48.0).view(2, 8, 3), torch.zeros(9, 2, 3)
    cache = CudaCache(lambda arrays: [torch.from_numpy(each) for each in arrays], CPU)
    sources, targets = np.array([7, 0, 1, 5, 2, 3, 4]), np.array([2, 3, 5, 6, 7, 8, 0])
    kv, sent = SimpleNamespace(groups=[group]), ["copies wait", "passes go on"]
    with pytest.raises(torch.OutOfMemoryError) if fails_at else nullcontext():
        cache.copy_out(kv, [host], sources, targets)  # type: ignore[arg-type]
    pieces = [("gather", 2), *sent, ("gather", 2), *sent, ("passes wait for", 0), ("gather", 2), *sent, ("passes wait for", 1)]
    if fails_at:  # memory for the last piece: of those before it, the copies go on
        assert log == [*pieces, ("gather", 1), ("keep", 2)]
    else:
        assert log == [*pieces, ("gather", 1), *sent, ("keep", 2), ("keep", 1)]
        assert torch.equal(host[targets], group.transpose(0, 1)[sources])


def test_memory_is_free_that_the_device_has_once_pytorch_has_given_back_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of tensors that are gone, and of graphs that are, which PyTorch only marks as free."""
    free = [0, 1000]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(1, 1070))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 9999))
    assert TritonBackend.free_memory(SimpleNamespace(device=torch.device("cuda", 1))) == 1070  # type: ignore[arg-type]


def test_steps_run_on_the_default_stream_of_their_device_whichever_the_calling_thread_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing makes a step wait for the one before it, which another thread may have run, but that both are on one stream."""
    streams = [f"of cuda:{index}" for index in range(2)]
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: streams[device.index])
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with TritonBackend.active(SimpleNamespace(device=torch.device("cuda", 1))) as stream:  # type: ignore[arg-type]
        assert stream == "of cuda:1"
