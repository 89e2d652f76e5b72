"""Tables of figures in README.md and docs, copied from the files in bench/results.

    python -m titan.bench.tables            write them into the pages
    python -m titan.bench.tables --check    only say whether they are up to date

A table stands between two comments, of which the first names a file and the title of a table in it:

    <!-- table: peers-amx.md "Titan over the others, tokens/s" -->
    <!-- end of table -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r'(<!-- table: (?P<file>\S+) "(?P<title>[^"]+)" -->\n).*?(<!-- end of table -->)', re.DOTALL)
TITLED = re.compile(r"^## (.+)\n\n((?:\|.*\n)+)", re.MULTILINE)


def with_tables(page: str, folder: Path) -> str:
    """Return a page with its tables copied anew, from files in ``folder``.

    Raises:
        ValueError: a comment names no table of its file, or there is no end after it.
        OSError: there is no such file.
    """
    if page.count("<!-- table") != len(MARKED.findall(page)):
        raise ValueError('a comment is not allowed: <!-- table: FILE "TITLE" --> and <!-- end of table --> must come in pairs')

    def copy(match: re.Match[str]) -> str:
        path = folder / match["file"]
        tables = dict(TITLED.findall(path.read_text(encoding="utf-8") + "\n"))
        if match["title"] not in tables:
            raise ValueError(f"table {match['title']!r} is not in {path}: allowed are {', '.join(map(repr, tables))}")
        return "".join([match[1], tables[match["title"]], match[4]])

    return MARKED.sub(copy, page)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if --check found a table that is out of date."""
    parser = argparse.ArgumentParser("python -m titan.bench.tables", None, __doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args(argv).check
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
    changed = {path: page for path, old in pages.items() if (page := with_tables(old, ROOT / "bench" / "results")) != old}
    for path, page in changed.items():
        if is_check:
            print(f"{path} has tables that are out of date: run python -m titan.bench.tables", file=sys.stderr)
        else:
            path.write_text(page, encoding="utf-8")
    return int(is_check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
