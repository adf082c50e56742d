"""The answer: what every rollout precision will do, which one was chosen, and how to apply it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, cast

from fp8plan import __version__
from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.json import read
from fp8plan.model.precision import Precision, precision
from fp8plan.model.risk.budget import Level, RiskBudget
from fp8plan.schemas import VERSIONS

# Where the scales of an FP8 KV cache come from: measured after each weight sync, as RolloutEngine does, or left at 1.0,
# as vLLM, verl and TRL leave them.
KV_SCALES: Final = ("calibrated", "unit")

# What a plan may say under "thresholds". Bounds are on pi_train / pi_rollout, as everywhere in fp8plan.
THRESHOLDS: Final[dict[str, str]] = {
    "token_tis": "upper bound C: w = min(ratio, C)",
    "sequence_tis": "upper bound C on the ratio of the summed log-ratios",
    "token_mis": "[low, high]: a token outside weighs 0 (IcePop)",
    "sequence_mis": "[low, high]: a sequence whose summed-log ratio is outside is dropped",
    "geometric_mis": "[low, high]: a sequence whose mean-log ratio is outside is dropped",
}

# Workload entries that emitters read; the workload may carry more.
WORKLOAD_KEYS: Final = ("prompts", "samples", "max_prompt_tokens", "max_response_tokens")


@dataclass(frozen=True, slots=True)
class Choice:
    """One precision on one parallel layout, predicted. Numbers are None where `available` is false.

    precision:            preset name (fp8plan.model.precision)
    tensor_parallel:      GPUs per replica
    data_parallel:        replicas of the trainer, with the batch split between them before it starts
    available, reason:    whether this GPU can run it, and why not
    makespan_s:           seconds from the first prompt to the last response, with its 90% interval
    output_tokens_per_s:  response tokens of all replicas / makespan_s
    speedup:              BF16 makespan / this makespan, same workload, GPU and limits, with its 90% interval
    rl_step_s:            seconds of a whole RL step; None without trainer figures
    step_speedup:         the same ratio for the RL step; None without trainer figures
    kv_cache_tokens:      tokens the KV pool of one replica holds
    preemptions:          in all replicas
    tail_fraction:        part of the makespan spent at small batch, in [0, 1]
    kl_k3:                mean k3 per token between trainer and rollout, with its range
    ess_raw:              effective sample size of the untruncated token ratios, a fraction
    clip_fraction:        part of the tokens that token TIS clips
    seq_reject_fraction:  part of the sequences that a sequence-level MIS would drop
    risk:                 "low", "moderate" or "high" (README states the rules)
    unit_kv_scales:       kl_k3, kl_k3_low, kl_k3_high and risk with K and V scales left at 1.0; None without FP8 KV
    extrapolated:         whether the profile was used outside what was measured
    refused_by:           target -> why it cannot start this layout, though vLLM can; {} if all of them can
    """

    precision: str
    tensor_parallel: int
    data_parallel: int
    available: bool
    reason: str | None
    makespan_s: float | None
    makespan_low_s: float | None
    makespan_high_s: float | None
    output_tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    rl_step_s: float | None
    step_speedup: float | None
    kv_cache_tokens: int | None
    preemptions: int | None
    tail_fraction: float | None
    kl_k3: float | None
    kl_k3_low: float | None
    kl_k3_high: float | None
    ess_raw: float | None
    clip_fraction: float | None
    seq_reject_fraction: float | None
    risk: str | None
    unit_kv_scales: dict[str, Any] | None
    extrapolated: bool | None
    refused_by: dict[str, str]

    def __post_init__(self) -> None:
        _plain_fields(self)
        precision(self.precision)

    @property
    def preset(self) -> Precision:
        return precision(self.precision)

    @property
    def seconds(self) -> float:
        """What choices are compared by: the RL step if the trainer's figures are known, else the rollout."""
        known = self.makespan_s if self.rl_step_s is None else self.rl_step_s
        return float("inf") if known is None else known


