"""llama.cpp's server over HTTP: an address is given, the server runs already, with the same model and enough slots.

Started for example with ``llama-server -m target.gguf -np 32 -c 8192``, and ``-md draft.gguf`` for a draft.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

TIMEOUT = 600  # seconds


class LlamaCppPeer:
    """A client that sends requests side by side.

    Raises:
        ValueError: ``options["url"]`` is no address.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        if not str(options["url"]).startswith("http://"):
            raise ValueError(f"no server at {options['url']}: give the address of a running one, --peer llama.cpp=http://HOST:PORT")
        self.url = options["url"].rstrip("/")
        self.opener = build_opener(ProxyHandler({}))  # nothing stands between
        with self.opener.open(f"{self.url}/props", timeout=TIMEOUT) as answer:
            self.versions = {"llama.cpp": str(json.load(answer).get("build_info", "unknown"))}

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says."""
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as threads:
            results = list(threads.map(lambda request: self._complete(request, start), requests))
        return {"seconds": time.perf_counter() - start, "requests": results, "figures": {}}

    def _complete(self, request: dict[str, Any], start: float) -> dict[str, Any]:
        question = {
            "prompt": request["prompt"],
            "n_predict": request["output_len"],
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }
        message = Request(f"{self.url}/completion", json.dumps(question).encode(), {"Content-Type": "application/json"})
        token_ids: list[int] = []
        first = None
        with self.opener.open(message, timeout=TIMEOUT) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    token_ids += json.loads(line.removeprefix(b"data: ")).get("tokens", [])
                    first = first or time.perf_counter() - start
        return {"token_ids": token_ids, "first_token_seconds": first, "finished_seconds": time.perf_counter() - start}


load = LlamaCppPeer
