"""fp8plan's methods in the workers of verl's vLLM server, which check the weights of verl's own transport."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits, vLLMColocateWorkerExtension

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.manifest import entry_of
from fp8plan.runtime.apply.worker.arriving import Arriving
from fp8plan.runtime.apply.worker.extension import Fp8PlanWorker, answering
from fp8plan.runtime.apply.worker.updates import Updates, over_ranks


class PlannedWorker(Fp8PlanWorker, vLLMColocateWorkerExtension):
    """The mixin of fp8plan and verl. The trainer's processes send to it as to verl's own."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """Keep tokens that verl's tokenizer does not know out of the sampling. Leave out verl's patch of the experts'
        loaders, which only verl's own loading needs."""
        for model in self._iter_all_models():
            monkey_patch_compute_logits(model, vocab_size, banned_token_ids)

    @answering
    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Take a whole update from the trainer's process on this GPU, even a refused one: that process waits.

        peft_config, base_sync_done, use_shm: as verl's worker takes them
        """
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        def write(pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
            updates = self._fp8plan_updates()
            if buckets.count == 1:
                updates.start()
            if not pairs:  # the last bucket may be empty
                return
            pairs = [part for name, tensor in pairs for part in self._fp8plan_experts(name, tensor)]
            sink = updates.announce(tuple(entry_of(name, tensor) for name, tensor in pairs))
            numbers = {entry.name: number for number, entry in enumerate(sink.manifest)}
            # Copies, as verl reuses a bucket's memory, and vLLM's reload keeps tensors until a layer is complete.
            sink.load([numbers[name] for name, _ in pairs], [tensor.clone() for _, tensor in pairs])

        begun, buckets = time.perf_counter(), Arriving(write)
        if peft_config is not None:
            buckets.failure = "verl sends a LoRA adapter; allowed: whole weights (model.lora.merge=True)"
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda pairs, is_last: buckets.load_weights(pairs))
        updates = self._fp8plan_updates()
        if failures := list(filter(None, over_ranks(buckets.failure))):
            updates.fail(failures[0])
            raise ConfigError(failures[0])
        updates.loaded(time.perf_counter() - begun, buckets.count)
        updates.finish()

    def _fp8plan_experts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tensor as the checkpoint has it. Transformers has all experts of a layer in one, [experts, rows,
        columns]. verl undoes that (unfuse_moe_params), but not for a policy whose LoRA it merges.
        """
        layer, _, part = name.rpartition(".")
        fused = layer.endswith(".mlp.experts") and tensor.dim() == 3
        if not fused or self.model_config.hf_config.model_type == "gpt_oss":  # whose checkpoints are fused
            yield name, tensor
            return
        parts = {part: tensor}
        if part == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        for number in range(len(tensor)):
            yield from ((f"{layer}.{number}.{part}.weight", experts[number]) for part, experts in parts.items())

    def _fp8plan_updates(self) -> Updates:
        if not hasattr(self, "_fp8plan_of_verl"):
            self._fp8plan_of_verl = Updates(self)
        return self._fp8plan_of_verl
