"""The answer: what every rollout precision will do, which one was chosen, and how to apply it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from types import NoneType
from typing import Any, Final, cast, get_args, get_type_hints

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import Precision, precision

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
    extrapolated:         whether the profile was used outside what was measured
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
    extrapolated: bool | None

    def __post_init__(self) -> None:
        _plain_fields(self)
        precision(self.precision)

    @property
    def preset(self) -> Precision:
        return precision(self.precision)


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

    `vllm_kwargs`, `env`, `verl_overrides` and `trl_config` translate the chosen choice, or the one whose index is
    given, and raise ConfigError for what the target cannot do.
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

    def __post_init__(self) -> None:
        _plain_fields(self)
        if not 0 <= self.chosen < len(self.choices):
            raise ConfigError(f"chosen is {self.chosen}; allowed: 0 to {len(self.choices) - 1}, an index into choices")
        unknown = sorted(self.thresholds.keys() - THRESHOLDS.keys())
        if unknown:
            raise ConfigError(f"unknown thresholds: {', '.join(unknown)}; allowed: {', '.join(THRESHOLDS)}")

    def select(self, choice: int | None = None) -> Choice:
        """The chosen Choice, or number `choice`. Raises ConfigError if there is none or the GPU cannot run it."""
        index = self.chosen if choice is None else choice
        if not 0 <= index < len(self.choices):
            raise ConfigError(f"there is no choice {index}; allowed: 0 to {len(self.choices) - 1}")
        picked = self.choices[index]
        if not picked.available:
            raise ConfigError(f"{picked.precision} cannot run on {self.gpu}: {picked.reason}; take another choice")
        return picked

    def to_dict(self) -> dict[str, Any]:
        """Only dicts, lists, strings, numbers, booleans and None."""
        return cast("dict[str, Any]", json.loads(self.to_json()))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The Plan that `to_json` wrote. Raises ConfigError naming what is unknown, missing or malformed."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"not a plan: {error}; write one with `fp8plan plan MODEL --gpu GPU --json`") from None
        data = _checked(cls, data, "plan", limits=_limits, choices=_choices, reasons=_reasons)
        return cls(**data)

    def vllm_kwargs(self, choice: int | None = None) -> dict[str, Any]:
        """Arguments of `vllm.LLM` or `vllm.EngineArgs` for one replica (vLLM 0.26 and later)."""
        from fp8plan.model.emit import vllm_kwargs

        return vllm_kwargs(self, self.select(choice))

    def env(self, choice: int | None = None) -> dict[str, str]:
        """Environment variables to set before vLLM is imported."""
        from fp8plan.model.emit import vllm_env

        return vllm_env(self, self.select(choice))

    def verl_overrides(self, choice: int | None = None) -> list[str]:
        """Hydra overrides for `python -m verl.trainer.main_ppo` (verl 0.9.1)."""
        from fp8plan.model.emit_verl import verl_overrides

        return verl_overrides(self, self.select(choice))

    def trl_config(self, choice: int | None = None, mode: str = "auto") -> dict[str, Any]:
        """Arguments of `trl.GRPOConfig` (TRL 1.16).

        mode: "colocate" (vLLM inside the trainer's processes), "server" (a `vllm serve` beside it; its command is in
              `emit(plan, "trl")`), or "auto": colocate where TRL's colocated engine can keep the plan, else server
        """
        from fp8plan.model.emit_trl import trl_config

        return trl_config(self, self.select(choice), mode)


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


def _checked(cls: type[Any], data: Any, where: str, **build: Callable[[Any], Any]) -> dict[str, Any]:
    """`data` as keyword arguments of dataclass `cls`: all fields there, none unknown, each of the declared type."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is a {type(data).__name__}; allowed: an object with named fields")
    names = [f.name for f in fields(cls)]
    for problem, found in (
        ("unknown", [n for n in data if n not in names]),
        ("missing", [n for n in names if n not in data]),
    ):
        if found:
            raise ConfigError(f"{where}: {problem} field {', '.join(map(repr, found))}; allowed: {', '.join(names)}")
    hints = get_type_hints(cls)
    return {n: build[n](data[n]) if n in build else _typed(data[n], hints[n], f"{where}.{n}") for n in names}


def _typed(value: Any, hint: Any, where: str) -> Any:
    allowed = get_args(hint) if NoneType in get_args(hint) else (getattr(hint, "__origin__", hint),)
    accepted = (*allowed, int) if float in allowed else allowed
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{where} is {value!r}; allowed: {' or '.join(t.__name__ for t in allowed)}")
    return value


def _limits(data: Any) -> EngineLimits:
    return EngineLimits(**_checked(EngineLimits, data, "limits"))


def _reasons(data: Any) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(reason, str) for reason in data):
        raise ConfigError(f"reasons is {data!r}; allowed: a list of sentences")
    return tuple(data)


def _choices(data: Any) -> tuple[Choice, ...]:
    if not isinstance(data, list):
        raise ConfigError(f"choices is a {type(data).__name__}; allowed: a list of objects")
    return tuple(Choice(**_checked(Choice, row, f"choices[{i}]")) for i, row in enumerate(data))
