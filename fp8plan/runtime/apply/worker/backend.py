"""The weight-transfer backend "fp8plan", in a worker of `vllm serve`: vLLM's NCCL engine, writing live weights.

A client speaks to it as to vLLM's own "nccl" backend of the same version. Only the tensors take another way: they are
checked against a manifest and written in place (apply.worker.updates). Nothing that a trainer sends is run as code
(runtime.apply.weight_sync.plain_group).

On CPUs the same protocol runs without NCCL: tensors go through the store of the rendezvous. This suits small
models, in tests or with a trainer on a CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from fp8plan.errors import ConfigError, LostEngineError, text_of
from fp8plan.runtime.apply.plugin import BACKEND, PLUGINS, logger, transfer_limit_s
from fp8plan.runtime.apply.vllm_versions import check_vllm_version, untested
from fp8plan.runtime.apply.weight_sync.manifest import Manifest, dtype_named, read_manifest
from fp8plan.runtime.apply.weight_sync.plain_group import PlainGroup
from fp8plan.runtime.apply.worker.arriving import Arriving
from fp8plan.runtime.apply.worker.extension import Fp8PlanWorker
from fp8plan.runtime.apply.worker.nccl_receive import PlainReceiver, on_one_stream
from fp8plan.runtime.apply.worker.updates import Sink, Updates, over_ranks

EXPIRY_S: Final = 60  # age at which the store forgets a broadcast: every rank has read it by then, or has died


class StoreCommunicator:
    """The part of vLLM's PyNcclCommunicator that transfers use.

    group: vLLM's StatelessProcessGroup, in which the trainer is rank 0; tensors go through it as in a PlainGroup
    """

    def __init__(self, group: Any) -> None:
        self.group = PlainGroup.of(group)
        self.group.data_expiration_seconds = EXPIRY_S
        self.rank, self.world_size = group.rank, group.world_size
        self.device, self.disabled = torch.device("cpu"), False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send `tensor` from rank `src`, and fill it on the others. Raises SyncError as PlainGroup does."""
        self.group.broadcast(tensor, src)

    def destroy(self) -> None:
        """Let go of the store; vLLM calls this at a shutdown from 0.32 on."""
        del self.group
        self.disabled = True


def meet(address: str, port: int, rank: int, world_size: int) -> StoreCommunicator:
    """Meet the other ranks, as `stateless_init_process_group` of vLLM's NCCL backend does."""
    return StoreCommunicator(PlainGroup.met(address, port, rank, world_size))


def send(pairs: Iterable[tuple[str, torch.Tensor]], group: Any) -> None:
    """Broadcast tensors from rank 0, each by itself."""
    for _, tensor in pairs:
        group.broadcast(tensor, src=0)


def receive(
    manifest: Manifest, group: Any, buffer_bytes: int | None, load: Callable[[Sequence[tuple[str, Any]]], None]
) -> None:
    """Take the tensors of a manifest from rank 0, and load each broadcast.

    buffer_bytes: of the packing, as at the other end; None: each tensor is a broadcast of its own
    """
    for part in _parts(manifest, buffer_bytes):
        sizes = [entry.nbytes for entry in part]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        if buffer_bytes is None:  # the tensor comes in its own dtype and shape
            group.broadcast(buffer.view(dtype_named(part[0].dtype)).view(part[0].shape), src=0)
        else:
            group.broadcast(buffer, src=0)
        pieces = zip(part, buffer.split(sizes), strict=True)
        load([(entry.name, bits.view(dtype_named(entry.dtype)).view(entry.shape)) for entry, bits in pieces])


def _parts(manifest: Manifest, buffer_bytes: int | None) -> Iterator[Manifest]:
    """Cut a manifest into broadcasts, where vLLM's packing does: after the tensor that exceeds the buffer."""
    begin = size = 0
    for at, entry in enumerate(manifest):
        size += entry.nbytes
        if buffer_bytes is None or size > buffer_bytes:
            yield manifest[begin : at + 1]
            begin, size = at + 1, 0
    if begin < len(manifest):
        yield manifest[begin:]


NEEDS_FRONT = (
    "the KV cache is FP8, and only fp8plan's part of the server can measure its scales, which would stay at 1.0; "
    f"start `vllm serve` with {PLUGINS}={BACKEND} in its environment (beside other plugins that you use, by commas), "
    "or with --kv-cache-dtype auto"
)


