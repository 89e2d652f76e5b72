"""The rooms and their import order, read from the source of every shipped file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutate import load_mutations

ROOT = Path(__file__).parents[1]
ROOMS = ["draft", "verify", "kernels", "bench"]  # top-level folders, imported as titan.<room>

# A module imports from earlier entries only, and from its own package; packages of one entry are siblings.
ORDER = [
    {"titan.core"},
    {"titan.kernels.interfaces"},
    {"titan.kernels.beam_growth", "titan.kernels.shape_growth"},
    {"titan.kernels.growth", "titan.kernels.tree_places"},
    {"titan.kernels.torch"},
    {"titan.kernels.cpu", "titan.kernels.triton"},
    {"titan.kernels.backend"},
    {"titan.models"},
    {"titan.memory", "titan.draft", "titan.verify"},
    {"titan.execute", "titan.schedule", "titan.adaptive", "titan.claims"},
    {"titan.engine_metrics"},
    {"titan.diagnosis", "titan.engine", "titan.model_info", "titan.tree_view", "titan.vllm_names"},
    {"titan.frontend"},
    {"titan.llm"},
    {"titan"},  # titan/__init__.py
    {"titan.commands"},
    {"titan.cli"},
    {"titan.bench"},
]
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}


def shipped_modules() -> dict[str, str]:
    """The source of every module of the distribution by its dotted name."""
    modules = {}
    for folder, prefix in [("titan", "titan"), *((room, f"titan.{room}") for room in ROOMS)]:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join([prefix, *(part for part in parts if part != "__init__")])] = path.read_text(encoding="utf-8")
    return modules


MODULES = shipped_modules()


def find_imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the full names that a file imports, and whether inside a function; TYPE_CHECKING makes no difference."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from ((alias.name, lazy) for alias in names)
            case ast.ImportFrom(module=module, names=names):  # ruff bans relative imports
                yield from ((f"{module}.{alias.name}", lazy) for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield name, lazy
        yield from find_imports(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def place_of(name: str) -> str:
    """The entry of ORDER that a module, or a name in a module, belongs to: the longest that it begins with."""
    while name not in RANKS:
        name = name.rpartition(".")[0]
    return name


def find_violations(module: str, source: str) -> list[str]:
    place = place_of(module)
    if place == "titan" and module != "titan":
        return [f"{module} has no place in the order"]
    violations = []
    for name, lazy in find_imports(ast.parse(source)):
        room = name.split(".")[0]
        if room == "titan":
            target = place_of(name)
            allowed = target == place or RANKS[target] < RANKS[place] or (place, target, lazy) == ("titan.cli", "titan.bench", True)
        else:
            allowed = room not in {*ROOMS, "tests", "examples"}  # a bare name
        if not allowed:
            violations.append(f"{module} imports {name}")
    return violations


def test_shipped_modules_keep_the_import_order() -> None:
    assert {place_of(module) for module in MODULES} == RANKS.keys()
    assert [violation for module, source in MODULES.items() for violation in find_violations(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("titan.core.request", "from titan import engine"),
        ("titan.core.request", "if TYPE_CHECKING:\n    from titan.memory.kv_cache import KVCache"),
        ("titan.kernels.growth", "from titan.kernels.torch.trees import TorchTrees"),
        ("titan.verify.accept", "from titan.draft import base"),
        ("titan.llm", "def f():\n    import titan.bench.throughput"),
        ("titan.llm", "importlib.import_module('titan.bench.throughput')"),
        ("titan.cli", "import titan.bench.throughput"),
        ("titan.models.decoder", "from kernels import linear"),
        ("titan.surprise", ""),
    ],
)
def test_violation_is_found(module: str, source: str) -> None:
    assert len(find_violations(module, source)) == 1


ASKING = {"takes_triton", "kinds_here", "load_library", "is_cpu", "is_cuda", "is_mps", "cuda", "mkldnn", "mps"}
"""Functions, attributes and modules that tell a device or a library."""
DEVICES = {"cpu", "cuda", "mps", "PyTorch", "compiled C++", "Triton"}
"""And the names of the back ends."""
PROTOCOLS = {"Backend", "Runner", "LayerOps", "CacheOps", "SamplingOps", "TreeOps"}
BACKENDS = ("titan.kernels.torch", "titan.kernels.cpu", "titan.kernels.triton")


def find_questions(source: str) -> list[str]:
    """Where a source asks which device, library, back end or kind of runner it has to do with."""
    tree = ast.parse(source)
    found = [name for name, _ in find_imports(tree) if name.startswith((*BACKENDS, "triton"))]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="type", value=ast.Name(id=owner) | ast.Attribute(attr=owner)) if "device" in owner:
                found.append(f"{owner}.type")
            case ast.Name(id=name) | ast.Attribute(attr=name):
                if name in ASKING or (name.endswith(("Backend", "Runner", "Ops")) and name not in PROTOCOLS):
                    found.append(name)
            case ast.Constant(value=str(value)) if value in DEVICES:
                found.append(repr(value))
    return found


def test_nobody_outside_the_kernels_asks_what_it_runs_on() -> None:
    """But benches, which measure devices."""
    others = {name: source for name, source in MODULES.items() if not name.startswith(("titan.kernels.", "titan.bench."))}
    assert {name: questions for name, source in others.items() if (questions := find_questions(source))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "fast = logits.is_cpu",
        "kind = self.device.type",
        "from torch import cuda\ncuda.synchronize()",
        "torch.backends.mkldnn.is_available()",
        "if name == 'cuda': pass",
        "home = torch.device('cpu')",
        "def f():\n    import titan.kernels.triton.backend",
        "if isinstance(self.ops, (TorchOps, kernels.TritonOps)): pass",
    ],
)
def test_question_is_found(source: str) -> None:
    assert find_questions(source)


def test_mutations_fit_the_sources() -> None:
    """A single one that does not keeps all others from running."""
    assert len(load_mutations(ROOT / "tests/mutations.toml", ROOT, [])) > 300


def test_rooms_and_tests_are_no_packages_of_their_own() -> None:
    assert [path for folder in (*ROOMS, "tests") for path in (ROOT / folder).rglob("__init__.py")] == []


def test_rooms_are_linked_into_the_package() -> None:
    assert {room: (ROOT / "titan" / room).readlink() for room in ROOMS} == {room: Path("..", room) for room in ROOMS}