@dataclass(frozen=True, slots=True)
class Plan:
    """What `fp8plan.plan()` returns and `fp8plan plan --json` prints.

    model:      Hugging Face id or local folder
    gpu:        name in fp8plan.model.hardware, e.g. "h200_sxm"
    profile:    {"kind", "engine_version", "source"} of the profile behind the numbers
    limits:     what every engine is started with; each Choice carries its own parallel sizes
    workload:   WORKLOAD_KEYS (counts and tokens) and whatever else describes the rollout
    seed:       of the sampled response lengths
    choices:    every precision and layout that was scored
    chosen:     index into `choices`
    thresholds: correction to start with, keys of THRESHOLDS; empty: none needed
    reasons:    plain sentences
    warnings:   what whoever uses the plan should know of the profile and the workload, one line each
    budget:     the highest risk that was accepted, and what counts as one
    kv_scales:  one of KV_SCALES: what kl_k3 and risk assume of an FP8 KV cache
    fp8plan_version: which made the plan

    A choice is named by its index, or by its precision: then it is that of the chosen layout, or where this cannot run,
    the fastest that can.
    `vllm_kwargs`, `env`, `verl_overrides` and `trl_config` translate the chosen choice, or the one that is named, and
    raise ConfigError for what the target cannot do. verl and TRL leave K and V scales at 1.0; where that is riskier
    than the plan accepts, it is a ConfigError too, unless `kv_scales="calibrated"` says that you calibrate them.
    """

    model: str
    gpu: str
    profile: dict[str, Any]
    limits: EngineLimits
    workload: dict[str, Any]
    seed: int
    choices: tuple[Choice, ...]
    chosen: int
    thresholds: dict[str, Any]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    budget: RiskBudget = field(default_factory=RiskBudget)
    kv_scales: str = "calibrated"
    fp8plan_version: str = __version__

    def __post_init__(self) -> None:
        _plain_fields(self)
        check_kv_scales(self.kv_scales)
        if not 0 <= self.chosen < len(self.choices):
            raise ConfigError(f"chosen is {self.chosen}; allowed: 0 to {len(self.choices) - 1}, an index into choices")
        unknown = sorted(self.thresholds.keys() - THRESHOLDS.keys())
        if unknown:
            raise ConfigError(f"unknown thresholds: {', '.join(unknown)}; allowed: {', '.join(THRESHOLDS)}")
        for name, value in self.thresholds.items():
            _check_threshold(name, value)
        for number, choice in enumerate(self.choices):
            for size in ("tensor_parallel", "data_parallel"):
                whole(f"choices[{number}].{size}", getattr(choice, size))

    def index(self, choice: int | str | None = None) -> int:
        """Number of the chosen Choice, or of the one that is named. Raises ConfigError if the plan has none."""
        if isinstance(choice, str):
            numbers = [number for number, found in enumerate(self.choices) if found.precision == choice]
            if not numbers:
                known = ", ".join(dict.fromkeys(found.precision for found in self.choices))
                raise ConfigError(f"the plan has no {choice!r}; allowed: {known}")
            return min(numbers, key=lambda number: (not self._as_chosen(number), self.choices[number].seconds))
        index = self.chosen if choice is None else choice
        allowed = f"allowed: 0 to {len(self.choices) - 1}, or a precision"
        if not isinstance(index, int) or isinstance(index, bool):
            raise ConfigError(f"choice is {index!r:.60}; {allowed}")
        if not 0 <= index < len(self.choices):
            raise ConfigError(f"there is no choice {index}; {allowed}")
        return index

    def _as_chosen(self, number: int) -> bool:
        """Whether a choice can run on the layout of the chosen one."""
        one, other = self.choices[number], self.choices[self.chosen]
        layouts = [(c.tensor_parallel, c.data_parallel) for c in (one, other)]
        return one.available and layouts[0] == layouts[1]

    def select(self, choice: int | str | None = None) -> Choice:
        """The chosen Choice, or the one that is named. Raises ConfigError if there is none or the GPU cannot run it."""
        picked = self.choices[self.index(choice)]
        if not picked.available:
            raise ConfigError(f"{picked.precision} cannot run on {self.gpu}: {picked.reason}; take another choice")
        return picked

    def accepts(self, risk: str | None) -> bool:
        """Whether the budget accepts a level of risk."""
        return self.budget.accepts(cast("Level", risk))

    def to_dict(self) -> dict[str, Any]:
        """Only dicts, lists, strings, numbers, booleans and None."""
        return cast("dict[str, Any]", json.loads(self.to_json()))

    def to_json(self) -> str:
        head = {"schema_version": VERSIONS["plan"], "fp8plan_version": self.fp8plan_version}
        return json.dumps(head | asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The Plan that `to_json` wrote, here or in another fp8plan of the same major schema version, whose further
        fields are passed over. Raises ConfigError naming the version, or what is missing or malformed."""
        return read(text, cls)

    def vllm_kwargs(self, choice: int | str | None = None) -> dict[str, Any]:
        """Arguments of `vllm.LLM` or `vllm.EngineArgs` for one replica (vLLM 0.26 and later).

        An engine made from these alone keeps K and V scales at 1.0; `RolloutEngine.from_plan` measures them.
        """
        from fp8plan.model.emit.settings import vllm_kwargs

        return vllm_kwargs(self, self.select(choice))

    def env(self, choice: int | str | None = None) -> dict[str, str]:
        """Environment variables to set before vLLM is imported."""
        from fp8plan.model.emit.settings import vllm_env

        return vllm_env(self, self.select(choice))

    def verl_overrides(self, choice: int | str | None = None, kv_scales: str = "unit") -> list[str]:
        """Hydra overrides for `python -m verl.trainer.main_ppo` (verl 0.9.1).

        kv_scales: "unit", as verl leaves them, or "calibrated" if you calibrate them after each weight sync
        """
        from fp8plan.model.emit.settings import check_risk
        from fp8plan.model.emit.verl import verl_overrides

        picked = self.select(choice)
        check_risk(self, picked, "verl", kv_scales)
        return verl_overrides(self, picked)

    def trl_config(
        self, choice: int | str | None = None, mode: str = "auto", kv_scales: str = "unit"
    ) -> dict[str, Any]:
        """Arguments of `trl.GRPOConfig` (TRL 1.16).

        mode: "colocate" (vLLM inside the trainer's processes), "server" (a `vllm serve` beside it; its command is in
              `emit(plan, "trl")`), or "auto": colocate where TRL's colocated engine can keep the plan, else server
        kv_scales: "unit", as TRL leaves them, or "calibrated" if you calibrate them after each weight sync
        """
        from fp8plan.model.emit.settings import check_risk
        from fp8plan.model.emit.trl import trl_config

        picked = self.select(choice)
        check_risk(self, picked, "trl", kv_scales)
        return trl_config(self, picked, mode)


def check_kv_scales(kv_scales: str) -> None:
    """Raises ConfigError unless it is one of KV_SCALES."""
    if kv_scales not in KV_SCALES:
        raise ConfigError(f"kv_scales is {kv_scales!r}; allowed: {', '.join(KV_SCALES)}")


def _check_threshold(name: str, value: Any) -> None:
    """Raises ConfigError for what is no bound, or no band, of a positive ratio."""
    if name.endswith("_tis"):
        good, allowed = is_number(value) and value > 0, "a number above 0"
    else:
        good = isinstance(value, list) and len(value) == 2 and all(map(is_number, value)) and 0 < value[0] < value[1]
        allowed = "[low, high], two numbers with 0 < low < high"
    if not good:
        raise ConfigError(f"thresholds[{name!r}] is {value!r}; allowed: {allowed}")


def _plain_fields(record: Any) -> None:
    """Turn numpy scalars and tuples inside dicts into what JSON gives back, so that a round trip is equal."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, dict):
            plain: Any = _plain_dict(value, f.name)
        elif hasattr(value, "item"):
            plain = value.item()
        else:
            continue
        object.__setattr__(record, f.name, plain)


def _plain_dict(value: dict[str, Any], name: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=lambda x: x.item()))
    except (ValueError, AttributeError, TypeError) as error:
        allowed = "finite numbers, text, lists, dicts"
        raise ConfigError(f"{name} cannot be written as JSON ({error}); allowed: {allowed}") from None
