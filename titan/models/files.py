"""The files of a model: in a folder, or on the Hugging Face hub, from which they are downloaded as they are asked for."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

DEMO = "demo"
"""Name of the models that ship with the package."""
ALLOWED_NAMES = "it must be 'demo', a folder or a Hugging Face hub id"
PATH_SIGNS = (".", "/", "~")
"""How a path may begin, and no hub id does."""
CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
WEIGHT_INDEX = "model.safetensors.index.json"
SINGLE_WEIGHT_FILE = "model.safetensors"
CONFIG_FILES = (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG, WEIGHT_INDEX)
"""Small files, which say what else is read."""
WHAT_IS_READ = "a model is a folder or hub id with config.json and weights in safetensors"
CODES_NEED = "integers and float8 need a quantization_config, which says what they stand for"
NOT_READ = ("*/*.json", "*/*.txt", "*/*.model", "*/*.tiktoken")
"""Files below a model's folder that are of other formats of it; the hub library's "*" stands for slashes as well."""


def resolve_model(name: str, role: Literal["target", "draft"]) -> str:
    """Return the folder of the demo model of this role, or any other name as it is."""
    return str(Path(__file__).resolve().parents[1] / "demo" / role) if name == DEMO else name


class ModelFiles:
    """The files of one model; on the hub all are of the commit that the revision stands for when the first are asked for.

    Args:
        name: a folder, a hub id, or ``ID@REVISION``.
        revision: branch, tag or commit on the hub; ``None`` = that of the name, else its main branch, or a folder, which has none.
        download_dir: folder for downloads; ``None`` = the hub library's cache.

    Raises:
        ValueError: the name is that of a file, or can be neither a folder nor a hub id; it is a folder, and has a revision; or it
            has two.
    """

    def __init__(self, name: str, revision: str | None = None, download_dir: str | None = None) -> None:
        self.name, self._revision = name, revision = _read_name(name, revision)
        self.download_dir = download_dir
        self._downloaded: Path | None = None
        self._fetched = set[str]()  # patterns
        self._listed: list[str] | None = None  # names on the hub; none: it cannot be reached
        path = os.path.expanduser(name)  # noqa: PTH111 - Path("") is a folder
        self._folder = Path(path) if os.path.isdir(path) else None  # noqa: PTH112 - any text may be asked about
        if self._folder is not None and revision is not None:
            raise ValueError(f"revision={revision!r} contradicts model {name!r}, which is a folder: allowed with it is None")
        if os.path.isfile(path):  # noqa: PTH113
            if path.endswith(".gguf"):
                raise ValueError(f"model {name!r} is a GGUF file, which is not supported: {WHAT_IS_READ}")
            raise ValueError(f"model {name!r} is a file: give its folder, {str(Path(path).parent)!r}, with config.json in it")
        if self._folder is None and (not name or name.startswith(PATH_SIGNS) or name.count("/") > 1):
            raise ValueError(f"model {name!r} does not exist: {ALLOWED_NAMES}")

    def fetch(self, *patterns: str) -> Path:
        """Return the model's folder; of one on the hub, with the files that match the patterns, as far as there are such.

        Raises:
            ValueError: the hub does not have the model or the revision, or not for this user, or it cannot be reached.
        """
        if self._folder is not None:
            return self._folder
        if self._downloaded is not None and self._fetched.issuperset(patterns):
            return self._downloaded
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        name = self.name
        try:
            folder = snapshot_download(
                name,
                revision=self._revision,
                cache_dir=self.download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(NOT_READ),
            )
        except GatedRepoError as error:
            raise ValueError(f"model {name!r} is gated: ask for access on its hub page, then run `hf auth login`") from error
        except RevisionNotFoundError as error:
            raise ValueError(f"model {name!r} has no revision={self._revision!r}: it must be a branch, tag or commit") from error
        except RepositoryNotFoundError as error:
            raise ValueError(f"model {name!r} does not exist: {ALLOWED_NAMES} (a private one needs `hf auth login`)") from error
        except Exception as error:  # a malformed id, or no network, of which every version has its own errors
            raise ValueError(
                f"model {name!r} is no folder, and it cannot be had from the Hugging Face hub: {one_line(error)}"
            ) from error
        self._downloaded = Path(folder)
        self._revision = self._downloaded.name  # the commit, lest two downloads be of different ones
        self._fetched.update(patterns)
        return self._downloaded

    def names(self) -> list[str]:
        """Return the names of all files; of a model on a hub that cannot be reached, those that were downloaded."""
        if self._folder is None and self._listed is None:
            from huggingface_hub import list_repo_files

            self._listed = []
            with suppress(Exception):
                self._listed = sorted(list_repo_files(self.name, revision=self._revision))
        if self._listed:
            return self._listed
        folder = self._folder or self._downloaded
        return sorted(path.name for path in folder.iterdir()) if folder else []

    def read_json(self, file: str) -> dict[str, Any]:
        """Return the content of a file that holds a JSON object.

        Raises:
            ValueError: there is no such file, or it holds something else.
        """
        path = self.fetch(file) / file
        if not path.is_file():
            raise ValueError(f"model {self.name!r} has no {file}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"model {self.name!r} has a {file} that cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"model {self.name!r} has a {file} that is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"model {self.name!r} has a {file} that is not a JSON object")
        return content


def _read_name(name: str, revision: str | None) -> tuple[str, str | None]:
    """Return a folder, or a hub id and its revision, which may be given as ``ID@REVISION``."""
    if "@" not in name or name.startswith(PATH_SIGNS) or os.path.exists(name):  # noqa: PTH110 - a folder's name may have an @
        return name, revision
    hub_id, _, own = name.partition("@")
    if not own or hub_id == DEMO:
        raise ValueError(f"model {name!r} is not allowed: an @ stands between a hub id and a branch, tag or commit of it")
    if revision not in (None, own):
        raise ValueError(f"model {name!r} contradicts revision={revision!r}: give one of them")
    return hub_id, own


def one_line(error: Exception) -> str:
    """Return what an error says, in one line; errors whose message is not meant for people also say their kind."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"


def no_model(files: ModelFiles) -> str | None:
    """Return why files without a config or without weights are no model, if they are something else that is known."""
    name, names = files.name, files.names()
    if ADAPTER_CONFIG in names:
        base = files.read_json(ADAPTER_CONFIG).get("base_model_name_or_path")
        return f"model {name!r} is an adapter (LoRA) of {base!r}, not a model: merge it into that one, and give the merged model"
    if gguf := [each for each in names if each.endswith(".gguf")]:
        return f"model {name!r} has weights in GGUF ({some(gguf)}), which is not supported: {WHAT_IS_READ}"
    return None


def some(names: list[str]) -> str:
    """Write the first five of some names, and how many more there are."""
    listed = ", ".join(names[:5]) or "none"
    return f"{listed} and {len(names) - 5} more" if len(names) > 5 else listed
