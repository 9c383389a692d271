"""A small server that answers as the test says."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Answers every request with what the test says, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.reply = 200, "Well done.\nScore: 8"
        self.body: dict[str, Any] | None = None
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.pause_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server = self.server
        content = self.rfile.read(int(self.headers["Content-Length"]))
        server.asked.append(json.loads(content))
        server.keys.append(self.headers["Authorization"])
        time.sleep(server.pause_s)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": server.reply}}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        data = json.dumps(body if server.body is None else server.body).encode()
        self.send_response(server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def answering() -> Iterator[Server]:
    """Run a server."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
