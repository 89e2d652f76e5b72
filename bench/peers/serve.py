"""The loop inside a peer's process: JSON lines in, JSON lines out. It runs in the peer's own environment, so it imports nothing.

    PYTHON serve.py ADAPTER.py

An adapter is a file with ``load(options) -> peer``; the peer has ``versions``, a dict of text, and ``run(requests, concurrency)``.
``options`` are model, draft_model (or null), dtype, device, max_draft_tokens, max_batch_size, max_model_len, threads, url, and what
the mode adds. ``requests`` are dicts of prompt (token ids) and output_len; they arrive together, at most ``concurrency`` run at
once, greedily, and the end of sequence is ignored. ``run`` returns a dict:

    seconds: wall time of the run
    requests: in order, dicts of token_ids, first_token_seconds (or null) and finished_seconds, both since the start of the run
    mean_acceptance_length: tokens per request and step of the target, or null

Answers: ``{"versions": ...}`` after loading, what ``run`` returned after a run, ``{"error": text}`` if something failed.
"""

import importlib.util
import json
import os
import sys
from typing import Any, TextIO


def load_adapter(path: str) -> Any:
    """Import an adapter from its file."""
    spec = importlib.util.spec_from_file_location("adapter", path)
    assert spec is not None and spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    return adapter


def serve(adapter: Any, questions: TextIO, answers: TextIO) -> None:
    """Answer each line; the first question loads, the others run. After a failed load there is nothing more to answer."""
    peer = None
    for line in questions:
        try:
            question = json.loads(line)
            if peer is None:
                peer = adapter.load(question)
                answer = {"versions": peer.versions}
            else:
                answer = peer.run(question["requests"], question["concurrency"])
        except Exception as error:  # noqa: BLE001 - the other process must hear of it, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if peer is None:
            return


if __name__ == "__main__":
    answer_file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    serve(load_adapter(sys.argv[1]), sys.stdin, answer_file)
