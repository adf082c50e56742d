"""The profile that fits a folder of measurements, and its errors before and after the fit.

    FOLDER/kernels/*.jsonl              timings of single kernels (runtime.measure.kernels.gemm, attention, moe, ...)
    FOLDER/kernels/power.jsonl          their power (runtime.measure.kernels.power)
    FOLDER/steps/rollouts.jsonl         rollouts whose steps are fitted (fp8plan.runtime.measure.rollouts.run --trace)
    FOLDER/steps/rollouts.trace.jsonl.gz
    FOLDER/families/rollouts.jsonl      rollouts of models with rare parts (MLA, states), if there are any; with a trace
    FOLDER/profile.json                 the fitted profile, which `fp8plan calibrate` writes

Kernels show how each GEMM and attention scales with its shape. Engine steps show the costs between them: launches,
small kernels, sampling, the host. Both are fitted at once, so neither has to be subtracted from the other. The
coefficients of rare parts are fitted after that, with all others fixed, unless their kernels were timed.

Some measured shapes are held out of every fit: they show the error of a profile on other shapes. They were chosen
before the first measurement. Decode batches of unequal contexts are held out too, because their imbalance is not
modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isclose
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
from fp8plan.model.profile.profile import (
    FITTED,
    HOST_PACE,
    KNOWN_HOST_SD,
    PACES,
    VERSION_SD,
    Profile,
    between,
    error_parts,
)
from fp8plan.model.validate.records import Record, read_records

LINEARS = {"Qwen/Qwen3-14B": ("qkv_proj", "gate_up_proj", "down_proj"), "meta-llama/Llama-3.2-1B": ("down_proj",)}
ATTENTION = ("Qwen/Qwen3-14B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-1B")
UNEQUAL = "lognormal"
MOE = ("Qwen/Qwen3-235B-A22B",)
STEPS = "engine steps"
POWER_ROWS, COURSE_ROWS = "power.jsonl", "clock_course.jsonl"  # kernels that ran for seconds: no timings
# sd of one cell between cards of one GPU model, which no calibration of one card can improve on. From Qwen3-8B with 8
# requests on four H200s (validation/anchor.jsonl and first_look of the H200's profile).
BETWEEN_CARDS = 0.017
LARGEST_SD = 1.0  # of whole rollouts by a calibrated profile: more tells of broken rollouts
# sd of a rare part's coefficient between models, assumed: each was measured in one model.
BETWEEN_MODELS = 0.1


def is_held_out(rows: pd.DataFrame) -> Array:
    """True for each timing of a held-out shape, shape (rows,)."""
    held = np.zeros(len(rows), dtype=bool)
    for columns, shapes in _shapes().items():
        if set(columns) <= set(rows.columns):
            held |= pd.MultiIndex.from_frame(rows[list(columns)]).isin(shapes)
    if {"kernel", "skew"} <= set(rows.columns):
        held |= rows.kernel.str.startswith("attention_decode").to_numpy() & (rows["skew"] == UNEQUAL).to_numpy()
    return held


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


@dataclass(frozen=True, slots=True)
class KernelError:
    """Relative errors of one kernel's rows: medians of |predicted / measured - 1|.

    rows, unseen: the rows of the fit, and the rows that are held out of every fit
    before:   by the prior (the datasheet profile)
    fitted:   by the fit, of its own rows
    held_out: by the fit, of the unseen rows; without any, by fits that have not seen the row's shape, layout or engine
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
    """A profile, the errors of its kernels, and the label of the profile that it began with."""

    profile: Profile
    errors: tuple[KernelError, ...]
    prior: str = "the datasheet profile"


