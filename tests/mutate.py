"""Breaks one line of a copy of the repository at a time, and tells whether the tests notice.

`python tests/mutate.py tests/mutations.toml`, from the root of the repository, runs all mutations, each with the tests that are
expected to notice it: about ten seconds per mutation. `--only NAME ...` runs some of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_SECONDS = 300
KILLED_CODES = (1, 2)
"""Exit codes of pytest: tests failed; or were not collected, for the mutation broke an import."""


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str
    file: str  # from the root
    find: str  # occurs exactly once in the file
    replace: str
    tests: list[str]


def load_mutations(path: Path, root: Path, only: list[str]) -> list[Mutation]:
    """Read the mutations that are asked for, all if ``only`` is empty.

    Raises:
        ValueError: names that are unknown or not unique, or mutations that do not fit the sources; the message has them all.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    mutations = [Mutation(name, file, **entry) for file, entries in tables.items() for name, entry in entries.items()]
    names = Counter(mutation.name for mutation in mutations)
    errors = [f"{name}: there are {names[name]} mutations of this name" for name in only or names if names[name] != 1]
    chosen = [mutation for mutation in mutations if not only or mutation.name in only]
    for mutation in chosen:
        count = (root / mutation.file).read_text(encoding="utf-8").count(mutation.find)
        if count != 1:
            errors.append(f"{mutation.name}: {mutation.find!r} is in {mutation.file} {count} times")
        errors += [f"{mutation.name}: no {test}" for test in mutation.tests if not _exists(test, root)]
    if errors:
        raise ValueError("\n".join(errors))
    return chosen


def _exists(test: str, root: Path) -> bool:
    """Whether there is a file, and in it a class and a function, of the name of a test; its parameters are not looked at."""
    file, *names = test.split("[")[0].split("::")
    if not (root / file).exists():
        return False
    text = (root / file).read_text(encoding="utf-8") if names else ""
    return all(re.search(rf"\b(def|class) {name}\b|^{name} = ", text, re.M) for name in names)


def copy_tree(root: Path, copy: Path) -> None:
    """Copy the files that git knows or does not ignore; links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(root / name):  # else it was deleted, and git has not been told
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name, follow_symlinks=False)


def run_mutation(mutation: Mutation, copy: Path) -> str:
    """Break the line, run the tests and mend it again: "killed", "SURVIVED" or "TIMEOUT".

    Raises:
        RuntimeError: pytest ended otherwise: nothing was run, or its own arguments were wrong.
    """
    file = copy / mutation.file
    source = file.read_text(encoding="utf-8")
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk", "-m", "models or long or not models"]
    command = [sys.executable, "-m", "pytest", *options, *mutation.tests]
    # without bytecode: it would be taken for that of a source of the same size and second
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    file.write_text(source.replace(mutation.find, mutation.replace), encoding="utf-8")
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return "TIMEOUT"
    finally:
        file.write_text(source, encoding="utf-8")
    if done.returncode != 0 and done.returncode not in KILLED_CODES:
        raise RuntimeError(f"{mutation.name}: pytest ended with code {done.returncode}\n{done.stdout}{done.stderr}")
    return "SURVIVED" if done.returncode == 0 else "killed"


def main() -> None:
    """Run the mutations; ends with code 1 if one was not killed, and with a message if they could not be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mutations", type=Path, help="TOML file with a table [FILE.NAME] for each")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these mutations only")
    arguments = parser.parse_args()
    root, outcomes = Path.cwd(), []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder).resolve()
        try:
            mutations = load_mutations(arguments.mutations, root, arguments.only)
            copy_tree(root, copy)
            for mutation in mutations:
                start = time.monotonic()
                outcomes.append(run_mutation(mutation, copy))
                print(f"{outcomes[-1]:8} {mutation.name} ({time.monotonic() - start:.1f} s)", flush=True)
        except (ValueError, RuntimeError) as error:
            sys.exit(f"error: {error}")
    num_killed = outcomes.count("killed")
    print(f"{num_killed} of {len(outcomes)} killed")
    sys.exit(num_killed < len(outcomes))


if __name__ == "__main__":
    main()
