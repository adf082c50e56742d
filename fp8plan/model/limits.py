"""The engine's limits, under vLLM's own argument names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.hardware import Gpu


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits that one vLLM engine (one data-parallel replica) is started with.

    The defaults are vLLM 0.26's for an offline `LLM` on a GPU of at least 70 GiB (see `for_gpu`). Only `max_model_len`
    differs: None means "just enough for the longest request of the workload", which is what an RL trainer sets.

    gpu_memory_utilization: fraction of the GPU's memory the engine may use, in (0, 1]; means nothing on a CPU
    max_model_len:          longest prompt + response in tokens
    max_num_seqs:           most requests running at once
    max_num_batched_tokens: token budget of one step
    block_size:             tokens per KV block, a multiple of 16 (FlashAttention's paged kernels demand it)
    enable_prefix_caching:  full blocks stay findable by content until they are evicted
    tensor_parallel_size:   GPUs per replica
    data_parallel_size:     replicas; the batch is split between them before it starts
    async_scheduling:       the next step is scheduled before the last one's tokens are known, so the slot
                            and the blocks of a finished request come free one step later
    enforce_eager:          no CUDA graphs
    scheduler_reserve_full_isl: a waiting request is admitted only if all it has to prefill fits the free blocks,
                            not just its first chunk
    num_gpu_blocks:         impose the KV pool (blocks the scheduler can use) instead of predicting it
    enable_expert_parallel: each GPU of a replica holds its share of the experts, whole, instead of a slice of each; it
                            needs a model with experts, and changes nothing where tensor_parallel_size is 1
    """

    gpu_memory_utilization: float = 0.92
    max_model_len: int | None = None
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 16384
    block_size: int = 16
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    async_scheduling: bool = True
    enforce_eager: bool = False
    scheduler_reserve_full_isl: bool = True
    num_gpu_blocks: int | None = None
    enable_expert_parallel: bool = False

    @classmethod
    def for_gpu(cls, gpu: Gpu, recurrent: bool = False) -> EngineLimits:
        """vLLM's defaults for an offline `LLM` on this GPU (get_batch_defaults in vllm/engine/arg_utils.py); on a CPU
        those of vllm/platforms/cpu.py, and as in `on`.

        recurrent: the model has layers that keep a state, for which vLLM leaves prefix caching off
        """
        caching = not recurrent
        if gpu.is_cpu:
            return cls(
                enable_prefix_caching=caching,
                max_num_seqs=256,
                max_num_batched_tokens=4096,
                block_size=128,
                async_scheduling=False,
                enforce_eager=True,
            )
        large = gpu.memory_bytes >= 70 << 30 and not gpu.name.startswith("a100")
        if large:
            return cls(enable_prefix_caching=caching)
        return cls(enable_prefix_caching=caching, max_num_seqs=256, max_num_batched_tokens=8192)

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if not (is_number(share) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization is {share!r}; allowed: above 0, at most 1")
        object.__setattr__(self, "gpu_memory_utilization", float(share))  # numpy's cannot be written as JSON
        sizes = ("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size", "data_parallel_size")
        for name in sizes:
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("max_model_len", "num_gpu_blocks"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name), otherwise=", or leave it out"))
        for name in (f.name for f in fields(self) if f.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: True or False")
        if self.block_size % 16:
            raise ConfigError(f"block_size is {self.block_size}; allowed: a multiple of 16")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, max_num_seqs is {self.max_num_seqs}; "
                "allowed: at least one token of budget per running request, as vLLM demands"
            )

    @property
    def expert_ranks(self) -> int:
        """GPUs of a replica that share out whole experts, vLLM's ep_size; 1: each holds a slice of every expert."""
        return self.tensor_parallel_size if self.enable_expert_parallel else 1

    @property
    def expert_slices(self) -> int:
        """Slices into which tensor parallelism cuts every expert, the tp_size of vLLM's expert layers."""
        return self.tensor_parallel_size // self.expert_ranks

    @property
    def cut(self) -> tuple[int, bool]:
        """How the model is cut: over how many GPUs, and whether these share out whole experts."""
        return self.tensor_parallel_size, self.expert_ranks > 1

    def holding(self, longest_request: int) -> EngineLimits:
        """These limits with max_model_len filled in if it is None.

        longest_request: prompt + response in tokens. Raises ConfigError if max_model_len is given and shorter.
        """
        if self.max_model_len is None:
            return replace(self, max_model_len=longest_request)
        if longest_request > self.max_model_len:
            raise ConfigError(
                f"the longest request has {longest_request} tokens (prompt + response), max_model_len is "
                f"{self.max_model_len}; shorten the response lengths or raise max_model_len"
            )
        return self

    def on(self, gpu: Gpu) -> EngineLimits:
        """These limits as vLLM runs them on `gpu`: as they are, except on a CPU.

        There vLLM turns async scheduling off and captures no CUDA graphs whatever it is told. What enforce_eager still
        decides is whether torch.compile runs: that needs a compiler, and was not measured. Raises ConfigError for
        what makes no sense on a CPU.
        """
        if not gpu.is_cpu:
            return self
        if (self.tensor_parallel_size, self.data_parallel_size) != (1, 1):
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, data_parallel_size {self.data_parallel_size}; "
                "allowed on a CPU: 1 and 1"
            )
        if self.gpu_memory_utilization != EngineLimits.for_gpu(gpu).gpu_memory_utilization:
            raise ConfigError(
                "gpu_memory_utilization is given; on a CPU VLLM_CPU_KVCACHE_SPACE is the size of the KV pool: leave it "
                "out, or impose the pool with num_gpu_blocks"
            )
        if self.block_size % 32:
            raise ConfigError(f"block_size is {self.block_size}; allowed on a CPU: a multiple of 32; vLLM takes 128")
        return replace(self, async_scheduling=False, enforce_eager=True)
