"""Pages that list what a program may name, methods, options, metrics and names that are kept; and links of all pages."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from titan import LLM, CompletionOutput, EngineMetrics, RequestMetrics, RequestOutput, SamplingParams
from titan.core.metrics import (
    DraftMetrics,
    RecentMetrics,
    Shortages,
    SpeculationMetrics,
    StepSplit,
    TierMetrics,
    UserMetrics,
)
from titan.core.options import MemoryOptions, ModelOptions, ScheduleOptions, SpeculationOptions
from titan.core.outputs import Logprob
from titan.core.terms import RequestTerms
from titan.kernels.cpu.kinds import CPU_KERNELS, KINDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.glob("*.md")), ROOT / "bench" / "results" / "README.md"]


def rows(page: str, section: str) -> Iterator[list[list[str]]]:
    """What each cell of a section's table has in backquotes, row by row."""
    text = (DOCS / page).read_text(encoding="utf-8")
    [body] = re.findall(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    for line in body.splitlines():
        if line.startswith("| `"):
            yield [re.findall(r"`(.*?)`", cell) for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize(
    ("section", "group"),
    [
        ("Models", ModelOptions),
        ("Speculation", SpeculationOptions),
        ("Scheduling", ScheduleOptions),
        ("Memory", MemoryOptions),
        ("SamplingParams, of a request", SamplingParams),
        ("Terms, of a call", RequestTerms),
    ],
)
def test_the_options_of_the_page_are_those_that_there_are(section: str, group: Any) -> None:
    """One default stands for all options of a row, or there is one for each."""
    on_page = [
        (name, repr(literal_eval(default)))
        for names, defaults, *_ in rows("options.md", section)
        for name, default in zip(names, defaults * len(names) if len(defaults) == 1 else defaults, strict=True)
    ]
    assert on_page == [(option.name, repr(option.default)) for option in fields(group)]


def test_the_kinds_of_kernels_of_the_page_are_those_that_there_are() -> None:
    [[_, kinds]] = [row for row in rows("options.md", "Environment") if row[0] == [CPU_KERNELS]]
    assert kinds == ["auto", *(kind.name for kind in KINDS), "torch"]


@pytest.mark.parametrize(
    ("section", "group"),
    [
        ("Engine", EngineMetrics),
        ("recent", RecentMetrics),
        ("recent.split", StepSplit),
        ("recent.shortages", Shortages),
        ("speculation", SpeculationMetrics),
        ("current_draft", DraftMetrics),
        ("kv_cache, swap_space", TierMetrics),
        ("users", UserMetrics),
        ("Requests", RequestMetrics),
    ],
)
def test_the_metrics_of_the_page_are_those_that_there_are(section: str, group: Any) -> None:
    assert [name for names, *_ in rows("metrics.md", section) for name in names] == field_names(group)


@pytest.mark.parametrize("group", [RequestOutput, CompletionOutput, Logprob])
def test_the_fields_of_outputs_of_the_page_are_those_that_there_are(group: Any) -> None:
    assert [name for names, *_ in rows("api.md", group.__name__) for name in names] == field_names(group)


def field_names(group: Any) -> list[str]:
    """Names of the fields of a dataclass, and of its properties."""
    return [*(each.name for each in fields(group)), *(name for name, value in vars(group).items() if isinstance(value, property))]


def test_the_methods_and_arguments_of_the_page_are_those_that_there_are() -> None:
    methods = {name: method for name, method in vars(LLM).items() if not name.startswith("_")}
    assert sorted(name for [name], *_ in rows("api.md", "LLM")) == sorted(methods)
    on_page = {
        (method, name, literal_eval(default))
        for [name], [default], owners, *_ in rows("api.md", "Arguments of a call")
        for method in owners
    }
    assert on_page == {
        (method, each.name, each.default)
        for method in ("generate", "chat", "chat_prompt")
        for each in signature(methods[method]).parameters.values()
        if each.default is not Parameter.empty and each.name != "sampling_params"
    }


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_sections(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in map(slug, headings), link


def test_names_that_are_kept_exist() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Names that are kept")[2]
    names = re.findall(r"`(titan(?:\.\w+)+)`", text)
    assert len(names) > 10
    for name in names:
        resolve_name(name)
