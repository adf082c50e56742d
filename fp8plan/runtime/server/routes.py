"""A vLLM endpoint plugin (vllm/plugins/endpoint_plugins) for servers with fp8plan's weight-transfer backend.

It adds the routes, the Front for updates by vLLM's own lifecycle (start, parts, finish), and a check of the API key
before every route. vLLM itself asks for the key only below /v1. Its routes for weights, which VLLM_SERVER_DEV_MODE
opens, are elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from fp8plan.errors import ConfigError
from fp8plan.runtime.engine.async_engine import driven
from fp8plan.runtime.plugin import API_KEY, BACKEND, PULL, ROLLOUT, STATUS, STORE, logger
from fp8plan.runtime.server.front import Front, UpdateError
from fp8plan.runtime.server.rollout import rolled_out
from fp8plan.runtime.weight_sync.delta.base import Chain
from fp8plan.runtime.weight_sync.delta.store import Follower
from fp8plan.runtime.weight_sync.manifest import checkpoint_manifest, local_folder
from fp8plan.runtime.weight_sync.procedure import learn_quantised, replace_weights
from fp8plan.runtime.weight_sync.state import Call, Procedure, SyncReport, SyncSettings, rpc

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


class LifecycleFront(Front):
    """A Front that also wraps the lifecycle's calls. New weights serve at the end of `finish_weight_update`.

    follower: reads versions of the weights from a store, for `pull`; None: there is no store
    """

    wrapped: ClassVar = (
        *Front.wrapped, "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
    )  # fmt: skip
    asks_facts: ClassVar = "fp8plan_attach"

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.follower: Follower | None = None

    async def follow(self, url: str) -> None:
        """Take the newest weights of a store, if it has any. A later `pull` goes on from there."""
        config = self.engine.vllm_config
        model, download = config.model_config, config.load_config.download_dir
        folder = local_folder(model.model, model.revision, download)
        self.state.expected = None if folder is None else checkpoint_manifest(folder)
        self.state.settings = SyncSettings(weights_in="fp8_block")
        self.state.staged_on, self.state.workers = "cpu", config.parallel_config.world_size
        self.follower = Follower(url)
        await self.pull()

    async def pull(self) -> SyncReport | None:
        """Bring the weights to the newest version of the store; None if they are that already.

        Raises UpdateError while requests run, unless generation is paused, and if the weights could not be synced.
        """
        if self.follower is None:
            raise UpdateError(f"this server follows no store; type: {STORE}=URL vllm serve ... (docs/guides/server.md)")
        self._refuse_open("pull")
        await self._refuse_running(PAUSE)
        self._updating = True
        try:
            async with nullcontext() if self._unfinished() else self._measuring_alone():
                report = await driven(self.follower.pulling(self), self._answer, threads=True)
        except Exception as error:
            raise await self._failed(error) from error
        self.failure = None
        await self._let(updating=False)
        return report

    @property
    def serving(self) -> bool:
        return self.state.refusal is None

    @staticmethod
    def _asked(procedure: Procedure) -> Procedure:
        return procedure

    def _sync(self, chain: Chain, *_: Any) -> Generator[Call, Any, SyncReport]:
        """Write the patches of a chain. KV scales stay while a pause keeps requests; else they are measured."""
        state = self.state
        state.version = (yield from rpc("fp8plan_status"))[0]["version"]
        if state.quantised is None:
            yield from learn_quantised(state)
        if self._unfinished():
            known, prompts, source = state.kv_scales, None, self._kept_scales()
        else:
            known, (prompts, source) = None, self._prompts()
        report = yield from replace_weights(state, chain, kv_prompts=prompts, kv_source=source, kv_known=known)
        self.kv_source, self.sampling = source, None
        self.pulled = recorded(report)
        return report

    async def init_weight_transfer_engine(self, *args: Any, **kwargs: Any) -> None:
        """Let the workers meet a trainer."""
        await self._called("init_weight_transfer_engine", *args, **kwargs)

    async def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Open an update, after closing one that a trainer has left open. Raises UpdateError while requests run, unless
        generation is paused."""
        await self._refuse_running(PAUSE)
        if self._updating:
            await self._release()
        self._updating, self.state.stamp = True, None
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
        """Close an update: the workers check it, then KV scales are measured, and the new weights serve."""
        try:
            await self._called("finish_weight_update", *args, **kwargs)
            await self._serve()
        except Exception as error:
            await self._release()
            raise await self._failed(error) from error
        self.failure = None
        await self._let(updating=False)

    async def _called(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call vLLM's own method. Meanwhile the status names this call, as the workers cannot answer."""
        self._under_way.append(name)
        self._kept.set()
        try:
            await self._own[name](*args, **kwargs)
        finally:
            self._under_way.remove(name)
            if not self._under_way:
                self._kept.clear()

    async def _release(self) -> None:
        """Close an update that vLLM's workers still count as open."""
        for _ in range(2):  # the first call fails if the backend has an update open, too
            with suppress(Exception):
                await self._called("finish_weight_update")


def recorded(report: SyncReport) -> dict[str, Any]:
    """Return a report as the status holds it."""
    left_out = ("checks", "healed", "kv_scales", "kv_source", "residual", "scored_k3")
    fields = {name: value for name, value in asdict(report).items() if name not in left_out}
    return fields | {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


PAUSE: Final = "pause generation before (POST /pause?mode=keep)"
ANOTHER: Final = (
    'this server has another weight-transfer backend; type: --weight-transfer-config \'{"backend": "fp8plan"}\''
)
RESUME: Final = "/resume"

router = APIRouter()


class Rollout(BaseModel, extra="forbid"):
    """Arguments of runtime.server.rollout.rolled_out."""

    prompts: list[list[Annotated[int, Field(ge=0)]]]
    sampling: dict[str, Any] = {}


@router.get(STATUS)
async def status(request: Request) -> JSONResponse:
    """Answer the status (Front.status); 404 on a server with another backend."""
    front = _front(request)
    return _refused(404, ANOTHER) if front is None else JSONResponse(await front.status())


@router.post(PULL)
async def pull(request: Request) -> JSONResponse:
    """Pull the newest weights of the server's store, and answer the update's record; null if there was nothing new."""
    front = _front(request)
    if front is None:
        return _refused(404, ANOTHER)
    try:
        report = await asyncio.shield(asyncio.create_task(front.pull()))
    except ValueError as error:
        return _refused(400, str(error))
    return JSONResponse(None if report is None else recorded(report))


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
        """Add the routes, /resume before vLLM's own, and the check of the API key before all."""
        app.include_router(router)
        if any(getattr(route, "path", None) == RESUME for route in app.routes):
            app.router.routes.insert(0, APIRoute(RESUME, resume, methods=["POST"]))
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
        state.fp8plan = await LifecycleFront.opened(engine_client)
        if store := os.environ.get(STORE):
            await state.fp8plan.follow(store)
