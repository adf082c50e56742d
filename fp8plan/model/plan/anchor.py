"""Anchoring: rollouts that were measured on the user's machine correct the profile behind a plan.

A rollout's log time is linear, near the profile, in the logs of the coefficients (`Rollout.log_gradient`). So the
coefficients, with the covariance of the profile, are the prior of a Bayesian linear regression on the measured log
times. Each rollout also has errors of its own, with these standard deviations:

- the pace of GPU and host, which the profile has as coefficients. A part of it belongs to the model
- the pace of the precision, `precision_pace`, and of an unmeasured layout, `layout_pace`
- the pace of another engine version than the plan's
- WORKLOAD_SD, REST_SD and FRONT_SD, which are each rollout's own. A busy host or a compile adds more

Outliers, such as a rollout that compiled a kernel, count less: the errors of single rollouts follow Student's t
distribution, by iteratively reweighted least squares (Lange, Little & Taylor, JASA 1989). The cost model is linearised
again at each estimate (Gauss-Newton).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.choice import Answer, speed_up
from fp8plan.model.precision import PRESETS, STORED_PRESETS
from fp8plan.model.profile.library import with_kernels
from fp8plan.model.profile.profile import (
    HOST_LOOP,
    HOST_PACE,
    LAYOUT,
    OTHER_HOST_SD,
    PACES,
    PRECISION,
    VERSION_SD,
    Profile,
    cut_of,
    layout_pace,
    precision_pace,
)
from fp8plan.model.rollout import Z90, Rollout, Simulated, rollout
from fp8plan.model.validate.records import OF_ENGINE, Record
from fp8plan.schemas import QUIET_HOST

Matrix = NDArray[np.float64]

WORKLOAD_SD = 0.02  # sd of the error of one workload, which all precisions share
REST_SD = 0.02  # sd of the error of one rollout
FRONT_SD = 0.25  # sd of the log of a front's seconds from one rollout to the next (python -m benchmarks.inside)
MODEL_SHARE = 0.4  # the model's share in the variance of a pace
COMPILED_SD = 0.5  # sd of the log time of a rollout that compiled a kernel
DEGREES = 4  # degrees of freedom of Student's t
ROUNDS = 30  # most linearisations
SETTLED = 1e-4  # move of the log times at which no further linearisation is made
REWEIGHTINGS = 500  # most of them for each linearisation
LEAST = 1e-6  # least number that an anchor keeps
MOST = 8  # last rollouts of one engine that are used
ODD = 0.3  # weight below which a rollout is named as an outlier
NAMED = 0.005  # least change of a part that is named
PARTS = {
    "gpu.pace": "all of the GPU",
    "gemm": "linear layers",
    "attention": "attention",
    "mla": "attention",
    "moe": "experts",
    "collective": "all-reduce",
    "host": "the host",
    "host.pace": "the host",
    "front": "the front end",
    "precision": "this precision",
    "layout": "this layout",
}


@dataclass(frozen=True, slots=True)
class Anchor:
    """The correction of a profile by measured rollouts.

    shifts:   coefficient -> log of the factor on its value
    learnt:   vectors over the coefficients. The sum of their outer products is taken from the prior's covariance
    left_out: number of records of other GPUs, which teach nothing
    rollouts: a row for each rollout that was used: line, model, precision, engine_version, seconds, predicted_s by the
              profile alone, anchored_s with the correction, and weight: about 1, and near 0 for an outlier
    host_loop_s: the loop of the host that the shifts start from; None: the profile's host was not timed
    """

    shifts: dict[str, float]
    learnt: tuple[dict[str, float], ...]
    rollouts: tuple[dict[str, Any], ...]
    left_out: int = 0
    host_loop_s: float | None = None

    def applied(self, profile: Profile) -> Profile:
        wide = prior(profile, self.shifts)
        names = list(wide.log_covariance)
        vectors = np.array([[vector.get(name, 0.0) for name in names] for vector in self.learnt]).reshape(
            -1, len(names)
        )
        before = wide.covariance(names)
        after = before - vectors.T @ vectors
        host = names.index(HOST_PACE)
        after[host, host] += max(OTHER_HOST_SD**2 - before[host, host], 0.0)
        after = _positive(after)
        narrower = np.sqrt(np.minimum(1.0, before.diagonal() / np.maximum(after.diagonal(), LEAST**2)))
        covariance = after * np.outer(narrower, narrower)
        shift = np.array([self.shifts.get(name, 0.0) for name in names])
        return replace(
            _shifted(wide, names, shift),
            log_covariance={
                a: dict(zip(names, row, strict=True)) for a, row in zip(names, covariance.tolist(), strict=True)
            },
            source=f"{profile.source}; corrected by {len(self.rollouts)} measured rollouts",
        )

    def sentences(self, alone: Profile, answer: Answer) -> tuple[str, ...]:
        """The sentences of a plan on what the measured rollouts taught, and on the one that would teach most.

        alone:  the profile without the correction
        answer: the plan's, by the corrected profile
        """
        picked, corrected = answer.picked, answer.profile
        beside = zip(answer.choices, answer.rollouts, strict=True)
        runs = {c.precision: run for c, run in beside if run is not None and c.layout == picked.layout}
        slopes, cut = runs[picked.precision].log_gradient, picked.cut
        before, now = (_half(_variance(profile, slopes, cut)) for profile in (alone, corrected))
        changes = f"They change the time of {picked.precision} by {_changes(self.shifts, slopes)}."
        for name in sorted(self.shifts.keys() & slopes.keys()):
            if name.startswith("front.") and name.endswith((".token_seconds", ".thread_seconds")):
                token_us = 1e6 * corrected.coefficient(name)
                usual_us = token_us * math.exp(-self.shifts[name])
                changes += f" The front end takes {token_us:.0f} us a token, not {usual_us:.0f}."
        sentences = [self._fit(), f"{changes} Its interval was +-{before:.0%} of the time, and is +-{now:.0%}."]
        fp8 = [name for name in runs if name != "bf16"]
        other = "bf16" if picked.precision != "bf16" else next(iter(fp8), "")
        if other not in runs:
            return tuple(sentences)
        base, own = runs[other], runs[picked.precision]
        gains = [speed_up(base, own, profile) for profile in (alone, corrected)]
        before, now = ((gain.high or gain.ratio) / gain.ratio - 1 for gain in gains)
        names = (*slopes, *base.log_gradient)
        apart = {name: slopes.get(name, 0.0) - base.log_gradient.get(name, 0.0) for name in names}
        taught = {name: _taught(corrected, apart, run.log_gradient) for name, run in runs.items()}
        best = max(taught, key=lambda name: taught[name])
        then = _half((math.log1p(now) / Z90) ** 2 - taught[best])
        sentences.append(
            f"The interval of the speed-up over {other} was +-{before:.1%}, and is +-{now:.1%}. A measured rollout in "
            f"{best} would tell most: +-{then:.1%}."
        )
        return tuple(sentences)

    def _fit(self) -> str:
        """A sentence on the measured rollouts before and after the correction."""
        gaps = [
            [abs(math.log(row["seconds"] / row[key])) for row in self.rollouts] for key in ("predicted_s", "anchored_s")
        ]
        before, now = (math.expm1(sum(gap) / len(gap)) for gap in gaps)
        odd = [str(row["line"]) for row in self.rollouts if row["weight"] < ODD]
        but = f" Line {', '.join(odd)} disagrees with the others and counts little." if odd else ""
        but += f" {self.left_out} of another GPU are left out." if self.left_out else ""
        count = len(self.rollouts)
        subject = "1 measured rollout corrects" if count == 1 else f"{count} measured rollouts correct"
        return f"{subject} the profile: it was off by {before:.1%}, and is by {now:.1%}.{but}"


def _half(variance: float) -> float:
    """The half-width of a 90% interval, as a fraction, of a log with this variance."""
    return math.expm1(Z90 * math.sqrt(variance))


def _variance(profile: Profile, slopes: Mapping[str, float], cut: tuple[int, bool]) -> float:
    """The variance of the log time of a rollout with these derivatives. cut: its layout, as in EngineLimits"""
    g = np.array(list(slopes.values()))
    own = profile.model_error**2 + profile.layout_error(*cut) ** 2
    return float(g @ profile.covariance(list(slopes)) @ g) + own


def _taught(profile: Profile, target: Mapping[str, float], slopes: Mapping[str, float]) -> float:
    """The variance that a measured rollout takes from a log. target, slopes: the derivatives of the log, and of its."""
    names = list(dict.fromkeys((*target, *slopes)))
    covariance = profile.covariance(names)
    wanted, seen = (np.array([each.get(name, 0.0) for name in names]) for each in (target, slopes))
    noise = WORKLOAD_SD**2 + REST_SD**2
    return float((wanted @ covariance @ seen) ** 2 / (seen @ covariance @ seen + noise))


def _changes(shifts: Mapping[str, float], slopes: Mapping[str, float]) -> str:
    """The words for the change of a rollout's time, and for its parts."""
    parts: dict[str, float] = {}
    for name, shift in shifts.items():
        part = PARTS.get(name.partition(".")[0] if name not in PACES else name, "other kernels")
        parts[part] = parts.get(part, 0.0) + shift * slopes.get(name, 0.0)
    largest = sorted((part for part in parts if abs(parts[part]) >= NAMED), key=lambda part: -abs(parts[part]))
    words = ", ".join(f"{part} {math.expm1(parts[part]):+.1%}" for part in largest)
    return f"{math.expm1(sum(parts.values())):+.1%}" + (f" ({words})" if words else "")


