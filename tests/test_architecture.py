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
    {"titan.core"},
    {"titan.kernels"},
    {"titan.models"},
    {"titan.memory", "titan.sample"},
    {"titan.execute"},
    {"titan.draft", "titan.verify"},
    {"titan.schedule"},
    {"titan.engine", "titan.detokenizer", "titan.tree_view"},
    {"titan.frontend"},
    {"titan.llm"},
    {"titan"},  # titan/__init__.py
    {"titan.cli"},
    {"titan.bench"},
]
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}

# The same inside of the kernels: what back ends have in common, PyTorch, the others, the choice.
KERNELS_ORDER = [{"interfaces"}, {"tree_places", "growth"}, {"torch"}, {"cpu", "triton"}, {"backend"}]
KERNELS_RANKS = {name: rank for rank, names in enumerate(KERNELS_ORDER) for name in names}


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


def find_kernel_violations(module: str, source: str) -> list[str]:
    """What the imports of a module of the kernels do against their order."""
    place = module.split(".")[2]
    targets = [name.split(".")[2] for name, _ in find_imports(ast.parse(source)) if name.startswith("titan.kernels.")]
    return [f"{module} imports {target}" for target in targets if target != place and KERNELS_RANKS[target] >= KERNELS_RANKS[place]]


QUESTIONS = {"takes_triton", "usable_library", "is_cpu", "is_cuda", "is_mps", "cuda", "mkldnn", "mps"}
"""Names that ask for a device or a library, as a function, an attribute or a module."""

DEVICES = {"cpu", "cuda", "mps", "meta", "PyTorch", "compiled C++", "Triton"}
"""And the names of the back ends."""
BACKENDS = ("titan.kernels.torch", "titan.kernels.cpu", "titan.kernels.triton")


def find_questions(source: str) -> list[str]:
    """Where a source asks which device, library, back end or kind of runner it has to do with."""
    tree = ast.parse(source)
    found = [name for name, _ in find_imports(tree) if name.startswith((*BACKENDS, "triton"))]
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in QUESTIONS or (
                name.endswith("Backend") and name != "Backend"
            ):
                found.append(name)
            case ast.Attribute(attr="type", value=ast.Name(id=owner) | ast.Attribute(attr=owner)) if "device" in owner:
                found.append(f"{owner}.type")
            case ast.Compare(left=left, comparators=comparators):
                values = [each.value for each in (left, *comparators) if isinstance(each, ast.Constant)]
                found += [repr(value) for value in values if value in DEVICES]
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                names = [each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in ast.walk(kinds)]
                found += [f"isinstance of {name}" for name in names if name.endswith(("Runner", "Ops", "Backend"))]
            case ast.Call(func=ast.Attribute(attr="device"), args=[ast.Constant(value=value)]) if value in DEVICES:
                found.append(f"device({value!r})")
    return found


def test_shipped_modules_keep_the_import_order() -> None:
    modules = shipped_modules()
    assert {place_of(module) for module in modules} >= {"titan", *(f"titan.{room}" for room in ROOMS)}
    violations = [v for module, path in modules.items() for v in find_violations(module, path.read_text(encoding="utf-8"))]
    assert not violations


def test_back_ends_keep_their_order_inside_the_kernels() -> None:
    modules = {module: path for module, path in shipped_modules().items() if module.startswith("titan.kernels.")}
    assert {module.split(".")[2] for module in modules} == KERNELS_RANKS.keys()
    violations = [v for module, path in modules.items() for v in find_kernel_violations(module, path.read_text(encoding="utf-8"))]
    assert not violations


def test_nobody_outside_the_kernels_asks_what_it_runs_on() -> None:
    """But benches, which measure devices."""
    asking = {
        module: questions
        for module, path in shipped_modules().items()
        if place_of(module) not in ("titan.kernels", "titan.bench")
        and (questions := find_questions(path.read_text(encoding="utf-8")))
    }
    assert asking == {}


@pytest.mark.parametrize(
    "source",
    [
        "if backend.takes_triton(device): pass",
        "library = usable_library()",
        "fast = logits.is_cpu",
        "if kv.device.type == 'cuda': pass",
        "kind = self.device.type",
        "torch.cuda.synchronize()",
        "from torch import cuda\ncuda.synchronize()",
        "torch.backends.mkldnn.is_available()",
        "if name == 'cuda': pass",
        "home = torch.device('cpu')",
        "if backend.name == 'Triton': pass",
        "from titan.kernels.cpu.runner import CompiledRunner",
        "def f():\n    import titan.kernels.triton.backend",
        "import triton",
        "if isinstance(runner, CompiledRunner): pass",
        "if isinstance(self.ops, (TorchOps, kernels.TritonOps)): pass",
        "backend = CpuBackend(library)",
    ],
)
def test_question_is_found(source: str) -> None:
    assert find_questions(source)


@pytest.mark.parametrize(
    "source",
    [
        "from titan.kernels.interfaces import Backend, Runner",
        "from titan.kernels.backend import choose_backend",
        "logits = torch.zeros(3, device=backend.device)",
        "if isinstance(proposal, DraftTrees): pass",
        "text = 'on a cpu'",
        "kind = request.type",
    ],
)
def test_handing_on_is_no_question(source: str) -> None:
    assert find_questions(source) == []


def test_tests_and_examples_use_full_names() -> None:
    files = [path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert {path.name: bare for path in files if (bare := find_bare_imports(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("titan.core.trees", "from titan.kernels.interfaces import Backend"),
        ("titan.core.request", "from titan import engine"),
        ("titan.core.request", "if TYPE_CHECKING:\n    from titan.memory.kv_cache import KVCache"),
        ("titan.kernels.torch.runner", "from titan.models.decoder import Decoder"),
        ("titan.kernels.growth", "from titan.execute.batch import target_batch"),
        ("titan.memory.block_pool", "def f():\n    from titan.sample.logits import transform_logits"),
        ("titan.draft.ngram", "from titan.verify.accept import collect"),
        ("titan.verify.accept", "from titan.draft import base"),
        ("titan.draft.base", "from titan.schedule.scheduler import Scheduler"),
        ("titan.execute.batch", "import titan.schedule.scheduler as s"),
        ("titan.engine", "from titan.frontend import FrontEnd"),
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
        ("titan.kernels.torch.trees", "import torch, triton\nfrom titan.core.trees import DraftTrees"),
        ("titan.core.step", "from titan.core.request import Request"),
        ("titan.memory.kv_cache", "from titan.kernels import interfaces"),
        ("titan", "from titan.llm import LLM"),
        ("titan.cli", "import titan\ndef f():\n    from titan.bench import throughput"),
        ("titan.bench.throughput", "from titan import LLM, cli"),
    ],
)
def test_order_is_not_stricter_than_meant(module: str, source: str) -> None:
    assert find_violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("titan.kernels.torch.runner", "from titan.kernels.cpu.runner import CompiledRunner"),
        ("titan.kernels.triton.layers", "from titan.kernels.cpu.linear import linear"),
        ("titan.kernels.growth", "from titan.kernels.torch.trees import TorchTrees"),
        ("titan.kernels.interfaces", "from titan.kernels.growth import grow_by_passes"),
    ],
)
def test_violation_inside_the_kernels_is_found(module: str, source: str) -> None:
    assert len(find_kernel_violations(module, source)) == 1


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
