"""The HTTP routes of a server with the backend, as a vLLM endpoint plugin (vllm/plugins/endpoint_plugins)."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from fp8plan.errors import ConfigError
from fp8plan.runtime.server.gate import Gate, keys_of
from fp8plan.runtime.server.lifecycle import LifecycleFront
from fp8plan.runtime.server.plugin import BACKEND, ROLLOUT, STATUS
from fp8plan.runtime.server.rollout import rolled_out

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
