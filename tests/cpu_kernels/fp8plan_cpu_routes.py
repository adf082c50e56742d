"""The experts of each token from vLLM's CPU build, whose model runner returns none from 0.31 on.

vLLM's connector of auxiliary outputs needs its V2 model runner, which needs a Triton for CPUs. Here the V1 runner calls
the connector in the same order. Routers, connector, scheduler and outputs are vLLM's own.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any


def register() -> None:
    """Let the CPU's runner call the connector, once. Does nothing with a vLLM that has none."""
    if find_spec("vllm.distributed.aux_output_connector") is None:
        return
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if issubclass(CPUModelRunner, _Returning):
        return
    CPUModelRunner.__bases__ = (_returning(CPUModelRunner.__bases__[0]),)
    _allow(VllmConfig)


class _Returning:
    """Marks a runner that returns experts."""


def _allow(config: Any) -> None:
    """Let vLLM's check pass over the runner's version. It does so for platforms outside its tree."""
    from vllm.platforms import current_platform

    plain = config._verify_aux_output_compatibility

    def verify(self: Any) -> None:
        platform = type(current_platform)
        outside = platform.is_out_of_tree
        platform.is_out_of_tree = lambda _: True
        try:
            plain(self)
        finally:
            platform.is_out_of_tree = outside

    config._verify_aux_output_compatibility = verify


def _returning(runner: Any) -> Any:
    """Return a runner of this class that calls the connector."""
    import numpy as np
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    class Returning(runner, _Returning):  # type: ignore[misc]
        connector: Any = None

        def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **more: Any) -> None:
            super().initialize_kv_cache(kv_cache_config, *args, **more)
            if self.vllm_config.aux_output_config.enabled:
                self.connector = get_aux_output_connector(self.get_model(), self.vllm_config, kv_cache_config)

        def execute_model(self, scheduled: Any, *args: Any, **more: Any) -> Any:
            if self.connector is not None:
                self.connector.begin_step(scheduled.aux_output_connector_metadata)
            return super().execute_model(scheduled, *args, **more)

        def sample_tokens(self, *args: Any, **more: Any) -> Any:
            if self.connector is None or self.execute_model_state is None:
                return super().sample_tokens(*args, **more)
            batch, count = self.input_batch, self.input_batch.num_reqs
            step = SimpleNamespace(
                req_ids=list(batch.req_ids[:count]),
                query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
            )
            pending = self.connector.prepare_output(step)
            output = super().sample_tokens(*args, **more)
            if pending is not None:
                sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
            return output

    return Returning
