"""A folder behind http://, whose server has the faults of one in trouble."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = b"<html><body>Please sign in to this network</body></html>"


class Faults:
    """fault: of the next `times` answers to a GET for a file whose name has `part` in it. Status "500" or "404", or a
    body that breaks off ("short"), does not come ("slow"), comes by a byte a second ("trickle"), or is another's
    ("page")"""

    fault, times, part = "", 0, ""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def set(self, fault: str, times: int, part: str = "") -> None:
        self.fault, self.times, self.part = fault, times, part

    def next(self, path: str) -> str:
        if not self.times or self.part not in path:
            return ""
        self.times -= 1
        return self.fault


class Handler(SimpleHTTPRequestHandler):
    def __init__(self, faults: Faults, *args: Any, **more: Any) -> None:
        self.faults = faults
        super().__init__(*args, **more)

    def do_GET(self) -> None:
        fault = self.faults.next(self.path)
        if fault in ("500", "404"):
            self.send_error(int(fault))
        elif fault:
            data = PAGE if fault == "page" else Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if fault == "slow":
                self.faults.ended.wait(30)
            elif fault == "trickle":
                self._trickle(data)
            elif fault == "page":
                self.wfile.write(data)
            else:
                self.wfile.write(data[: len(data) // 2])
        else:
            super().do_GET()

    def _trickle(self, data: bytes) -> None:
        with suppress(OSError):  # the client has had enough
            for at in range(60):
                self.wfile.write(data[at : at + 1])
                self.wfile.flush()
                if self.faults.ended.wait(1):
                    break

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def http_files(folder: Path, port: int = 0) -> Iterator[tuple[str, Faults]]:
    """The URL of a folder's files, and the server's faults. port: 0 for any that is free"""
    faults = Faults()
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, faults, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        faults.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