def calibrate(folder: Path, card: Gpu, engine_version: str, other: Profile | None = None) -> Calibration:
    """Fit everything measured in `folder`. Raises ConfigError without engine steps, the least it needs.

    other: the profile of this GPU with another engine version. It lends the coefficients of parts not measured here
    """
    rows, steps = kernel_rows(folder / "kernels"), step_windows(folder / "steps")
    powers = power_rows(folder / "kernels")
    if not steps:
        raise _no_rollouts(folder)
    _check_same([run.record for run in steps], card, engine_version)
    sheet, kept = datasheet_profile(card, engine_version), ~is_held_out(rows)
    rare = step_windows(folder / "families")
    prior = without_rare_parts(sheet, timed_rare_parts(rows[kept]), rare_parts(card))
    prior = with_power(prior.with_errors(0.0, 0.0), [*steps, *rare], sheet, powers)
    observations = [*observe(rows[kept], card), observe_steps(steps)]
    first = fit(observations, prior).profile
    # A second fit, with the timed layers that engine steps run, and with the known sizes of small kernels.
    layers = layer_residuals(rows[kept], card, first)
    known = replace(with_rare_parts(first, rare, sheet), layers=layers)
    again = with_power(replace(prior, layers=layers), [*steps, *rare], known, powers)
    fitted = fit(observations, again)
    leaving_out = LeavingOut(observations, again, fitted)
    unseen = leaving_out.errors()
    never = {timed.kernel: timed.errors(fitted.profile) for timed in observe(rows[~kept], card)}
    errors = []
    for timed in observations:
        elsewhere = never.get(timed.kernel, unseen[timed.kernel])
        number, worst = never.get(timed.kernel, np.zeros(0)).size, float(np.max(np.abs(np.expm1(elsewhere))))
        before, after = _median(timed.errors(prior)), _median(timed.errors(fitted.profile))
        errors.append(KernelError(timed.kernel, timed.seconds.size, number, before, after, _median(elsewhere), worst))
    whole = with_rare_parts(fitted.profile, rare, sheet)
    profile = replace(
        whole,
        kind="calibrated",
        source=_source(rows, powers, steps),
        residuals={kernel: robust_sd(values) for kernel, values in unseen.items()},
        hull=_hull(rows, steps),
        date=max(str(w.record.fields.get("date", ""))[:10] for w in steps) or datetime.now(UTC).date().isoformat(),
        notes=_unmoved(whole, sheet),
        layers=layer_residuals(rows[kept], card, fitted.profile),
        tensor_parallel=sorted({size for size, whole in (w.record.limits.cut for w in steps) if not whole}),
    )
    profile = profile.with_errors(*error_parts(total_error(steps, leaving_out)))
    return Calibration(with_lent(profile, other), tuple(errors))


def _unmoved(fitted: Profile, sheet: Profile) -> dict[str, str]:
    """The coefficients that no measurement moved -> the datasheet's source of their values."""
    shared = fitted.coefficients.keys() & sheet.coefficients.keys() - {*PACES}
    unmoved = (name for name in sorted(shared) if isclose(fitted.coefficients[name], sheet.coefficients[name]))
    return {name: sheet.notes[name] for name in unmoved}


def with_power(profile: Profile, steps: Sequence[Windows], known: Profile, kernels: pd.DataFrame) -> Profile:
    """The profile with the power coefficients of the readings of rollouts and single kernels.

    known: the profile that says how long kernels run
    """
    others = {name: value for name, value in profile.coefficients.items() if not name.startswith("power.")}
    return replace(profile, coefficients=others | power_coefficients(steps, known, kernels))


def with_rare_parts(profile: Profile, steps: Sequence[Windows], prior: Profile) -> Profile:
    """The profile with the coefficients of rare parts fitted to the steps of these rollouts, if there are any.

    prior: the datasheet profile, where they start
    """
    if not steps:
        return profile
    measured = profile.coefficients.keys()
    started = replace(
        profile,
        coefficients=prior.coefficients | profile.coefficients,
        log_covariance=between(prior.log_covariance, prior.coefficients.keys() - measured) | profile.log_covariance,
    )
    rare = [name for name in prior.coefficients if name.startswith(RARE_PARTS) and name not in measured]
    used = [run.cost(started).partials.keys() & set(rare) for run in steps]
    names = [name for name in rare if any(name in mine for mine in used)]
    having = [run for run, mine in zip(steps, used, strict=True) if mine]
    fitted = fit([observe_steps(having)], started, names).profile
    unmeasured = set(rare) - set(names)
    covariance = {name: row for name, row in fitted.log_covariance.items() if name not in unmeasured}
    for name in names:
        covariance[name] = covariance[name] | {name: covariance[name][name] + BETWEEN_MODELS**2}
    kept = {name: value for name, value in fitted.coefficients.items() if name not in unmeasured}
    return replace(fitted, coefficients=kept, log_covariance=covariance)


