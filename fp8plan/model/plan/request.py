"""The question of a plan. Its fields are the arguments of `plan` and, with their Option, the options of `fp8plan plan`.

A limit of the engine is a field of EngineLimits. An Option beside it makes it an option of the command, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, update_wrapper
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Self, TypeVar

from fp8plan.checks import kinds
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.attention_backend import Backend, named_backend, why_fixed_kv_scales
from fp8plan.model.cost.front import OWN
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import LIMIT_OPTIONS, EngineLimits
from fp8plan.model.precision import FP8_KV, PRESETS
from fp8plan.model.profile.profile import LOOPS_S, Profile
from fp8plan.model.risk.expected import BUDGET_OPTIONS, RiskBudget
from fp8plan.model.risk.remedies import REMEDY_OPTIONS, Remedies
from fp8plan.model.rl_step import DEFAULT_LINK, SENDERS, STEP_OPTIONS, StepTimes, WeightSync, changes_of
from fp8plan.model.setup import check_inside
from fp8plan.model.shards import check_target
from fp8plan.model.targets import TARGETS
from fp8plan.model.validate.records import Record
from fp8plan.model.weight_changes import DEFAULT_OPTIMIZER, TopK
from fp8plan.model.weights import sampled
from fp8plan.model.workload import WORKLOAD_OPTIONS, Batch, Workload
from fp8plan.model.workload_turns import TURN_OPTIONS
from fp8plan.options import ENGINE, TRAINER, WORKLOAD, Option, Words
from fp8plan.version import DEFAULT_ON_CPU, DEFAULT_VERSION, planned_version

Progress = Callable[[Iterable[Any]], Iterable[Any]]
P = ParamSpec("P")
Request = TypeVar("Request")
Answer = TypeVar("Answer")


def _host_loop_s(microseconds: float) -> float:
    """The value of host_loop_s for --host-loop-us. Raises ConfigError for a time that no host takes."""
    if not LOOPS_S[0] < microseconds * 1e-6 < LOOPS_S[1]:
        raise ConfigError(f"--host-loop-us is {microseconds!r}; allowed: microseconds, such as 300")
    return microseconds * 1e-6


@dataclass(frozen=True)
class PlanRequest:
    """One rollout on one kind of GPU, and what the user has decided about its engines and its trainer.

    model:          a ModelShape, a hub id, or a folder with config.json
    gpu:            a Gpu or its name; "auto" asks the driver
    workload:       the prompts and responses of one rollout
    observed:       rollouts that were measured on this machine, which correct the profile (`read_records`). With
                    `delta_bytes` they correct the bytes of a delta
    gpus:           GPUs in all. Every tensor-parallel size that divides them, a node and the model is tried, for MoE
                    models with expert parallelism too; the rest are replicas. None: the layout in `limits`
    gpus_per_node:  GPUs that reach each other without the network; None: the usual number for this GPU
    limits:         limits of each engine. One that is not set takes vLLM's default for this GPU and model
    inside:         the program that calls the engines, one of fp8plan.model.cost.front.INSIDE. None: the target's. For
                    the target trl that is "server" if an engine may have several GPUs, else "trl"
    engine_version: version of vLLM; None: that of `version.default_version`
    host_loop_s:    speed of the engine's host, in seconds as in RolloutRecord; `fp8plan doctor --host` measures it.
                    None: that of the observed rollouts. Without these the plan expects the hosts that were seen, with
                    a wide error
    strict:         refuse a profile of another engine version
    precisions:     preset names; None: all, and those that this GPU cannot run are listed as unavailable
    budget:         the highest mismatch risk that may be chosen; None: that of RiskBudget()
    remedies:       settings that lower the mismatch, which every precision is planned with
    kv_scales_calibrated: K and V scales of FP8 KV are measured after each sync. False: they stay at 1.0, as in engines
                    that keep the scales they started with (EngineSetup.why_fixed_kv_scales)
    trainer:        the other parts of an RL step; None: only the rollout is compared
    link:           bandwidth of a weight sync to one engine GPU, such as "25Gb/s" or "3GB/s"; None: 400Gb/s
    learning_rate:  predicts the bytes of a sync that sends only what has changed. The RL step takes the fastest mode,
                    and the reasons name it. Without effect where verl or TRL sends. None: syncs send all of BF16
    optimizer:      with it, one of fp8plan.model.weight_changes.OPTIMIZERS; None: adamw
    top_k:          with it, also a sparse sync, which is not lossless; None: all modes are
    target:         the program that starts the engines, one of fp8plan.model.targets.TARGETS
    profile:        used instead of the best known one
    progress:       wraps the candidates while they are predicted, as tqdm does
    workers:        processes for the layouts of a large batch. They are forked: leave it at 1 beside threads

    Raises ConfigError for a value of the wrong type, and for a part of a weight sync that changes nothing.
    """

    model: Annotated[
        ModelShape | str | Path,
        Option(help="hub id (Qwen/Qwen3-8B) or a folder with config.json", kind=str, argument=True, required=True),
    ]
    gpu: Annotated[
        Gpu | str,
        Option(
            help="h200, a100-80gb, rtx4090, ...; auto asks the driver; datasheet:NUMBERS, any other card",
            kind=str,
            required=True,
        ),
    ]
    workload: Annotated[
        Workload,
        Option(
            WORKLOAD,
            "the last rollout in a file of rollout records (`import`, a Monitor's run file); goes alone",
            metavar="FILE.jsonl",
            kind=Path,
        ),
        WORKLOAD_OPTIONS,
        TURN_OPTIONS,
    ]
    _: KW_ONLY
    observed: Annotated[
        Sequence[Record],
        Option(
            WORKLOAD,
            "measured rollouts of this machine, in any precision, which correct the prediction (the same files)",
            metavar="FILE.jsonl",
            kind=Path,
        ),
    ] = ()
    gpus: Annotated[int | None, Option(ENGINE, "try every layout of so many GPUs: TP x DP, and with experts EP")] = None
    gpus_per_node: Annotated[
        int | None, Option(ENGINE, "that reach each other without the network", "8, or the NVLink domain")
    ] = None
    limits: Annotated[EngineLimits | None, LIMIT_OPTIONS] = None
    inside: Annotated[
        str | None,
        Option(
            ENGINE,
            "its caller: own, verl, trl (colocated), server (of TRL); without fp8plan: verl-stock, trl-stock, "
            "server-stock, server-http (vllm serve)",
            "that of --emit, else own",
            metavar="NAME",
        ),
    ] = None
    engine_version: Annotated[
        str | None, Option(ENGINE, "of vLLM", f"the installed one, else {DEFAULT_VERSION}, on a CPU {DEFAULT_ON_CPU}")
    ] = None
    host_loop_s: Annotated[
        float | None,
        Option(
            ENGINE,
            "speed of its host: type there `fp8plan doctor --host`",
            "measured here if this machine has the GPU, else as seen on others",
            "--host-loop-us",
            read=_host_loop_s,
        ),
    ] = None
    strict: Annotated[bool, Option(ENGINE, "only a profile of this very version", name="--strict")] = False
    precisions: Annotated[
        Sequence[str] | None,
        Option(
            None,
            "bf16, fp8_block, fp8_kv, fp8_block+fp8_kv; repeat",
            "all",
            "--precision",
            metavar="NAME",
            kind=list[str],
        ),
    ] = None
    budget: Annotated[RiskBudget | None, BUDGET_OPTIONS] = None
    remedies: Annotated[Remedies, REMEDY_OPTIONS] = field(default_factory=Remedies)
    kv_scales_calibrated: Annotated[
        bool,
        Option(
            None,
            "of FP8 KV: calibrated after each weight sync, as fp8plan does, or unit: 1.0, as vLLM leaves them",
            "unit where --emit names a program that measures none, else calibrated",
            "--kv-scales",
            kind=str,
        ),
    ] = True
    trainer: Annotated[StepTimes | None, STEP_OPTIONS] = None
    link: Annotated[
        str | None, Option(TRAINER, "bandwidth of new weights to an engine GPU: 25Gb/s (bits), 3GB/s", DEFAULT_LINK)
    ] = None
    learning_rate: Annotated[
        float | None, Option(TRAINER, "finds the fastest mode of a weight sync", "none: all of BF16 is sent")
    ] = None
    optimizer: Annotated[str | None, Option(TRAINER, "adamw or muon", DEFAULT_OPTIMIZER, metavar="NAME")] = None
    top_k: Annotated[
        TopK | None,
        Option(
            TRAINER,
            "with a learning rate, also top-k: 1e-4 (of the values), 20MB, or residual=1e-3 (of the weights)",
            "none: syncs are lossless",
            kind=str,
            read=TopK.parse,
        ),
    ] = None
    target: str = "vllm"
    profile: Profile | None = None
    progress: Progress = iter
    workers: int = 1

    def __post_init__(self) -> None:
        self._planned_sync()  # its errors say more than those of `kinds`
        names = self.precisions
        if not (names is None or (isinstance(names, Sequence) and all(isinstance(name, str) for name in names))):
            raise ConfigError(f"precisions is {names!r}; allowed: some of {', '.join(PRESETS)}, or None for all")
        kinds(self)
        if not all(isinstance(record, Record) for record in self.observed):
            raise ConfigError(f"observed is {self.observed!r}; allowed: records; type: read_records(FILE.jsonl)")
        check_target(self.target)
        if self.top_k is not None and self.sender is not None:
            raise ConfigError(
                f"top_k is {self.top_k}, and {self.sender}'s own sync sends no patches; leave one of them out"
            )

    @classmethod
    def of(cls, words: Words, **made: Any) -> Self:
        """The request of the fields that are set: its own, and those of the dataclasses in it.

        words: has at least model and gpu of this class; made: fields of this class that go before

        Raises ConfigError as this class and those in it do.
        """
        own = words[cls]
        card, shape = find_gpu(own["gpu"]), ModelShape.from_hf(own["model"])
        parts: dict[str, Any] = {
            "limits": EngineLimits.for_gpu(card, shape.recurrent, **words.get(EngineLimits, {})),
            "trainer": StepTimes(**words[StepTimes]) if words.get(StepTimes) else None,
            "budget": RiskBudget(**words.get(RiskBudget, {})),
            "remedies": Remedies(**words.get(Remedies, {})),
        }
        return cls(**{**parts, **own, "model": shape, "gpu": card, **made})

    @cached_property
    def shape(self) -> ModelShape:
        """The model, read. Raises ConfigError for one that is unknown or not modelled."""
        return self.model if isinstance(self.model, ModelShape) else ModelShape.from_hf(self.model)

    @cached_property
    def card(self) -> Gpu:
        """The GPU, with `gpus_per_node` of them in a node. Raises ConfigError for an unknown one."""
        card = self.gpu if isinstance(self.gpu, Gpu) else find_gpu(self.gpu)
        return card if self.gpus_per_node is None else replace(card, gpus_per_node=self.gpus_per_node)

    @cached_property
    def batch(self) -> Batch:
        return self.workload.batch()

    @property
    def caller(self) -> str:
        """The program that calls the engines: `inside`, or the usual one of the target."""
        if self.inside is not None:
            return check_inside(self.inside)
        most_gpus = self.gpus or (self.limits or EngineLimits()).tensor_parallel_size
        fronts = {"verl": "verl", "verl-stock": "verl-stock", "trl": "trl" if most_gpus == 1 else "server"}
        return fronts.get(self.target, OWN)

    @property
    def sender(self) -> str | None:
        """The trainer that sends new weights; None: fp8plan sends them."""
        return TARGETS[self.target].sender or SENDERS[self.caller]

    @cached_property
    def vllm(self) -> str:
        return planned_version(self.engine_version, self.card.is_cpu)

    @cached_property
    def engine(self) -> EngineLimits:
        """The limits of each engine, with vLLM's defaults and a max_model_len.

        Raises ConfigError for limits that hold no request of the workload, or more tokens than the model's context.
        """
        longest = self.workload.longest_prompt + self.workload.longest_response
        limits = self.limits or EngineLimits.for_gpu(self.card, self.shape.recurrent)
        limits = limits.holding(longest, self.workload.shorten)
        if self.remedies.router_replay:
            limits = replace(limits, enable_return_routed_experts=True)
        if limits.enable_return_routed_experts:
            self._check_experts()
        self.shape.check_max_model_len(limits.max_model_len or longest, self.vllm, self.workload.shorten)
        return limits

    def _check_experts(self) -> None:
        """Raise ConfigError for a model or a device whose engine returns no experts."""
        argument = "router_replay" if self.remedies.router_replay else "enable_return_routed_experts"
        typed = "--router-replay" if self.remedies.router_replay else argument
        if not self.shape.parts_of(Experts):
            raise ConfigError(f"{argument} is True, and {self.shape.name} has no experts; leave {typed} out")
        if self.card.is_cpu:
            raise ConfigError(f"{argument} is True, and it is planned for GPUs alone; leave {typed} out")

    @property
    def risk_budget(self) -> RiskBudget:
        """The limits of each level of mismatch risk, and the highest level that may be chosen."""
        return self.budget or RiskBudget()

    @cached_property
    def fixed_scales(self) -> str | None:
        """The reason why an engine keeps the K and V scales that it starts with; None if it reads new ones."""
        return why_fixed_kv_scales(self.card, FP8_KV, self.shape)

    @property
    def names_triton(self) -> bool:
        """True if a plan with an FP8 KV cache names Triton's attention, in place of vLLM's own choice."""
        return named_backend(self.card, FP8_KV, self.shape) == Backend.TRITON_ATTN

    @property
    def measures_scales(self) -> bool:
        """True if K and V scales of FP8 KV are measured after each sync: as asked, and as the GPU allows."""
        return self.kv_scales_calibrated and self.fixed_scales is None

    @cached_property
    def sync(self) -> WeightSync | None:
        """The weight sync of an RL step, with what the checkpoint and the observed rollouts tell of its changes.

        None if no figure depends on it.
        """
        sync = self._planned_sync()
        if sync is None:
            return None
        sync = replace(sync, sender=self.sender)
        if sync.learning_rate is None:
            return sync
        source = Path(self.shape.source)
        sync = replace(sync, weights=sampled(source.parent) if source.is_file() else {})
        return replace(sync, measured=changes_of(self.observed, self.shape, sync))

    def _planned_sync(self) -> WeightSync | None:
        """The weight sync as it is asked for. Raises ConfigError for a part of one that changes nothing."""
        if self.link is not None and self.trainer is None and self.learning_rate is None:
            raise ConfigError(
                f"link is {self.link!r}, and there is neither a learning rate nor an RL step that a sync is part of; "
                "give --learning-rate 1e-6, or --train-s SECONDS --logprob-s SECONDS (learning_rate, or trainer)"
            )
        for name, value in {"optimizer": self.optimizer and repr(self.optimizer), "top_k": self.top_k}.items():
            if value is not None and self.learning_rate is None:
                raise ConfigError(f"{name} is {value} without a learning rate; give --learning-rate 1e-6, too")
        if self.trainer is None and self.learning_rate is None:
            return None
        link = DEFAULT_LINK if self.link is None else self.link
        return WeightSync(link, self.learning_rate, self.optimizer or DEFAULT_OPTIMIZER, top_k=self.top_k)


def of_fields(
    request: Callable[P, Request],
) -> Callable[[Callable[[Request], Answer]], Callable[P, Answer]]:
    """A decorator that lets a function of a request take the request's fields as arguments instead.

    A type checker sees the fields, and so does `help`.
    """

    def decorate(function: Callable[[Request], Answer]) -> Callable[P, Answer]:
        def answered(*arguments: P.args, **fields: P.kwargs) -> Answer:
            try:
                signature(request).bind(*arguments, **fields)
            except TypeError as error:  # a field that is missing or unknown
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(request(*arguments, **fields))

        return update_wrapper(update_wrapper(answered, function), request, assigned=(), updated=())

    return decorate
