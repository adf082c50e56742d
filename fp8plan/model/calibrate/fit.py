"""The fit of coefficients to measurements: penalised least squares on log time.

    minimise  sum over kernels and their rows    rho(log(predicted / measured) / sigma_kernel)
            + sum over coefficients              rho((log c - log prior) / sd)

The prior is the datasheet profile, so a coefficient that no measurement moves keeps its value and its wide uncertainty.
sigma_kernel is the residual of that kernel (iterated to a fixed point), so a badly modelled kernel does not pull on a
well modelled one. rho is Huber's: a stalled measurement must not move a coefficient. Rows of one group (one engine, one
weight shape) have common errors. So the held-out error leaves out whole groups, and the covariance is a jackknife: how
far the fit moves when a group is left out.

Engine steps are measured by a rollout record and its trace, cut into windows of time. Times are the engine's own clock
(core_s). The front end's clock (t_s) has pauses of 0.3 to 1.2 s, for which the next steps make up: its windows must be
long. A window is matched to the schedule by the number of tokens generated so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.jsonl import rows
from fp8plan.model.cost.base import Array, Cost, FloatArray, StepBatch
from fp8plan.model.cost.host import start_cost
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.profile.profile import HOST_LOOP, HOST_PACE, Profile
from fp8plan.model.rollout import schedule_with, step_batch
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.validate.records import Record

HUBER = 1.5  # in units of sigma; a larger residual counts linearly
LEAST_SIGMA = 0.01  # the timer's own spread
ROUNDS = 6  # updates of sigma; later ones change it by less than a percent
FOLDS = 5
WINDOW_S, FRONT_END_WINDOW_S = 0.5, 12.0
FEWEST_STEPS = 8  # in a window

Rows: TypeAlias = tuple[Array, Array]  # log errors of a kernel's rows and their slopes: (rows,) and (rows, names)


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured seconds of one kernel, or of whole engine steps, and their prediction by a profile.

    kernel:  the name of its residual in the profile
    seconds: shape (rows,)
    groups:  shape (rows,); rows of one group are left out together
    predict: profile -> seconds with partials, shape (rows,)
    """

    kernel: str
    seconds: Array
    groups: Array
    predict: Callable[[Profile], Cost]

    def errors(self, profile: Profile) -> Array:
        """The errors log(predicted / measured), shape (rows,)."""
        return np.asarray(np.log(self.predict(profile).seconds / self.seconds))


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of `fit`.

    profile:   the prior with the fitted coefficients and their covariance
    residuals: kernel -> robust sd of log error, of the fitted rows
    names:     the coefficients that were fitted
    """

    profile: Profile
    residuals: dict[str, float]
    names: tuple[str, ...]


def fit(observations: Sequence[Observations], prior: Profile, free: Sequence[str] | None = None) -> Fit:
    """Fit the profile whose predictions are nearest to the observations.

    prior: its coefficients are the start and the prior, with the variances of its log_covariance
    free:  coefficients to fit; None: all that have a variance

    Raises ConfigError if there is nothing to fit.
    """
    observations = [observed for observed in observations if observed.seconds.size]
    if not observations:
        raise ConfigError("there are no measurements to fit; run `fp8plan calibrate` on the GPU first")
    names = [name for name in (free or prior.coefficients) if prior.log_covariance.get(name, {}).get(name, 0) > 0]
    theta, sigmas = _prior(prior, names)[0], np.full(len(observations), 0.2)

    def rows(at: Array) -> list[Rows]:
        return _residuals(observations, _with_values(prior, names, at), names)

    for _ in range(ROUNDS):
        theta = _minimise(rows, prior, names, theta, sigmas)
        sigmas = np.array([max(robust_sd(errors), LEAST_SIGMA) for errors, _ in rows(theta)])
    covariance = _covariance([observed.groups for observed in observations], rows(theta), prior, names, sigmas)
    table = {a: {b: float(covariance[i, j]) for j, b in enumerate(names)} for i, a in enumerate(names)}
    kept = {
        a: {b: v for b, v in row.items() if b not in table} for a, row in prior.log_covariance.items() if a not in table
    }
    fitted = replace(_with_values(prior, names, theta), log_covariance=kept | table)
    residuals = {observed.kernel: float(sigma) for observed, sigma in zip(observations, sigmas, strict=True)}
    return Fit(fitted, residuals, tuple(names))


def _with_values(profile: Profile, names: Sequence[str], logs: Array) -> Profile:
    values = dict(zip(names, np.exp(logs).tolist(), strict=True))
    return replace(profile, coefficients=profile.coefficients | values)


def robust_sd(errors: Array) -> float:
    """The standard deviation around zero of errors clipped at Huber's bend, so that a few outliers do not move it."""
    scale = 1.4826 * float(np.median(np.abs(errors)))
    clipped = np.clip(errors, -2 * scale, 2 * scale) if scale > 0 else errors
    return float(np.sqrt(np.mean(clipped**2)))


