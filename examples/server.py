"""A small HTTP server: all clients share one `LLM`, each gets its text as it grows, and one that leaves ends its request.

python examples/server.py
curl -N localhost:8000 -d '{"prompt": "def quicksort(", "temperature": 0, "max_tokens": 64}'
curl localhost:8000
"""

import json
from contextlib import closing, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from titan import LLM, SamplingParams


class Server(ThreadingHTTPServer):
    """Has a thread for each client; the requests of all of them run in one batch."""

    def __init__(self, llm: LLM, port: int) -> None:
        super().__init__(("127.0.0.1", port), Client)
        self.llm = llm


class Client(BaseHTTPRequestHandler):
    """Answers one client, in lines of JSON."""

    server: Server

    def do_POST(self) -> None:
        """Stream completions; the body is an object of the prompt and of options of `SamplingParams`."""
        try:
            options = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            outputs = self.server.llm.stream(options.pop("prompt", None), SamplingParams(**options))
        except (AttributeError, TypeError, ValueError) as error:
            self.send_error(400, explain=str(error))
            return
        self.begin()
        sent: dict[int, tuple[str, str | None]] = {}  # text and finish reason by completion
        with closing(outputs):  # which ends the request, if the client has left
            for output in outputs:
                for each in output.outputs:
                    text, reason = sent.get(each.index, ("", None))
                    if (each.text, each.finish_reason) == (text, reason):
                        continue
                    sent[each.index] = each.text, each.finish_reason
                    line = {"index": each.index, "text": each.text[len(text) :], "finish_reason": each.finish_reason}
                    try:
                        self.wfile.write(json.dumps(line | {"error": output.error}).encode() + b"\n")
                    except ConnectionError:
                        return

    def do_GET(self) -> None:
        """Report the metrics."""
        self.begin()
        self.wfile.write(json.dumps(asdict(self.server.llm.metrics())).encode() + b"\n")

    def begin(self) -> None:
        """Send the head of an answer."""
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt), Server(LLM("demo", draft_model="demo"), 8000) as server:
        server.serve_forever()
