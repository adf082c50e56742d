"""TRL's vLLM backend in server mode, with a plan: the server is checked against it, synced by TRL's client, judged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from accelerate.utils import broadcast_object_list

from fp8plan.errors import ConfigError, Fp8PlanError, SyncError, warn
from fp8plan.integrations.common import report_of, safer_than
from fp8plan.integrations.trl.client import Call, PlannedClient, Served, read_from
from fp8plan.integrations.trl.colocated import PolicyTensors
from fp8plan.model.emit.trl import server_command
from fp8plan.model.limits import LIMITS, EngineLimits, fields_of
from fp8plan.model.plan.anchor import Anchor
from fp8plan.runtime.apply.engine.judge import Judge, Judging
from fp8plan.runtime.apply.engine.launch import Launch, facts_of
from fp8plan.runtime.apply.engine.options import not_predicted, options_of, remarks
from fp8plan.runtime.apply.engine.rollout_log import RolloutLog
from fp8plan.runtime.apply.plugin import STATUS
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings
from fp8plan.runtime.watch.guard.guard import Guard
from fp8plan.runtime.watch.guard.observation import EngineFacts

logger = logging.getLogger(__name__)

# Limits that a server's command line sets, and on which a plan's prediction depends.
COMPARED: Final = (
    "tensor_parallel_size", "data_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "enable_prefix_caching", "enable_expert_parallel",
)  # fmt: skip


def limits_of(config: Mapping[str, Any], on_cpu: bool) -> EngineLimits:
    """The limits of a server. config: its VllmConfig as a JSON tree"""
    limits = fields_of({limit.argument: config[limit.part].get(limit.argument) for limit in LIMITS if limit.part})
    if on_cpu:
        del limits["gpu_memory_utilization"]
    return EngineLimits(**limits)


def check_server(served: Served, launched: Launch) -> None:
    """Raise ConfigError, with the command to type, for a server that does not run the plan."""
    fault = next(_faults(served, launched), None)
    if fault is not None:
        line = server_command(launched.setup)
        raise ConfigError(f"the server at {served.url} {fault}; end it, and type: {line}")


def _faults(served: Served, launched: Launch) -> Iterator[str]:
    config, status = served.config, served.status
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if backend != "fp8plan":
        yield f"has the weight-transfer backend {backend}, and a plan needs fp8plan's"
    if status is None:
        yield "was started without VLLM_PLUGINS=fp8plan, by which it would say what it runs"
        return
    if status["precision"] != launched.precision:
        yield (
            f"runs {status['precision']}, and the plan is for {launched.precision} (choice={status['precision']!r} "
            "takes the server as it is)"
        )
    limits = limits_of(config, launched.setup.gpu.is_cpu)
    for name in COMPARED:
        theirs, planned = getattr(limits, name), getattr(launched.limits, name)
        if theirs != planned and planned is not None:
            yield f"has {name} {theirs}, and the plan {planned}"
    if config["model_config"].get("logprobs_mode") != "processed_logprobs":
        yield f"gives {config['model_config'].get('logprobs_mode')}, and the correction needs processed_logprobs"
    try:
        launched.refuse_other(status["facts"])
    except ConfigError as error:
        yield f"cannot be used: {error}"


class ServerEngine(Judging):
    """The engine of a server, with the part of RolloutEngine that a Monitor and a trainer use.

    launch:    the plan that runs
    guard:     compares rollouts with the prediction, corrected by the plan's anchor; None in all processes but the
               first, or without a profile (`guard_off` says why)
    """

    def __init__(self, launched: Launch, served: Served, client: PlannedClient | None, anchor: Anchor | None) -> None:
        assert served.status is not None
        self.launch, self.url = launched, served.url
        self.guard: Guard | None = None
        self.guard_off: str | None = "the first process judges the rollouts" if client is None else None
        self._status = served.status
        self._limits = limits_of(served.config, launched.setup.gpu.is_cpu)
        self._not_predicted = not_predicted(options := options_of(served.config))
        self._judge = Judge(self)
        if client is not None:
            client.heard = self._count
            for remark in remarks(options):
                warn(remark)
            try:
                self.guard = Guard(self.engine_facts(), GuardSettings(anchor=anchor))
            except Fp8PlanError as error:  # a GPU without a profile: everything works but this comparison
                self.guard_off = str(error)

    def engine_facts(self) -> EngineFacts:
        """The running engine, as the guard needs it."""
        return facts_of(replace(self.launch.setup, limits=self._limits), self._status["facts"], self._not_predicted)

    def _count(self, call: Call) -> None:
        now = time.perf_counter()

        def add(log: RolloutLog) -> None:
            log.add(now - call.seconds, now, call.responses, call.sampling)
            for name, gain in call.counted.items():
                log.counted[name] = log.counted.get(name, 0) + gain
            log.kv_cache_tokens = self._status["kv_cache_tokens"]

        self._judge.count(add, call.seconds)

    def synced(self) -> None:
        """Note that the server has new weights."""
        self._judge.synced()

    def apply(self, action: Action, escalate: Escalation | None = None) -> None:
        """Log the words to type for a step down: the server is another program."""
        running = self.launch.precision
        safer = safer_than(running, action, escalate)
        if safer is None:
            return
        try:
            line = server_command(self.launch.with_precision(safer).setup)
        except ConfigError as error:
            line = str(error)
        logger.warning(
            "fp8plan advises a step down from %s, and the server at %s is another program; end both, type: %s, and go "
            "on from a checkpoint with choice=%r",
            running,
            self.url,
            line,
            safer,
        )

    def shutdown(self) -> None:
        """Stop judging. The server goes on."""
        self._judge.close()


class PlannedServer(PolicyTensors):
    """TRL's VLLMGeneration in server mode.

    connect: plans for the server and checks it, in every process. Only the first has a client

    engine: the ServerEngine
    report: stays None in all processes but the first
    """

    def __init__(
        self,
        *args: Any,
        connect: Callable[[PlannedServer, Served, PlannedClient | None], ServerEngine],
        **kwargs: Any,
    ) -> None:
        self._connect = connect
        self.engine: ServerEngine
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        """Connect to the server where TRL does, and check it before anything is sent."""
        client: PlannedClient | None = None
        shared: list[Any] = [None]  # the server, or the error, for all processes
        if self.accelerator.is_main_process:
            try:
                client = PlannedClient(
                    base_url=self.server_base_url or f"http://{self.server_host}:{self.server_port}",
                    group_port=self.group_port,
                    connection_timeout=self.server_timeout,
                )
                shared = [client.seen()]
            except Exception as error:  # so that the other processes do not wait for ever
                shared = [error]
        broadcast_object_list(shared, from_process=0)
        if isinstance(shared[0], Exception):
            raise shared[0]
        self.engine = self._connect(self, shared[0], client)
        if client is not None:
            self.vllm_client = client
            client.init_communicator(device=self.accelerator.device)
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Sync all of the policy's weights. The server checks them, and measures KV scales if its cache is FP8.

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
            why = "it answers no status" if status is None else status["refusal"] or "it names no update"
            raise SyncError(f"{self.engine.url} does not serve the new weights: {why}")
        with read_from(f"{self.engine.url}{STATUS}"):
            self.report = report_of(status, seconds)
        self.engine.synced()
