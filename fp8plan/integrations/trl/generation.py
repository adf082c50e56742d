"""TRL's vLLM backend with fp8plan's engine in it: TRL asks for completions as ever, and each sync is fp8plan's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from trl.generation.vllm_generation import empty_cache
from trl.trainer.utils import ensure_master_addr_port

from fp8plan.integrations.trl.policy import PolicyTensors
from fp8plan.runtime.engine.engine import RolloutEngine
from fp8plan.runtime.weight_sync.manifest import Manifest

# Starts the engine, with arguments of vllm.LLM that only TRL knows.
Start = Callable[["PlannedGeneration", dict[str, Any]], RolloutEngine]


class EngineAsLlm:
    """A RolloutEngine under the names by which TRL uses a vllm.LLM. Whatever it does not have is the LLM's own."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.generate, self.sleep, self.wake_up = engine.generate, engine.sleep, engine.wake_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.llm, name)


class PlannedGeneration(PolicyTensors):
    """TRL's VLLMGeneration, colocated, with a RolloutEngine for a vllm.LLM.

    start: starts the engine

    engine: the RolloutEngine
    """

    def __init__(self, *args: Any, start: Start, **kwargs: Any) -> None:
        self._start = start
        self.engine: RolloutEngine
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        """Start the engine in the place where TRL starts its own."""
        # Each process holds an engine of its own, on its own device, as TRL's do.
        accelerator = self.accelerator
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(accelerator.num_processes)
        ensure_master_addr_port()
        of_trl = {
            "distributed_executor_backend": "external_launcher",
            "enable_sleep_mode": self.enable_sleep_mode,
            "model_impl": self.model_impl,
            "seed": accelerator.process_index,
            "trust_remote_code": self.trust_remote_code,
        }
        self.engine = self._start(self, of_trl)
        self.llm = EngineAsLlm(self.engine)
        if self.enable_sleep_mode:
            self.engine.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode
        accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Make the policy's weights serve: all of them, checked, and with new KV scales if the cache is FP8.

        Raises SyncError, whose message says which weights serve.
        """
        if self.enable_sleep_mode:
            empty_cache()
            self.engine.wake_up()  # the KV cache, too: its scales are measured in it
            self._llm_weights_sleeping = False
        self._before_sync()
        sent = self.announced()
        self.report = self.engine.sync_weights(self.copies(sent), manifest=sent)

    @property
    def expected(self) -> Manifest | None:
        return self.engine.state.expected
