"""The check of the server's API key, before every route.

vLLM asks for the key below /v1 alone. Its routes for weights, which VLLM_SERVER_DEV_MODE opens, and its calls into the
workers are elsewhere.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from starlette.datastructures import Headers
from fastapi.responses import JSONResponse

from fp8plan.runtime.server.plugin import API_KEY, logger

READS: Final = ("GET", "HEAD", "OPTIONS")  # methods by which nothing is changed; vLLM decides who may read
Scope = MutableMapping[str, Any]


def keys_of(args: Any) -> tuple[bytes, ...]:
    """Return the keys that a server was started with, as vLLM reads them; none for a server that asks for none."""
    keys = getattr(args, "api_key", None) or [os.environ.get(API_KEY)]
    return tuple(key.encode() for key in keys if key)


class Gate:
    """ASGI middleware: a request that does more than read needs one of `app.state.fp8plan_keys`, if there are any."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] in ("http", "websocket") and scope.get("method") not in READS:
            keys = getattr(scope["app"].state, "fp8plan_keys", ())
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if keys and not (scheme.lower() == "bearer" and matches(key, keys)):
                logger.warning(
                    "fp8plan refused %s %s from %s: it lacks the API key of the server",
                    scope.get("method", scope["type"]),
                    scope["path"],
                    (scope.get("client") or ("an unknown address",))[0],
                )
                why = f"{scope['path']} needs the API key of the server; type: -H 'Authorization: Bearer KEY'"
                await JSONResponse({"error": why}, status_code=401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def matches(key: str, keys: tuple[bytes, ...]) -> bool:
    """Return whether a key is one of those allowed; how long that takes does not say which part of it is wrong."""
    return any(secrets.compare_digest(key.encode(), allowed) for allowed in keys)
