"""TRL's colocated vLLM backend with fp8plan's engine, and the policy's tensors as any engine takes them.

TRL generates as ever, and each sync is fp8plan's. Tensors come one at a time, in the checkpoint's names and dtypes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from trl.trainer.utils import ensure_master_addr_port

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.launch import Launch
from fp8plan.runtime.apply.server.rollout import enough
from fp8plan.runtime.apply.weight_sync.manifest import Manifest, dtype_named
from fp8plan.runtime.apply.weight_sync.report import SyncReport

Sent = list[tuple[str, str, list[int]]]  # name, dtype and shape of each tensor


def refuse_quantised(policy: Any) -> None:
    """Raise ConfigError for a policy with quantised parameters, as QLoRA's."""
    for name, tensor in policy.named_parameters():
        if not tensor.is_floating_point():
            raise ConfigError(
                f"{name} of the policy is {str(tensor.dtype).removeprefix('torch.')}; allowed with a plan: a policy in "
                "BF16, FP16 or FP32, with LoRA or without (leave quantization_config out), or plan=None"
            )


class PolicyTensors(VLLMGeneration):
    """TRL's VLLMGeneration, which can gather a policy, with the tensors of a sync.

    before_sync: called before each sync, to follow a verdict's advice
    rollout:     all that is generated in its `with` is one rollout

    engine: a RolloutEngine, or a ServerEngine
    report: report of the last sync; None before the first

    Raises ConfigError for a quantised policy.
    """

    engine: Any
    _sent: Sent | None = None

    def __init__(
        self,
        model: Any,
        *args: Any,
        before_sync: Callable[[], None],
        rollout: Callable[[], AbstractContextManager[None]],
        **kwargs: Any,
    ) -> None:
        refuse_quantised(model)
        self._before_sync, self._rollout = before_sync, rollout
        self.report: SyncReport | None = None
        super().__init__(model, *args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does, in the rollout that is open, or in one of its own."""
        with self._rollout():
            return super().generate(*args, **kwargs)

    @cached_property
    def expected(self) -> Manifest | None:
        """The tensors of the checkpoint; None if it is not on this machine."""
        launched: Launch = self.engine.launch
        return launched.checkpoint()

    def announced(self) -> Sent:
        """Name, dtype and shape of the tensors of every sync. Gathering them takes all processes.

        A checkpoint that mixes BF16 with others (a router's bias in FP32) keeps its dtypes; others are sent in BF16.
        """
        if self._sent is None:
            dtypes = {entry.name: entry.dtype for entry in self.expected or ()}
            if "bfloat16" not in dtypes.values():
                dtypes = {}
            self._sent = [(name, dtypes.get(name, "bfloat16"), list(tensor.shape)) for name, tensor in self.tensors()]
        return self._sent

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's tensors under the checkpoint's names: parameters, and the checkpoint's buffers.

        Transformers has all experts of a layer in one tensor, and renames some parts. Both are undone.
        """
        from transformers.core_model_loading import revert_weight_conversion

        policy = self.accelerator.unwrap_model(self.model)
        known = {entry.name for entry in self.expected or ()}
        buffers = (named for named in policy.named_buffers() if named[0] in known)
        for name, tensor in chain(self._iter_named_params(), buffers):
            if known and name not in known:
                yield from revert_weight_conversion(policy, {name: tensor}).items()
            else:
                yield name, tensor

    def copies(self, sent: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the tensors in the dtypes of `sent`. TRL shards or unmerges a tensor after yielding the next."""
        dtypes = {name: dtype_named(dtype) for name, dtype, _ in sent}
        for name, tensor in self.tensors():
            yield name, tensor.detach().to(dtypes[name], copy=True)


class EngineAsLlm:
    """A RolloutEngine in place of TRL's vllm.LLM. All but three methods are the LLM's own.

    for_trl: TRL itself generates, which decodes the tokens; False: a rollout_func does, which may need the text
    routes:  the experts of each response of the last `generate`; empty if the engine returns none
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.for_trl = False
        self.routes: list[Any] = []
        self.sleep, self.wake_up = engine.sleep, engine.wake_up

    def generate(self, prompts: Any, sampling_params: Any = None, **more: Any) -> list[Any]:
        """Generate as an LLM does; for TRL itself without the text.

        The engine runs in this process, so its GPU waits while Python makes text and objects for each token.
        """
        params = enough(sampling_params) if self.for_trl else sampling_params
        outputs = self._engine.generate(prompts, params, **more)
        if self._engine.facts["routed_experts"]:
            self.routes = [response.routed_experts for output in outputs for response in output.outputs]
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.llm, name)


class PlannedGeneration(PolicyTensors):
    """TRL's colocated VLLMGeneration, with a RolloutEngine in place of a vllm.LLM.

    start: starts the engine, with arguments of vllm.LLM that only TRL knows

    engine:     the RolloutEngine
    kv_prompts: token ids on which the next sync measures KV scales; None: those that the engine remembers
    """

    kv_prompts: list[list[int]] | None = None

    def __init__(
        self, *args: Any, start: Callable[[PlannedGeneration, dict[str, Any]], RolloutEngine], **kwargs: Any
    ) -> None:
        self._start = start
        self.engine: RolloutEngine
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        """Start the engine where TRL starts its own: one in each process, on its device."""
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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.llm.for_trl = True
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.llm.for_trl = False

    def sync_weights(self) -> None:
        """Sync all of the policy's weights. They are checked, and KV scales are measured if the cache is FP8.

        Raises SyncError, whose message says which weights serve.
        """
        if self.enable_sleep_mode:
            empty_cache()
            measures = self.engine.state.fp8_kv  # in the KV cache; else the gathered policy has its memory
            self.engine.wake_up(None if measures else ["weights"])
            self._llm_weights_sleeping = False
        self._before_sync()
        sent, kv_prompts = self.announced(), self.kv_prompts
        self.report = self.engine.sync_weights(self.copies(sent), manifest=sent, kv_prompts=kv_prompts)
        self.kv_prompts = None
