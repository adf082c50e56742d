"""The result of a Monitor's step, and its record (fp8plan.schemas.RunRecord)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fp8plan import schemas
from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.jsonl import now, plain
from fp8plan.model.validate.records import check_fields
from fp8plan.runtime.watch.correction.correct import weighted_mean
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.observation import Observation
from fp8plan.runtime.watch.guard.rollout_record import observation_in, rollout_fields
from fp8plan.runtime.watch.mismatch.sampling import Sampling

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.watch.controller.state import ControllerState, Decided
    from fp8plan.runtime.watch.correction.correct import Thresholds
    from fp8plan.runtime.watch.guard.guard import Guard, Verdict
    from fp8plan.runtime.watch.guard.observation import EngineFacts
    from fp8plan.runtime.watch.mismatch.attribution import Part
    from fp8plan.runtime.watch.mismatch.measure import Array
    from fp8plan.runtime.watch.mismatch.metrics import Mismatch

    Rollout = Observation | Mapping[str, Any] | None

Metrics = dict[str, float | None]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Weights and mask for one step of training, and its findings.

    weights:    float32 in the form of the input, detached; None if the settings ask for none
    mask:       the input's mask, less rejected tokens and those without a finite log-prob
    thresholds: the thresholds that made both
    mismatch:   the mismatch over all ranks
    decided:    the controller's decision, its reason and alarms
    verdict:    the guard's, if there is one
    sampling:   that of the rollout; None: not known
    attribution: the parts of the KL, by cause (fp8plan.runtime.watch.mismatch.attribution)
    metrics:    the record's figures of all ranks, under verl's names if verl has one; None: not known
    """

    weights: Array | None
    mask: Array
    thresholds: Thresholds
    mismatch: Mismatch
    decided: Decided
    verdict: Verdict | None
    sampling: Sampling | None
    attribution: tuple[Part, ...]
    metrics: Mapping[str, float | None]

    @property
    def action(self) -> Action:
        """The guard's advice."""
        return Action.NONE if self.verdict is None else self.verdict.action

    def loss(self, token_losses: torch.Tensor) -> torch.Tensor:
        """The mean of weight x loss over the tokens that the mask keeps, by `correct.weighted_mean`."""
        return weighted_mean(token_losses, self.weights, self.mask)


def record_of(
    number: int,
    step: Step,
    facts: EngineFacts | None,
    guard: Guard | None,
    guard_off: str | None,
    rollout: Rollout,
) -> dict[str, Any]:
    """The record of a step. guard_off: reason for a missing verdict; rollout: a result of `checked_rollout`"""
    decided, judged = step.decided, None
    if guard is not None or step.verdict is not None or guard_off is not None:
        judged = {
            "verdict": None if step.verdict is None else step.verdict.to_dict(),
            "state": None if guard is None else guard.state.to_dict(),
            "off": guard_off,
        }
    return {
        **rollout_fields(rollout, facts),  # the Monitor's own fields follow, and replace the rollout's
        "schema_version": schemas.VERSIONS["record"],
        "step": number,
        "date": now(),
        "thresholds": asdict(step.thresholds),
        "decision": decided.decision.value,
        "reason": decided.reason,
        "alarms": [alarm.value for alarm in decided.alarms],
        "escalate": None if decided.escalate is None else decided.escalate.value,
        "sampling": None if step.sampling is None else asdict(step.sampling),
        "attribution": [asdict(part) for part in step.attribution],
        "metrics": step.metrics,
        **mismatch_parts(step.mismatch),
        "guard": judged,
    }


def checked_rollout(rollout: Any) -> Observation | dict[str, Any] | None:
    """The rollout of a step: an Observation, None, or the fields of a rollout record as plain data.

    Raises ConfigError for fields that no reader of the run file would take.
    """
    if rollout is None or isinstance(rollout, Observation):
        return rollout
    if not isinstance(rollout, Mapping):
        raise ConfigError(
            f"it is a {type(rollout).__name__}; allowed: the fields of a rollout record, or an Observation, as "
            "fp8plan.runtime.watch.guard.observation.observation_of(outputs, seconds) gives it"
        )
    row: dict[str, Any] = plain(rollout)
    check_fields(row, "it")
    Sampling.of(row.get("sampling"))
    if row.get("seconds") is not None:
        observation_in(row)
    return row


def own_metrics(metrics: Mapping[str, Any] | None) -> Metrics:
    """The loop's own figures. Raises ConfigError for anything but a mapping of names to numbers, or None."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is a {type(metrics).__name__}; allowed: a mapping of names to numbers, or None")
    for name, value in metrics.items():
        if not (isinstance(name, str) and is_number(value, finite=False, nan=True)):
            raise ConfigError(f"metrics has {name!r}: {value!r:.60}; allowed: names and numbers, as {{'reward': 0.5}}")
    return {name: float(value) for name, value in metrics.items()}


def control_metrics(thresholds: Thresholds, state: ControllerState, decided: Decided) -> Metrics:
    """Figures of the controller."""
    low, high = thresholds.band or (None, None)
    return {
        schemas.TIS: thresholds.tis,
        schemas.BAND_LOW: low,
        schemas.BAND_HIGH: high,
        schemas.SMOOTHED: state.kl,
        schemas.KL_LIMIT: state.limit_kl,
        schemas.BASELINE: decided.baseline,
        schemas.NEWS: decided.news,
        "fp8plan/alarms": float(len(decided.alarms)),
    }


def speed_metrics(rollout: Observation | None, verdict: Verdict | None) -> Metrics:
    """Response tokens per second, and the prediction for the work that ran."""
    if verdict is not None:
        return {
            schemas.TOKENS_PER_S: verdict.tokens_per_s,
            schemas.PREDICTED: verdict.predicted_tokens_per_s,
            schemas.PREDICTED_LOW: verdict.low_tokens_per_s,
            schemas.PREDICTED_HIGH: verdict.high_tokens_per_s,
        }
    return {} if rollout is None else {schemas.TOKENS_PER_S: rollout.tokens_per_s}


def mismatch_parts(mismatch: Mismatch) -> dict[str, Any]:
    """The mismatch by position and by weight version."""
    profile = [{key: n if math.isfinite(n) else None for key, n in asdict(span).items()} for span in mismatch.profile]
    versions = mismatch.versions.items()
    return {
        "profile": profile,
        "versions": {str(v): {"tokens": span.tokens, "k1": span.k1, "k3": span.k3} for v, span in versions},
    }
