"""vLLM's own trainer of its weight-transfer lifecycle, on a CPU: its broadcasts go through the rendezvous's store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from frozen_imports import freeze_imports
from tiny_models import BLOCK_SIZE, KV_BLOCKS, checkpoint, experts_or_skip, started
from vllm_server import free_port

BUFFER = 300_000  # bytes: some broadcasts for a tiny model, with fused groups cut in two
SETTINGS: dict[str, Any] = {
    "quantization": "fp8_per_block",
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": KV_BLOCKS + 1,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}


class InProcess:
    """vLLM's weight-sync client of an LLM in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


def engine_of(kind: str, which: str = "a", **settings: Any) -> Any:
    import torch
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from fp8plan.runtime.apply.plugin import register

    freeze_imports()
    torch.set_num_threads(1)
    register()
    register()  # as a process does that loads its plugins twice
    config = WeightTransferConfig(backend="fp8plan")
    with experts_or_skip():
        return LLM(str(checkpoint(kind, which)), weight_transfer_config=config, **(SETTINGS | settings))


def clear_streams() -> None:
    """Let vLLM forget the streams of a test, which 0.30 and later keep."""
    from vllm.distributed.weight_transfer import packed_tensor

    if hasattr(packed_tensor, "_get_streams"):
        packed_tensor._get_streams.cache_clear()


def ended(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def digests_of_fresh(kind: str, precision: str) -> dict[str, dict[str, int]]:
    """Digests of the parameters of fresh engines on each set of weights, which differ."""
    found = {}
    for which in "ab":
        with started(kind, which, precision) as engine:
            found[which] = digests_of(engine.llm)
    assert found["a"] != found["b"]
    return found


def digests_of(llm: Any) -> dict[str, int]:
    """A checksum of each live parameter."""
    found: dict[str, int] = llm.collective_rpc("fp8plan_digests")[0]["ok"]
    return found


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def without_cuda() -> Iterator[None]:
    """Let the trainer's side of vLLM's "nccl" backend run without a GPU. vLLM's own code stays, but for NCCL itself."""
    import torch
    from vllm.distributed.device_communicators import pynccl

    from fp8plan.runtime.apply.worker.backend import StoreCommunicator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(pynccl, "PyNcclCommunicator", lambda group, device: StoreCommunicator(group))
        yield
    clear_streams()


class Source:
    """A trainer's tensors, as vLLM's WeightSource. lie: what it announces instead"""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors.items())


def trainer_of(client: Any, packed: bool = True) -> Any:
    """vLLM's trainer engine, which has met the workers. client: speaks to the engine, as vLLM's HTTP client does"""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo("127.0.0.1", free_port(), 2, packed, BUFFER, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source({}))


def send(trainer: Any, tensors: Mapping[str, Any]) -> None:
    """One update, in one part."""
    trainer.source = Source(tensors)
    trainer.send_weights()


def send_in_parts(trainer: Any, parts: Sequence[Mapping[str, Any]]) -> None:
    """One update, in several parts, as a client does that sends a layer, or a tensor, at a time."""
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import asdict

    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    trainer.client.start_weight_update()
    for part in parts:
        trainer.source = Source(part)
        meta = trainer.source.metadata()
        names, dtypes = [m.name for m in meta], [str(m.dtype).removeprefix("torch.") for m in meta]
        info = NCCLWeightTransferUpdateInfo(names, dtypes, [list(m.shape) for m in meta])
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(trainer.client.update_weights, asdict(info))
            trainer._broadcast(trainer.source, meta)
            answer.result()
    trainer.client.finish_weight_update()
