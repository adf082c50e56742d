"""The HTTP routes of a server with the backend, as a vLLM endpoint plugin (vllm/plugins/endpoint_plugins).

The front end of a server that is synced by vLLM's own weight-transfer lifecycle: start, parts, finish.

The check of the server's API key, before every route.

vLLM asks for the key below /v1 alone. Its routes for weights, which VLLM_SERVER_DEV_MODE opens, and its calls into the
workers are elsewhere.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from fp8plan.errors import ConfigError
from fp8plan.runtime.plugin import API_KEY, BACKEND, ROLLOUT, STATUS, logger
from fp8plan.runtime.server.front import Front
from fp8plan.runtime.server.rollout import rolled_out

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


class LifecycleFront(Front):
    """A Front before the lifecycle's calls.

    `start_weight_update` is refused while requests run, unless generation is paused. At the end of
    `finish_weight_update` the new weights serve.
    """

    wrapped: ClassVar = (
        *Front.wrapped, "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
    )  # fmt: skip
    asks_facts: ClassVar = "fp8plan_attach"

    async def init_weight_transfer_engine(self, *args: Any, **kwargs: Any) -> None:
        """Have the workers meet a trainer."""
        await self._called("init_weight_transfer_engine", *args, **kwargs)

    async def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Open an update. One that a trainer has left open is ended first."""
        await self._refuse_running("pause generation before (POST /pause?mode=keep)")
        if self._updating:
            await self._release()
        self._updating = True
        try:
            await self._called("start_weight_update", *args, **kwargs)
        except Exception as error:
            raise await self._failed(error) from error

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take one part of an update."""
        try:
            await self._called("update_weights", *args, **kwargs)
        except Exception as error:
            raise await self._failed(error) from error

    async def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Close an update: what the workers check, then KV scales and prefix cache. Then the new weights serve."""
        try:
            await self._called("finish_weight_update", *args, **kwargs)
            await self._serve()
        except Exception as error:
            await self._release()
            raise await self._failed(error) from error
        self.failure = None
        await self._let(updating=False)

    async def _called(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call vLLM's own. The status says so meanwhile, as the workers do not."""
        self._under_way.append(name)
        self._kept.set()
        try:
            await self._own[name](*args, **kwargs)
        finally:
            self._under_way.remove(name)
            if not self._under_way:
                self._kept.clear()

    async def _release(self) -> None:
        """End what vLLM's workers still count as an open update."""
        for _ in range(2):  # the first fails where the backend has an update open, too
            with suppress(Exception):
                await self._called("finish_weight_update")


ANOTHER: Final = "this server has another weight-transfer backend; type: "
RESUME: Final = "/resume"
TYPE: Final = """--weight-transfer-config '{"backend": "fp8plan"}'"""

router = APIRouter()


class Rollout(BaseModel, extra="forbid"):
    """What is to be generated: runtime.server.rollout.rolled_out says what the fields are."""

    prompts: list[list[Annotated[int, Field(ge=0)]]]
    sampling: dict[str, Any] = {}


@router.get(STATUS)
async def status(request: Request) -> JSONResponse:
    """Answer what serves (runtime.server.status); 404 on a server with another backend."""
    front = _front(request)
    return _refused(404, ANOTHER + TYPE) if front is None else JSONResponse(await front.status())


@router.post(ROLLOUT)
@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def rollout(asked: Rollout, raw_request: Request) -> Response:
    """Answer tokens and log-probs of responses to many prompts; 400 for what must not or cannot be generated."""
    front = _front(raw_request)
    if front is None:
        return _refused(404, ANOTHER + TYPE)
    try:
        config = front.engine.vllm_config.model_config
        found = await rolled_out(front.generate, config, asked.prompts, asked.sampling)
    except ValueError as error:
        return _refused(400, str(error))
    # A million tokens keep the event loop for 0.04 s; Python's own json would for 0.7 s.
    return Response(msgspec.json.encode(found), media_type="application/json")


async def resume(request: Request) -> JSONResponse:
    """Resume generation as vLLM's own route does, which answers 500 for whatever it must not; 400 while an update is
    open."""
    try:
        await request.app.state.engine_client.resume_generation()
    except ValueError as error:
        return _refused(400, str(error))
    return JSONResponse({"status": "resumed"})


def _front(request: Request) -> LifecycleFront | None:
    found: LifecycleFront | None = getattr(request.app.state, "fp8plan", None)
    return found


def _refused(code: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=code)


class Routes:
    """The endpoint plugin. VLLM_PLUGINS must name it."""

    name = BACKEND
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, one of them before vLLM's own if that is there, and the check of the API key before all."""
        app.include_router(router)
        if any(getattr(route, "path", None) == RESUME for route in app.routes):
            app.router.routes.insert(0, APIRoute(RESUME, resume, methods=["POST"]))
        app.add_middleware(Gate)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Stand before the engine. Raises ConfigError for a server that this cannot work for, which then ends."""
        config = getattr(getattr(engine_client, "vllm_config", None), "weight_transfer_config", None)
        if config is None or config.backend != BACKEND:
            return
        servers = getattr(args, "api_server_count", None) or 1
        if servers > 1:
            raise ConfigError(f"--api-server-count is {servers}; allowed: 1, as one process must see all requests")
        state.fp8plan_keys = keys_of(args)
        state.fp8plan = await LifecycleFront.opened(engine_client)