def prior(profile: Profile, names: Iterable[str] = ()) -> Profile:
    """The profile with the errors of precisions and layouts as coefficients, and with the kernels of `names`."""
    kernels = {name.rpartition(".")[0] for name in names if not name.endswith(".pace")}
    wide = with_kernels(profile, find_gpu(profile.gpu), sorted(kernels))
    own = max(profile.model_error**2 - REST_SD**2, 0.0)
    paces = {precision_pace(name): own for name in PRESETS | STORED_PRESETS}
    paces |= {name: profile.layout_error(*cut_of(name)) ** 2 for name in names if name.startswith(LAYOUT)}
    paces = {name: variance for name, variance in paces.items() if name not in wide.coefficients}
    return replace(
        wide,
        coefficients=wide.coefficients | dict.fromkeys(paces, 1.0),
        log_covariance=wide.log_covariance | {name: {name: variance} for name, variance in paces.items()},
        model_error=min(profile.model_error, REST_SD),
    )


def anchored(profile: Profile, shape: ModelShape | None, engine_version: str, records: Sequence[Record]) -> Anchor:
    """The correction of a profile by measured rollouts on its GPU.

    shape, engine_version: the plan's model and version of vLLM; None: any other model than the measured ones

    Records of another GPU teach nothing and are left out.

    Raises ConfigError if no record is left, and, naming the line, for one that fp8plan cannot simulate.
    """
    here = [record for record in records if record.setup.gpu.name == profile.gpu]
    if not here:
        others = ", ".join(dict.fromkeys(record.setup.gpu.name for record in records)) or "no GPU"
        allowed = f"at least one of {profile.gpu}, the plan's GPU"
        raise ConfigError(f"the observed rollouts are of {others}; allowed: {allowed}")
    latest = _latest(here)
    alone = [_simulated(record, profile) for record in latest]
    base = prior(profile, dict.fromkeys(name for each in alone for name in _coefficients(each)))
    hosts = [record.fields.get("host_loop_s") for record in latest]
    models = [each.model.shape for each in alone]
    common = _Common(base, engine_version, models, [record.fields["engine_version"] for record in latest])
    seconds, count = np.log([record.seconds for record in latest]), len(latest)
    bare = replace(base, log_covariance={})  # the steps below need no intervals
    shifts, weights = np.zeros((count, len(common.names))), np.ones(count)
    disturbed = np.array([_disturbance(*pair, bare) for pair in zip(latest, alone, strict=True)])
    left = np.full(count, math.inf)
    for _ in range(ROUNDS):
        rollouts = [
            _predicted(each, _shifted(bare, common.names, shift).on_host(loop_s))
            for each, shift, loop_s in zip(alone, shifts, hosts, strict=True)
        ]
        slopes = np.array([[x.log_gradient.get(name, 0.0) for name in common.names] for x in rollouts])
        gaps = seconds - np.log([x.makespan_s for x in rollouts]) + (slopes * shifts).sum(axis=1)
        noise = disturbed + np.array([_noise(each) for each in rollouts])
        in_common, last = common.spread(slopes), left
        for _ in range(REWEIGHTINGS):
            spread = in_common + np.diag(noise / weights)
            pulls = np.linalg.solve(spread, gaps)
            left = noise / weights * pulls
            weights, before = (DEGREES + 1) / (DEGREES + left**2 / noise), weights
            if np.allclose(weights, before, rtol=1e-9):
                break
        shifts = np.array([common.with_coefficients(model, slopes).T @ pulls for model in models])
        if np.allclose(left, last, rtol=0.0, atol=SETTLED):
            break
    moved = common.with_coefficients(shape, slopes).T
    values, vectors = np.linalg.eigh(spread)
    return Anchor(
        shifts=_sparse(common.names, moved @ pulls),
        learnt=tuple(_sparse(common.names, vector) for vector in (moved @ vectors / np.sqrt(values)).T),
        rollouts=tuple(
            {name: record.fields[name] for name in ("model", "precision", "engine_version")}
            | {"line": record.line, "seconds": record.seconds, "predicted_s": each.rollout.makespan_s}
            | {"anchored_s": record.seconds * math.exp(-gap), "weight": weight}
            for record, each, gap, weight in zip(latest, alone, left.tolist(), weights.tolist(), strict=True)
        ),
        left_out=len(records) - len(here),
        host_loop_s=profile.coefficients.get(HOST_LOOP),
    )