class Fp8PlanTransfer(PlainReceiver):
    """A worker's end of transfers. Raises ConfigError, when made, for an engine that they cannot sync.

    updates:  the worker's weight updates
    attached: True once fp8plan's part of the server's front end is there (runtime.apply.server.front)
    """

    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        _refuse(vllm_config)
        if note := untested(check_vllm_version()):
            logger.warning("fp8plan: %s", note)
        self._limit_s = transfer_limit_s()
        self.attached = False
        self._fp8_kv = str(vllm_config.cache_config.cache_dtype).startswith("fp8")
        if self._fp8_kv and BACKEND not in os.environ.get(PLUGINS, "").split(","):
            raise ConfigError(NEEDS_FRONT)
        _extend(vllm_config.parallel_config.worker_cls)
        # vLLM hands the transfer engine the model, but not the worker.
        runner = SimpleNamespace(get_model=lambda: model, model_config=self.model_config, vllm_config=vllm_config)
        worker = SimpleNamespace(model_runner=runner, vllm_config=vllm_config, device=device)
        self.updates = Updates(worker)

    def opened(self, group: PlainGroup) -> Any:
        """Return the communicator of a group: NCCL's, and on a CPU one without NCCL."""
        group.limit_s = self._limit_s
        return StoreCommunicator(group) if self.device.type == "cpu" else super().opened(group)

    def start_weight_update(self) -> None:
        if self._fp8_kv and not self.attached:
            raise ConfigError(NEEDS_FRONT)
        self.updates.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one part: check its announcement, and write it. Raises ConfigError; all ranks raise if one does."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            self.updates.fail(text_of(error))
            raise

    def receive_weights(self, update_info: Any) -> None:
        """Take all announced tensors, even if they are refused: the trainer's broadcasts wait for every rank."""
        if self.model_update_group is None:
            raise ConfigError("no trainer has connected; allowed: init_weight_transfer_engine, then an update")
        update_info = self.complete(update_info)
        part = read_manifest(zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True))
        sink: Sink | None = None
        failure = None
        try:
            sink = self.updates.announce(part)
        except Exception as error:
            failure = text_of(error)
        arriving = Arriving(None if sink is None else on_one_stream(sink.load, sink.manifest))
        arriving.failure = next(filter(None, over_ranks(failure)), None)
        begun = time.perf_counter()
        try:
            if self.device.type == "cpu":
                size = self.packed_buffer_size_bytes if self.packed else None
                receive(part, self.model_update_group, size, arriving.load_weights)
            else:
                self.take(update_info, arriving, self._limit_s)
        except Exception as error:  # the transfer has failed: nothing more can come from this trainer
            arriving.failure = "; ".join(filter(None, (arriving.failure, self._left(error))))
        if failures := list(filter(None, over_ranks(arriving.failure))):
            raise ConfigError(failures[0])
        self.updates.loaded(time.perf_counter() - begun, arriving.count)

    def _left(self, error: Exception) -> str:
        """Let go of the trainer, whose next broadcast would be taken for another. Return the error's text."""
        text = f"{text_of(error)}; connect again (init_weight_transfer_engine) before the next update"
        logger.warning("fp8plan broke a transfer of weights off: %s", text)
        if isinstance(error, LostEngineError):
            self.updates.live.lose(text)
        else:
            self.model_update_group.destroy()
        self.model_update_group = None
        return text

    def finish_weight_update(self) -> None:
        """Close the update, and check it. Does nothing without an open one.

        vLLM counts an update that failed here as open until it is finished once more.
        """
        if self.updates.live.weights.is_open:
            self.updates.finish()


def _refuse(config: Any) -> None:
    parallel = config.parallel_config
    if parallel.data_parallel_size != 1:
        raise ConfigError(f"data_parallel_size is {parallel.data_parallel_size}; allowed: 1, a server for each replica")
    if parallel.enable_eplb:
        raise ConfigError("EPLB is on: experts that move between updates would get each other's weights; turn it off")
    if config.model_config.dtype != torch.bfloat16:
        raise ConfigError(f"the model runs as {config.model_config.dtype}; allowed: --dtype bfloat16")


def _extend(worker_cls: str) -> None:
    kind = resolve_obj_by_qualname(worker_cls)
    if not issubclass(kind, Fp8PlanWorker):
        kind.__bases__ += (Fp8PlanWorker,)