def with_lent(profile: Profile, other: Profile | None) -> Profile:
    """The profile with the coefficients that only `other` has measured, each with a note.

    other: a profile of the same GPU with another engine version; its values get the error of such a use
    """
    if other is None:
        return profile
    borrowed = {name for name, note in other.notes.items() if note.startswith(FITTED)}
    lent = other.coefficients.keys() - profile.coefficients.keys() - borrowed
    covariance = between(other.log_covariance, lent)
    for name, row in covariance.items():
        row[name] += VERSION_SD**2
    note = f"{FITTED}measurements with {other.engine} {other.engine_version}"
    return profile.with_coefficients_of(replace(other, log_covariance=covariance), dict.fromkeys(lent, note))


def timed_rare_parts(rows: pd.DataFrame) -> set[str]:
    """The prefixes of the coefficients of rare parts that timings of kernels cover."""
    if "head_dim" not in rows:
        return set()
    kernels = rows.kernel[rows.head_dim > NARROW].str.extract(r"^attention_(decode|prefill)\.(\w+)$").dropna()
    return {f"{WIDE_HEADS}{dtype}.{phase}_" for phase, dtype in kernels.itertuples(index=False)}


def measured_version(folder: Path) -> str:
    """The engine version of the rollouts in `folder`. Raises ConfigError if there are none, or several versions."""
    file = folder / "steps" / "rollouts.jsonl"
    if not file.is_file():
        raise _no_rollouts(folder)
    versions = sorted({str(record.fields["engine_version"]) for record in read_records(file)})
    if len(versions) > 1:
        raise ConfigError(
            f"{file} holds rollouts of vLLM {' and '.join(versions)}; a profile is of one: move the others"
        )
    return versions[0]


def _no_rollouts(folder: Path) -> ConfigError:
    return ConfigError(f"{folder / 'steps'} has no measured rollouts; type: fp8plan calibrate --output {folder}")


def kernel_rows(folder: Path) -> pd.DataFrame:
    """All timings of single kernels; empty where none was measured."""
    others = (".failed.jsonl", "machines.jsonl", POWER_ROWS, COURSE_ROWS)
    return read_all(file for file in sorted(folder.glob("*.jsonl")) if not file.name.endswith(others))


def power_rows(folder: Path) -> pd.DataFrame:
    """The power readings of single kernels; empty where none was measured."""
    rows = read_all(file for file in [folder / POWER_ROWS] if file.is_file())
    return rows[rows.power_w.notna()] if len(rows) else rows


def _check_same(records: Iterable[Record], card: Gpu, engine_version: str) -> None:
    """Raise ConfigError for rollouts of another GPU or engine version than the profile's."""
    for record in records:
        gpu, version = find_gpu(record.fields["gpu"]).name, record.fields["engine_version"]
        if (gpu, version) != (card.name, engine_version):
            raise ConfigError(
                f"line {record.line} of the rollouts is of {gpu} with vLLM {version}, the profile of {card.name} with "
                f"vLLM {engine_version}; a profile is of one GPU and one version: name that GPU with --gpu, or move "
                "the others away"
            )