def corrected(profile: Profile, anchor: Anchor | None, host_loop_s: float | None) -> Profile:
    """The profile for an engine: by rollouts that were measured on its machine, else by the seconds of its host's loop.

    host_loop_s: as in RolloutRecord; None: not known. An anchor knows the host better
    """
    return profile.on_host(host_loop_s) if anchor is None else anchor.applied(profile.on_host(anchor.host_loop_s))


def _noise(rollout: Rollout) -> float:
    """The variance of a rollout's log time that no other rollout teaches."""
    front = FRONT_SD * rollout.parts.get("front", 0.0)
    return WORKLOAD_SD**2 + REST_SD**2 + rollout.sampling_sd**2 + front**2


def _disturbance(record: Record, alone: Simulated, profile: Profile) -> float:
    """The variance that a compile and a busy host add to a rollout's log time. Of a timed host its pace is known."""
    variance = COMPILED_SD**2 if record.fields.get("compiled_files") else 0.0
    if record.fields.get("host_loop_s") is not None and HOST_LOOP in profile.coefficients:
        return variance
    slowdown = (record.fields.get("host_slowdown") or 1.0) / QUIET_HOST
    if slowdown > 1:
        slow = _predicted(alone, _shifted(profile, [HOST_PACE], np.log([slowdown])))
        variance += math.log(slow.makespan_s / alone.rollout.makespan_s) ** 2
    return variance


