"""The profile that fits a folder of measurements, and how wrong it was before and is now.

    FOLDER/kernels/*.jsonl              timings of single kernels (runtime.measure.kernels.gemm, attention, moe, ...)
    FOLDER/kernels/power.jsonl          their power (runtime.measure.kernels.power)
    FOLDER/steps/rollouts.jsonl         rollouts whose steps are fitted (fp8plan.runtime.measure.rollouts.run --trace)
    FOLDER/steps/rollouts.trace.jsonl.gz
    FOLDER/families/rollouts.jsonl      rollouts of models with rare parts (MLA, states), if there are any; with a trace
    FOLDER/profile.json                 what `fp8plan calibrate` writes

Kernels say how each GEMM and attention scales with its shape; engine steps say what is between them: launches, small
kernels, sampling, the host. Both are fitted at once, so neither has to be subtracted from the other. The coefficients
of rare parts are fitted after that, with all others as they are, unless their kernels were timed.

The shapes whose kernels are measured but never fitted: on them a profile shows how far off it is elsewhere.

The shapes were named before the first measurement. Other models' layers of the same size are the same shape and are
left out as well. So are, since they were seen, decode batches of unequal contexts, whose imbalance is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, Experts
from fp8plan.model.calibrate.fit import LeavingOut, Observations, Windows, fit, read_traces, robust_sd, windows
from fp8plan.model.calibrate.kernel_rows import hull, layer_residuals, observe, read_all
from fp8plan.model.calibrate.power import power_coefficients
from fp8plan.model.cost.attention import NARROW
from fp8plan.model.cost.base import QUANTITIES, Array, Cost, together
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.profile.library import RARE_PARTS, WIDE_HEADS, datasheet_profile, rare_parts, without_rare_parts
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import read_records

LINEARS = {"Qwen/Qwen3-14B": ("qkv_proj", "gate_up_proj", "down_proj"), "meta-llama/Llama-3.2-1B": ("down_proj",)}
ATTENTION = ("Qwen/Qwen3-14B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-1B")
UNEQUAL = "lognormal"
MOE = ("Qwen/Qwen3-235B-A22B",)


def is_held_out(rows: pd.DataFrame) -> Array:
    """True for each timing of a held-out shape, shape (rows,)."""
    found = np.zeros(len(rows), dtype=bool)
    for columns, shapes in _shapes().items():
        if set(columns) <= set(rows.columns):
            found |= pd.MultiIndex.from_frame(rows[list(columns)]).isin(shapes)
    if {"kernel", "skew"} <= set(rows.columns):
        found |= rows.kernel.str.startswith("attention_decode").to_numpy() & (rows["skew"] == UNEQUAL).to_numpy()
    return found


def _shapes() -> dict[tuple[str, ...], list[tuple[int, ...]]]:
    linears = {model: {x.name: (x.n, x.k) for x in ModelShape.from_hf(model).linears()} for model in LINEARS}
    heads = [part for model in ATTENTION for part, _ in ModelShape.from_hf(model).parts_of(Attention)]
    experts = [(shape, part) for shape in map(ModelShape.from_hf, MOE) for part, _ in shape.parts_of(Experts)]
    return {
        ("n", "k"): [linears[model][name] for model, names in LINEARS.items() for name in names],
        ("heads", "kv_heads", "head_dim"): [(x.heads, x.kv_heads, x.head_dim) for x in heads],
        ("experts", "top_k", "hidden", "inner"): [
            (e.num_experts, e.experts_per_token, shape.hidden_size, e.intermediate_size) for shape, e in experts
        ],
    }


STEPS = "engine steps"
POWER_ROWS, COURSE_ROWS = "power.jsonl", "clock_course.jsonl"  # of kernels that ran for seconds, which are no timings
# sd of one cell between cards of one GPU model: Qwen3-8B, 8 requests, on four H200s: 2.96, 2.97, 3.06 and 3.05 s
# (validation/anchor.jsonl and first_look of the H200's profile). No calibration of one card can know better.
BETWEEN_CARDS = 0.017
# sd of a rare part's coefficient between models, assumed: each was measured in one model, which says nothing of others.
BETWEEN_MODELS = 0.1


@dataclass(frozen=True, slots=True)
class KernelError:
    """Relative errors of one kernel's rows: medians of |predicted / measured - 1|.

    rows, unseen: those that the fit has seen, and those that no fit sees (fp8plan.model.calibrate.profile_of)
    before:   by the prior (the datasheet profile)
    fitted:   by the fit, of the rows it has seen
    held_out: of the unseen rows; without any, by fits that have not seen the row's weight shape, head layout or engine
    worst:    the largest held-out error
    """

    kernel: str
    rows: int
    unseen: int
    before: float
    fitted: float
    held_out: float
    worst: float


@dataclass(frozen=True, slots=True)
class Calibration:
    profile: Profile
    errors: tuple[KernelError, ...]


def calibrate(folder: Path, card: Gpu, engine_version: str) -> Calibration:
    """Fit everything measured in `folder`. Raises ConfigError without engine steps, the least it needs."""
    rows, steps = kernel_rows(folder / "kernels"), step_windows(folder / "steps")
    powers = power_rows(folder / "kernels")
    if not steps:
        raise _no_rollouts(folder)
    _check_same(steps, card, engine_version)
    sheet, kept = datasheet_profile(card, engine_version), ~is_held_out(rows)
    rare = step_windows(folder / "families")
    prior = without_rare_parts(sheet, timed_rare_parts(rows[kept]), rare_parts(card))
    prior = with_power(prior, [*steps, *rare], sheet, powers)
    observations = [*observe(rows[kept], card), observe_steps(steps)]
    found = fit(observations, prior)
    # Again: engine steps run the layers that were timed, and how much small kernels move is known by now.
    again = replace(prior, layers=layer_residuals(rows[kept], card, found.profile))
    known = replace(with_rare_parts(found.profile, rare, sheet), layers=again.layers)
    again = with_power(again, [*steps, *rare], known, powers)
    found = fit(observations, again)
    leaving_out = LeavingOut(observations, again, found)
    unseen = leaving_out.errors()
    never = {x.kernel: x.errors(found.profile) for x in observe(rows[~kept], card)}
    errors = []
    for x in observations:
        elsewhere = never.get(x.kernel, unseen[x.kernel])
        before, fitted = _median(x.errors(prior)), _median(x.errors(found.profile))
        number, worst = never.get(x.kernel, np.zeros(0)).size, float(np.max(np.abs(np.expm1(elsewhere))))
        errors.append(KernelError(x.kernel, x.seconds.size, number, before, fitted, _median(elsewhere), worst))
    profile = replace(
        with_rare_parts(found.profile, rare, sheet),
        kind="calibrated",
        source=_source(rows, powers, steps),
        residuals={kernel: robust_sd(values) for kernel, values in unseen.items()},
        model_error=model_error(steps, leaving_out),
        hull=_hull(rows, steps),
        date=max(str(w.record.fields.get("date", ""))[:10] for w in steps) or datetime.now(UTC).date().isoformat(),
        notes={},
        layers=layer_residuals(rows[kept], card, found.profile),
        tensor_parallel=sorted(
            {size for size, whole_experts in (w.record.limits.cut for w in steps) if not whole_experts}
        ),
    )
    return Calibration(profile, tuple(errors))


def with_power(profile: Profile, steps: Sequence[Windows], known: Profile, kernels: pd.DataFrame) -> Profile:
    """The profile with the power coefficients of the readings of rollouts and single kernels.

    known: the profile that says how long kernels run
    """
    others = {name: value for name, value in profile.coefficients.items() if not name.startswith("power.")}
    return replace(profile, coefficients=others | power_coefficients(steps, known, kernels))


def with_rare_parts(profile: Profile, steps: Sequence[Windows], prior: Profile) -> Profile:
    """The profile with the coefficients of the rare parts of these rollouts' models, fitted to their steps; as it is
    without rollouts.

    prior: the datasheet profile, from which they start
    """
    if not steps:
        return profile
    started = replace(
        profile,
        coefficients=prior.coefficients | profile.coefficients,
        log_covariance=prior.log_covariance | profile.log_covariance,
    )
    measured = profile.coefficients
    rare = [name for name in prior.coefficients if name.startswith(RARE_PARTS) and name not in measured]
    used = [x.cost(started).partials.keys() & set(rare) for x in steps]
    names = [name for name in rare if any(name in mine for mine in used)]
    having = [x for x, mine in zip(steps, used, strict=True) if mine]
    found = fit([observe_steps(having)], started, names).profile
    unmeasured = set(rare) - set(names)
    covariance = {name: row for name, row in found.log_covariance.items() if name not in unmeasured}
    for name in names:
        covariance[name] = covariance[name] | {name: covariance[name][name] + BETWEEN_MODELS**2}
    kept = {name: value for name, value in found.coefficients.items() if name not in unmeasured}
    return replace(found, coefficients=kept, log_covariance=covariance)


def timed_rare_parts(rows: pd.DataFrame) -> set[str]:
    """The coefficients of rare parts that timings of kernels cover, as they begin."""
    if "head_dim" not in rows:
        return set()
    kernels = rows.kernel[rows.head_dim > NARROW].str.extract(r"^attention_(decode|prefill)\.(\w+)$").dropna()
    return {f"{WIDE_HEADS}{dtype}.{phase}_" for phase, dtype in kernels.itertuples(index=False)}


def measured_version(folder: Path) -> str:
    """The engine version of the rollouts in `folder`. Raises ConfigError where there are none, or of several."""
    file = folder / "steps" / "rollouts.jsonl"
    if not file.is_file():
        raise _no_rollouts(folder)
    found = sorted({str(x.fields["engine_version"]) for x in read_records(file)})
    if len(found) > 1:
        raise ConfigError(f"{file} holds rollouts of vLLM {' and '.join(found)}; a profile is of one: move the others")
    return found[0]


def _no_rollouts(folder: Path) -> ConfigError:
    return ConfigError(f"{folder / 'steps'} has no measured rollouts; type: fp8plan calibrate --output {folder}")


def kernel_rows(folder: Path) -> pd.DataFrame:
    """All timings of single kernels; empty where none was measured."""
    others = (".failed.jsonl", "machines.jsonl", POWER_ROWS, COURSE_ROWS)
    return read_all(x for x in sorted(folder.glob("*.jsonl")) if not x.name.endswith(others))


def power_rows(folder: Path) -> pd.DataFrame:
    """The power readings of single kernels; empty where none was measured."""
    rows = read_all(x for x in [folder / POWER_ROWS] if x.is_file())
    return rows[rows.power_w.notna()] if len(rows) else rows


def _check_same(steps: Sequence[Windows], card: Gpu, engine_version: str) -> None:
    """Raise ConfigError for rollouts of another GPU or engine version than the profile's."""
    for record in (x.record for x in steps):
        found = find_gpu(record.fields["gpu"]).name, record.fields["engine_version"]
        if found != (card.name, engine_version):
            raise ConfigError(
                f"line {record.line} of the rollouts is of {found[0]} with vLLM {found[1]}, the profile of {card.name} "
                f"with vLLM {engine_version}; a profile is of one GPU and one version: name that GPU with --gpu, or "
                "move the others away"
            )


