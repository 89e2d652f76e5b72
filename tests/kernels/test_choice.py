"""Which back end a device gets, what kernels it gives a model, and what it refuses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from back_ends import make_back_end
from interpreted import triton_backend
from stepping import make_engine
from tiny_models import make_model

from titan.kernels.backend import choose_backend
from titan.kernels.cpu import kinds as cpu_kinds
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.cpu.kinds import CPU_KERNELS, choose_kind, kinds_here
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.library import load_library
from titan.kernels.cpu.threads import available_cores
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend, torch_threads, using_threads
from titan.kernels.torch.layers import TorchOps
from titan.kernels.triton.backend import DECODER_TRAITS, TritonBackend
from titan.kernels.triton.layers import TritonOps

CPU = torch.device("cpu")


@pytest.mark.long_where("native")
@pytest.mark.parametrize("choice", ["auto", *(kind.name for kind in kinds_here())])
def test_a_cpu_with_a_compiler_gets_cpp_of_the_kind_that_the_environment_says(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_back_end("cpu")  # or skip
    monkeypatch.setenv(CPU_KERNELS, choice)
    backend = choose_backend(CPU, 3)
    assert type(backend) is CpuBackend and backend.facts()["device"] == "cpu, 3 threads"
    kind = next(kind for kind in kinds_here() if choice in ("auto", kind.name))
    loaded = load_library(kind)
    assert (backend.facts()["kernels"], backend.facts()["library"]) == (loaded.description, str(loaded.path or "not kept"))


@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
def test_a_back_end_is_freed_as_soon_as_nobody_uses_it(name: str) -> None:
    """And with it the threads of the C++, which wait for no collection."""
    backend = make_back_end(name)
    is_there = ref(backend)
    gc.disable()
    try:
        del backend
        assert is_there() is None
    finally:
        gc.enable()


def test_pytorch_runs_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_KERNELS, "torch")
    assert type(choose_backend(CPU)) is TorchBackend


def test_the_fastest_kind_that_is_here_is_chosen_and_no_other_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = tuple(replace(kind, is_here=lambda i=i: i >= 2) for i, kind in enumerate(cpu_kinds.KINDS))
    monkeypatch.setattr(cpu_kinds, "KINDS", kinds)
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    assert choose_kind() is kinds[2]
    monkeypatch.setenv(CPU_KERNELS, "")  # as good as none
    assert choose_kind() is kinds[2]
    for choice, reason in (("amx", "this processor lacks it"), ("fast", "it is unknown")):
        monkeypatch.setenv(CPU_KERNELS, choice)
        message = f"^TITAN_CPU_KERNELS={choice} is not allowed: {reason}; allowed are 'auto', 'torch', 'avx512', 'avx2', 'native'$"
        with pytest.raises(ValueError, match=message):
            choose_backend(CPU)


def test_without_a_compiler_pytorch_runs_with_the_threads_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("titan.kernels.backend.load_library", load_library.__wrapped__)  # what is loaded stays
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    backend = choose_backend(CPU, 7)
    assert type(backend) is TorchBackend and "several times slower" in caplog.text
    assert "not compiled: no C++ compiler was found" in backend.facts()["kernels"] and "7 threads" in backend.facts()["device"]
    with choose_backend(CPU).active():
        assert counts == []
    monkeypatch.undo()
    before = torch.get_num_threads()
    with backend.active():
        assert torch.get_num_threads() == 7
    assert torch.get_num_threads() == before


@pytest.fixture
def _three_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_three_torch_threads")
@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_an_engine_that_is_made_while_another_runs_has_the_threads_that_it_would_have_had_before(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan.kernels.cpu.compiled.available_cores", lambda: 8)
    monkeypatch.setenv(CPU_KERNELS, choice)
    facts = choose_backend(CPU).facts()
    assert facts["device"] == "cpu, 3 threads"
    with using_threads(1), ThreadPoolExecutor(1) as executor:
        assert executor.submit(lambda: choose_backend(CPU).facts()).result() == choose_backend(CPU).facts() == facts


@pytest.mark.usefixtures("_three_torch_threads")
def test_a_thread_gets_back_the_number_from_before_all_that_run() -> None:
    with using_threads(1), ThreadPoolExecutor(1) as executor:

        def numbers_within() -> list[int]:
            with using_threads(2), using_threads(4):
                pass
            return [torch_threads(), torch.get_num_threads()]

        def own_number_after() -> int:
            torch.set_num_threads(5)
            with using_threads(2):
                pass
            return torch.get_num_threads()

        assert executor.submit(numbers_within).result() == [3, 3]
        assert executor.submit(own_number_after).result() == 5
        with using_threads(2):
            pass
        assert [torch_threads(), torch.get_num_threads()] == [3, 1]
    assert [torch_threads(), torch.get_num_threads()] == [3, 3]


def test_threads_are_as_many_as_physical_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even processors below 4 are one core, odd ones another; of the others nothing is known."""
    files = {f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}\n" for i in range(4)}

    def read_text(path: Path, encoding: str) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    files["/proc/self/cgroup"], files["/sys/fs/cgroup/a.slice/cpu.max"] = "0::/a.slice/b.scope\n", "max 1000\n"
    for limit in (None, "max 1000", "?", "2500 1000", "1500 1000", "10 1000"):
        if limit is not None:
            files["/sys/fs/cgroup/a.slice/b.scope/cpu.max"] = limit + "\n"
        for affinity, num_cores in ({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1, 2, 5, 6}, 4):
            monkeypatch.setattr("os.sched_getaffinity", lambda process, affinity=affinity: affinity, raising=False)
            assert available_cores() == min(num_cores, {"2500 1000": 3, "1500 1000": 2, "10 1000": 1}.get(str(limit), 8))
    files["/sys/fs/cgroup/a.slice/b.scope/cpu.max"], files["/sys/fs/cgroup/cpu.max"] = "max 1000\n", "2000 1000\n"
    assert available_cores() == 2, "a group around it has less"


