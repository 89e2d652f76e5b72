"""What the built distributions hold, and that the wheel runs without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from titan.kernels.cpu.library import load_library

ROOT = Path(__file__).parents[1]
ROOMS = ["draft", "verify", "kernels", "bench"]
SOURCES = ["*.py", "*.cpp", "*.h"]


def run(*args: str | Path, cwd: Path, **env: str) -> str:
    """Run Python with ``args``; what it prints to stderr shows up in the report of a failure."""
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=os.environ | env, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it; no network is used."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the checkout with the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder)
    return folder


def contents(wheel: Path) -> dict[str, int]:
    """File names and checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def source_files(folder: str, *patterns: str) -> set[str]:
    paths = [path for pattern in patterns for path in (ROOT / folder).rglob(pattern)]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_file()}


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    top_level = {name.split("/")[0] for name in contents(wheel)}
    assert top_level == {"titan", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}


@pytest.mark.parametrize("room", ROOMS)
def test_wheel_has_the_room(wheel: Path, room: str) -> None:
    sources = source_files(room, *SOURCES)
    assert sources
    assert {f"titan/{name}" for name in sources} <= contents(wheel).keys()


def test_wheel_has_the_demo_models_and_the_type_marker(wheel: Path) -> None:
    demo = source_files("titan/demo", "*")
    assert {Path(name).suffix for name in demo} >= {".safetensors", ".json", ".md"}
    assert demo | {"titan/py.typed"} <= contents(wheel).keys()


def test_sdist_has_what_development_needs(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {"pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt"}
    assert files | source_files("tests", "*.py") | source_files("examples", "*.py") <= names
    assert {"kernels/cpu/library.cpp", "kernels/cpu/decoder.h"} <= names
    assert set().union(*(source_files(room, *SOURCES) for room in ROOMS)) <= names


def test_wheel_is_the_same_from_the_sdist_and_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    run("-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    assert contents(tmp_path / wheel.name) == contents(wheel)


def test_installed_wheel_generates(installed: Path, tmp_path: Path) -> None:
    """With a draft, and as fast as the checkout: the C++ of the wheel is compiled, or had been for the checkout."""
    code = (
        "import sys, titan.cli, titan.kernels.cpu.library as library; print(titan.__file__); "
        "print(library.load_library().description); sys.exit(titan.cli.main())"
    )
    env = {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    lines = run("-c", code, "generate", "def f(", "--max-tokens", "8", "--json", cwd=tmp_path, **env).splitlines()
    assert lines[:2] == [str(installed / "titan" / "__init__.py"), load_library().description]
    assert json.loads(lines[2])["metrics"]["proposed_per_depth"]