class LeavingOut:
    """Fits without some rows, approximated from the fit of all rows.

    They are exact to first order in the coefficients, with the same sigmas. Predicting all rows anew for each of some
    fifty fits would take minutes.
    """

    def __init__(self, observations: Sequence[Observations], prior: Profile, full: Fit) -> None:
        self.observations, self.prior, self.full = observations, prior, full
        self.theta = np.log([full.profile.coefficients[name] for name in full.names])
        self.rows = _residuals(observations, full.profile, full.names)
        self.sigmas = np.array([full.residuals[x.kernel] for x in observations])

    def without(self, kernel: str, left_out: Array) -> Array:
        """Logs of the fitted coefficients without the `left_out` rows of `kernel`, shape (names,)."""
        kept = [np.full(x.seconds.size, True) if x.kernel != kernel else ~left_out for x in self.observations]

        def rows(at: Array) -> list[Rows]:
            away = at - self.theta
            return [(e[keep] + j[keep] @ away, j[keep]) for keep, (e, j) in zip(kept, self.rows, strict=True)]

        return _minimise(rows, self.prior, self.full.names, self.theta, self.sigmas)

    def profile_without(self, kernel: str, left_out: Array) -> Profile:
        """The profile with those coefficients, and the covariance of the fit of all."""
        return _with_values(self.full.profile, self.full.names, self.without(kernel, left_out))

    def errors(self, folds: int = FOLDS) -> dict[str, Array]:
        """Kernel -> log errors of its rows, each by a fit that has not seen the row's group, shape (rows,)."""
        unseen = {}
        for target, (errors, slopes) in zip(self.observations, self.rows, strict=True):
            fold, moved = _folds(target.groups, folds), errors.copy()
            for number in np.unique(fold):
                out = fold == number
                moved[out] += slopes[out] @ (self.without(target.kernel, out) - self.theta)
            unseen[target.kernel] = moved
        return unseen


def _folds(groups: Array, folds: int) -> Array:
    """A number below `folds` for each row, the same within a group, shape (rows,)."""
    labels, group = np.unique(groups, return_inverse=True)
    return np.asarray((np.random.default_rng(0).permutation(labels.size) % folds)[group])


def _residuals(observations: Sequence[Observations], profile: Profile, names: Sequence[str]) -> list[Rows]:
    """The (log errors, derivatives by log coefficient) of each kernel's rows, shapes (rows,) and (rows, names)."""
    residuals = []
    for observed in observations:
        cost = observed.predict(profile)
        zero = np.zeros_like(cost.seconds)
        slopes = np.stack([cost.partials.get(name, zero) / cost.seconds for name in names], axis=1)
        residuals.append((np.asarray(np.log(cost.seconds / observed.seconds)), slopes))
    return residuals


