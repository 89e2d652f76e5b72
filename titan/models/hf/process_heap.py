"""The heap of the process, where weights come and go while a model is made ready."""

import ctypes
import sys


def give_back() -> None:
    """Give free memory back to the system: weights leave holes into which others, such as packed ones, do not fit."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # of glibc
        library.malloc_trim(0)
