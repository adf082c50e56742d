"""The result of a Monitor's step, its record (fp8plan.schemas.RunRecord), and the reader of run files.

A run file has one JSON object a line for every training step. The reader also follows a file that grows.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fp8plan import schemas
from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.jsonl import BROKEN, now, plain, uncompressed
from fp8plan.model.validate.records import check_fields
from fp8plan.runtime.watch.correction.correct import weighted_mean
from fp8plan.runtime.watch.guard.observation import rollout_fields
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.monitor.steps import ShownRecord, Steps
from fp8plan.schemas import FIRST, VERSIONS, check_version, parse

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.watch.controller.laws import ControllerState, Decided
    from fp8plan.runtime.watch.correction.correct import Correction, Thresholds
    from fp8plan.runtime.watch.guard.guard import Guard, Verdict
    from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation
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
    """The record of a step. guard_off: reason for a missing verdict; rollout: a result of `checked`"""
    thresholds, decided, judged = step.thresholds, step.decided, None
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
        "thresholds": {"tis": thresholds.tis, "band": thresholds.band},
        "decision": decided.decision.value,
        "reason": decided.reason,
        "alarms": [alarm.value for alarm in decided.alarms],
        "escalate": None if decided.escalate is None else decided.escalate.value,
        "sampling": None if step.sampling is None else step.sampling.to_dict(),
        "attribution": [part.to_dict() for part in step.attribution],
        "metrics": step.metrics,
        **mismatch_parts(step.mismatch),
        "guard": judged,
    }


def checked(rollout: Any) -> Observation | dict[str, Any] | None:
    """The rollout of a step: an Observation, None, or the fields of a rollout record as plain data.

    Raises ConfigError for fields that no reader of the run file would take.
    """
    from fp8plan.runtime.watch.guard.observation import Observation

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
        observation(row)
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


def mismatch_metrics(mismatch: Mismatch) -> Metrics:
    """Figures of the distance between the policies, before any correction."""
    own = ("k3_robust", "ess_raw", "tokens", "sequences", "invalid")
    return {
        **mismatch.verl_metrics(),
        **{f"fp8plan/{name}": getattr(mismatch, name) for name in own},
        **{f"fp8plan/log_ratio_p{100 * q:g}": value for q, value in mismatch.log_ratio_quantiles.items()},
        **{f"fp8plan/beyond_{factor:g}x": share for factor, share in mismatch.tail_fractions.items()},
    }


def correction_metrics(correction: Correction) -> Metrics:
    """Figures of the correction's effect on the batch."""
    return {
        **correction.metrics,
        schemas.ESS: correction.ess,
        schemas.CLIP_FRACTION: correction.clip_fraction,
        schemas.CLIPPED_MASS: correction.clipped_mass,
        schemas.LOST_TOKENS: 1.0 - correction.kept_tokens,
        schemas.LOST_SEQUENCES: 1.0 - correction.kept_sequences,
        schemas.LOST_WEIGHT: correction.lost_weight,
    }


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


def observation(record: Mapping[str, Any]) -> Observation:
    """The guard's observation, from the fields of a rollout record as plain data.

    Raises ConfigError as Observation does, and for a record without its seconds or lengths.
    """
    from fp8plan.runtime.watch.guard.observation import Observation

    missing = [name for name in ("seconds", "prompt_lengths", "response_lengths") if record.get(name) is None]
    if missing:
        raise ConfigError(f"a rollout with its seconds lacks {', '.join(missing)}; give the tokens of each response")
    known = {field.name for field in fields(Observation)} - {"kv_cache_tokens"}
    values = {name: value for name, value in record.items() if name in known and value is not None}
    return Observation(**values, kv_cache_tokens=record.get("measured_kv_cache_tokens"))


READ: Final = (FIRST, VERSIONS["record"])  # versions that need no second look
DECODER: Final = msgspec.json.Decoder(ShownRecord)


@dataclass(slots=True)
class RunReader:
    """The steps of a run file, also of one that grows, without the lengths of their requests, which are most of it.

    steps:    in order. A record replaces earlier ones with the same step number or a higher one, as in a run that went
              back to a checkpoint
    replaced: number of replaced records
    returns:  number of records whose step number is not above the one before
    skipped:  number of lines that are no records

    A compressed file (.gz) is read again whenever it has changed.
    """

    path: Path
    steps: Steps = field(default_factory=Steps)
    replaced: int = 0
    returns: int = 0
    skipped: int = 0
    _offset: int = 0
    _torn: bytes = b""  # the first byte of an incomplete last line
    _file: tuple[int, ...] = ()  # device and inode, to notice another file

    @property
    def foreign(self) -> bool:
        """True if the content is certainly no run file, not even the beginning of one."""
        return not len(self.steps) and (self.skipped > 0 or self._torn not in (b"", b"{"))

    def read(self) -> int:
        """Read the lines added since the last call, and return the number of new records.

        Raises ConfigError without a readable regular file; `steps` stay then, and the next call begins at the start of
        the file. Raises it, too, for a record of a version that this fp8plan does not know.
        """
        new, packed = 0, self.path.suffix == ".gz"
        try:
            with open(self.path, "rb", opener=_at_once) as stored, uncompressed(stored, packed) as file:
                info = os.fstat(stored.fileno())
                if not stat.S_ISREG(info.st_mode):  # a device may have no end, and a pipe is read once
                    raise OSError(errno.EINVAL, "it is no regular file")
                same = info.st_dev, info.st_ino, *((info.st_size, info.st_mtime_ns) if packed else ())
                if same != self._file or (not packed and info.st_size < self._offset):
                    self.steps, self.replaced, self.returns, self.skipped, self._offset = Steps(), 0, 0, 0, 0
                    self._file = same
                file.seek(self._offset)
                self._torn = b""
                for text in file:  # one at a time: a file may be larger than the memory
                    if not text.endswith(b"\n"):
                        self._torn = text[:1]
                        break
                    new += self._take(text)
                    self._offset += len(text)
        except BROKEN as error:
            self._file = ()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot read {self.path}: {reason}; give the file of a Monitor") from None
        return new

    def _take(self, text: bytes) -> bool:
        try:
            record = DECODER.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            record = self._by_json(text)
        if record is None:
            self.skipped += bool(text.strip())
            return False
        if record.schema_version not in READ:
            check_version(parse(text, "it"), "record", str(self.path))
        replaced = self.steps.add(record)
        self.replaced += replaced
        self.returns += replaced > 0
        return True

    def _by_json(self, text: bytes) -> Any:
        """The record in a line that msgspec refuses, such as one with a lone surrogate; None if it is no record.

        A record of another version may look different, so the version is checked first.
        """
        try:
            row = parse(text, "it", finite=False)
        except ConfigError:
            return None
        if isinstance(row, dict):
            check_version(row, "record", str(self.path))
        try:
            return msgspec.convert(row, ShownRecord)
        except msgspec.ValidationError:
            return None


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such pipes
