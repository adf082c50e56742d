"""The engine's limits: their names in vLLM, verl and rollout records, their defaults, and vLLM's rules for them.

`model_runner` names the one of vLLM's two model runners, which decides sampler, activation peak and graph reserve.
`cudagraph_capture_sizes` has the sizes of its CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Final, Literal

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.hardware import Gpu
from fp8plan.options import ENGINE, PREFIX_CACHING, Group, Option, group_of
from fp8plan.version import DEFAULT_VERSION, has

GRAPH_STEP: Final = 16  # between the sizes of CUDA graphs above 256


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit under all its names.

    field:  of EngineLimits
    part:   the part of a VllmConfig with the limit, under vLLM's argument; "" if versions of vLLM have it elsewhere
    record: field of a rollout record; "" if records lack it
    verl:   word in verl's actor_rollout_ref.rollout; "" if verl has none with the same values
    """

    field: str
    part: str
    record: str = ""
    verl: str = ""

    @property
    def argument(self) -> str:
        """The argument of vLLM's `LLM` and EngineArgs; with dashes it is the flag of `vllm serve`."""
        return "num_gpu_blocks_override" if self.field == "num_gpu_blocks" else self.field


# Records and emitted settings list the limits in this order.
LIMITS: Final = (
    Limit("tensor_parallel_size", "parallel_config", "tensor_parallel", "tensor_model_parallel_size"),
    Limit("data_parallel_size", "parallel_config", "data_parallel"),
    Limit("enable_expert_parallel", "parallel_config", "expert_parallel"),
    Limit("gpu_memory_utilization", "cache_config", "gpu_memory_utilization", "gpu_memory_utilization"),
    Limit("max_model_len", "model_config", "max_model_len", "max_model_len"),
    Limit("max_num_seqs", "scheduler_config", "max_num_seqs", "max_num_seqs"),
    Limit("max_num_batched_tokens", "scheduler_config", "max_num_batched_tokens", "max_num_batched_tokens"),
    Limit("block_size", "cache_config", "block_size"),
    Limit("enable_prefix_caching", "cache_config", "enable_prefix_caching", "enable_prefix_caching"),
    Limit("async_scheduling", "scheduler_config", "async_scheduling"),
    Limit("enforce_eager", "model_config", "enforce_eager", "enforce_eager"),
    Limit("scheduler_reserve_full_isl", "scheduler_config"),
    Limit("num_gpu_blocks", "cache_config"),
    Limit("max_cudagraph_capture_size", "compilation_config"),
    Limit("enable_return_routed_experts", "", "routed_experts"),
)
RECORDED: Final = {limit.record: limit.field for limit in LIMITS if limit.record}
VERLS: Final = {limit.verl: limit.field for limit in LIMITS if limit.verl}


def fields_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of EngineLimits among vLLM's arguments; None is an argument that was not given."""
    limits = {x.field: arguments[x.argument] for x in LIMITS if arguments.get(x.argument) is not None}
    if "num_gpu_blocks" in limits:  # vLLM counts its null block too, which no request can use (v1/core/block_pool.py)
        limits["num_gpu_blocks"] -= 1
    if limits.get("max_cudagraph_capture_size") == 0:  # vLLM's own word for an engine with enforce_eager
        del limits["max_cudagraph_capture_size"]
    return limits


class Derived(int):
    """A limit that the user left out, so `EngineLimits.derived` derives it from the GPU and the other limits, as vLLM
    does. Everywhere else it is a number."""


class Lowerable(int):
    """A limit that no user insists on, such as one of a search: a plan may lower it, as it may a Derived one."""


# Defaults of an offline `LLM`: get_batch_defaults in vllm/engine/arg_utils.py. Block sizes are from
# vllm/config/cache.py and vllm/platforms/cpu.py. A GPU is large from 70 GiB on, unless its name has "a100" in it.
LARGE_GPU: Final[dict[str, Any]] = {
    "max_num_seqs": Derived(1024),
    "max_num_batched_tokens": Derived(16384),
    "block_size": Derived(16),
}
SMALL_GPU: Final = LARGE_GPU | {"max_num_seqs": Derived(256), "max_num_batched_tokens": Derived(8192)}
ANY_CPU: Final = SMALL_GPU | {"max_num_batched_tokens": Derived(4096), "block_size": Derived(128)}


