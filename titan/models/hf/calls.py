"""Calls of transformers: one thread at a time, and without what it prints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

TRANSFORMERS_LOCK = Lock()
"""Held while configs, tokenizers and models are read: the lazy imports of transformers fail in threads that run into each other."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing: what matters is said by errors."""
    from transformers.utils import logging

    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()
