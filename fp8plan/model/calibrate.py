"""Measurements -> coefficients: penalised least squares on log time.

    minimise  sum over kernels and their rows    rho(log(predicted / measured) / sigma_kernel)
            + sum over coefficients              rho((log c - log prior) / sd)

The prior is the datasheet profile, so a coefficient that no measurement moves keeps its value and its wide uncertainty.
sigma_kernel is what the fit leaves of that kernel (iterated to a fixed point), so a kernel the model describes badly
does not drag down one that it describes well. rho is Huber's: a stalled measurement must not move a coefficient.
Rows of one group (one engine, one weight shape) are wrong together: the held-out error leaves out whole groups, and
the covariance says how far the fit moves when a group is left out (a jackknife), not how rows scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.batch import Array
from fp8plan.model.cost import Cost
from fp8plan.model.profile import Profile

HUBER = 1.5  # in units of sigma: beyond, a residual counts linearly
LEAST_SIGMA = 0.01  # below, the timer's own spread
ROUNDS = 6  # of sigma; the change after them is below a percent
FOLDS = 5


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured seconds of one kernel, or of whole engine steps, and how a profile predicts them.

    kernel:  what was measured; the name of its residual in the profile
    seconds: shape (rows,)
    groups:  shape (rows,); rows of one group are left out together
    predict: profile -> seconds with partials, shape (rows,)
    """

    kernel: str
    seconds: Array
    groups: Array
    predict: Callable[[Profile], Cost]

    def errors(self, profile: Profile) -> Array:
        """log(predicted / measured), shape (rows,)."""
        return np.asarray(np.log(self.predict(profile).seconds / self.seconds))

    def subset(self, keep: Array) -> Observations:
        """The rows where `keep` (bool, shape (rows,)) is true."""

        def predict(profile: Profile) -> Cost:
            cost = self.predict(profile)
            return Cost(cost.seconds[keep], {name: partial[keep] for name, partial in cost.partials.items()})

        return replace(self, seconds=self.seconds[keep], groups=self.groups[keep], predict=predict)


@dataclass(frozen=True, slots=True)
class Fit:
    """coefficients, log_covariance: as in Profile; residuals: kernel -> robust sd of log error, of the fitted rows."""

    profile: Profile
    residuals: dict[str, float]


def fit(
    observations: Sequence[Observations],
    prior: Profile,
    free: Sequence[str] | None = None,
    near: Fit | None = None,
) -> Fit:
    """The profile whose predictions lie nearest to the observations.

    prior: its coefficients are the start and the prior, with the variances of its log_covariance
    free:  coefficients to fit; None: all that have a variance
    near:  a fit of almost the same observations: the start, and sigma as it was found there

    Raises ConfigError if there is nothing to fit.
    """
    observations = [x for x in observations if x.seconds.size]
    if not observations:
        raise ConfigError("there are no measurements to fit; run `fp8plan calibrate` on the GPU first")
    names = [x for x in (free or prior.coefficients) if prior.log_covariance.get(x, {}).get(x, 0) > 0]
    if near is None:
        theta, sigmas = _prior(prior, names)[0], np.full(len(observations), 0.2)
        for _ in range(ROUNDS):
            theta = _minimise(observations, prior, names, theta, sigmas)
            current = with_values(prior, names, theta)
            sigmas = np.array([max(robust_sd(x.errors(current)), LEAST_SIGMA) for x in observations])
    else:
        start = np.log([near.profile.coefficients[name] for name in names])
        sigmas = np.array([near.residuals[x.kernel] for x in observations])
        theta = _minimise(observations, prior, names, start, sigmas)
    covariance = _covariance(observations, prior, names, theta, sigmas)
    table = {a: {b: float(covariance[i, j]) for j, b in enumerate(names)} for i, a in enumerate(names)}
    kept = {
        a: {b: v for b, v in row.items() if b not in table} for a, row in prior.log_covariance.items() if a not in table
    }
    fitted = replace(with_values(prior, names, theta), log_covariance=kept | table)
    return Fit(fitted, {x.kernel: float(s) for x, s in zip(observations, sigmas, strict=True)})


def with_values(profile: Profile, names: Sequence[str], logs: Array) -> Profile:
    values = dict(zip(names, np.exp(logs).tolist(), strict=True))
    return replace(profile, coefficients=profile.coefficients | values)


def robust_sd(errors: Array) -> float:
    """Standard deviation around zero that a few outliers do not move: of the errors, clipped at Huber's bend."""
    scale = 1.4826 * float(np.median(np.abs(errors)))
    clipped = np.clip(errors, -2 * scale, 2 * scale) if scale > 0 else errors
    return float(np.sqrt(np.mean(clipped**2)))


