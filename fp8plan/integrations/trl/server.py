"""TRL's vLLM backend in server mode, with a plan: the server is checked, synced by TRL's client, and asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from fp8plan.errors import SyncError
from fp8plan.integrations.trl.client import PlannedClient, Served
from fp8plan.integrations.trl.policy import PolicyTensors
from fp8plan.integrations.trl.served import ServerEngine
from fp8plan.runtime.server.status import report_of
from fp8plan.runtime.weight_sync.manifest import Manifest

# Plans for the server and checks it, in every process; only the first has a client.
Connect = Callable[["PlannedServer", Served, PlannedClient | None], ServerEngine]


class PlannedServer(PolicyTensors):
    """TRL's VLLMGeneration in server mode.

    connect: plans for the server that was found, and checks it

    engine: the server's, as a Monitor needs it
    report: stays None in all processes but the first
    """

    def __init__(self, *args: Any, connect: Connect, **kwargs: Any) -> None:
        self._connect = connect
        self.engine: ServerEngine
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        """Connect to the server in the place where TRL does, and check it before it is given anything."""
        client: PlannedClient | None = None
        told: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                client = PlannedClient(
                    base_url=self.server_base_url or f"http://{self.server_host}:{self.server_port}",
                    group_port=self.group_port,
                    connection_timeout=self.server_timeout,
                )
                told = [client.seen()]
            except Exception as error:  # the other processes must not wait for ever
                told = [error]
        broadcast_object_list(told, from_process=0)
        if isinstance(told[0], Exception):
            raise told[0]
        self.engine = self._connect(self, told[0], client)
        if client is not None:
            self.vllm_client = client
            client.init_communicator(device=self.accelerator.device)
        self.accelerator.wait_for_everyone()

    @property
    def expected(self) -> Manifest | None:
        return self.engine.expected

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super().generate(*args, **kwargs)
        self.engine.observe()
        return found

    def sync_weights(self) -> None:
        """Make the policy's weights serve: all of them, checked by the server, with new KV scales if its cache is FP8.

        Raises SyncError, whose message says which weights serve.
        """
        self._before_sync()
        sent = self.announced()
        if not self.accelerator.is_main_process:
            for _ in self.tensors():  # take part in gathering them
                pass
            return
        begun = time.perf_counter()
        self.vllm_client.update_named_params(sent, self.copies(sent))
        seconds, status = time.perf_counter() - begun, self.vllm_client.status()
        if status is None or status["last_update"] is None or not status["serving"]:
            raise SyncError(f"the server does not serve the new weights: {status and status['refusal']}")
        self.report = report_of(status, seconds)