def test_fast_operations_are_given_to_models_whose_traits_they_know(backend: Backend) -> None:
    of_back_ends = {CpuBackend: CompiledOps, TritonBackend: TritonOps, TorchBackend: TorchOps}  # a C++ one is one of PyTorch
    fast = next(ops for kind, ops in of_back_ends.items() if isinstance(backend, kind))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        is_known = dtype != torch.float16 or not isinstance(backend, CpuBackend)
        assert type(backend.layer_ops(dtype, DECODER_TRAITS | {"sliding_window"} - {"tied_embedding"})) is (
            fast if is_known else TorchOps
        )
        assert type(backend.layer_ops(dtype, frozenset({"rms_norm", "moe"}))) is TorchOps


def test_a_card_that_triton_does_not_support_is_refused_and_so_are_threads_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^num_threads=2 is not allowed with device='cuda:0': it is for a CPU$"):
        choose_backend(torch.device("cuda", 0), 2)
    backend = choose_backend(torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert type(backend) is TritonBackend and type(backend.layer_ops(torch.bfloat16, frozenset())) is TritonOps
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    message = r"'cuda:0' is a Tesla T4 of compute capability 7.5: the Triton kernels.* need 8.0 or more"
    with pytest.raises(ValueError, match=message):
        backend.layer_ops(torch.bfloat16, frozenset())


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"head_dim": 514}, {}, "head_dim is 514: it must be from 8 to 512"),
        ({}, {"block_size": 64}, "^block_size=64 is not supported on .*: it must be 16 or 32$"),
        ({}, {"max_batch_size": 1025}, "^max_batch_size=1025 is not supported on .*: it must be at most 1024$"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_by_the_engine(
    config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    triton_backend().check_limits(block_size=32, max_batch_size=1024)
    make_model(tmp_path, num_hidden_layers=1, **config)
    with pytest.raises(ValueError, match=message):
        make_engine(str(tmp_path), backend=triton_backend(), **({"num_kv_blocks": 40} | options))


@pytest.mark.parametrize(
    ("vendor", "order"),
    [
        ("GenuineIntel", ["amx", "avx512", "avx512bf16", "avx2", "native"]),
        ("AuthenticAMD", ["amx", "avx512bf16", "avx512", "avx2", "native"]),
        (None, ["amx", "avx512bf16", "avx512", "avx2", "native"]),
    ],
)
def test_products_of_bfloat16_are_for_those_whose_processor_does_them_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str | None, order: list[str]
) -> None:
    monkeypatch.setattr(cpu_kinds, "KINDS", tuple(replace(kind, is_here=lambda: True) for kind in cpu_kinds.KINDS))
    facts = tmp_path / "cpuinfo"
    if vendor is not None:
        facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n", encoding="utf-8")
    monkeypatch.setattr(cpu_kinds, "Path", lambda _: facts)
    assert [kind.name for kind in kinds_here()] == order