def held_out(observations: Sequence[Observations], prior: Profile, full: Fit, folds: int = FOLDS) -> dict[str, Array]:
    """Kernel -> log errors of its rows, each predicted by a fit that has not seen the row's group, shape (rows,).

    full: the fit of all observations
    """
    found = {x.kernel: np.full(x.seconds.size, np.nan) for x in observations}
    for target in observations:
        labels = np.unique(target.groups)
        fold_of = dict(zip(np.random.default_rng(0).permutation(labels), np.arange(labels.size) % folds, strict=True))
        fold = np.array([fold_of[label] for label in target.groups])
        for number in np.unique(fold):
            seen = [x.subset(fold != number) if x is target else x for x in observations]
            profile = fit(seen, prior, near=full).profile if any(x.seconds.size for x in seen) else prior
            found[target.kernel][fold == number] = target.subset(fold == number).errors(profile)
    return found


def _residuals(
    observations: Sequence[Observations], profile: Profile, names: Sequence[str]
) -> list[tuple[Array, Array]]:
    """Per kernel (log errors, their derivatives by log coefficient): shapes (rows,) and (rows, names)."""
    found = []
    for x in observations:
        cost = x.predict(profile)
        zero = np.zeros_like(cost.seconds)
        slopes = np.stack([cost.partials.get(name, zero) / cost.seconds for name in names], axis=1)
        found.append((np.asarray(np.log(cost.seconds / x.seconds)), slopes))
    return found


def _minimise(
    observations: Sequence[Observations], prior: Profile, names: Sequence[str], theta: Array, sigmas: Array
) -> Array:
    """Logs of the coefficients that minimise the loss, from `theta` on."""
    from scipy.optimize import least_squares

    start, spread = _prior(prior, names)
    # An efficiency is a fraction of a peak, at most 1. (The solver wants its start inside of the bounds.)
    upper = np.array([0.0 if x.endswith("_efficiency") else np.inf for x in names])

    def values(at: Array) -> Array:
        rows = _residuals(observations, with_values(prior, names, at), names)
        return np.concatenate([e / sigma for (e, _), sigma in zip(rows, sigmas, strict=True)] + [(at - start) / spread])

    def slopes(at: Array) -> Array:
        rows = _residuals(observations, with_values(prior, names, at), names)
        return np.concatenate([j / sigma for (_, j), sigma in zip(rows, sigmas, strict=True)] + [np.diag(1 / spread)])

    bounds = (np.full(len(names), -np.inf), upper)
    return np.asarray(
        least_squares(values, np.minimum(theta, upper - 1e-6), slopes, bounds, loss="huber", f_scale=HUBER).x
    )


def _prior(prior: Profile, names: Sequence[str]) -> tuple[Array, Array]:
    """(logs of the values, their standard deviations), each of shape (names,)."""
    values = np.log([prior.coefficients[x] for x in names])
    return values, np.sqrt([prior.log_covariance[x][x] for x in names])


def _covariance(
    observations: Sequence[Observations], prior: Profile, names: Sequence[str], theta: Array, sigmas: Array
) -> Array:
    """Of log coefficients, shape (names, names): the prior's share, and a jackknife over groups.

    To first order, leaving out a group moves the fit by (curvature of all the rest)^-1 (the group's pull). The usual
    sandwich divides by the curvature of all instead, and its sds are two to three times too small for few groups.
    """
    rows = _residuals(observations, with_values(prior, names, theta), names)
    pulls, curvatures = [], []
    for x, sigma, (errors, slopes) in zip(observations, sigmas, rows, strict=True):
        scores = slopes * (np.clip(errors / sigma, -HUBER, HUBER) / sigma)[:, None]
        curved = slopes * (np.abs(errors) < HUBER * sigma)[:, None] / sigma  # beyond the bend the loss is straight
        for inside in (x.groups == label for label in np.unique(x.groups)):
            pulls.append(scores[inside].sum(axis=0))
            curvatures.append(curved[inside].T @ curved[inside])
    precision = np.diag(1 / _prior(prior, names)[1] ** 2)
    every = precision + sum(curvatures)
    inverse = np.linalg.inv(every)
    moves = np.array([np.linalg.solve(every - own, pull) for own, pull in zip(curvatures, pulls, strict=True)])
    covariance = inverse @ precision @ inverse + moves.T @ moves
    return np.asarray((covariance + covariance.T) / 2)