def step_windows(folder: Path) -> list[Windows]:
    """The windows of every rollout in `folder` that has a trace."""
    if not (folder / "rollouts.jsonl").is_file():
        return []
    traces = read_traces(sorted(folder.glob("*.trace.jsonl.gz")))
    records = read_records(folder / "rollouts.jsonl")
    return [windows(x, traces[x.fields["key"]]) for x in records if x.fields.get("key") in traces]


def observe_steps(steps: Sequence[Windows]) -> Observations:
    """The windows of several rollouts as observations of one kernel. A group is an engine: a model in a precision."""

    def predict(profile: Profile) -> Cost:
        return together([x.cost(profile) for x in steps])

    groups = np.concatenate([np.repeat(x.engine, x.seconds.size) for x in steps])
    return Observations(STEPS, np.concatenate([x.seconds for x in steps]), groups, predict)


def model_error(steps: Sequence[Windows], leaving_out: LeavingOut) -> float:
    """The sd of log(predicted / measured) of whole rollouts that the coefficients' covariance does not explain.

    Each rollout is predicted by a fit that has not seen its engine, and counts by its seconds: one of a tenth of a
    second is start-up. What the fit's covariance says of the error is taken off: the interval adds it again.
    """
    engines = np.concatenate([np.repeat(x.engine, x.seconds.size) for x in steps])
    without = {engine: leaving_out.profile_without(STEPS, engines == engine) for engine in dict.fromkeys(engines)}
    unexplained = []
    for x in steps:
        profile = without[x.engine]
        cost = x.cost(profile)
        total = cost.seconds.sum()
        slopes = np.array([partial.sum() / total for partial in cost.partials.values()])
        explained = slopes @ profile.covariance(list(cost.partials)) @ slopes
        unexplained.append(np.log(total / x.seconds.sum()) ** 2 - explained)
    weights = [x.seconds.sum() for x in steps]
    return float(np.sqrt(max(np.average(unexplained, weights=weights), BETWEEN_CARDS**2)))


