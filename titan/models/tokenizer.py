"""The tokenizer of a model, or another one that is requested; transformers reads them."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from titan.core.checks import shown
from titan.models.files import ModelFiles, one_line, resolve_model, some
from titan.models.hf.calls import TRANSFORMERS_LOCK, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.json"
"""File beside a tokenizer, of models of images whose processor was saved by an old version of transformers."""
TEKKEN = "tekken.json"
"""File of a tokenizer of mistral-common: where transformers reads it, no beginning of sequence is put before a prompt."""
TEKKEN_TOKEN, TEKKEN_SIZE = "[INST]", 100_000
"""Token of such tokenizers, and how large they are at least: of those of 2024 and 2025, tokenizer.json has another pattern than the
vocabulary was made with."""
CORRECTS_TEKKEN = 5, 5
"""First version of transformers that does."""
TIKTOKEN = "tiktoken.model"
"""The one file of this ending that is not of sentencepiece."""
LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"
"""What transformers calls its warning of a long text, which it gives once: here prompts that are too long are refused."""
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
TOKENIZER_SIGNS = ("tokenizer*", "vocab.*", "merges.txt", "*.model")
"""Files of which a folder with a tokenizer has at least one."""


def choose_tokenizer(
    files: ModelFiles, tokenizer: str | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the requested tokenizer, or else the target model's; return ``None`` if it has none.

    Args:
        files: of the target model.
        tokenizer: "demo", a folder or a hub id, of whose main branch it is unless given as ``ID@REVISION``; ``None`` = the model's.
        trust_remote_code: as in `titan.core.options.ModelOptions`.

    Raises:
        ValueError: the tokenizer cannot be used, or the requested one does not exist.
    """
    if tokenizer is None:
        return load_tokenizer(files, trust_remote_code=trust_remote_code)
    try:
        requested = ModelFiles(resolve_model(tokenizer, "target"), download_dir=files.download_dir)
        loaded = load_tokenizer(requested, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(f"tokenizer={tokenizer!r} cannot be used: {error}") from error
    if loaded is None:
        raise ValueError(f"tokenizer={tokenizer!r} has no tokenizer: it must be a folder or hub id with tokenizer.json")
    return loaded


def load_tokenizer(files: ModelFiles, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer of a model; ``None`` if the model has none.

    Raises:
        ValueError: the model does not exist, or its tokenizer cannot be read.
    """
    name = files.name
    folder = files.fetch(*TOKENIZER_FILES, *(["*.py"] if trust_remote_code else []))
    found = sorted({path.name for pattern in TOKENIZER_SIGNS for path in folder.glob(pattern)})
    if not found:
        if (folder / TEKKEN).is_file():
            LOG.warning(
                "model %r has no tokenizer but %s, which is not read: it needs a tokenizer.json beside it; that of a target may be "
                "elsewhere, with tokenizer=...",
                *(name, TEKKEN),
            )
        return None
    try:
        with TRANSFORMERS_LOCK:
            import transformers
            from transformers import AutoTokenizer

            # where mistral-common is installed, its tokenizers would be taken, which lack some of the others' methods
            read = partial(AutoTokenizer.from_pretrained, folder, trust_remote_code=trust_remote_code, mistral_format=False)
            with quiet():  # of the pattern that is corrected
                tokenizer: PreTrainedTokenizerBase = read()
            if TEKKEN_TOKEN in tokenizer.get_added_vocab() and tokenizer.vocab_size >= TEKKEN_SIZE:
                if tuple(map(int, transformers.__version__.split(".")[:2])) < CORRECTS_TEKKEN:
                    raise ImportError(
                        f"its pattern may be wrong, which transformers corrects from {'.'.join(map(str, CORRECTS_TEKKEN))} on: "
                        f"{transformers.__version__} is installed"
                    )
                tokenizer = read(fix_mistral_regex=True)
    except Exception as error:  # transformers and tokenizers raise whatever the damage leads to
        for file in found:
            if file.endswith(".json"):
                files.read_json(file)
        if "trust_remote_code" in str(error):  # which transformers advises to set
            auto_map = files.read_json(TOKENIZER_CONFIG).get("auto_map")
            raise ValueError(
                f"model {name!r} has a {TOKENIZER_CONFIG} with auto_map={shown(auto_map)}, and transformers has no such "
                f"tokenizer: code of checkpoints is run only with trust_remote_code=True"
            ) from error
        raise ValueError(
            f"model {name!r} has a tokenizer that cannot be read ({some(found)}): {_missing_reader(found) or one_line(error)}"
        ) from error
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        raise ValueError(f"model {name!r} has a tokenizer without a vocabulary ({some(found)}): it knows special tokens only")
    tokenizer.deprecation_warnings[LENGTH_WARNING] = True
    if tokenizer.chat_template is None and (folder / CHAT_TEMPLATE).is_file():
        tokenizer.chat_template = files.read_json(CHAT_TEMPLATE).get("chat_template")
    return tokenizer


def _missing_reader(found: list[str]) -> str | None:
    """Return what to install, if files of a tokenizer are read by packages that are not there; transformers names another."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available

    is_read = "tokenizer.json" in found or (is_sentencepiece_available() and is_protobuf_available())
    pieces = [each for each in found if each.endswith(".model") and each != TIKTOKEN]
    return f"`pip install sentencepiece protobuf`, with which {some(pieces)} can be read" if pieces and not is_read else None
