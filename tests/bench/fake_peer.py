"""An adapter without an engine: a request generates numbers from the length of its prompt on; ``fails`` says what goes wrong."""

from __future__ import annotations

import os
import sys
import threading
import time
from itertools import count
from typing import Any


class FakePeer:
    """Answers at once; with ``spins`` a thread keeps a core busy."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.fails = options.get("fails")
        self.versions = {"fake": "1.0", "pid": str(os.getpid()), "folders": " ".join(sys.path)}
        if self.fails == "load":
            raise ValueError("no such\nmodel")
        if options.get("spins"):
            threading.Thread(target=lambda: sum(0 for _ in count()), daemon=True).start()

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says."""
        print("noise of a library")
        if self.fails == "run":
            raise RuntimeError("out of memory")
        if self.fails == "exit":
            sys.exit("last words")
        if self.fails == "answer":
            time.sleep(600)
        results = []
        for request in requests:
            first = len(request["prompt"])
            tokens = list(range(first, first + request["output_len"] - (self.fails == "short")))
            results.append({"token_ids": tokens, "first_token_seconds": 0.5, "finished_seconds": 1.0 * concurrency})
        return {"seconds": 2.0, "requests": results, "figures": {"tokens/step": 1.5}}


load = FakePeer