def _minimise(
    rows: Callable[[Array], list[Rows]], prior: Profile, names: Sequence[str], theta: Array, sigmas: Array
) -> Array:
    """Logs of the coefficients that minimise the loss, starting at `theta`. rows: logs -> errors and slopes."""
    from scipy.optimize import least_squares

    start, spread = _prior(prior, names)
    # An efficiency is a fraction of a peak, at most 1. (The solver's start must lie inside the bounds.)
    upper = np.array([0.0 if name.endswith("_efficiency") else np.inf for name in names])
    evaluated = lru_cache(maxsize=1)(lambda at: rows(np.frombuffer(at)))  # the solver asks for values, then slopes

    def values(at: Array) -> Array:
        scaled = [errors / sigma for (errors, _), sigma in zip(evaluated(at.tobytes()), sigmas, strict=True)]
        return np.concatenate([*scaled, (at - start) / spread])

    def slopes(at: Array) -> Array:
        scaled = [slope / sigma for (_, slope), sigma in zip(evaluated(at.tobytes()), sigmas, strict=True)]
        return np.concatenate([*scaled, np.diag(1 / spread)])

    bounds = (np.full(len(names), -np.inf), upper)
    return np.asarray(
        least_squares(values, np.minimum(theta, upper - 1e-6), slopes, bounds, loss="huber", f_scale=HUBER).x
    )


def _prior(prior: Profile, names: Sequence[str]) -> tuple[Array, Array]:
    """The logs of the prior's values and their standard deviations, each of shape (names,)."""
    values = np.log([prior.coefficients[name] for name in names])
    return values, np.sqrt([prior.log_covariance[name][name] for name in names])


def _covariance(
    groups: Sequence[Array], rows: Sequence[Rows], prior: Profile, names: Sequence[str], sigmas: Array
) -> Array:
    """The covariance of the log coefficients, shape (names, names): the prior's share, and a jackknife over groups.

    To first order, leaving out a group moves the fit by (curvature of all the rest)^-1 (the group's pull). The usual
    sandwich divides by the curvature of all groups. For few groups its sds are two to three times too small. No
    direction is wider than in the prior.
    """
    pulls, curvatures = [], []
    for labels, sigma, (errors, slopes) in zip(groups, sigmas, rows, strict=True):
        scores = slopes * (np.clip(errors / sigma, -HUBER, HUBER) / sigma)[:, None]
        curved = slopes * (np.abs(errors) < HUBER * sigma)[:, None] / sigma  # beyond the bend the loss is straight
        for inside in (labels == label for label in np.unique(labels)):
            pulls.append(scores[inside].sum(axis=0))
            curvatures.append(curved[inside].T @ curved[inside])
    precision = np.diag(1 / _prior(prior, names)[1] ** 2)
    every = precision + sum(curvatures)
    inverse = np.linalg.inv(every)
    moves = np.array([np.linalg.solve(every - own, pull) for own, pull in zip(curvatures, pulls, strict=True)])
    return within_prior(inverse @ precision @ inverse + moves.T @ moves, _prior(prior, names)[1])


def within_prior(covariance: Array, spread: Array) -> Array:
    """The covariance with no direction wider than in the prior, whose standard deviations are `spread`.

    A jackknife can say more: without its only group, a coefficient moves back to the prior's value, however far.
    """
    scale = np.outer(spread, spread)
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2 / scale)
    narrowed = (vectors * np.clip(values, 0.0, 1.0)) @ vectors.T * scale
    return np.asarray((narrowed + narrowed.T) / 2)