class _Common:
    """The covariance of the errors that rollouts have in common.

    Rollouts of two models share a part of the paces of GPU and host, and no pace of a precision. All rollouts of one
    engine version other than the plan's share an error.
    """

    def __init__(
        self, base: Profile, engine_version: str, models: Sequence[ModelShape], versions: Sequence[str]
    ) -> None:
        self.names, self._models = list(base.log_covariance), models
        same = base.covariance(self.names)
        paces = [self.names.index(name) for name in PACES]
        precisions = [number for number, name in enumerate(self.names) if name.startswith(PRECISION)]
        same[paces, paces] = np.maximum(same[paces, paces] - WORKLOAD_SD**2, 0.0)
        host = self.names.index(HOST_PACE)
        same[host, host] = max(same[host, host], OTHER_HOST_SD**2)
        other = same.copy()
        other[paces, paces] *= 1 - MODEL_SHARE
        other[precisions, precisions] = 0.0
        self._covariances = {True: same, False: other}
        self._versions = np.array([[VERSION_SD**2 * (a == b != engine_version) for b in versions] for a in versions])

    def with_coefficients(self, model: ModelShape | None, slopes: Matrix) -> Matrix:
        """The covariance of each rollout with the coefficients for a model, shape (rollouts, names)."""
        pairs = zip(self._models, slopes, strict=True)
        return np.asarray([self._covariances[other.is_like(model)] @ slope for other, slope in pairs])

    def spread(self, slopes: Matrix) -> Matrix:
        """The covariance of the rollouts with each other, shape (rollouts, rollouts)."""
        pairs = zip(self._models, slopes, strict=True)
        rows = [self.with_coefficients(model, slopes) @ slope for model, slope in pairs]
        return np.asarray(self._versions + np.array(rows))


