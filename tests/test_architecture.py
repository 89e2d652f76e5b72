"""The rooms and their import order, read from the source of every shipped file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["draft", "verify", "kernels", "bench"]  # top-level folders, imported as titan.<room>

# A module imports from earlier entries only, and from its own package; modules of one entry are siblings.
ORDER = [
    {"titan.kernels"},
    {"titan.core.trees", "titan.core.sampling_params", "titan.core.outputs", "titan.detokenizer", "titan.core.draft_history"},
    {"titan.core.options", "titan.core.request", "titan.sample.logits", "titan.core.device_trees"},
    {"titan.core.step"},
    {
        "titan.execute.batch",
        "titan.memory.block_pool",
        "titan.schedule.admission",
        "titan.sample.distributions",
        "titan.schedule.stopping",
        "titan.core.metrics",
        "titan.tree_view",
    },
    {"titan.memory.kv_cache"},
    {"titan.models", "titan.kernels.triton.cuda_graphs"},
    {"titan.kernels.triton.pass_inputs"},
    {"titan.kernels.triton.runner", "titan.kernels.cpu.runner"},
    {"titan.execute.model_runner"},
    {"titan.draft", "titan.verify"},
    {"titan.schedule.scheduler", "titan.execute.memory_profile"},
    {"titan.engine"},
    {"titan.llm"},
    {"titan"},  # titan/__init__.py
    {"titan.cli"},
    {"titan.bench"},
]
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}


def shipped_modules() -> dict[str, Path]:
    """Every module of the distribution by its dotted name."""
    modules = {}
    for folder, prefix in [("titan", "titan"), *((room, f"titan.{room}") for room in ROOMS)]:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return modules


def find_imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the full names that a file imports, and whether inside a function; TYPE_CHECKING makes no difference."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from ((alias.name, lazy) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from (("." * level + ".".join(filter(None, (module, alias.name))), lazy) for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield name, lazy
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from find_imports(child, lazy or is_function)


def place_of(name: str) -> str:
    """The entry of ORDER that a module, or a name in a module, belongs to."""
    entry = ".".join(name.split(".")[:2])
    return entry if entry in RANKS else "titan"


def find_bare_imports(source: str) -> list[str]:
    """Imports of rooms by their bare names, and relative imports, which hide where they lead."""
    return [name for name, _ in find_imports(ast.parse(source)) if name.split(".")[0] in {*ROOMS, "tests", "examples", ""}]


def find_violations(module: str, source: str) -> list[str]:
    """What the imports of a shipped module do against the order."""
    if module != "titan" and place_of(module) == "titan":
        return [f"{module} has no place in the order"]
    place = place_of(module)
    violations = [f"{module} imports {name}" for name in find_bare_imports(source)]
    for name, lazy in find_imports(ast.parse(source)):
        if name.split(".")[0] != "titan":
            continue
        target = place_of(name)
        allowed = target == place or RANKS[target] < RANKS[place] or (place == "titan.cli" and target == "titan.bench" and lazy)
        if not allowed:
            violations.append(f"{module} imports {name}")
    return violations


def test_shipped_modules_keep_the_import_order() -> None:
    modules = shipped_modules()
    assert {place_of(module) for module in modules} >= {"titan", *(f"titan.{room}" for room in ROOMS)}
    violations = [v for module, path in modules.items() for v in find_violations(module, path.read_text(encoding="utf-8"))]
    assert not violations


def test_tests_and_examples_use_full_names() -> None:
    files = [path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert {path.name: bare for path in files if (bare := find_bare_imports(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("titan.kernels.cpu.linear", "from titan.core.trees import DraftTree"),
        ("titan.core.trees", "import titan.core.options"),
        ("titan.core.trees", "from titan import request"),
        ("titan.core.request", "if TYPE_CHECKING:\n    from titan.core.step import StepPlan"),
        ("titan.memory.block_pool", "def f():\n    from titan.memory.kv_cache import KVCache"),
        ("titan.draft.ngram", "from titan.verify.accept import walk"),
        ("titan.verify.accept", "from titan.draft import base"),
        ("titan.schedule.scheduler", "from titan.execute.memory_profile import memory_for_kv"),
        ("titan.execute.model_runner", "import titan.schedule.scheduler as s"),
        ("titan.engine", "from titan import LLM"),
        ("titan.llm", "def f():\n    import titan.bench.throughput"),
        ("titan.llm", "importlib.import_module('titan.bench.throughput')"),
        ("titan.cli", "import titan.bench.throughput"),
        ("titan.models.decoder", "from . import layers"),
        ("titan.models.decoder", "import kernels.linear"),
        ("titan.models.decoder", "from kernels import linear"),
        ("titan.surprise", ""),
    ],
)
def test_violation_is_found(module: str, source: str) -> None:
    assert len(find_violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("titan.kernels.cpu.linear", "import torch, triton\nfrom titan.bench.gpu.attention_reference import attend"),
        ("titan.core.step", "from titan.core.request import Request"),
        ("titan.execute.batch", "from titan.kernels import linear"),
        ("titan", "from titan.llm import LLM"),
        ("titan.cli", "import titan\ndef f():\n    from titan.bench import throughput"),
        ("titan.bench.throughput", "from titan import LLM, cli"),
    ],
)
def test_order_is_not_stricter_than_meant(module: str, source: str) -> None:
    assert find_violations(module, source) == []


@pytest.mark.parametrize("folder", [*ROOMS, "tests"])
def test_folder_is_no_package_of_its_own(folder: str) -> None:
    assert list((ROOT / folder).rglob("__init__.py")) == []


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an unpacked sdist holds files in place of the links")
@pytest.mark.parametrize("room", ROOMS)
def test_room_is_linked_into_the_package(room: str) -> None:
    assert (ROOT / "titan" / room).readlink() == Path("..", room)


def test_import_titan_is_light_and_offers_its_public_names() -> None:
    code = """
import sys, titan
assert not {"triton", "transformers"} & sys.modules.keys(), "loaded by import titan"
assert titan.__all__
for name in titan.__all__:
    getattr(titan, name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
