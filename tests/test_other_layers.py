"""Models of transformers on Triton: several shapes of heads, kinds of attention, passes that no graph takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint
from families import FAMILIES
from interpreted import DEVICE, eager_capture, triton_backend
from torch import Tensor
from twins import LIMITS, Twins

from titan.core.batch import QueryRow
from titan.core.trees import EMPTY_TREE
from titan.kernels.interfaces import Backend, PassCounts
from titan.kernels.triton.cuda_graphs import Replay, Replays
from titan.kernels.triton.runner import TritonRunner
from titan.kernels.triton.tools import INTERPRETED

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's in the interpreter
WITH_EXPERTS = pytest.mark.skipif(not INTERPRETED, reason="on a device, which of them are chosen may be read on the host")


def make_twins(folder: Path, name: str, backend: Backend) -> Twins:
    twins = Twins(Path(Checkpoint(FAMILIES[name], folder).path), backend)
    assert type(twins.runner) is TritonRunner and "transformers" in twins.runner.model.config.traits
    return twins


@pytest.mark.long_where("gemma2", "granite_swa", "llama4_text")
@pytest.mark.parametrize(
    "name",
    ["gemma2", "granite_swa", "youtu", *(pytest.param(each, marks=WITH_EXPERTS) for each in ("llama4_text", "mimo_v2_flash"))],
)
def test_layers_of_several_kinds_are_planned_each_and_replayed_together(tmp_path: Path, name: str) -> None:
    """Soft caps, sinks, latents, chunks, narrow values; with windows in some of the layers."""
    twins = make_twins(tmp_path, name, triton_backend())
    for query_lens in ([3, 1, 2], [3, 1, 2], [20, 3]):
        twins.run(twins.parts(query_lens, have_chunks=max(query_lens) > 3))
    assert twins.counts == PassCounts(num_replayed=1, num_eager=2)


def failing_capture(tried: list[Callable[[], Tensor]], num_good: int = 1) -> Callable[[Callable[[], Tensor]], Replay | None]:
    succeed = eager_capture()

    def capture(function: Callable[[], Tensor]) -> Replay | None:
        tried.append(function)
        if len(tried) > num_good:
            raise ValueError("a number was read on the host")
        return succeed(function)

    return capture


def test_what_was_captured_before_a_failure_is_replayed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A chunk, which is not padded where it has no graph, and after it a pass that fails, which is told; no other is tried."""
    tried: list[Callable[[], Tensor]] = []
    twins = make_twins(tmp_path, "gemma2", triton_backend(lambda: failing_capture(tried)))
    for query_len in (10, 2, 10, 2, 1, 20):
        is_chunk = query_len > LIMITS.query_len
        chunk = QueryRow(twins.tables()[0], 3, twins.tokens(query_len), True), EMPTY_TREE
        twins.run([chunk] if is_chunk else twins.parts([query_len]))
    assert len(tried) == 2 and twins.counts == PassCounts(num_replayed=1, num_eager=5)
    [record] = caplog.records
    reason = "a pass of 2 tokens could not be captured: ValueError: a number was read on the host"
    assert record.levelname == "WARNING" and record.getMessage() == f"this model gets no further CUDA graphs, since {reason}"
    with pytest.raises(ValueError, match="a number was read on the host"):  # of Titan's own models
        Replays(failing_capture([], 0), PassCounts(), DEVICE).record(0, lambda: torch.zeros(1), "a pass")
