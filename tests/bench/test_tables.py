"""Tables in the README and in docs are those of the files in bench/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.bench import tables
from titan.bench.report import Table, table_lines
from titan.bench.tables import main

END = "<!-- end of table -->\n"
PAGE = f'before\n<!-- table: run.md "Speed" -->\nold\n{END}between\n<!-- table: run.md "Load" -->\n{END}'
SPEED = table_lines(Table("Speed", ["mode", "tokens/s"], [["titan", "75.0 ±3 %"]]))
RESULT = "\n".join(["# Run", "", "## Speed", "", *SPEED, "", "## Load", "", "| a |"])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a page in each place and a file of two tables."""
    for name, text in {"README.md": PAGE, "docs/other.md": PAGE, "bench/results/run.md": RESULT}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tmp_path


def test_the_pages_are_up_to_date() -> None:
    assert (tables.ROOT / "docs" / "numbers.md").read_text(encoding="utf-8").count("<!-- table") >= 1
    assert main(["--check"]) == 0


def test_tables_are_copied_between_their_comments(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 1
    assert "README.md has tables that are out of date" in capsys.readouterr().err and "old" in (root / "README.md").read_text()
    assert main([]) == 0 and main(["--check"]) == 0
    made = PAGE.replace("old", "\n".join(SPEED)).replace('"Load" -->', '"Load" -->\n| a |')
    assert (root / "README.md").read_text() == (root / "docs" / "other.md").read_text() == made


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"Load"', '"Loads"', r"'Loads' is not in .*run.md: allowed are 'Speed', 'Load'"),
        ('"Load"', "Load", "a comment is not allowed"),
        (f"{END}b", "b", "a comment is not allowed"),
        ("run.md", "walk.md", "walk.md"),
    ],
)
def test_a_comment_that_is_wrong_is_refused(root: Path, old: str, new: str, message: str) -> None:
    (root / "README.md").write_text(PAGE.replace(old, new))
    with pytest.raises((ValueError, OSError), match=message):
        main([])