def _simulated(record: Record, profile: Profile) -> Simulated:
    """The record's rollout by the profile. Raises ConfigError naming the line."""
    from fp8plan.model.validate.validate import simulated

    try:
        return simulated(record, profile)
    except Fp8PlanError as error:
        raise type(error)(f"line {record.line}: {error}") from None


def _predicted(alone: Simulated, profile: Profile) -> Rollout:
    """The simulated rollout by another profile. Its schedule stays the same."""
    return rollout(alone.schedules, replace(alone.model, profile=profile))


def _coefficients(alone: Simulated) -> list[str]:
    """The coefficients behind a simulated rollout, and those of its precision and layout."""
    model = alone.model
    return [*alone.rollout.log_gradient, precision_pace(model.precision.name), layout_pace(*model.limits.cut)]


def _latest(records: Sequence[Record]) -> list[Record]:
    """The last MOST records of each engine and model, in order."""
    engines: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        # As text, since a list (keep_bf16) is no key.
        engines.setdefault(tuple(str(record.fields.get(name)) for name in OF_ENGINE), []).append(record)
    return sorted((record for own in engines.values() for record in own[-MOST:]), key=lambda record: record.line)


def _shifted(base: Profile, names: Sequence[str], shift: Matrix) -> Profile:
    """The profile with each coefficient times exp(shift)."""
    factors = zip(names, np.exp(shift).tolist(), strict=True)
    moved = {name: base.coefficients[name] * factor for name, factor in factors}
    moved |= {name: min(value, 1.0) for name, value in moved.items() if name.endswith("_efficiency")}
    return replace(base, coefficients=base.coefficients | moved)


def _sparse(names: Sequence[str], values: Matrix) -> dict[str, float]:
    return {name: value for name, value in zip(names, values.tolist(), strict=True) if abs(value) > LEAST}


def _positive(covariance: Matrix) -> Matrix:
    """The nearest positive semidefinite matrix."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    cleaned = (vectors * np.maximum(values, 0.0)) @ vectors.T
    return np.asarray((cleaned + cleaned.T) / 2)
