"""The Plan: the prediction of every rollout precision, the chosen one, and the settings that apply it.

A plan is saved as JSON. Reading it checks every field that this version knows, and ignores other fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.cost.front import OWN
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import Anchor
from fp8plan.model.plan.choice import OF_RISK, OF_ROLLOUT, Choice, plain_fields, seconds, several_layouts
from fp8plan.model.risk.expected import LEVELS, THRESHOLD, RiskBudget, check_thresholds
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup, check_inside, check_kv_scales
from fp8plan.model.shards import check_target, why_not_shardable
from fp8plan.schemas import VERSIONS, check_version, checked, parse
from fp8plan.version import __version__, check_starts

if TYPE_CHECKING:
    from fp8plan.model.emit.job import Job

WITH_REMEDIES: Final = 8  # minor version of the schema that added them
MAKE_ONE: Final = "fp8plan plan MODEL --gpu GPU --json plan.json"

# Figures of every choice that can run. Speed-ups also need BF16 to fit, the RL step a trainer.
PREDICTED: Final = (*OF_ROLLOUT, *OF_RISK, "kv_cache_tokens", "risk", "extrapolated")


class UnitScales(msgspec.Struct):
    """The figures that a Choice expects with K and V scales left at 1.0."""

    kl_k3: float
    kl_k3_low: float
    kl_k3_high: float
    risk: str | None


def _read(data: Any) -> Plan:
    if isinstance(data, dict) and data.get("schema_version") is None:
        raise ConfigError("not a plan: it has no schema_version")
    check_version(data, "plan", "the plan")
    if int(data["schema_version"].partition(".")[2]) < WITH_REMEDIES:
        data = _without_remedies(data)
    plan = checked(data, Plan, "the plan")
    try:
        _check_values(plan)
    except ConfigError as error:
        raise ConfigError(f"the plan: {error}") from None
    _check_complete(fields := asdict(plan), data, "")
    for number, choice in enumerate(fields["choices"]):
        _check_choice(choice, f"the plan: choices[{number}]")
    return plan


def _check_values(plan: Plan) -> None:
    check_kv_scales(plan.kv_scales)
    check_inside(plan.inside)
    last = len(plan.choices) - 1
    if not 0 <= plan.chosen <= last:
        raise ConfigError(f"chosen is {plan.chosen}; allowed: 0 to {last}, an index into choices")
    if plan.baseline is not None and not 0 <= plan.baseline <= last:
        raise ConfigError(f"baseline is {plan.baseline}; allowed: null, or 0 to {last}, an index into choices")
    check_thresholds(plan.thresholds)
    for number, choice in enumerate(plan.choices):
        for size in ("tensor_parallel", "data_parallel"):
            whole(f"choices[{number}].{size}", getattr(choice, size))


def _without_remedies(data: Mapping[str, Any]) -> dict[str, Any]:
    """A plan of an older schema, with the fields of remedies at the values that hold for it."""
    written: dict[str, Any] = {"remedies": asdict(Remedies()), **data}
    if isinstance(data.get("limits"), Mapping):
        written["limits"] = {"enable_return_routed_experts": False, **data["limits"]}
    return written


def _check_complete(written: Mapping[str, Any], data: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for an absent field, even one with a default: the plan may have had another value."""
    for name, value in written.items():
        if name not in data:
            raise ConfigError(f"the plan: field {f'{where}{name}'!r} is missing")
        if isinstance(value, dict):
            _check_complete(value, data[name], f"{where}{name}.")


def _check_choice(choice: Mapping[str, Any], where: str) -> None:
    for name, value in choice.items():
        if isinstance(value, float) and not is_number(value):  # 1e999
            raise ConfigError(f"{where}.{name} is {value}; allowed: a finite number")
        if value is None and choice["available"] and name in PREDICTED:
            raise ConfigError(f"{where}.{name} is None, but the choice is available")
    _check_risk(choice["risk"], f"{where}.risk", (*LEVELS, None))
    if choice["unit_kv_scales"] is not None:
        at_one = checked(choice["unit_kv_scales"], UnitScales, f"{where}.unit_kv_scales")
        _check_risk(at_one.risk, f"{where}.unit_kv_scales: risk", LEVELS)


