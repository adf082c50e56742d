"""fp8plan's methods in the workers of verl's vLLM server: weights come over verl's own transport, and are checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits, vLLMColocateWorkerExtension

from fp8plan.errors import ConfigError, text_of
from fp8plan.runtime.weight_sync.manifest import entry_of
from fp8plan.runtime.worker.extension import Fp8PlanWorker, answering
from fp8plan.runtime.worker.updates import Updates, over_ranks

if TYPE_CHECKING:
    Pairs = Sequence[tuple[str, torch.Tensor]]


class PlannedWorker(Fp8PlanWorker, vLLMColocateWorkerExtension):
    """The mixin of both. The trainer's processes send to it as to verl's own."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """Keep tokens out of the sampling that verl's tokenizer does not know. verl's patch of experts' loaders is for
        its own loading of weights."""
        for model in self._iter_all_models():
            monkey_patch_compute_logits(model, vocab_size, banned_token_ids)

    @answering
    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Take an update from the trainer's process on this GPU: all of it, also if it is refused, as that process
        waits until all is taken.

        peft_config, base_sync_done, use_shm: as verl's worker takes them
        """
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        begun, buckets = time.perf_counter(), Buckets(self._fp8plan_updates)
        if peft_config is not None:
            buckets.failure = "verl sends a LoRA adapter; allowed: whole weights (model.lora.merge=True)"
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda pairs, is_last: buckets.take(pairs))
        updates = self._fp8plan_updates()
        if failures := list(filter(None, over_ranks(buckets.failure))):
            updates.fail(failures[0])
            raise ConfigError(failures[0])
        updates.loaded(time.perf_counter() - begun, buckets.count)
        updates.finish()

    def _fp8plan_updates(self) -> Updates:
        if not hasattr(self, "_fp8plan_of_verl"):
            self._fp8plan_of_verl = Updates(self, over_ranks)
        return self._fp8plan_of_verl


class Buckets:
    """The buckets of an update, which the first one opens. After a failure, which is kept, the rest is ignored.

    updates: of the worker

    count: of the buckets that have come
    """

    def __init__(self, updates: Callable[[], Updates]) -> None:
        self.failure: str | None = None
        self.count = 0
        self._updates = updates

    def take(self, pairs: Pairs) -> None:
        """Check what a bucket holds, and write it. Raises nothing: the process that sends waits for an answer."""
        self.count += 1
        if self.failure is not None:
            return
        try:
            if self.count == 1:
                self._updates().start()
            if pairs:  # the last bucket may be empty
                self._write(pairs)
        except Exception as error:
            self.failure = text_of(error)

    def _write(self, pairs: Pairs) -> None:
        """Write copies: verl uses a bucket's memory again, and vLLM's reload keeps tensors until a layer is whole."""
        sink = self._updates().announce(tuple(entry_of(name, tensor) for name, tensor in pairs))
        numbers = {entry.name: number for number, entry in enumerate(sink.manifest)}
        sink.load([numbers[name] for name, _ in pairs], [tensor.clone() for _, tensor in pairs])
