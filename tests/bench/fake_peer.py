"""An adapter without an engine: a request generates numbers from the length of its prompt on; options say what goes wrong."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any


def load(options: dict[str, Any]) -> FakePeer:
    """Load nothing."""
    if options.get("fails") == "load":
        raise ValueError("no such\nmodel")
    return FakePeer(options)


class FakePeer:
    """Answers at once; with ``spins`` a thread keeps a core busy."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.fails = options.get("fails")
        self.versions = {"fake": "1.0", "pid": str(os.getpid()), "folders": " ".join(sys.path)}
        if options.get("spins"):
            threading.Thread(target=self._spin, daemon=True).start()

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says."""
        print("noise of a library")
        if self.fails == "run":
            raise RuntimeError("out of memory")
        if self.fails == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if self.fails == "answer":
            time.sleep(600)
        cut = 1 if self.fails == "short" else 0
        results = []
        for request in requests:
            first = len(request["prompt"])
            tokens = list(range(first, first + request["output_len"] - cut))
            results.append({"token_ids": tokens, "first_token_seconds": 0.5, "finished_seconds": 1.0 * concurrency})
        return {"seconds": 2.0, "requests": results, "figures": {"tokens/step": 1.5}}

    def _spin(self) -> None:
        while True:
            pass