def _check_risk(risk: str | None, where: str, allowed: Sequence[str | None]) -> None:
    if risk not in allowed:
        raise ConfigError(f"{where} is {risk!r}; allowed: {', '.join(map(str, allowed))}")


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of `fp8plan.plan()`, which `fp8plan plan --json` prints.

    model:      Hugging Face id or local folder
    gpu:        name in fp8plan.model.hardware, e.g. "h200_sxm"
    profile:    {"kind", "engine_version", "source"} of the profile behind the numbers
    limits:     limits of every engine; each Choice has its own parallel sizes, and may have its own max_num_seqs
    workload:   prompts, samples (counts), max_prompt_tokens, max_response_tokens, and other facts on the rollout
    seed:       random seed of the response lengths
    choices:    every precision and layout that was scored
    chosen:     index into `choices`
    baseline:   index of the BF16 choice that `speedup_over_best` is over; None: BF16 cannot run
    thresholds: correction to start with, {"token_tis": C}; empty: none needed
    reasons:    plain sentences
    warnings:   caveats about the profile and the workload, one line each
    budget:     the limits of each level of risk, and the highest level that was accepted
    remedies:   settings that lower the mismatch, which all choices are predicted with
    kv_scales:  one of KV_SCALES: the scales of an FP8 KV cache that kl_k3 and risk assume
    anchor:     the correction of the profile by rollouts that the user measured; None without any
    inside:     the program that calls the engines, as in `plan`
    engine_version: version of vLLM that is planned
    fp8plan_version: the version that made the plan

    A choice is named by its index or by its precision. A precision means the chosen choice, if it has that. Else bf16,
    the way back, means the fastest bf16. Another means the one on the chosen layout, or the fastest if that layout
    cannot run it. `vllm_kwargs`, `env`, `verl_overrides` and `trl_config` translate the chosen choice,
    or the one that is named. They raise ConfigError for anything that the target cannot do. vLLM leaves K and V scales
    at 1.0. If that is riskier than the plan accepts, it is a ConfigError too; `kv_scales="calibrated"` says that you
    calibrate them.
    """

    model: str
    gpu: str
    profile: dict[str, Any]
    limits: EngineLimits
    workload: dict[str, Any]
    seed: int
    choices: tuple[Choice, ...]
    chosen: int
    baseline: int | None = field(default=None, kw_only=True)
    thresholds: dict[str, Any]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    budget: RiskBudget = field(default_factory=RiskBudget)
    remedies: Remedies = field(default_factory=Remedies)
    kv_scales: str = "calibrated"
    anchor: Anchor | None = None
    inside: str = OWN
    engine_version: str = field(kw_only=True)
    fp8plan_version: str = __version__

    def __post_init__(self) -> None:
        plain_fields(self)

    def index(self, choice: int | str | None = None) -> int:
        """The index of the chosen Choice, or of the one that is named. Raises ConfigError if the plan has none."""
        if isinstance(choice, str):
            numbers = [number for number, c in enumerate(self.choices) if c.precision == choice]
            if not numbers:
                known = ", ".join(dict.fromkeys(c.precision for c in self.choices))
                raise ConfigError(f"the plan has no {choice!r}; allowed: {known}")
            if self.chosen in numbers:
                return self.chosen
            elsewhere = {number: choice != "bf16" and not self._as_chosen(number) for number in numbers}
            return min(numbers, key=lambda number: (elsewhere[number], self.choices[number].seconds))
        index = self.chosen if choice is None else choice
        allowed = f"allowed: 0 to {len(self.choices) - 1}, or a precision"
        if not isinstance(index, int) or isinstance(index, bool):
            raise ConfigError(f"choice is {index!r:.60}; {allowed}")
        if not 0 <= index < len(self.choices):
            raise ConfigError(f"there is no choice {index}; {allowed}")
        return index

    def _as_chosen(self, number: int) -> bool:
        """True if a choice can run, and has the layout of the chosen one."""
        return self.choices[number].available and self.choices[number].layout == self.choices[self.chosen].layout

    def select(self, choice: int | str | None = None) -> Choice:
        """The chosen Choice, or the one that is named. Raises ConfigError if there is none or the GPU cannot run it."""
        picked = self.choices[self.index(choice)]
        if not picked.available:
            raise ConfigError(f"{picked.precision} cannot run on {self.gpu}: {picked.reason}; take another choice")
        return picked

    @property
    def several_layouts(self) -> bool:
        return several_layouts(self.choices)

    @property
    def baseline_label(self) -> str:
        """The bf16 that speed-ups are over, in words; empty if the plan does not know it."""
        if self.baseline is None:
            return ""
        if not self.several_layouts:
            return "bf16"
        base = self.choices[self.baseline]
        best = min(c.seconds for c in self.choices if c.precision == "bf16") == base.seconds
        return f"{'the best bf16' if best else 'the observed bf16'} ({base.layout_label})"

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: only dicts, lists, strings, numbers, booleans and None."""
        return cast("dict[str, Any]", json.loads(self.to_json()))

    def to_json(self, **beside: Any) -> str:
        """The plan as JSON, which `from_json` reads again. beside: more fields, which it ignores"""
        head = {"schema_version": VERSIONS["plan"], "fp8plan_version": self.fp8plan_version}
        return json.dumps(head | asdict(self) | beside, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text that `to_json` wrote, in this fp8plan or another with the same major schema version.

        Fields that this version does not know are ignored. Raises ConfigError naming the version, or the field that is
        missing or malformed.
        """
        if not isinstance(text, str | bytes):
            raise ConfigError(f"the plan is a {type(text).__name__}; allowed: text, as Plan.to_json writes it")
        try:
            return _read(parse(text, "the plan"))
        except ConfigError as error:
            raise ConfigError(f"{error}; to make one, type: {MAKE_ONE}") from None

    def setup(self, choice: int | str | None = None) -> EngineSetup:
        """The engine of the chosen choice, or of the one that is named, with data_parallel_size replicas."""
        picked = self.select(choice)
        from fp8plan.model.emit.job import workload_tokens

        longest = sum(workload_tokens(self.workload, f"max_{part}_tokens") for part in ("prompt", "response"))
        limits = replace(
            self.limits,
            max_model_len=self.limits.max_model_len or longest,
            tensor_parallel_size=picked.tensor_parallel,
            data_parallel_size=picked.data_parallel,
            enable_expert_parallel=picked.expert_parallel,
            max_num_seqs=picked.max_num_seqs or self.limits.max_num_seqs,
        )
        return EngineSetup(
            self.model,
            self.gpu,
            picked.preset,
            limits,
            self.inside,
            self.engine_version,
            self.remedies,
        )

    def precisions_beside(self, choice: int | str | None = None) -> tuple[str, ...]:
        """The precisions that can run on a replica like that of this choice: as many GPUs, and the model cut alike."""
        cut = self.select(choice).cut
        return tuple(c.precision for c in self.choices if c.available and c.cut == cut)

    def vllm_kwargs(self, choice: int | str | None = None, kv_scales: str = "unit") -> dict[str, Any]:
        """Arguments of `vllm.LLM` or `vllm.EngineArgs` for one replica.

        kv_scales: as in `emit`. An engine made from these alone keeps K and V scales at 1.0; `RolloutEngine.from_plan`
                   measures them

        Raises ConfigError if K and V scales of 1.0 are riskier than the plan accepts, and for a vLLM before the
        supported ones.
        """
        from fp8plan.model.emit.vllm import vllm_kwargs

        return vllm_kwargs(self._job("vllm", choice, kv_scales).setup)

    def env(self, choice: int | str | None = None) -> dict[str, str]:
        """Environment variables to set before vLLM is imported."""
        from fp8plan.model.emit.vllm import vllm_env

        return vllm_env(self.setup(choice))

    def verl_overrides(self, choice: int | str | None = None) -> list[str]:
        """Hydra overrides for `python -m verl.trainer.main_ppo` (verl 0.9.1), with fp8plan.integrations.verl.

        fp8plan measures the scales of an FP8 cache after each weight sync.
        """
        from fp8plan.model.emit.verl import verl_overrides

        return verl_overrides(self._job("verl", choice))

    def trl_config(self, choice: int | str | None = None, mode: str = "auto") -> dict[str, Any]:
        """Arguments of `trl.GRPOConfig` (TRL 1.16).

        mode: "colocate": vLLM in the trainer's processes, run by fp8plan.integrations.trl if the engine has one GPU;
              "server": a `vllm serve` beside it, whose command is in `emit("trl")`;
              "auto": colocate if that can keep the plan, else server

        fp8plan measures the scales of an FP8 cache after each weight sync.
        """
        from fp8plan.model.emit.trl import trl_config

        return trl_config(self._job("trl", choice), mode)

    def emit(
        self,
        target: str,
        choice: int | str | None = None,
        kv_scales: str = "unit",
        plan_file: str | None = None,
        python: bool = False,
    ) -> str:
        """Text for `fp8plan emit` and `fp8plan plan --emit`.

        vllm: JSON {"engine_args", "env", "notes"}
        trl:  JSON {"grpo_config", "trainer", "command", "env", "notes"}: the line with fp8plan.integrations.trl, and
              the command of a vLLM server; each null if there is none
        prime-rl: TOML. Others: words to paste into a shell. Comments stand behind both

        target:    one of fp8plan.model.targets.TARGETS
        kv_scales: "unit", as vLLM leaves the K and V scales of an FP8 cache, or "calibrated" if you calibrate them. In
                   verl and TRL fp8plan measures them, and NeMo RL does itself
        plan_file: full path of this plan's JSON, which a trainer's settings name; None: "plan.json", and a note says so
        python:    trl: Python to paste instead of JSON, `training_args = GRPOConfig(...)` and comments

        Raises ConfigError for an unknown target, for a vLLM before the supported ones, for anything that the target
        cannot do, and if K and V scales of 1.0 are riskier than the plan accepts. So it does without a `choice` where
        no choice is within the risk budget.
        """
        from fp8plan.model.emit.targets import EMITTERS
        from fp8plan.model.emit.trl import emit_trl_python

        check_target(target)
        if choice is None:
            self._check_budget(target)
        emitter = emit_trl_python if python and target == "trl" else EMITTERS[target]
        return emitter(self._job(target, choice, kv_scales, plan_file))

    def _check_budget(self, target: str) -> None:
        """Raise ConfigError if the plan chose a precision that its own risk budget rules out."""
        picked = self.select()
        if picked.risk is None or self.budget.accepts(picked.risk):
            return
        allowed = " or ".join(LEVELS[: LEVELS.index(self.budget.accept) + 1])
        raise ConfigError(
            f"the risk of {picked.precision} is {picked.risk}, and no precision stays within the risk budget; allowed: "
            f"{allowed}; plan again with --accept {picked.risk}, or "
            f"save the plan (--json plan.json), and type: fp8plan emit plan.json {target} --choice {picked.precision}"
        )

    def _job(self, target: str, choice: int | str | None, kv_scales: str = "unit", plan_file: str | None = None) -> Job:
        """The input of `target`'s settings for one choice. kv_scales: as in `emit`

        Raises ConfigError if its K and V scales are too risky, or if the plan is of a vLLM that is not started.
        """
        from fp8plan.model.emit.job import Job, scales_in
        from fp8plan.model.emit.notes import check_risk

        check_starts(self.engine_version)
        check_kv_scales(kv_scales)
        picked, setup, number = self.select(choice), self.setup(choice), self.index(choice)
        reason = self._refusal(number, target)
        job = Job(
            target=target,
            setup=setup,
            workload=self.workload,
            tis=self.thresholds.get(THRESHOLD),
            picked=picked,
            counted=self.kv_scales == "calibrated",
            budget=self.budget,
            kv_scales=scales_in(target, setup, kv_scales),
            choice=picked.precision if self.index(picked.precision) == number else number,
            plan_file=plan_file,
            refused=f"{reason}; {self._way_out(number, target)}" if reason else "",
        )
        check_risk(job)
        return job

    def _refusal(self, number: int, target: str) -> str:
        """The reason why `target` cannot start a choice that vLLM can; "" if it can."""
        choice, setup = self.choices[number], self.setup(number)
        if target in choice.refused_by:
            return choice.refused_by[target]
        shape = setup.known_shape
        if shape is None or shape.stored is not None:
            return ""
        return why_not_shardable(shape, setup.precision, choice.tensor_parallel, target, setup.limits.cut[1]) or ""

    def _way_out(self, number: int, target: str) -> str:
        """Advice for a choice that `target` cannot start: the best one that it can, or another plan."""
        again, refused = f"plan again with --emit {target}", self.choices[number]
        safe = [
            (index, choice)
            for index, choice in enumerate(self.choices)
            if choice.available and choice.riskiness <= refused.riskiness and not self._refusal(index, target)
        ]
        if not safe:
            return f"{again}, which looks for another layout"
        index, best = min(safe, key=lambda pair: pair[1].seconds)
        cost = ""
        if best.makespan_s is not None and refused.makespan_s is not None:
            cost = f", in {seconds(best.makespan_s)} s instead of {seconds(refused.makespan_s)} s"
        return (
            f"the next best is choice {index}, {best.precision} at {best.sizes} with "
            f"{best.data_parallel} replica(s){cost}: --choice {index} (in Python choice={index}), or {again}"
        )
