"""A vLLM endpoint plugin (vllm/plugins/endpoint_plugins) for servers with fp8plan's weight-transfer backend.

It adds the routes, the Front, and a check of the API key before every route. vLLM itself asks for the key only below
/v1. Its routes for weights, which VLLM_SERVER_DEV_MODE opens, are elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.plugin import API_KEY, BACKEND, PULL, ROLLOUT, STATUS, STORE, logger
from fp8plan.runtime.apply.server.ending import Ending
from fp8plan.runtime.apply.server.lifecycle import LifecycleFront
from fp8plan.runtime.apply.server.rollout import rolled_out

READS: Final = ("GET", "HEAD", "OPTIONS")  # methods that change nothing; vLLM decides who may read
Scope = MutableMapping[str, Any]


def keys_of(args: Any) -> tuple[bytes, ...]:
    """Return the server's API keys, as vLLM reads them."""
    keys = getattr(args, "api_key", None) or [os.environ.get(API_KEY)]
    return tuple(key.encode() for key in keys if key)


class Gate:
    """ASGI middleware: a request that may change something needs one of `app.state.fp8plan_keys`, if there are any."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] in ("http", "websocket") and scope.get("method") not in READS:
            keys = getattr(scope["app"].state, "fp8plan_keys", ())
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # compare_digest takes equally long wherever the keys differ.
            known = any(secrets.compare_digest(key.encode(), allowed) for allowed in keys)
            if keys and not (scheme.lower() == "bearer" and known):
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


ANOTHER: Final = (
    'this server has another weight-transfer backend; type: --weight-transfer-config \'{"backend": "fp8plan"}\''
)
RESUME: Final = "/resume"
HEALTH: Final = "/health"
# Calls that vLLM answers whatever they hold, and what it reads: names in the URL, and fields of a JSON body. For a name
# that is misspelt it takes the default: "/pause?mod=keep" aborts all requests.
NAMES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "/start_weight_update": ((), ("is_checkpoint_format",)),
    "/finish_weight_update": ((), ("weight_version",)),
    "/pause": (("mode", "clear_cache", "wait_for_inflight_requests"), ()),
    RESUME: ((), ()),
    PULL: ((), ()),
}

router = APIRouter()


async def refuse_unread(request: Request) -> None:
    """Raise HTTPException (400) for a call in NAMES with something that vLLM would not read."""
    path = request.scope["route"].path
    in_url, in_body = NAMES[path]
    try:
        body = json.loads(await request.body() or "{}")
    except ValueError:
        raise HTTPException(400, f"the body of {path} is no JSON; allowed: {_allowed(path)}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, f"the body of {path} is {body!r:.60}; allowed: {_allowed(path)}")
    wrong = [f"?{name}=" for name in request.query_params if name not in in_url]
    wrong += [f"the field {name!r:.60}" for name in body if name not in in_body]
    if wrong:
        raise HTTPException(400, f"{path} does not read {', '.join(wrong)}; allowed: {_allowed(path)}")
    if body.get("is_checkpoint_format", True) is not True:
        raise HTTPException(400, f"is_checkpoint_format is {body['is_checkpoint_format']!r:.60}; allowed: true")


def _allowed(path: str) -> str:
    in_url, in_body = NAMES[path]
    ways = [f"{path}?{name}=" for name in in_url] + [f'{{"{name}": ...}}' for name in in_body]
    return ", ".join(["no body" if in_url or not in_body else "an empty body", *ways])


class Rollout(BaseModel, extra="forbid"):
    """Arguments of apply.server.rollout.rolled_out. Only whole numbers are tokens: pydantic would take true for 1."""

    prompts: list[list[Annotated[int, Field(ge=0, strict=True)]]]
    sampling: dict[str, Any] = {}


@router.get(STATUS)
async def status(request: Request) -> JSONResponse:
    """Answer the status (Front.status); 404 on a server with another backend."""
    front = _front(request)
    return _refused(404, ANOTHER) if front is None else JSONResponse(await front.status())


@router.get(HEALTH)
async def health(request: Request) -> JSONResponse:
    """Answer 200 while the engine's process lives, 503 otherwise; the body says whether the weights may be used.

    A refusal is no 503: a trainer that waits for the server's health would never send the weights that mend it.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    front, code = _front(request), 200
    if (engine := request.app.state.engine_client) is not None:
        try:
            await engine.check_health()
        except EngineDeadError:
            code = 503
    if front is None:
        return JSONResponse({}, code)
    return JSONResponse({"serving": front.refusal is None, "refusal": front.refusal}, code)


@router.post(PULL, dependencies=[Depends(refuse_unread)])
async def pull(request: Request) -> JSONResponse:
    """Pull the newest weights of the server's store, and answer the update's record; null if there was nothing new."""
    front = _front(request)
    if front is None:
        return _refused(404, ANOTHER)
    try:
        record = await asyncio.shield(asyncio.create_task(front.pull()))
    except ValueError as error:
        return _refused(400, str(error))
    return JSONResponse(record)


@router.post(ROLLOUT)
@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def rollout(wanted: Rollout, raw_request: Request) -> Response:
    """Answer tokens and log-probs of responses to many prompts; 400 for a request that is refused."""
    front = _front(raw_request)
    if front is None:
        return _refused(404, ANOTHER)
    try:
        config = front.engine.vllm_config.model_config
        responses = await rolled_out(front.generate, config, wanted.prompts, wanted.sampling)
    except ValueError as error:
        return _refused(400, str(error))
    # A million tokens block the event loop for 0.04 s, with Python's own json for 0.7 s.
    return Response(msgspec.json.encode(responses), media_type="application/json")


async def resume(request: Request) -> JSONResponse:
    """Resume generation as vLLM's own route does, but with 400 in the place of 500 if it is refused."""
    try:
        await request.app.state.engine_client.resume_generation()
    except ValueError as error:
        return _refused(400, str(error))
    return JSONResponse({"status": "resumed"})


def _front(request: Request) -> LifecycleFront | None:
    front: LifecycleFront | None = getattr(request.app.state, "fp8plan", None)
    return front


def _refused(code: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=code)


class Routes:
    """The endpoint plugin. VLLM_PLUGINS must name it."""

    name = BACKEND
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, /health and /resume before vLLM's own, and the checks of NAMES and of the API key."""
        theirs = {route.path: route for route in app.routes if isinstance(route, APIRoute)}
        for path in NAMES.keys() & theirs.keys():
            call = resume if path == RESUME else theirs[path].endpoint
            checked = APIRoute(path, call, methods=["POST"], dependencies=[Depends(refuse_unread)])
            app.router.routes.insert(0, checked)
        for route in reversed(router.routes):
            app.router.routes.insert(0, route)
        app.add_middleware(Gate)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Wrap the engine. Raises ConfigError, which ends the server, if several processes take requests."""
        config = getattr(getattr(engine_client, "vllm_config", None), "weight_transfer_config", None)
        if config is None or config.backend != BACKEND:
            return
        servers = getattr(args, "api_server_count", None) or 1
        if servers > 1:
            raise ConfigError(f"--api-server-count is {servers}; allowed: 1, as one process must see all requests")
        state.fp8plan_keys = keys_of(args)
        state.fp8plan_ending = Ending(engine_client, state)
        state.fp8plan = await LifecycleFront.opened(engine_client)
        if store := os.environ.get(STORE):
            await state.fp8plan.follow(store)