@dataclass(frozen=True, slots=True)
class Windows:
    """Consecutive windows of one rollout.

    seconds: measured, shape (windows,)
    weights: the number of times that each row of `batch` ran in each window, shape (windows, rows)
    batch:   the rows of the rollout's schedule
    engine:  model and precision; windows of one engine share an error
    """

    record: Record
    engine: str
    batch: StepBatch
    weights: FloatArray
    seconds: FloatArray

    def cost(self, profile: Profile) -> Cost:
        """Predicted seconds of each window with their partials, shape (windows,)."""
        loop_s = self.record.fields.get("host_loop_s")
        timed = loop_s is not None and HOST_LOOP in profile.coefficients
        # Without the covariance, which a copy would check each time.
        on_host = replace(profile, log_covariance={}).on_host(loop_s) if timed else profile
        model = self.record.setup.step_model(on_host, self.record.fields.get("experts_hit"))
        steps = model.cost(self.batch)
        partials = {name: self.weights @ partial for name, partial in steps.partials.items()}
        prompts, first = self.record.batch.prompts, np.eye(1, self.seconds.size)[0]
        start = start_cost(prompts.size, int(prompts.sum()), on_host).scaled(first)
        cost = Cost(self.weights @ steps.seconds, partials) + start
        if not timed:
            return cost
        return cost.plus_partials({HOST_LOOP: -cost.partials[HOST_PACE]})  # the pace is loop_s over the coefficient


def read_traces(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The traces that fp8plan.runtime.measure.rollouts.run wrote, by the key of their record; columns per step."""
    return {row["key"]: row for path in paths for row in rows(path)}


def windows(record: Record, trace: dict[str, Any]) -> Windows:
    """Cut one rollout into windows. Its KV pool is the measured one, so that preemptions are the engine's.

    Raises ConfigError if the record lacks the size of its pool.
    """
    planned = schedule_with(record.batch, measured_kv(record), record.limits)
    tokens = np.cumsum(trace["generation_tokens"])
    own = trace.get("core_s")
    times = np.asarray(own or trace["t_s"])
    cuts = _cuts(times, WINDOW_S if own else FRONT_END_WINDOW_S)
    edges_s, edges_tokens = np.append(0.0, times[cuts]), np.append(0, tokens[cuts])
    return Windows(
        record=record,
        engine=f"{record.fields['model']} {record.fields['precision']}",
        batch=step_batch(planned),
        weights=overlap(planned, edges_tokens),
        seconds=np.diff(edges_s),
    )


def measured_kv(record: Record) -> KvPlan:
    """The KV cache that a rollout ran with. Raises ConfigError if the record lacks the size of its pool."""
    fields, setup = record.fields, record.setup
    if fields.get("num_gpu_blocks") is not None:
        return setup.kv_plan(fields["num_gpu_blocks"])
    if fields.get("measured_kv_cache_tokens") is None:
        raise ConfigError(f"line {record.line}: measured_kv_cache_tokens is missing; steps need the pool they ran in")
    return setup.kv_plan(setup.blocks_in(fields["measured_kv_cache_tokens"]))


def _cuts(times: FloatArray, window_s: float) -> list[int]:
    """The indices of the steps that end a window; the last step of all ends the last window."""
    cuts, begun, last = [], 0.0, -1
    for i, time in enumerate(times):
        if time - begun >= window_s and i - last >= FEWEST_STEPS:
            cuts.append(i)
            begun, last = float(time), i
    end = len(times) - 1
    if cuts and cuts[-1] != end and times[end] - begun < window_s / 2:
        cuts[-1] = end
    elif not cuts or cuts[-1] != end:
        cuts.append(end)
    return cuts


def overlap(planned: Schedule, edges: Array) -> FloatArray:
    """The number of steps of each row between token counts `edges`, shape (len(edges) - 1, rows).

    The tokens of a row are spread evenly over it. A row without tokens belongs to the window of the next token.
    """
    made = planned.steps * planned.sampled_requests
    end = np.cumsum(made)
    begin, total = end - made, end[-1]
    edges = edges * (total / edges[-1])  # equal unless the trace lost its last line
    low, high = edges[:-1, None], edges[1:, None]
    share = (np.minimum(high, end) - np.maximum(low, begin)).clip(min=0) / np.maximum(made, 1)
    silent = (made == 0) & (low <= begin) & (begin < high)
    return np.asarray((share + silent) * planned.steps, dtype=np.float64)
