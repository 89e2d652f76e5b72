"""The loop inside a peer's process: JSON lines in, JSON lines out. It runs in the peer's own environment, so it imports nothing.

    PYTHON serve.py FOLDER/ADAPTER

An adapter is a module with ``load(options) -> peer``; the peer has ``versions``, a dict of text, and either ``run(requests,
concurrency)`` or what `run_steps` needs. ``options`` are model, draft_model (or null), dtype, device, max_draft_tokens,
max_batch_size, max_num_batched_tokens, max_model_len, threads, and what the mode adds. ``requests`` are dicts of prompt (token ids)
and output_len; they arrive together, at most ``concurrency`` run at once, greedily, and the end of sequence is ignored. ``run``
returns a dict:

    seconds: wall time of the run
    requests: in order, dicts of token_ids, first_token_seconds (or null) and finished_seconds, both since the start of the run
    figures: numbers by name, such as "tokens/step", per request and step of the target

Answers: ``{"versions": ...}`` after loading, what ``run`` returned after a run, ``{"error": text}`` if something failed.
"""

import importlib
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO


def run_steps(peer: Any, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Run requests in an engine that is stepped: ``add(request)`` returns a handle, ``step(handles)`` (handle, tokens) pairs."""
    results: list[dict[str, Any]] = [{"token_ids": [], "first_token_seconds": None} for _ in requests]
    waiting = deque(zip(requests, results, strict=True))
    running: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}
    num_outputs = 0
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            request, result = waiting.popleft()
            running[peer.add(request)] = request, result
        outputs = peer.step(list(running))
        now = time.perf_counter() - start
        for handle, token_ids in outputs:
            request, result = running[handle]
            num_outputs += 1
            result["token_ids"] += token_ids
            if result["first_token_seconds"] is None:
                result["first_token_seconds"] = now
            if len(result["token_ids"]) >= request["output_len"]:
                result["finished_seconds"] = now
                del running[handle]
    seconds = time.perf_counter() - start
    num_tokens = sum(len(result["token_ids"]) for result in results)
    return {"seconds": seconds, "requests": results, "figures": {"tokens/step": num_tokens / num_outputs}}


def serve(adapter: Any, questions: TextIO, answers: TextIO) -> None:
    """Answer each line; the first question loads, the others run. After a failed load there is nothing more to answer."""
    peer = None
    for line in questions:
        try:
            question = json.loads(line)
            if peer is None:
                peer = adapter.load(question)
                answer = {"versions": peer.versions}
            elif hasattr(peer, "run"):
                answer = peer.run(**question)
            else:
                answer = run_steps(peer, **question)
        except Exception as error:  # noqa: BLE001 - the other process must hear of it, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if peer is None:
            return


if __name__ == "__main__":
    answer_file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    adapter = Path(sys.argv[1])
    sys.path.append(str(adapter.parent))
    serve(importlib.import_module(adapter.name), sys.stdin, answer_file)
