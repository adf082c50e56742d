"""An HTTP client that trusts no server: answers may have any form and size, and may never end.

Every answer has a deadline and a type. A server that breaks off, sends a byte a second, or does not answer like a
`vllm serve`, gives one ConfigError.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from threading import Timer
from time import monotonic
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.plugin import API_KEY, PROBE, authorization
from fp8plan.schemas import checked

T = TypeVar("T")

TIMEOUT_S: Final = 120.0  # seconds for all questions of one doctor
PAGE_S: Final = 20.0  # seconds for a page, which costs a server nothing
MOST_BYTES: Final = 1 << 26  # bytes of one answer: log-probs of 256 tokens with 20 alternatives are 300 kB
# vLLM's server takes the first for its --api-key, and vLLM's own clients (`vllm chat`, `vllm bench serve`) the second.
KEYS: Final = (API_KEY, "OPENAI_API_KEY")
GIVE_URL: Final = "give the URL of a vllm serve that runs"


class CannotLook(ConfigError):
    """A server that cannot be examined: the whole examination ends, not only one of its questions."""


class Refused(ConfigError):
    """An answer with another status than success, such as 404 for a page that this server does not have."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A server's HTTP interface.

    url:       of the server, with or without /v1
    api_key:   None: that of the environment (KEYS), if it has one
    timeout_s: seconds for all questions, from now on

    Raises ConfigError for a key that no header can hold, and a time that is no number above 0.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        if not (is_number(timeout_s) and timeout_s > 0):
            raise ConfigError(f"timeout_s is {timeout_s!r}; allowed: seconds above 0")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = _key(api_key)
        self._timeout_s, self._until = timeout_s, monotonic() + timeout_s

    def text(self, path: str) -> str:
        """The answer to a GET as text. Raises as `json` does, and CannotLook for bytes that are no text."""
        try:
            return self._asked(path).decode()
        except UnicodeDecodeError as error:
            raise self._strange(path, error) from None

    def json(self, path: str, kind: type[T], body: Mapping[str, Any] | None = None) -> T:
        """The answer to a GET, or with a body to a POST, as JSON of a type.

        Raises Refused for an error's status, and CannotLook for anything but a whole answer of this type in time.
        """
        content = self._asked(path, body)
        try:
            return checked(msgspec.json.decode(content), kind, "the answer")
        except (ConfigError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._strange(path, error) from None

    def _strange(self, path: str, error: Any) -> CannotLook:
        return CannotLook(f"{self.url}{path} is not what a vllm serve answers: {shown(error)}; {GIVE_URL}")

    def _asked(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        where, begun = f"{self.url}{path}", monotonic()
        until = self._until if body is not None else min(self._until, begun + PAGE_S)
        try:
            return self._answer(where, body, until)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, Refused):
                raise
            if monotonic() < until:
                raise CannotLook(f"{where} does not answer: {_cause(error)}; {GIVE_URL}") from None
            waited = self._timeout_s if until == self._until else PAGE_S
            more = "type: --timeout SECONDS, or " if until == self._until else ""
            raise CannotLook(f"{where} does not answer within {waited:g} s; {more}{GIVE_URL}") from None

    def _answer(self, where: str, body: Mapping[str, Any] | None, until: float) -> bytes:
        url, left = urlsplit(where), until - monotonic()
        if not url.hostname:
            raise ValueError("it names no host")
        if left <= 0:
            raise TimeoutError
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = kind(url.hostname, url.port, timeout=left)
        connection.connect()
        # A socket's own timeout begins anew with each byte.
        deadline = Timer(until - monotonic(), _break_off, [connection.sock])
        deadline.start()
        try:
            path = url._replace(scheme="", netloc="").geturl()
            headers = {} if self._key is None else authorization(self._key)
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                own = {"Content-Type": "application/json", "X-Request-Id": f"{PROBE}-{uuid4().hex}"}
                connection.request("POST", path, json.dumps(body).encode(), headers | own)
            with connection.getresponse() as answer:
                return _content(where, answer, until)
        finally:
            deadline.cancel()
            connection.close()


def _break_off(sock: socket.socket) -> None:
    """End a connection under whoever reads from it."""
    with suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # an SSLSocket's own would let the reader go on in plain text


def _content(where: str, answer: HTTPResponse, until: float) -> bytes:
    """A whole answer. Raises Refused for another status than success."""
    content = answer.read(MOST_BYTES)
    if monotonic() >= until:  # the end may be that of `_break_off`
        raise TimeoutError
    if len(content) == MOST_BYTES:
        raise ValueError(f"the answer has more than {MOST_BYTES} bytes")
    if answer.length:  # bytes are missing; `read` leaves that check to its caller
        raise IncompleteRead(content, answer.length)
    if answer.status < 300:
        return content
    todo = ""
    if answer.status < 400:
        todo = f"; give the URL that it sends to: {shown(answer.headers['Location'])}"
    elif answer.status in (401, 403):
        todo = f"; type: --api-key KEY, or export {KEYS[0]}=KEY"
    beginning = shown(content[:1000].decode(errors="replace"))
    raise Refused(f"{where} answers {answer.status}: {beginning}{todo}", answer.status)


def _key(key: str | None) -> str | None:
    key = key if key is not None else next(filter(None, map(os.environ.get, KEYS)), None)
    key = None if key is None else key.strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the API key holds characters that no header can; allowed: --api-key, or {KEYS[0]}, in ASCII"
        )
    return key or None


def _cause(error: Exception) -> str:
    if isinstance(error, IncompleteRead):
        return "its answer breaks off"
    return shown(f"{type(error).__name__}: {error}" if isinstance(error, HTTPException) else error)


def shown(answer: Any) -> str:
    """A server's answer as printable text of one line."""
    text = " ".join((str(answer) or type(answer).__name__).split())
    return "".join(character if character.isprintable() else "?" for character in text)[:200]