def _median(errors: Array) -> float:
    return float(np.median(np.abs(np.expm1(errors))))


def _hull(rows: pd.DataFrame, steps: Sequence[Windows]) -> dict[str, dict[str, tuple[float, float]]]:
    """The measured ranges: kernels' timings give those of their own quantities, and steps those of all others."""
    ranges: dict[str, tuple[float, float]] = {}
    of_kernels = hull(rows)
    covered = {quantity for found in of_kernels.values() for quantity in found}
    for name in set(QUANTITIES) - covered:
        values = np.concatenate([getattr(x.batch, name) for x in steps])
        used = values[values > 0]
        if used.size:
            ranges[name] = (float(used.min()), float(used.max()))
    return of_kernels | {STEPS: ranges}


def _source(rows: pd.DataFrame, powers: pd.DataFrame, steps: Sequence[Windows]) -> str:
    fields = [x.record.fields for x in steps]
    cards = sorted({str(x.get("gpu_uuid") or f"{x.get('cpu_count')} cores of {x.get('cpu_model')}") for x in fields})
    engines = len({x.engine for x in steps})
    kernels = [f"{len(rows)} timings of {rows.kernel.nunique()} kernels"] if len(rows) else []
    kernels += [f"{len(powers)} readings of their power"] if len(powers) else []
    rollouts = f"{len(steps)} rollouts of {engines} engines, measured on {', '.join(cards)}"
    return " and ".join(filter(None, [", ".join(kernels), rollouts]))
