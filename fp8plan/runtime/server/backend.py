"""The weight-transfer backend "fp8plan", in a worker of `vllm serve`: vLLM's NCCL engine, into the live weights.

A client speaks to it as to vLLM's own "nccl" backend, of the same version. What differs is where the tensors go: by a
manifest of what `update_info` announces, in place, and checked (runtime.server.updates).
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.utils.import_utils import resolve_obj_by_qualname

from fp8plan.errors import ConfigError
from fp8plan.runtime.server import cpu_transfer
from fp8plan.runtime.server.plugin import BACKEND, PLUGINS
from fp8plan.runtime.server.updates import Sink, Updates, over_ranks, text_of
from fp8plan.runtime.weight_sync.manifest import read_manifest
from fp8plan.runtime.weight_sync.nccl.protocol import wait
from fp8plan.runtime.worker.extension import Fp8PlanWorker
from fp8plan.runtime.worker.nccl_receive import Arriving

NEEDS_FRONT = (
    "the KV cache is FP8, and only fp8plan's part of the server can measure its scales, which would stay at 1.0; "
    f"start `vllm serve` with {PLUGINS}={BACKEND} in its environment (beside other plugins that you use, by commas), "
    "or with --kv-cache-dtype auto"
)


class Fp8PlanTransfer(NCCLWeightTransferEngine):
    """A worker's end. Making one raises ConfigError for an engine that cannot be synced so.

    updates:  the worker's weight updates
    attached: whether fp8plan's part of the server's front end is there (runtime.server.front)
    """

    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        _refuse(vllm_config)
        self.attached = False
        self._fp8_kv = str(vllm_config.cache_config.cache_dtype).startswith("fp8")
        if self._fp8_kv and BACKEND not in os.environ.get(PLUGINS, "").split(","):
            raise ConfigError(NEEDS_FRONT)
        _extend(vllm_config.parallel_config.worker_cls)
        # vLLM gives the engine its model, and not the worker.
        held = SimpleNamespace(get_model=lambda: model, model_config=self.model_config, vllm_config=vllm_config)
        worker = SimpleNamespace(model_runner=held, vllm_config=vllm_config, device=device)
        self.updates = Updates(worker, over_ranks)

    def init_transfer_engine(self, init_info: Any) -> None:
        """Meet the trainer. Returns once it has come."""
        if self.device.type != "cpu":
            super().init_transfer_engine(init_info)
            return
        self.packed = getattr(init_info, "packed", False)
        self.packed_buffer_size_bytes = getattr(init_info, "packed_buffer_size_bytes", None)
        rank = init_info.rank_offset + self.parallel_config.rank
        meeting: Any = (init_info.master_address, init_info.master_port, rank, init_info.world_size)
        self.model_update_group = cpu_transfer.meet(*meeting)

    def start_weight_update(self) -> None:
        if self._fp8_kv and not self.attached:
            raise ConfigError(NEEDS_FRONT)
        self.updates.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one part: check what it announces, and write it. Raises ConfigError; all ranks raise if one does."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            self.updates.fail(text_of(error))
            raise

    def receive_weights(self, update_info: Any) -> None:
        """Take all that was announced, even if it is refused: the trainer's broadcasts wait for every rank."""
        if self.model_update_group is None:
            raise ConfigError("no trainer has connected; allowed: init_weight_transfer_engine, then an update")
        part = read_manifest(zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True))
        sink: Sink | None = None
        failure = None
        try:
            sink = self.updates.announce(part)
        except Exception as error:
            failure = text_of(error)
        arriving = Arriving(sink, () if sink is None else sink.manifest)
        arriving.failure = next(filter(None, over_ranks(failure)), None)
        begun = time.perf_counter()
        if self.device.type == "cpu":
            self._receive_on_cpu(update_info, part, arriving)
        else:
            self.set_weight_update_target(arriving, self.model_config)
            try:
                super().receive_weights(update_info)
                wait(self.device)
            finally:
                self.reset_weight_update_target()
            torch.cuda.empty_cache()  # 0.26 uses other streams every time, and their buffers would never be used again
        if failures := list(filter(None, over_ranks(arriving.failure))):
            raise ConfigError(failures[0])
        self.updates.loaded(time.perf_counter() - begun, arriving.count)

    def _receive_on_cpu(self, update_info: Any, part: Any, arriving: Arriving) -> None:
        # How tensors are packed is said when the group is made from 0.28 on, and with the tensors before.
        packed = getattr(update_info, "packed", self.packed)
        size = getattr(update_info, "packed_buffer_size_bytes", self.packed_buffer_size_bytes)
        cpu_transfer.receive(part, self.model_update_group, size if packed else None, arriving.load_weights)

    def finish_weight_update(self) -> None:
        """Close the update, and check it. Without an open one this does nothing: vLLM counts an update that failed here
        as open until it was finished once more."""
        if self.updates.open:
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
    """Give the worker's class fp8plan's methods, as vLLM does for worker_extension_cls."""
    kind = resolve_obj_by_qualname(worker_cls)
    if not issubclass(kind, Fp8PlanWorker):
        kind.__bases__ += (Fp8PlanWorker,)
