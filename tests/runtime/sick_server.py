"""A server that answers what a `vllm serve` does, but for what a test has it answer instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

# Writes a whole answer, its status line included, or a part of one.
Answer = Callable[[BaseHTTPRequestHandler], object]

METRICS = """vllm:num_preemptions_total{engine="0"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop"} 400.0
vllm:prefix_cache_queries_total{engine="0"} 200000.0
vllm:prefix_cache_hits_total{engine="0"} 150000.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",enable_prefix_caching="True"} 1.0
"""
INFO = {
    "vllm_config": {
        "model_config": {"enforce_eager": False, "logprobs_mode": "raw_logprobs", "quantization": None},
        "compilation_config": {"cudagraph_mode": [2, 1]},
        "device_config": {"device": "cuda"},
    }
}
PAGES: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "m", "max_model_len": 128}]},
    "/version": {"version": "0.30.0"},
    "/metrics": METRICS,
    "/server_info": INFO,
}


def completion(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Every token has the log-prob -1."""
    tokens = [7] * asked["max_tokens"]
    choice: dict[str, Any] = {"token_ids": tokens, "logprobs": {"top_logprobs": [{"token_id:7": -1.0} for _ in tokens]}}
    if "prompt_logprobs" in asked:
        rows = [{str(token): {"logprob": -1.0, "rank": 1}} for token in asked["prompt"]]
        choice["prompt_logprobs"] = [None, *rows[1:]]
    return {"choices": [choice], "usage": {"prompt_tokens_details": None}}


def whole(body: bytes, status: int = 200) -> Answer:
    """A whole answer with this body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def raw(content: bytes) -> Answer:
    """These bytes, and the end of the connection."""
    return lambda handler: handler.wfile.write(content)


@contextmanager
def serving(sick: Mapping[str, Answer], key: str | None = None) -> Iterator[str]:
    """Serve, and give the URL. sick: path -> its answer; key: that every request must have"""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, asked: Any) -> None:
            self.asked = asked
            path = urlsplit(self.path).path
            self.close_connection = True
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                whole(b'{"error": "Unauthorized"}', 401)(self)
            elif path in sick:
                sick[path](self)
            elif path == "/v1/completions":
                whole(json.dumps(completion(asked)).encode())(self)
            elif path in PAGES:
                page = PAGES[path]
                whole(page.encode() if isinstance(page, str) else json.dumps(page).encode())(self)
            else:
                whole(b"Not Found", 404)(self)

        def handle(self) -> None:
            try:
                super().handle()
            except OSError as error:  # a client that had enough
                seen.append(str(error))

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
