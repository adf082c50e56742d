"""The plugins of fp8plan's entry points, and names and clients that both ends of a server share.

vllm.general_plugins:  `register`, which every process of vLLM calls. It names a weight-transfer backend, which only a
                       server with {"backend": "fp8plan"} imports.
vllm.endpoint_plugins: server.routes.Routes. vLLM loads them if VLLM_PLUGINS names fp8plan.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any, Final

from fp8plan.checks import seconds_in
from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.apply.vllm_versions import check_vllm_version

# A library in vLLM's server sets the root logger to ERROR. Loggers below vLLM's name are spared.
logger = logging.getLogger("vllm.fp8plan")

BACKEND: Final = "fp8plan"
PROBE: Final = "fp8plan-doctor"  # part of the ids of requests that belong to no rollout
STATUS: Final = "/fp8plan/status"
ROLLOUT: Final = "/v1/fp8plan/rollout"  # vLLM asks for its --api-key below /v1
PULL: Final = "/fp8plan/pull"
STORE: Final = "FP8PLAN_STORE"  # variable of the server's environment: URL of a store of weights
API_KEY: Final = "VLLM_API_KEY"  # vLLM's own variable for its --api-key; fp8plan's clients take theirs from it
LIMIT: Final = "FP8PLAN_TRANSFER_TIMEOUT_S"  # variable of the server's environment
# Its default: seconds without a broadcast, or without a call of an open update, after which a trainer counts as gone.
LIMIT_S: Final = 120.0
PLUGINS: Final = "VLLM_PLUGINS"  # vLLM's own variable: names of the plugins that it may load, by commas


def register() -> None:
    """Register the backend. Does nothing in a vLLM that is not supported, so as not to break it."""
    try:
        check_vllm_version()
    except ConfigError as error:
        logger.debug("the weight-transfer backend %s is not registered: %s", BACKEND, error)
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # a process may load its plugins twice
        WeightTransferEngineFactory.register_engine(BACKEND, "fp8plan.runtime.apply.worker.backend", "Fp8PlanTransfer")


def transfer_limit_s() -> float:
    """Return the seconds of silence after which a trainer counts as gone. Raises ConfigError unless above 0."""
    return seconds_in(LIMIT, LIMIT_S)


def authorization(api_key: str | None = None) -> dict[str, str]:
    """Return the headers by which a client gives a server its API key; None: the one in VLLM_API_KEY, if any."""
    key = api_key or os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def weight_sync_client(url: str, api_key: str | None = None, timeout: float = 300.0) -> Any:
    """Return vLLM's own HTTP client of the weight-transfer lifecycle, with an API key, which vLLM's lacks.

    api_key: None: the one in VLLM_API_KEY, if there is one
    timeout: seconds for each call

    Its calls raise SyncError with the address and the server's answer.
    """
    import requests
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    class Client(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            where = f"{self.base_url}/{path}"
            try:
                answer = requests.post(where, json=json, timeout=timeout, headers=authorization(api_key))
            except requests.RequestException as error:
                raise SyncError(f"{where} does not answer: {error}; look whether the server runs") from error
            if not answer.ok:
                raise SyncError(f"{where} answers {answer.status_code}: {answer.text:.2000}")

    return Client(url, timeout)
