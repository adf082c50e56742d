"""The engine's limits, under vLLM's own argument names.

Which of vLLM's two model runners an engine takes; sampler, activation peak and CUDA-graph reserve follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.hardware import Gpu


class Derived(int):
    """A limit that nobody gave. vLLM derives it from the GPU and from the limits that were given, and so does
    `EngineLimits.derived`. To everything else it is a number."""


# Of an offline `LLM`: get_batch_defaults in vllm/engine/arg_utils.py, 0.26 to 0.30, and the block size of
# vllm/config/cache.py and vllm/platforms/cpu.py. A GPU is large from 70 GiB on, unless its name has "a100" in it.
LARGE_GPU: Final[dict[str, Any]] = {
    "max_num_seqs": Derived(1024),
    "max_num_batched_tokens": Derived(16384),
    "block_size": Derived(16),
}
SMALL_GPU: Final = LARGE_GPU | {"max_num_seqs": Derived(256), "max_num_batched_tokens": Derived(8192)}
ANY_CPU: Final = SMALL_GPU | {"max_num_batched_tokens": Derived(4096), "block_size": Derived(128)}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits that one vLLM engine (one data-parallel replica) is started with.

    What is left out is vLLM's default for an offline `LLM`. Three of these depend on the GPU and on what was given:
    max_num_seqs, max_num_batched_tokens and block_size. They are those of a GPU of at least 70 GiB until an EngineSetup
    or a plan says which GPU it is. Only `max_model_len` differs from vLLM: None means "just enough for the longest
    request of the workload", which is what an RL trainer sets.

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
    max_num_seqs: int = LARGE_GPU["max_num_seqs"]
    max_num_batched_tokens: int = LARGE_GPU["max_num_batched_tokens"]
    block_size: int = LARGE_GPU["block_size"]
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    async_scheduling: bool = True
    enforce_eager: bool = False
    scheduler_reserve_full_isl: bool = True
    num_gpu_blocks: int | None = None
    enable_expert_parallel: bool = False

    @classmethod
    def for_gpu(cls, gpu: Gpu, recurrent: bool = False, **given: Any) -> EngineLimits:
        """The limits of an engine that is given `given`; the rest is vLLM's default for this GPU.

        recurrent: the model has layers that keep a state, for which vLLM leaves prefix caching off
        given:     fields of this class; None is one that was not given

        Raises ConfigError for limits that contradict each other.
        """
        defaults = {"enable_prefix_caching": not recurrent}
        if gpu.is_cpu:
            defaults |= {"async_scheduling": False, "enforce_eager": True}
        return cls(**defaults | {name: value for name, value in given.items() if value is not None}).derived(gpu)

    def derived(self, gpu: Gpu) -> EngineLimits:
        """These limits with what nobody gave as vLLM derives it on `gpu` (get_batch_defaults, and
        _set_default_max_num_seqs_and_batched_tokens_args in vllm/engine/arg_utils.py).

        A budget that was not given is at most max_num_seqs * max_model_len. A max_num_seqs that was not given is at
        most the budget. Raises ConfigError where vLLM's budget is too small for a max_num_seqs that was given.
        """
        large = gpu.memory_bytes >= 70 << 30 and "a100" not in gpu.product.lower()
        defaults = ANY_CPU if gpu.is_cpu else LARGE_GPU if large else SMALL_GPU
        kept = {name: getattr(self, name) for name in defaults if not isinstance(getattr(self, name), Derived)}
        limits = replace(self, **defaults | kept)
        budget, requests = limits.max_num_batched_tokens, limits.max_num_seqs
        if budget < requests:  # nobody gave the budget, or __post_init__ would have raised
            raise ConfigError(
                f"max_num_seqs is {requests}, and max_num_batched_tokens is {budget}, vLLM's default on {gpu.product}; "
                "allowed: at least one token of budget per running request, as vLLM demands: give "
                f"max_num_batched_tokens {requests} too, or max_num_seqs {budget} or less"
            )
        return limits

    def settled(self) -> EngineLimits:
        """These limits as plain numbers, as if all had been given: nothing is derived from others any more."""
        plain: dict[str, Any] = {name: int(getattr(self, name)) for name in LARGE_GPU}
        return replace(self, **plain)

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if not (is_number(share) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization is {share!r}; allowed: above 0, at most 1")
        object.__setattr__(self, "gpu_memory_utilization", float(share))  # numpy's cannot be written as JSON
        sizes = ("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size", "data_parallel_size")
        for name in sizes:
            if not isinstance(getattr(self, name), Derived):
                object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name, left_out in (("max_model_len", "the longest prompt + response"), ("num_gpu_blocks", "what fits")):
            if getattr(self, name) is not None:
                otherwise = f", or leave it out: {left_out}"
                object.__setattr__(self, name, whole(name, getattr(self, name), otherwise=otherwise))
        for name in (f.name for f in fields(self) if f.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: True or False")
        if self.block_size % 16:
            raise ConfigError(f"block_size is {self.block_size}; allowed: a multiple of 16")
        self._derive()

    def _derive(self) -> None:
        """Lower a budget, and a max_num_seqs, that nobody gave, to what the other limits leave, in vLLM's order."""
        budget, requests = self.max_num_batched_tokens, self.max_num_seqs
        if isinstance(budget, Derived) and self.max_model_len is not None:
            budget = Derived(min(budget, requests * self.max_model_len))
        if isinstance(requests, Derived):
            requests = Derived(min(requests, budget))
        object.__setattr__(self, "max_num_batched_tokens", budget)
        object.__setattr__(self, "max_num_seqs", requests)
        if budget < requests and not isinstance(budget, Derived):
            raise ConfigError(
                f"max_num_batched_tokens is {budget}, max_num_seqs is {requests}; "
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
        """The cut of the model: over how many GPUs, and whether these share out whole experts."""
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
        """These limits as vLLM runs them on `gpu`: `derived`, and else as they are, except on a CPU.

        There vLLM turns async scheduling off and captures no CUDA graphs whatever it is told. What enforce_eager still
        decides is whether torch.compile runs: that needs a compiler, and was not measured. Raises ConfigError for
        what makes no sense on a CPU.
        """
        limits = self.derived(gpu)
        if not gpu.is_cpu:
            return limits
        if (self.tensor_parallel_size, self.data_parallel_size) != (1, 1):
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, data_parallel_size {self.data_parallel_size}; "
                "allowed on a CPU: 1 and 1"
            )
        if self.gpu_memory_utilization != EngineLimits().gpu_memory_utilization:
            raise ConfigError(
                "gpu_memory_utilization is given; on a CPU VLLM_CPU_KVCACHE_SPACE is the size of the KV pool: leave it "
                "out, or impose the pool with num_gpu_blocks"
            )
        if limits.block_size % 32:
            raise ConfigError(f"block_size is {limits.block_size}; allowed on a CPU: a multiple of 32; vLLM takes 128")
        return replace(limits, async_scheduling=False, enforce_eager=True)


# DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES of vllm/config/vllm.py, 0.26, those that fp8plan reads, by their model_type.
V2_WITH_EXPERTS: Final = ("deepseek_v2", "granitemoe", "qwen2_moe")


def model_runner(shape: ModelShape, gpu: Gpu) -> Literal["v1", "v2"]:
    """The model runner of vLLM 0.26 (VllmConfig._is_default_v2_model_runner_model): V2 on a GPU for models without
    recurrent layers that are dense or among `V2_WITH_EXPERTS`."""
    sparse = bool(shape.parts_of(Experts)) and shape.model_type not in V2_WITH_EXPERTS
    return "v1" if gpu.is_cpu or shape.recurrent or sparse else "v2"
