"""The findings of a Monitor in a step, and the record that it writes of them (fp8plan.schemas.RunRecord).

Reader of run files, also while they grow: one JSON object a line for every training step.
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
from fp8plan.jsonl import BROKEN, now, parse, plain, uncompressed
from fp8plan.model.limits import RECORDED, EngineLimits
from fp8plan.model.profile.profile import ENGINE
from fp8plan.model.validate.records import check_fields
from fp8plan.runtime.correction.correct import weighted_mean
from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.monitor.steps import ShownRecord, Steps
from fp8plan.schemas import FIRST, VERSIONS, check_version

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.controller.laws import ControllerState, Decided
    from fp8plan.runtime.correction.correct import Correction, Thresholds
    from fp8plan.runtime.guard.guard import Guard, Verdict
    from fp8plan.runtime.guard.observation import EngineFacts, Observation
    from fp8plan.runtime.mismatch.attribution import Part
    from fp8plan.runtime.mismatch.measure import Array
    from fp8plan.runtime.mismatch.metrics import Mismatch

    Rollout = Observation | Mapping[str, Any] | None

Metrics = dict[str, float | None]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Weights and mask for one step of training, and everything that was found.

    weights:    float32 in the form that came in, detached; None if the settings ask for none
    mask:       the mask that came in, less what is rejected and less tokens without a finite log-prob
    thresholds: the thresholds that made both
    mismatch:   the mismatch over all ranks
    decided:    the controller's decision, its reason and alarms
    verdict:    the guard's, if there was one
    sampling:   of the rollout; None: not known
    attribution: the parts of the KL, by cause (fp8plan.runtime.mismatch.attribution)
    metrics:    figures of all ranks as the record has them, under verl's names where verl has one; None: not known
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
        """The mean of weight x loss over the tokens that the mask keeps, as `correct.weighted_mean` makes it."""
        return weighted_mean(token_losses, self.weights, self.mask)


def record_of(
    number: int,
    step: Step,
    facts: EngineFacts | None,
    guard: Guard | None,
    guard_off: str | None,
    rollout: Rollout,
) -> dict[str, Any]:
    """The record of a step. guard_off: why there is no verdict; rollout: what was seen, or fields as `checked` gives"""
    thresholds, decided, judged = step.thresholds, step.decided, None
    if guard is not None or step.verdict is not None or guard_off is not None:
        judged = {
            "verdict": None if step.verdict is None else step.verdict.to_dict(),
            "state": None if guard is None else guard.state_dict(),
            "off": guard_off,
        }
    return {
        **rollout_fields(rollout, facts),  # what follows is the Monitor's, whatever a rollout says
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
    """An Observation, None, or the fields of a rollout record as JSON has them.

    Raises ConfigError for what no reader of the run file would take.
    """
    from fp8plan.runtime.guard.observation import Observation

    if rollout is None or isinstance(rollout, Observation):
        return rollout
    if not isinstance(rollout, Mapping):
        raise ConfigError(
            f"it is a {type(rollout).__name__}; allowed: the fields of a rollout record, or an Observation, as "
            "fp8plan.runtime.guard.observation.observation_of(outputs, seconds) gives it"
        )
    found: dict[str, Any] = plain(rollout)
    check_fields(found, "it")
    Sampling.of(found.get("sampling"))
    if found.get("seconds") is not None:
        observation(found)
    return found


def own_metrics(given: Mapping[str, Any] | None) -> Metrics:
    """Figures of the loop's own. Raises ConfigError for what is no mapping of names to numbers."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"metrics is a {type(given).__name__}; allowed: a mapping of names to numbers, or None")
    for name, value in given.items():
        if not (isinstance(name, str) and is_number(value, finite=False, nan=True)):
            raise ConfigError(f"metrics has {name!r}: {value!r:.60}; allowed: names and numbers, as {{'reward': 0.5}}")
    return {name: float(value) for name, value in given.items()}


def mismatch_metrics(mismatch: Mismatch) -> Metrics:
    """Figures of how far the policies are apart, before any correction."""
    found: Metrics = dict(mismatch.verl_metrics())
    found |= {f"fp8plan/{name}": getattr(mismatch, name) for name in ("k3_robust", "ess_raw")}
    found |= {f"fp8plan/{name}": getattr(mismatch, name) for name in ("tokens", "sequences", "invalid")}
    found |= {f"fp8plan/log_ratio_p{100 * q:g}": x for q, x in mismatch.log_ratio_quantiles.items()}
    return found | {f"fp8plan/beyond_{factor:g}x": x for factor, x in mismatch.tail_fractions.items()}


def correction_metrics(correction: Correction) -> Metrics:
    """Figures of what the correction did to the batch."""
    return {
        **correction.metrics,
        schemas.ESS: correction.ess,
        schemas.CLIP_FRACTION: correction.clip_fraction,
        schemas.CLIPPED_MASS: correction.clipped_mass,
        schemas.LOST_TOKENS: 1.0 - correction.kept_tokens,
        schemas.LOST_SEQUENCES: 1.0 - correction.kept_sequences,
        schemas.LOST_WEIGHT: correction.lost_weight,
    }


