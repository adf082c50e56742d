"""The HTTP route of a server with the backend, as a vLLM endpoint plugin (vllm/plugins/endpoint_plugins)."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from fp8plan.errors import ConfigError
from fp8plan.runtime.server.lifecycle import LifecycleFront
from fp8plan.runtime.server.plugin import BACKEND

STATUS: Final = "/fp8plan/status"
ANOTHER: Final = "this server has another weight-transfer backend; type: "
TYPE: Final = """--weight-transfer-config '{"backend": "fp8plan"}'"""

router = APIRouter()


@router.get(STATUS)
async def status(request: Request) -> JSONResponse:
    """Answer what serves (runtime.server.status); 404 on a server with another backend."""
    front: LifecycleFront | None = getattr(request.app.state, "fp8plan", None)
    if front is None:
        return JSONResponse({"error": ANOTHER + TYPE}, status_code=404)
    return JSONResponse(await front.status())


class Routes:
    """The endpoint plugin. VLLM_PLUGINS must name it."""

    name = BACKEND
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Stand before the engine. Raises ConfigError for a server that this cannot work for, which then ends."""
        config = getattr(getattr(engine_client, "vllm_config", None), "weight_transfer_config", None)
        if config is None or config.backend != BACKEND:
            return
        servers = getattr(args, "api_server_count", None) or 1
        if servers > 1:
            raise ConfigError(f"--api-server-count is {servers}; allowed: 1, as one process must see all requests")
        state.fp8plan = await LifecycleFront.opened(engine_client)
