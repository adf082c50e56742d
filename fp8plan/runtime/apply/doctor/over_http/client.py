"""An HTTP client that trusts no server: answers may have any form and size, and may never end.

Every answer has a deadline and a type. A server that breaks off, sends a byte a second, or does not answer like a
`vllm serve`, gives one ConfigError.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import Any, Final, TypeVar
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener
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
    """An answer with an error's status, such as 404 for a page that this server does not have."""

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
        except HTTPError as error:
            with error:
                raise Refused(f"{where} answers {error.code}: {_beginning(error)}{_typed(error)}", error.code) from None
        except (OSError, HTTPException, ValueError) as error:
            if monotonic() < until:
                raise CannotLook(f"{where} does not answer: {_cause(error)}; {GIVE_URL}") from None
            waited = self._timeout_s if until == self._until else PAGE_S
            more = "type: --timeout SECONDS, or " if until == self._until else ""
            raise CannotLook(f"{where} does not answer within {waited:g} s; {more}{GIVE_URL}") from None

    def _answer(self, where: str, body: Mapping[str, Any] | None, until: float) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = Request(where, data)
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.add_header("X-Request-Id", f"{PROBE}-{uuid4().hex}")
        if self._key is not None:
            for name, value in authorization(self._key).items():
                request.add_unredirected_header(name, value)  # not for another server
        left = until - monotonic()
        if left <= 0:
            raise TimeoutError
        with build_opener(_Http(until), _Https(until)).open(request, timeout=left) as answer:
            content: bytes = answer.read(MOST_BYTES)
            if len(content) == MOST_BYTES:
                raise ValueError(f"the answer has more than {MOST_BYTES} bytes")
            if getattr(answer, "length", None):  # bytes are missing; `read` leaves that check to its caller
                raise IncompleteRead(content, answer.length)
        return content


def _key(key: str | None) -> str | None:
    key = key if key is not None else next(filter(None, map(os.environ.get, KEYS)), None)
    key = None if key is None else key.strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the API key holds characters that no header can; allowed: --api-key, or {KEYS[0]}, in ASCII"
        )
    return key or None


def _beginning(error: HTTPError) -> str:
    try:
        return shown(error.read(1000).decode(errors="replace"))
    except (OSError, HTTPException, ValueError):
        return "an answer that breaks off"


def _cause(error: Exception) -> str:
    """Text of an error, or of the error inside urllib's "<urlopen error ...>"."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, IncompleteRead):
        return "its answer breaks off"
    return shown(f"{type(cause).__name__}: {cause}" if isinstance(cause, HTTPException) else cause)


def _typed(error: HTTPError) -> str:
    return f"; type: --api-key KEY, or export {KEYS[0]}=KEY" if error.code in (401, 403) else ""


def shown(answer: Any) -> str:
    """A server's answer as printable text of one line."""
    text = " ".join((str(answer) or type(answer).__name__).split())
    return "".join(character if character.isprintable() else "?" for character in text)[:200]


class _Timed(RawIOBase):
    """The bytes of a connection until a deadline. A socket's own timeout begins anew with each byte."""

    def __init__(self, sock: socket.socket, raw: Any, until: float) -> None:
        self._sock, self._raw, self._until = sock, raw, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - monotonic()
        if left <= 0:
            raise TimeoutError("the time is up")
        self._sock.settimeout(left)
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, until: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = BufferedReader(_Timed(sock, self.fp.detach(), until))


def _timed(kind: type[HTTPConnection], until: float, *args: Any, **kwargs: Any) -> HTTPConnection:
    """A connection whose responses end at a deadline."""
    connection = kind(*args, **kwargs)
    connection.response_class = partial(_Response, until)  # type: ignore[assignment]
    return connection


class _Http(HTTPHandler):
    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(partial(_timed, HTTPConnection, self._until), request)


class _Https(HTTPSHandler):
    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def https_open(self, request: Request) -> HTTPResponse:
        return self.do_open(partial(_timed, HTTPSConnection, self._until), request)
