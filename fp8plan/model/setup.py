"""One engine, shared by planner, validate, guard, probe and launch: model, GPU, precision and limits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.attention_backend import why_fixed_kv_scales
from fp8plan.model.cost.front import INSIDE, OWN
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import Derived, EngineLimits, Lowerable, cudagraph_capture_sizes
from fp8plan.model.memory.kv_plan import KvPlan, plan_kv_cache
from fp8plan.model.memory.kv_specs import model_caches
from fp8plan.model.memory.plan import MemoryPlan, memory_plan
from fp8plan.model.precision import Precision, Stored, find_precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.remedies import NO_REMEDIES, POW2, Remedies
from fp8plan.version import planned_version

# The scales of an FP8 KV cache: measured after each weight sync, as RolloutEngine does, or left at 1.0, as by vLLM.
# Each reload of weights puts 1.0 back (vllm/model_executor/layers/attention).
KV_SCALES: Final = ("calibrated", "unit")


def default_limits(gpu: Gpu, model: str | Path | ModelShape, **limits: Any) -> EngineLimits:
    """These limits, and vLLM's defaults for this GPU and model for the rest.

    An unreadable model counts as one without recurrent layers. Raises ConfigError as EngineLimits.for_gpu does.
    """
    try:
        recurrent = (model if isinstance(model, ModelShape) else ModelShape.from_hf(model)).recurrent
    except ConfigError:
        recurrent = False
    return EngineLimits.for_gpu(gpu, recurrent, **limits)


def check_kv_scales(kv_scales: str) -> None:
    """Raise ConfigError unless the value is one of KV_SCALES."""
    if kv_scales not in KV_SCALES:
        raise ConfigError(f"kv_scales is {kv_scales!r}; allowed: {', '.join(KV_SCALES)}")


def check_inside(inside: str) -> str:
    """The name of a program that calls the engine. Raises ConfigError if it is none of INSIDE."""
    if inside not in INSIDE:
        raise ConfigError(f"inside is {inside!r}; allowed: {', '.join(INSIDE)}")
    return inside


@dataclass(frozen=True, init=False)
class EngineSetup:
    """The engine of `limits.data_parallel_size` replicas.

    model:     a hub id, a folder with config.json, or a ModelShape. A model that the cost model does not know can still
               be started; only `shape`, and methods that use it, raise ConfigError
    gpu:       a Gpu or its name; "auto" asks the driver
    precision: a Precision or the name of a preset
    limits:    fields that are left out take vLLM's default for this GPU; None: vLLM's defaults for this model
    inside:    the program that calls the engine, one of fp8plan.model.cost.front.INSIDE
    engine_version: version of vLLM; None: the installed one, else that of the newest profile
    remedies:  those of engine and trainer. Layers kept in BF16 are without effect on BF16 weights
    """

    model: str | ModelShape
    gpu: Gpu
    precision: Precision
    limits: EngineLimits
    inside: str
    engine_version: str
    remedies: Remedies

    def __init__(
        self,
        model: str | Path | ModelShape,
        gpu: Gpu | str,
        precision: Precision | str = "bf16",
        limits: EngineLimits | None = None,
        inside: str = OWN,
        engine_version: str | None = None,
        remedies: Remedies = NO_REMEDIES,
    ) -> None:
        card = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
        fields = {
            "model": model if isinstance(model, ModelShape) else str(model),
            "gpu": card,
            "precision": precision if isinstance(precision, Precision) else find_precision(precision),
            "limits": limits.derived(card) if limits else default_limits(card, model),
            "inside": check_inside(inside),
            "engine_version": planned_version(engine_version, card.is_cpu),
            "remedies": remedies,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape in this engine.

        Raises ConfigError if the model is not found, if the cost model does not know it, and for `keep_bf16` of an FP8
        checkpoint or of as many layers as there are.
        """
        shape = self.model if isinstance(self.model, ModelShape) else ModelShape.from_hf(self.model)
        return shape if self.precision.weights == "bf16" else shape.keeping_bf16(self.remedies.keep_bf16)

    @property
    def known_shape(self) -> ModelShape | None:
        """The shape; None for a model that the cost model does not know. Raises ConfigError for a wrong `keep_bf16`."""
        try:
            return self.shape
        except ConfigError:
            if self.remedies != NO_REMEDIES and replace(self, remedies=NO_REMEDIES).known_shape is not None:
                raise
            return None

    @property
    def stored(self) -> Stored | None:
        """The format of an FP8 checkpoint, which vLLM reads from its config; None for one in BF16."""
        shape = self.known_shape
        return None if shape is None else shape.stored

    @property
    def e8m0(self) -> bool:
        """True if scales of FP8 blocks are powers of two, as GPU, checkpoint or trainer have them."""
        held = self.stored is not None and self.stored.e8m0
        return self.gpu.has_e8m0(held or self.remedies.trainer_precision == POW2)

    @property
    def path(self) -> str:
        """The model's hub id, or the full path of its folder, as the engine may start in another directory."""
        if isinstance(self.model, ModelShape):
            config = Path(self.model.source)
            return str(config.parent.resolve()) if config.is_file() else self.model.name
        folder = Path(self.model)
        return str(folder.resolve()) if (folder / "config.json").is_file() else self.model

    def holding(self, longest_request: int) -> EngineSetup:
        """This engine as vLLM runs it, for requests of up to `longest_request` tokens (prompt + response).

        Raises ConfigError for limits that do not allow them, or that make no sense on this GPU.
        """
        return replace(self, limits=self.limits.holding(longest_request).on(self.gpu))

    def check_precision(self) -> None:
        """Raise ConfigError for a precision that this GPU does not have. On a CPU vLLM's kernels decide at start-up."""
        if not self.gpu.is_cpu and (reason := self.gpu.why_not(self.precision)):
            raise ConfigError(f"{self.precision.name}: {reason}; allowed: bf16, or another GPU")

    @property
    def why_fixed_kv_scales(self) -> str | None:
        """The reason why this engine keeps the K and V scales that it starts with; None if it reads new ones."""
        return why_fixed_kv_scales(self.gpu, self.precision, self.known_shape)

    def memory(self, longest_request: int | None = None) -> MemoryPlan:
        """The memory of one rank and its KV pool. Raises as `memory_plan` does."""
        return memory_plan(self.shape, self.precision, self.gpu, self.limits, longest_request, self.engine_version)

    def placed(self) -> tuple[EngineSetup, MemoryPlan]:
        """The engine as vLLM can start it, and its memory.

        With full CUDA graphs vLLM needs a KV block of its own for each request that may run, if layers keep a recurrent
        state (CompilationConfig.resolve_cudagraph_mode_and_sizes). A max_num_seqs that nobody gave is lowered to that.

        Raises as `memory` does, and CapacityError for a given max_num_seqs above the number of blocks.
        """
        memory, seqs = self.memory(), self.limits.max_num_seqs
        if self.limits.enforce_eager or not memory.kv.keeps_states:
            return self, memory
        fixed = not isinstance(seqs, Derived | Lowerable)
        if seqs <= (memory.num_gpu_blocks if fixed else memory.sure_blocks):
            return self, memory
        most = self._most_running()
        if fixed:
            raise CapacityError(
                f"max_num_seqs is {seqs}, and the KV pool of {self.shape.name} in {self.precision.name} on "
                f"{self.gpu.product} has {memory.num_gpu_blocks} blocks: with CUDA graphs vLLM demands a block for "
                f"each running request, as some layers keep a recurrent state; allowed: at most {most}, as fewer "
                f"requests leave room for more blocks: type --max-num-seqs {most} (max_num_seqs={most}), or leave it "
                "out"
            )
        lowered = self._running(Lowerable(most))
        return lowered, lowered.memory()

    def lowered_from(self, asked: EngineLimits) -> tuple[str, ...]:
        """A sentence on this engine's max_num_seqs, if `placed` has lowered it from the one that was asked for."""
        own = self.limits.max_num_seqs
        if own == asked.max_num_seqs:
            return ()
        sentence = (
            f"max_num_seqs is {own} instead of {asked.max_num_seqs}: some layers keep a recurrent state, and with CUDA "
            f"graphs vLLM starts only if each running request has one of the {self.memory().num_gpu_blocks} KV blocks "
            "(predicted; a few are kept in reserve)"
        )
        return (sentence,)

    def _most_running(self) -> int:
        """The largest max_num_seqs below this one that surely does not exceed its blocks.

        Fewer requests need no more memory beside the KV pool, so the pool does not shrink as max_num_seqs falls.
        """

        def too_many(seqs: int) -> bool:
            return seqs > self._running(seqs).memory().sure_blocks

        return max(1, bisect_left(range(1, self.limits.max_num_seqs), True, key=too_many))

    def _running(self, seqs: int) -> EngineSetup:
        """This engine with another max_num_seqs, and the same budget."""
        budget = int(self.limits.max_num_batched_tokens)
        return replace(self, limits=replace(self.limits, max_num_seqs=seqs, max_num_batched_tokens=budget))

    @property
    def cudagraph_sizes(self) -> tuple[int, ...]:
        """The numbers of tokens that vLLM captures a CUDA graph for, ascending."""
        return cudagraph_capture_sizes(self.shape, self.gpu, self.limits, self.engine_version)

    def kv_plan(self, num_gpu_blocks: int) -> KvPlan:
        """The KV cache of an engine with a pool of `num_gpu_blocks`, including the null block."""
        longest, gpu = self.shape.context.derived(), self.gpu
        where = gpu.is_cpu, gpu.compute_capability, self.engine_version
        caches = model_caches(self.shape, self.precision, self.limits, longest, *where)
        return plan_kv_cache(*caches, num_blocks=num_gpu_blocks)

    def blocks_in(self, pool_tokens: int) -> int:
        """Blocks, including the null block, of a pool of `pool_tokens`: num_gpu_blocks times the engine's block_size.

        The engine's block_size may be larger than that of `limits`.
        """
        return pool_tokens // self.kv_plan(0).block_size

    def step_model(
        self, profile: Profile, experts_hit: int | None = None, memory: MemoryPlan | None = None
    ) -> StepModel:
        """The cost model of one replica's steps.

        experts_hit: as in StepModel
        memory:      the engine's memory, if it is already known
        """
        groups = 1  # with a block table; on a CPU, whose profile lacks their coefficient, all layers count as one
        if not self.gpu.is_cpu:
            groups = len((self.kv_plan(0) if memory is None else memory.kv).groups)
        facts = (experts_hit, groups, self.inside, self.engine_version)
        return StepModel(self.shape, self.gpu, self.precision, self.limits, profile, *facts)
