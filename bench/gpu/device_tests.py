"""The tests of the CUDA kernels on this device, each a row: those that need one, then every kernel against its slow twin.

They are found by pytest in a checkout. What an illegal access costs the tests after it in one run of pytest, it does not cost here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from titan.bench.gpu.sections import Figures, Section, Setting, Task

ROOT = Path(__file__).resolve().parents[2]
FULL = (
    ("tests",),
    (
        *("test_cuda_graphs", "test_triton_chains", "test_device_trees", "test_conformance_trees", "test_conformance_layers"),
        *("test_conformance_sampling", "test_a_rounded_draft", "test_short_weights", "test_other_layers"),
        *("test_tree_attention", "test_attention_planner", "[triton", "-triton", "_with_triton", "test_triton", "test_conformance"),
        "test_wrapper_arguments",
    ),
)
"""Where tests are, and words in the names of those that run Triton kernels: on a CUDA device if there is one, or interpreted.

The first words are of what is most likely to fail on a device: what was changed since it last ran on one, and whole passes.
"""
TINY = ("tests/kernels/test_conformance_cache.py",), ("[triton",)
OTHER_BACK_ENDS = ("[torch", "[cpu")


class Plugin:
    """Keeps pytest where it would run the tests that it has found, and hears what becomes of them."""

    def __init__(self) -> None:
        self._found: SimpleQueue[list[Any]] = SimpleQueue()
        self._reports: list[Any] = []

    def find(self, files: Sequence[str]) -> list[Any]:
        """Find the tests of some files; pytest stays in a thread, that they can be run, for as long as this process lives.

        Those that take long in the interpreter are among them. Of warnings, only a drafter's that it has failed is a failure.
        """
        options = ["-q", f"--rootdir={ROOT}", f"--config-file={ROOT}/pyproject.toml", "-p", "no:cacheprovider"]
        options += ["-m", "long or not models", "-W", "default", "-W", "error:the drafter:RuntimeWarning"]
        arguments = [*options, "--continue-on-collection-errors", *(str(ROOT / each) for each in files)]

        def run_pytest() -> None:
            try:
                with redirect_stdout(sys.stderr):
                    import_module("pytest").main(arguments, plugins=[self])
            finally:
                self._found.put([])

        Thread(target=run_pytest, daemon=True).start()
        return self._found.get()

    def pytest_runtestloop(self, session: Any) -> bool:
        self._found.put(session.items)
        return Event().wait()  # for ever: the session is still needed

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # such as for a package that is not installed
            print(report.longreprtext, file=sys.stderr, flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)

    def run(self, item: Any, next_item: Any) -> Figures:
        """Run a test; fixtures that the next one shares stay.

        Raises:
            ValueError: it failed; the whole report is on stderr.
        """
        self._reports.clear()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        for report in self._reports:
            if report.failed:
                print(report.longreprtext, file=sys.stderr, flush=True)
                crash = getattr(report.longrepr, "reprcrash", None)
                raise ValueError(crash.message if crash else "see its report")
        return {"skipped" if any(report.skipped for report in self._reports) else "passed": 1.0}


def make_tasks(setting: Setting) -> Sequence[Task]:
    """The tests, those that need a device first, then by the first word in their names.

    Raises:
        FileNotFoundError: there are none.
    """
    plugin, (files, words) = Plugin(), TINY if setting.is_tiny else FULL
    found = [item for item in plugin.find(files) if not any(each in item.nodeid for each in OTHER_BACK_ENDS)]
    on_cuda = [item for item in found if item.get_closest_marker("cuda") and not setting.is_tiny]
    others = [item for item in found if item not in on_cuda]
    items = list(dict.fromkeys([*on_cuda, *(item for word in words for item in others if word in item.nodeid)]))
    if not items:
        raise FileNotFoundError(f"there are no tests in {ROOT}, or pytest cannot read them: see above")
    return [
        Task({"test": item.nodeid}, partial(plugin.run, item, after), 20 if item in on_cuda else 8)  # most of it is compiling
        for item, after in pairwise([*items, None])
    ]


SECTION = Section(
    "tests",
    "Tests of the kernels",
    "Tests: those that need a CUDA device, and those of every Triton kernel against its slow twin.",
    seconds=400,
    columns={"passed": ".0f", "skipped": ".0f"},
    make_tasks=make_tasks,
)
