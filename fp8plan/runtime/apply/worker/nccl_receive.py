"""A worker's end of a transfer: vLLM's own NCCL engine, whose tensors go to the live weights, not into a reload.

A RolloutEngine makes its Receiver itself. vLLM's registry would make it at the start, and vLLM's own RPCs would write
past the engine's state. A server's backend is registered instead: runtime.apply.worker.backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from fp8plan.runtime.apply.weight_sync.manifest import Manifest
from fp8plan.runtime.apply.weight_sync.nccl import Rendezvous, agree, chunk_manifest, digest, limited, working
from fp8plan.runtime.apply.weight_sync.plain_group import PlainGroup, communicator
from fp8plan.runtime.apply.worker.arriving import Arriving

if TYPE_CHECKING:
    from fp8plan.runtime.apply.worker.arriving import Write
    from fp8plan.runtime.apply.worker.live_weights import LiveWeights


Load = Callable[[Sequence[int], Sequence[torch.Tensor]], None]  # takes tensors, by their numbers in a manifest


class PlainReceiver(NCCLWeightTransferEngine):
    """vLLM's engine, which meets a trainer in a group that takes data alone."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Meet the trainer. Returns once it has come."""
        if init_info.nccl_unique_id_b64 is not None:  # it needs no store to meet at
            super().init_transfer_engine(init_info)
            return
        for name in ("packed", "packed_buffer_size_bytes", "packed_num_buffers"):
            setattr(self, name, getattr(init_info, name))
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        group = PlainGroup.met(init_info.master_address, init_info.master_port, rank, init_info.world_size)
        self.model_update_group = self.opened(group)
        self._announced.clear()

    @property
    def _announced(self) -> dict[Any, Any]:
        """vLLM's notes: model -> its last announcement. Before 0.33 there are none, and nothing is kept."""
        notes: dict[Any, Any] = getattr(self, "_last_update_info", {})
        return notes

    def complete(self, update_info: Any) -> Any:
        """Return an announcement with its tensors. From 0.33 on an empty one means those of the one before."""
        if update_info.names:
            self._announced[self.model] = update_info
            return update_info
        return self._announced.get(self.model, update_info)

    def take(self, update_info: Any, arriving: Arriving, limit_s: float) -> None:
        """Let vLLM load the announced tensors into `arriving` instead of the model.

        Raises SyncError or LostEngineError, as `limited` does, if none comes for limit_s.
        """
        self.set_weight_update_target(arriving, self.model_config)
        try:
            with limited(self.model_update_group, limit_s) as arriving.renew:
                super().receive_weights(update_info)
                torch.get_device_module(self.device).synchronize(self.device)
        finally:
            self.reset_weight_update_target()
            self._announced.pop(arriving, None)  # vLLM's note would keep it for ever
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # gives the buffers back to the GPU

    def opened(self, group: PlainGroup) -> Any:
        """Return the communicator of a group: NCCL's."""
        return communicator(group)


class Receiver(PlainReceiver):
    """A worker's end. Making one waits until the trainer has come. Raises ConfigError without NCCL.

    worker: vLLM's worker; live: its weights
    """

    def __init__(self, worker: Any, live: LiveWeights, where: Rendezvous) -> None:
        model = worker.model_runner.get_model()
        super().__init__(WeightTransferConfig(backend="nccl"), worker.vllm_config, worker.device, model)
        self._live, self._where = live, where
        # The packing goes into both messages, as versions differ in which one they read it from.
        self._packing = {
            "packed": True,
            "packed_buffer_size_bytes": where.buffer_bytes,
            "packed_num_buffers": where.buffers,
        }
        meeting = {
            "master_address": where.address,
            "master_port": where.port,
            "rank_offset": where.first_rank,
            "world_size": where.world_size,
        }
        self.init_transfer_engine(_made(self.init_info_cls, meeting | self._packing))
        self.expect()

    def expect(self) -> None:
        """Raises ConfigError if no more tensors can arrive."""
        working(self.model_update_group)

    def receive(self) -> int:
        """Take all tensors of the open sync, and count the broadcasts. Raises SyncError if either end failed."""
        return self._taken(self._live.manifest, self._live.load)

    def receive_patches(self, numbers: Sequence[int], lengths: Sequence[int]) -> int:
        """Take a chunk of patches as `receive` takes tensors.

        numbers: of their tensors in the open sync's manifest; lengths: bytes of each patch
        """

        def write(_: Sequence[int], chunks: Sequence[torch.Tensor]) -> None:
            for chunk in chunks:  # which the host unpacks
                self._live.patch(numbers, chunk.cpu().split(list(lengths)))

        return self._taken(chunk_manifest(lengths), write)

    def _taken(self, manifest: Manifest, load: Load) -> int:
        agree(self.model_update_group, digest(manifest))
        torch.get_device_module(self.device).synchronize(self.device)
        arriving = Arriving(on_one_stream(load, manifest))
        contents = {
            "names": [entry.name for entry in manifest],
            "dtype_names": [entry.dtype for entry in manifest],
            "shapes": [list(entry.shape) for entry in manifest],
        }
        self.take(_made(self.update_info_cls, contents | self._packing), arriving, self._where.limit_s)
        agree(self.model_update_group, digest(manifest), arriving.failure)
        return arriving.count


def on_one_stream(load: Load, manifest: Manifest) -> Write:
    """Return a function that writes named tensors by `load`, on one stream.

    vLLM's reload may keep tensors until the next broadcast, which comes on another stream. The broadcast's stream waits
    for the writes, and vLLM waits for that stream before it reuses the buffer. All tensors are views of the buffer. One
    record_stream keeps it from reuse while a kept tensor is read.
    """
    places = {entry.name: number for number, entry in enumerate(manifest)}
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def write(pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        numbers, tensors = [places[name] for name, _ in pairs], [tensor for _, tensor in pairs]
        if stream is None:
            load(numbers, tensors)
            return
        arrived = torch.cuda.current_stream()
        stream.wait_stream(arrived)
        tensors[0].record_stream(stream)
        with torch.cuda.stream(stream):
            load(numbers, tensors)
        arrived.wait_stream(stream)

    return write


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make vLLM's dataclass from the values that this version has."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})