def control_metrics(thresholds: Thresholds, state: ControllerState, alarms: int) -> Metrics:
    """Figures of what the controller saw and chose."""
    low, high = thresholds.band or (None, None)
    found: Metrics = {schemas.TIS: thresholds.tis, schemas.BAND_LOW: low, schemas.BAND_HIGH: high}
    found |= {schemas.SMOOTHED: getattr(state, "kl", None), schemas.KL_LIMIT: getattr(state, "limit_kl", None)}
    return found | {"fp8plan/alarms": float(alarms)}


def speed_metrics(rollout: Observation | None, verdict: Verdict | None) -> Metrics:
    """Response tokens per second, and what was predicted for the work that ran."""
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
    profile = [{name: x if math.isfinite(x) else None for name, x in asdict(span).items()} for span in mismatch.profile]
    versions = {str(v): {"tokens": x.tokens, "k1": x.k1, "k3": x.k3} for v, x in mismatch.versions.items()}
    return {"profile": profile, "versions": versions}


def rollout_fields(rollout: Rollout, facts: EngineFacts | None) -> dict[str, Any]:
    """The rollout record: facts about the engine and the rollout; empty if neither is known."""
    found: dict[str, Any] = {} if facts is None else engine_fields(facts)
    if rollout is None or isinstance(rollout, Mapping):
        return {**found, **(rollout or {})}
    found |= {
        name: getattr(rollout, name)
        for name in ("seconds", "preemptions", "compiled_files", "arrival_s", "host_slowdown")
    }
    found |= {name: list(getattr(rollout, name)) for name in ("prompt_lengths", "response_lengths")}
    if rollout.prompt_ids is not None:
        found["prompt_ids"] = list(rollout.prompt_ids)
    if rollout.sampling is not None:
        found["sampling"] = rollout.sampling.to_dict()
    return found | {"measured_kv_cache_tokens": rollout.kv_cache_tokens}


def observation(record: Mapping[str, Any]) -> Observation:
    """The guard's observation, from the fields of a rollout record as JSON has them.

    Raises ConfigError as Observation does, and for a record that lacks its seconds or lengths.
    """
    from fp8plan.runtime.guard.observation import Observation

    missing = [name for name in ("seconds", "prompt_lengths", "response_lengths") if record.get(name) is None]
    if missing:
        raise ConfigError(f"a rollout with its seconds lacks {', '.join(missing)}; give the tokens of each response")
    known = {field.name for field in fields(Observation)} - {"kv_cache_tokens"}
    given = {name: value for name, value in record.items() if name in known and value is not None}
    return Observation(**given, kv_cache_tokens=record.get("measured_kv_cache_tokens"))


def engine_fields(facts: EngineFacts) -> dict[str, Any]:
    """Facts about the engine that runs, under the names of a rollout record."""
    limits: EngineLimits = facts.limits
    imposed = None if limits.num_gpu_blocks is None else (limits.num_gpu_blocks + 1) * limits.block_size
    return {
        "model": facts.model,
        "gpu": facts.gpu,
        "engine": ENGINE,
        "engine_version": facts.engine_version,
        "precision": facts.precision,
        **{name: getattr(limits, limit) for name, limit in RECORDED.items()},
        "kv_cache_tokens": imposed,
        "kernel_backends": dict(facts.kernel_backends),
        "e8m0": facts.e8m0,
    }


READ: Final = (FIRST, VERSIONS["record"])  # versions that need no second look
DECODER: Final = msgspec.json.Decoder(ShownRecord)


@dataclass(slots=True)
class RunReader:
    """The steps of a run file, also of one that grows, without the lengths of their requests, which are most of it.

    steps:    in order. A record replaces earlier ones with the same step number or a higher one, as in a run that went
              back to a checkpoint
    replaced: number of records that were replaced so
    returns:  how often a step number came that was not above the one before
    skipped:  number of lines that are no records

    A compressed file (.gz) is read anew when it has changed.
    """

    path: Path
    steps: Steps = field(default_factory=Steps)
    replaced: int = 0
    returns: int = 0
    skipped: int = 0
    _offset: int = 0
    _torn: bytes = b""  # the first byte of a last line that is not whole
    _file: tuple[int, ...] = ()  # device and inode: a file that was begun anew is read anew

    @property
    def foreign(self) -> bool:
        """True if the content shows that this is no run file, not even one that has just been begun."""
        return not len(self.steps) and (self.skipped > 0 or self._torn not in (b"", b"{"))

    def read(self) -> int:
        """Read what has been added since the last call, and return the number of new records.

        Raises ConfigError without a readable regular file; `steps` stay then, and what is there next is read from its
        beginning. Raises it, too, for a record of a version that this fp8plan does not know.
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
        """The record in a line that msgspec does not take, as one with a lone surrogate; None if it is no record.

        A record of another version need not look like ours, so its version is judged first.
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