VLLMS: Final = "vLLM's for this GPU"  # a default, in help


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits that one vLLM engine (one data-parallel replica) is started with.

    A limit that is left out takes vLLM's default for an offline `LLM`. Defaults of max_num_seqs, max_num_batched_tokens
    and block_size depend on the GPU and the other limits. Until an EngineSetup or a plan names the GPU, they are those
    of a GPU of at least 70 GiB. Only `max_model_len` differs from vLLM: None means just enough for the workload's
    longest request, as RL trainers set it.

    gpu_memory_utilization: fraction of the GPU's memory the engine may use, in (0, 1]; unused on a CPU
    max_model_len:          longest prompt + response in tokens
    max_num_seqs:           most requests running at once
    max_num_batched_tokens: token budget of one step
    block_size:             tokens per KV block, a multiple of 16 (FlashAttention's paged kernels demand it)
    enable_prefix_caching:  full blocks can be reused by their content until they are evicted
    tensor_parallel_size:   GPUs per replica
    data_parallel_size:     replicas; the batch is split between them before it starts
    async_scheduling:       a step is scheduled before the last step's tokens are known, so a finished request's slot
                            and blocks are free one step later
    enforce_eager:          no CUDA graphs
    scheduler_reserve_full_isl: admit a waiting request only if its whole prefill fits the free blocks, not just its
                            first chunk
    num_gpu_blocks:         impose the KV pool (blocks the scheduler can use) instead of predicting it
    enable_expert_parallel: each GPU of a replica holds whole experts instead of a slice of each; needs a model with
                            experts, and changes nothing at tensor_parallel_size 1
    max_cudagraph_capture_size: the most tokens of a step that runs as a CUDA graph; None: at most 512 or, on data
                            center Blackwell since vLLM 0.28 and for gpt-oss, 1,024
    enable_return_routed_experts: return the experts of each token, for router replay
    """

    gpu_memory_utilization: Annotated[float, Option(ENGINE, default=VLLMS)] = 0.92
    max_model_len: Annotated[int | None, Option(ENGINE, default="the longest prompt + response")] = None
    max_num_seqs: Annotated[int, Option(ENGINE, default=VLLMS)] = LARGE_GPU["max_num_seqs"]
    max_num_batched_tokens: Annotated[int, Option(ENGINE, default=VLLMS)] = LARGE_GPU["max_num_batched_tokens"]
    block_size: Annotated[int, Option(ENGINE, default=VLLMS)] = LARGE_GPU["block_size"]
    enable_prefix_caching: Annotated[
        bool, Option(ENGINE, default="on, off for recurrent layers", name=PREFIX_CACHING)
    ] = True
    tensor_parallel_size: Annotated[int, Option(ENGINE, default="1")] = 1
    data_parallel_size: Annotated[int, Option(ENGINE, "replicas", "1")] = 1
    async_scheduling: Annotated[bool, Option(ENGINE)] = True
    enforce_eager: Annotated[bool, Option(ENGINE, name="--enforce-eager")] = False
    scheduler_reserve_full_isl: bool = True
    num_gpu_blocks: Annotated[int | None, Option(ENGINE, "impose the KV pool", "what the memory holds")] = None
    enable_expert_parallel: Annotated[
        bool, Option(ENGINE, "expert parallelism: each GPU holds whole experts", name="--expert-parallel")
    ] = False
    max_cudagraph_capture_size: Annotated[
        int | None, Option(ENGINE, "tokens of the largest step with a CUDA graph", VLLMS)
    ] = None
    enable_return_routed_experts: bool = False

    @classmethod
    def for_gpu(cls, gpu: Gpu, recurrent: bool = False, **limits: Any) -> EngineLimits:
        """These limits, and vLLM's defaults on this GPU for the rest.

        recurrent: the model has layers that keep a state, for which vLLM up to 0.27 leaves prefix caching off
        limits:    fields of this class; None is left to vLLM

        Raises ConfigError for limits that contradict each other.
        """
        defaults = {"enable_prefix_caching": not recurrent}
        if gpu.is_cpu:
            defaults |= {"async_scheduling": False, "enforce_eager": True}
        return cls(**defaults | {name: value for name, value in limits.items() if value is not None}).derived(gpu)

    def derived(self, gpu: Gpu) -> EngineLimits:
        """These limits, with the ones that were left out derived for `gpu` as in vLLM.

        A budget that was left out is at most max_num_seqs * max_model_len. A max_num_seqs that was left out is at most
        the budget (get_batch_defaults and _set_default_max_num_seqs_and_batched_tokens_args in
        vllm/engine/arg_utils.py). Raises ConfigError if vLLM's budget is too small for the given max_num_seqs.
        """
        defaults = SMALL_GPU
        if gpu.is_cpu:
            defaults = ANY_CPU
        elif gpu.memory_bytes >= 70 << 30 and "a100" not in gpu.product.lower():
            defaults = LARGE_GPU
        kept = {name: getattr(self, name) for name in defaults if not isinstance(getattr(self, name), Derived)}
        limits = replace(self, **defaults | kept)
        budget, requests = limits.max_num_batched_tokens, limits.max_num_seqs
        if budget < requests:  # the budget is vLLM's, or __post_init__ would have raised
            raise ConfigError(
                f"max_num_seqs is {requests}, and max_num_batched_tokens is {budget}, vLLM's default on {gpu.product}; "
                "allowed: at least one token of budget per running request, as vLLM demands: give "
                f"max_num_batched_tokens {requests} too, or max_num_seqs {budget} or less"
            )
        return limits

    def settled(self) -> EngineLimits:
        """These limits as plain numbers, as if the user had given all of them."""
        plain: dict[str, Any] = {name: int(getattr(self, name)) for name in LARGE_GPU}
        return replace(self, **plain)

    def vllm_arguments(self) -> dict[str, Any]:
        """The arguments of vLLM for these limits, as plain numbers; those that are None are left out."""
        limits = self.settled()
        arguments = {limit.argument: getattr(limits, limit.field) for limit in LIMITS}
        if self.num_gpu_blocks is not None:
            arguments["num_gpu_blocks_override"] += 1  # the null block
        return {name: value for name, value in arguments.items() if value is not None}

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if not (is_number(share) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization is {share!r}; allowed: above 0, at most 1")
        object.__setattr__(self, "gpu_memory_utilization", float(share))  # numpy's cannot be written as JSON
        sizes = ("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size", "data_parallel_size")
        for name in sizes:
            if not isinstance(getattr(self, name), Derived | Lowerable):
                object.__setattr__(self, name, whole(name, getattr(self, name)))
        otherwise_taken = {
            "max_model_len": "the longest prompt + response",
            "num_gpu_blocks": "what fits",
            "max_cudagraph_capture_size": "vLLM's own",
        }
        for name, left_out in otherwise_taken.items():
            if getattr(self, name) is not None:
                otherwise = f", or leave it out: {left_out}"
                object.__setattr__(self, name, whole(name, getattr(self, name), otherwise=otherwise))
        for name in (f.name for f in fields(self) if isinstance(f.default, bool)):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: True or False")
        if self.enable_return_routed_experts and not self.enable_prefix_caching:
            raise ConfigError(
                'enable_return_routed_experts is True without prefix caching, which vLLM needs for it ("AuxOutput '
                'Connector requires prefix caching"); type --prefix-caching (enable_prefix_caching=True), or leave '
                "--router-replay out"
            )
        if self.block_size % 16:
            raise ConfigError(f"block_size is {self.block_size}; allowed: a multiple of 16")
        self._derive()

    def _derive(self) -> None:
        """Lower a budget or max_num_seqs that was left out to the bound by the other limits, in vLLM's order."""
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
        """GPUs of a replica that share whole experts (vLLM's ep_size); 1: each has a slice of every expert."""
        return self.tensor_parallel_size if self.enable_expert_parallel else 1

    @property
    def expert_slices(self) -> int:
        """Slices into which tensor parallelism cuts every expert, the tp_size of vLLM's expert layers."""
        return self.tensor_parallel_size // self.expert_ranks

    @property
    def cut(self) -> tuple[int, bool]:
        """The number of GPUs that share the model, and True if each has whole experts."""
        return self.tensor_parallel_size, self.expert_ranks > 1

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def layout(self) -> tuple[int, bool, int]:
        """`cut`, and the number of replicas."""
        return *self.cut, self.data_parallel_size

    def holding(self, longest_request: int, shorten: str = "shorten the requests") -> EngineLimits:
        """These limits with max_model_len filled in if it is None.

        longest_request: in tokens. Raises ConfigError, with the advice to `shorten`, if max_model_len is shorter.
        """
        if self.max_model_len is None:
            return replace(self, max_model_len=longest_request)
        if longest_request > self.max_model_len:
            raise ConfigError(
                f"the longest request has {longest_request} tokens, max_model_len is {self.max_model_len}; {shorten}, "
                "or raise max_model_len"
            )
        return self

    def on(self, gpu: Gpu) -> EngineLimits:
        """These limits as vLLM runs them on `gpu`: `derived`, with the changes that vLLM makes on a CPU.

        On a CPU vLLM turns async scheduling off and captures no CUDA graphs, whatever the limits say. enforce_eager
        then only decides if torch.compile runs, which is not modelled. Raises ConfigError for limits that make no sense
        on a CPU.
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


_OPTIONS: Final = group_of(EngineLimits).options
LIMIT_OPTIONS: Final = Group(EngineLimits, {x.field: _OPTIONS[x.field] for x in LIMITS if x.field in _OPTIONS})

# Those of DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES (vllm/config/vllm.py, 0.26) that fp8plan reads, by their model_type.
V2_WITH_EXPERTS: Final = ("deepseek_v2", "granitemoe", "qwen2_moe")


def model_runner(shape: ModelShape, gpu: Gpu, engine_version: str = DEFAULT_VERSION) -> Literal["v1", "v2"]:
    """The model runner that vLLM takes by itself (VllmConfig.use_v2_model_runner): V2 on a GPU.

    vLLM 0.26 takes V2 only for models without recurrent layers that are dense or one of `V2_WITH_EXPERTS`.
    """
    if gpu.is_cpu:
        return "v1"
    if has(engine_version, "V2 runs every model"):
        return "v2"
    sparse = bool(shape.parts_of(Experts)) and shape.model_type not in V2_WITH_EXPERTS
    return "v1" if shape.recurrent or sparse else "v2"


def cudagraph_capture_sizes(
    shape: ModelShape, gpu: Gpu, limits: EngineLimits, engine_version: str = DEFAULT_VERSION
) -> tuple[int, ...]:
    """Batch sizes that vLLM captures as CUDA graphs, ascending; () with enforce_eager.

    Source: vllm/config/vllm.py, _set_cudagraph_sizes; for gpt-oss vllm/model_executor/models/config.py.
    """
    if limits.enforce_eager:
        return ()
    imposed = limits.max_cudagraph_capture_size
    largest = _default_largest(shape, gpu, limits, engine_version) if imposed is None else imposed
    largest = min(largest, limits.max_num_batched_tokens)
    sizes = {*(1, 2, 4), *range(8, 256, 8), *range(256, largest + 1, GRAPH_STEP)}
    sizes.add(limits.max_num_batched_tokens)  # the full budget is captured too, if it is not too large
    if imposed is None and has(engine_version, "max_num_seqs is captured"):
        sizes.add(limits.max_num_seqs)
    return tuple(sorted(size for size in sizes if size <= largest))


def capture_size_for(requests: int) -> int:
    """The least max_cudagraph_capture_size with which a step of so many requests has a CUDA graph."""
    return -(-requests // GRAPH_STEP) * GRAPH_STEP


def _default_largest(shape: ModelShape, gpu: Gpu, limits: EngineLimits, engine_version: str) -> int:
    """The largest batch size that vLLM captures if no limit names one."""
    if shape.model_type == "gpt_oss":
        return 1024
    larger = gpu.is_blackwell_data_center and has(engine_version, "Blackwell captures up to 1024")
    return min(2 * limits.max_num_seqs, 1024 if larger else 512)
