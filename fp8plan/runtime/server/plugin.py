"""The plugins that fp8plan's entry points give to vLLM.

vllm.general_plugins:  `register`, which every process of vLLM calls. It names a weight-transfer backend and imports
                       nothing of it: only a server that is started with {"backend": "fp8plan"} ever does.
vllm.endpoint_plugins: routes.Routes. vLLM loads them where VLLM_PLUGINS names fp8plan.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.vllm_versions import check_vllm_version

logger = logging.getLogger(__name__)

BACKEND: Final = "fp8plan"
PROBE: Final = "fp8plan-doctor"  # in the ids of requests that are no rollout's
STATUS: Final = "/fp8plan/status"
ROLLOUT: Final = "/v1/fp8plan/rollout"  # vLLM asks for its --api-key below /v1
PLUGINS: Final = "VLLM_PLUGINS"  # vLLM's own variable: names of the plugins that it may load, by commas


def register() -> None:
    """Name the backend. Does nothing in a vLLM that is not supported: fp8plan must not break what it does not serve."""
    try:
        check_vllm_version()
    except ConfigError as error:
        logger.debug("the weight-transfer backend %s is not registered: %s", BACKEND, error)
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # a process may load its plugins twice
        WeightTransferEngineFactory.register_engine(BACKEND, "fp8plan.runtime.server.backend", "Fp8PlanTransfer")
