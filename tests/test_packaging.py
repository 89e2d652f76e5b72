"""What the built distributions hold, and that the wheel runs without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import hatchling.build
import pytest
from hatchling.builders.wheel import WheelBuilder

import titan
from titan.kernels.cpu.kinds import CPU_KERNELS, kinds_here
from titan.kernels.cpu.library import load_library

ROOT = Path(__file__).parents[1]
ROOMS = ["draft", "verify", "kernels", "bench"]
SOURCES = ["*.py", "*.cpp", "*.h"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it, by the hooks that pyproject.toml names; no network is used."""
    folder = tmp_path_factory.mktemp("dist")
    sources = folder / "sources"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["build-backend"] == hatchling.build.__name__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zlib, "compressobj", lambda _, *rest, compress=zlib.compressobj: compress(0, *rest))  # the models take long
        patch.chdir(ROOT)
        sdist = folder / hatchling.build.build_sdist(str(folder))
        with tarfile.open(sdist) as archive:
            archive.extractall(sources, filter="data")
        patch.chdir(next(sources.iterdir()))
        hatchling.build.build_wheel(str(folder))
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        yield archive


def source_files(folder: str, *patterns: str) -> set[str]:
    paths = [path for pattern in patterns for path in (ROOT / folder).rglob(pattern)]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_file()}


def test_the_wheel_from_the_sdist_holds_what_one_from_the_checkout_would(wheel: zipfile.ZipFile) -> None:
    """Under one name: its rooms, the demo models and the type marker."""
    checkout = {each.distribution_path: Path(each.path) for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    packed = {info.filename: info.CRC for info in wheel.infolist() if ".dist-info/" not in info.filename}
    assert packed == {name: zlib.crc32(path.read_bytes()) for name, path in checkout.items()}
    assert {name.split("/")[0] for name in packed} == {"titan"}
    for room in ROOMS:
        sources = source_files(room, *SOURCES)
        assert sources and {f"titan/{name}" for name in sources} <= packed.keys()
    demo = source_files("titan/demo", "*")
    assert {Path(name).suffix for name in demo} >= {".safetensors", ".json", ".md"}
    assert demo | {"titan/py.typed"} <= packed.keys()


def test_the_sdist_holds_what_the_wheel_is_built_from_once(dist: Path) -> None:
    """Under titan/, where changes of it have an effect, and not also in the folders behind the links."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} | source_files("examples", "*.py") <= names
    for room in ROOMS:
        assert {f"titan/{name}" for name in source_files(room, *SOURCES)} <= names
        assert not any(name.startswith(f"{room}/") for name in names)


def test_the_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """With its own demo models, and as fast as the checkout: the C++ of the wheel is compiled, or had been for the checkout."""
    wheel.extractall(tmp_path)
    code = (
        "import sys, importlib.metadata, titan.llm; from titan.models.files import resolve_model; "
        "from titan.kernels.cpu import kinds, library; print(titan.__file__, resolve_model('demo', 'draft'), "
        "library.load_library(kinds.choose_kind()).path, sep='\\n', flush=True); "
        "sys.exit(importlib.metadata.distribution('titan-spec').entry_points['titan'].load()())"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path), CPU_KERNELS: "auto"}
    command = [sys.executable, "-c", code, "info", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    *files, facts = done.stdout.splitlines()
    assert files == [*map(str, (tmp_path / "titan/__init__.py", tmp_path / "titan/demo/draft", load_library(kinds_here()[0]).path))]
    assert json.loads(facts)["titan"] == titan.__version__