def step_windows(folder: Path) -> list[Windows]:
    """The windows of every rollout in `folder` that has a trace."""
    if not (folder / "rollouts.jsonl").is_file():
        return []
    traces = read_traces(sorted(folder.glob("*.trace.jsonl.gz")))
    records = read_records(folder / "rollouts.jsonl")
    return [windows(record, traces[record.fields["key"]]) for record in records if record.fields.get("key") in traces]


def observe_steps(steps: Sequence[Windows]) -> Observations:
    """The windows of several rollouts as observations of one kernel. A group is an engine: a model in a precision."""

    def predict(profile: Profile) -> Cost:
        return together([run.cost(profile) for run in steps])

    groups = np.concatenate([np.repeat(run.engine, run.seconds.size) for run in steps])
    return Observations(STEPS, np.concatenate([run.seconds for run in steps]), groups, predict)


def total_error(steps: Sequence[Windows], leaving_out: LeavingOut) -> float:
    """The sd of log(predicted / measured) of whole rollouts that the interval has no other term for, at the likeliest.

    Each rollout is predicted by a fit that has not seen its engine, and counts by its seconds, as a short one is mostly
    start-up. The interval's other terms are the coefficients' covariance and KNOWN_HOST_SD of the host's time.
    """
    engines = np.concatenate([np.repeat(run.engine, run.seconds.size) for run in steps])
    without = {engine: leaving_out.profile_without(STEPS, engines == engine) for engine in dict.fromkeys(engines)}
    errors, explained = [], []
    for run in steps:
        profile = without[run.engine]
        cost = run.cost(profile)
        total = cost.seconds.sum()
        slopes = {name: partial.sum() / total for name, partial in cost.partials.items()}
        vector = np.array([*slopes.values()])
        host = slopes.get(HOST_PACE, 0.0) * KNOWN_HOST_SD
        errors.append(np.log(total / run.seconds.sum()))
        explained.append(vector @ profile.covariance([*slopes]) @ vector + host**2)
    return likeliest_sd(np.array(errors), np.array(explained), np.array([run.seconds.sum() for run in steps]))


def likeliest_sd(errors: Array, explained: Array, weights: Array) -> float:
    """The sd, from BETWEEN_CARDS to LARGEST_SD, under which these errors are likeliest.

    Each error is normal with mean 0. Its variance is that sd squared plus its own `explained`. A rollout whose error is
    explained otherwise, such as by the host, tells little of the sd.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_sd: float) -> float:
        variance = explained + np.exp(2 * log_sd)
        return float(weights @ (np.log(variance) + errors**2 / variance))

    bounds = np.log([BETWEEN_CARDS, LARGEST_SD])
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x))


def _median(errors: Array) -> float:
    return float(np.median(np.abs(np.expm1(errors))))


def _hull(rows: pd.DataFrame, steps: Sequence[Windows]) -> dict[str, dict[str, tuple[float, float]]]:
    """The measured ranges: kernels' timings give those of their own quantities, and steps those of all others."""
    ranges: dict[str, tuple[float, float]] = {}
    of_kernels = hull(rows)
    covered = {quantity for own in of_kernels.values() for quantity in own}
    for name in set(QUANTITIES) - covered:
        values = np.concatenate([getattr(run.batch, name) for run in steps])
        used = values[values > 0]
        if used.size:
            ranges[name] = (float(used.min()), float(used.max()))
    return of_kernels | {STEPS: ranges}


def _source(rows: pd.DataFrame, powers: pd.DataFrame, steps: Sequence[Windows]) -> str:
    engines = len({x.engine for x in steps})
    kernels = [f"{len(rows)} timings of {rows.kernel.nunique()} kernels"] if len(rows) else []
    kernels += [f"{len(powers)} readings of their power"] if len(powers) else []
    fields = [run.record.fields for run in steps]
    cards = {str(x.get("gpu_uuid") or f"{x.get('cpu_count')} cores of {x.get('cpu_model')}") for x in fields}
    rollouts = f"{len(steps)} rollouts of {engines} engines, measured on {', '.join(sorted(cards))}"
    return " and ".join(filter(None, [", ".join(kernels), rollouts]))
