"""verl's vLLM server with a planned engine, which logs a rollout's requests, and the replica that starts it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any, Final

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from fp8plan.integrations.verl.front import VerlFront
from fp8plan.integrations.verl.name import NAME
from fp8plan.integrations.verl.settings import check_verl, handed_on, scored
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.apply.engine.launch import facts_of, launch
from fp8plan.runtime.apply.engine.returned_experts import OPTION
from fp8plan.runtime.apply.engine.rollout_log import Response, RolloutLog

WORKER: Final = "fp8plan.integrations.verl.worker.PlannedWorker"
UPDATE: Final = "update_weights_from_ipc"
OF_VERL: Final = ("model", "worker_extension_cls", "skip_tokenizer_init")  # vLLM's arguments that stay verl's


class PlannedServer(vLLMHttpServer):
    """verl's server of one replica, with the plan's precision and limits.

    Raises ConfigError if vLLM, the GPU or the settings do not allow the plan, and if no trainer has handed one on.
    """

    def _validate_configs(self) -> None:
        check_verl()
        super()._validate_configs()
        self._plan = Plan.from_json(handed_on(self.config.custom))
        self._requests = RolloutLog()
        self._front: VerlFront

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if self.config.enable_rollout_routing_replay:
            engine_kwargs[OPTION] = True  # verl adds it later, when the launch has been checked
        self._launch = launch(
            replace(self._plan.setup(), inside="verl"),
            self.model_config.local_path,
            more=dict(engine_kwargs),
            precisions=self._plan.precisions_beside(),
            server=True,
        )
        self._launch.prepare()
        engine_kwargs |= {name: value for name, value in self._launch.kwargs.items() if name not in OF_VERL}

    def _apply_quantization(self) -> tuple[None, dict[str, Any]]:
        """Leave verl's own FP8 out: vLLM quantises as the launch says."""
        return None, {}

    def _get_worker_extension_cls(self) -> str:
        return WORKER

    async def run_server(self, args: Any) -> None:
        """Start the engine, and check that the plan runs."""
        await super().run_server(args)
        self._front = await VerlFront.opened(self.engine)
        self._launch = self._launch.holding(self.engine.model_config.max_model_len)
        self._launch.refuse_other(self._front.facts)

    async def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        """Call a method of every worker, as verl does, and return the answers.

        An update of the weights is checked, and serves once nothing sleeps. Raises UpdateError if it is refused.
        """
        call = partial(self.engine.collective_rpc, method=method, timeout=timeout, args=args, kwargs=kwargs)
        if method == UPDATE:
            return await self._front.update(call)
        return await call()

    async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, *args: Any, **more: Any) -> Any:
        """Generate one request as verl does, and count it."""
        begun, sampling = time.perf_counter(), scored(sampling_params, self.config)  # before verl removes some params
        output = await super().generate(prompt_ids, sampling_params, request_id, *args, **more)
        self._requests.add(begun, time.perf_counter(), [Response(prompt_ids, output.token_ids)], sampling)
        return output

    async def fp8plan_begin(self) -> None:
        """Begin to count the requests of a rollout. Its sequences alone measure KV scales, once there are some."""
        self._requests = RolloutLog()
        self._requests.begin()
        self._front.begin_rollout()

    async def fp8plan_seen(self) -> dict[str, Any]:
        """Return {"status": VerlFront.seen, "facts": EngineFacts, "rollout": fields of an Observation, or None}."""
        self._requests.end()
        self._requests.kv_cache_tokens = self._front.seen["kv_cache_tokens"]
        return {
            "status": self._front.seen,
            "facts": facts_of(self._launch.setup, self._front.facts, self._launch.not_predicted),
            "rollout": self._requests.observed(),
        }


class PlannedReplica(vLLMReplica):
    """verl's replica, of PlannedServers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_verl()
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PlannedServer)

    def _get_server_name_prefix(self) -> str:
        """Return the prefix of the server's name for verl's client: the rollout's name."""
        return f"{NAME}_"
