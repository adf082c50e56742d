"""A Monitor for trainers that call a function once for every micro-batch, with no place for an object and no step.

    batches = running(settings_at())
    correction = batches.correct(train_logprobs, rollout_logprobs, mask)

There is one for each HookSettings in a process. Every micro-batch of an optimiser step is corrected with the same
thresholds: those that the steps before led to. So thresholds answer to a KL one step later than with `Monitor.step`,
which sees the whole batch first, and the controller's limits (max_clipped, min_kept) hold in the batch that it saw. A
step ends when an optimiser of this process has stepped
(torch.optim.optimizer.register_optimizer_step_post_hook); optimisers that step with no micro-batch in between count
once. A loss that is worked out twice (recomputation) counts twice, which leaves every mean as it is.

Ranks: if they share, each adds its own sums to those of the others when its optimiser steps, so all have the same
thresholds, and rank 0 writes the run file with the figures of all. They are the ranks of Megatron's data-parallel
group, where Megatron is up, and all ranks elsewhere. All of them must have called the function before their first
optimiser step, and step their optimisers equally often; otherwise they wait for each other for ever. If they do not
share, each rank's thresholds follow from its own shard, and the run file has rank 0's shard only.

Nothing is saved with the trainer's checkpoints: a resumed run begins with the initial thresholds.

Settings of a hook: one JSON file, named by FP8PLAN_MONITOR or in the trainer's own configuration.

    {"tis": 2.0, "plan": "plan.json", "run_file": "run.jsonl"}

Every key may be left out, and without a file all of them are: token TIS that begins at C = 2. HookSettings lists them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from fp8plan import schemas
from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.jsonl import parse
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.controller.laws import AdaptiveThresholds, Controller
from fp8plan.runtime.correction.correct import Correction, correct
from fp8plan.runtime.correction.settings import CorrectionSettings, Level, Mode, Thresholds
from fp8plan.runtime.mismatch.measure import measure, pack
from fp8plan.runtime.mismatch.metrics import MismatchSums
from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.mismatch.sums import ALONE, rank, together
from fp8plan.runtime.monitor.monitor import Monitor
from fp8plan.runtime.monitor.sinks import JsonLines
from fp8plan.runtime.monitor.witness import constant
from fp8plan.schemas import checked

if TYPE_CHECKING:
    from fp8plan.runtime.mismatch.measure import Array
    from fp8plan.runtime.monitor.record import Step

VARIABLE: Final = "FP8PLAN_MONITOR"


class HookSettings(msgspec.Struct, frozen=True):
    """Settings of the Monitor in a trainer's process.

    level, mode: as in CorrectionSettings; a level is needed
    tis:         C that TIS begins with
    band:        (low, high) that MIS or IcePop begins with; null: 0.5 to 2
    veto:        as in CorrectionSettings
    thresholds:  "constant", or "adaptive" (AdaptiveThresholds)
    target_kl:   of adaptive ones, in nats per token; null: as the plan expects, or else its default
    limit_kl:    of either, likewise
    plan:        a plan's file, whose choice gives the thresholds to begin with and the KL to expect
    run_file:    file for `fp8plan monitor`; null: none is written
    sampling:    how rollouts are sampled, as {"top_p": 0.9} (fp8plan.Sampling); null: as the trainer's own settings
                 say, where the hook sees them
    share:       whether the ranks add up what they see (see micro_batches); null: as the hook says

    Paths are relative to the settings' file. As read, `plan` holds the file's text and `run_file` is absolute.
    """

    level: Level = "token"
    mode: Mode = "tis"
    tis: float = 2.0
    band: tuple[float, float] | None = None
    veto: float | None = None
    thresholds: Literal["constant", "adaptive"] = "constant"
    target_kl: float | None = None
    limit_kl: float | None = None
    plan: str | None = None
    run_file: str | None = None
    sampling: Sampling | None = None
    share: bool | None = None

    def correction(self) -> CorrectionSettings:
        """How gradients are corrected, with the thresholds to begin with. Raises ConfigError for what cannot be."""
        if self.band is not None and self.mode == "tis":
            raise ConfigError('band with mode \'tis\', which has none; allowed: "mode": "mis", or tis alone')
        start = Thresholds(self.tis) if self.mode == "tis" else Thresholds(None, self.band or (0.5, 2.0))
        return CorrectionSettings(self.level, self.mode, start, veto=self.veto)

    def controller(self) -> Controller:
        """The law of the thresholds. Raises ConfigError for what cannot be."""
        return controller_for(self.correction(), self.thresholds, self.target_kl, self.limit_kl, self.read_plan())

    def read_plan(self) -> Plan | None:
        """The plan, or None without one. Raises ConfigError for what is no plan."""
        return None if self.plan is None else Plan.from_json(self.plan)


def controller_for(
    correction: CorrectionSettings,
    law: str,
    target_kl: float | None,
    limit_kl: float | None,
    plan: Plan | None = None,
) -> Controller:
    """The law of a correction's thresholds; the arguments are those of HookSettings. A plan's thresholds go before its.

    Raises ConfigError for a target of constant thresholds, and for what cannot be.
    """
    kl: dict[str, Any] = {name: x for name, x in (("target_kl", target_kl), ("limit_kl", limit_kl)) if x is not None}
    if law == "constant":
        if "target_kl" in kl:
            raise ConfigError('target_kl with constant thresholds, which have none; allowed: thresholds "adaptive"')
        return constant(correction, plan, **kl)
    start = correction.thresholds
    return AdaptiveThresholds(start.tis, start.band, correction.level or "token", **kl)


def settings_at(path: str | os.PathLike[str] | None = None) -> HookSettings:
    """The settings of a file; None: the file that FP8PLAN_MONITOR names, or the defaults if it names none.

    Each file is read once in a process. Raises ConfigError, which begins with the file, for what cannot be.
    """
    named = path or os.environ.get(VARIABLE)
    return HookSettings() if not named else _read(str(named))


@cache
def _read(path: str) -> HookSettings:
    place = Path(path).expanduser()
    where = f"the hook's settings in {place}"
    data = parse(_text(place, f"give {VARIABLE} the path of a JSON file"), where)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} are a {type(data).__name__}; allowed: a JSON object")
    refuse_names(f"the file of the hook's settings, {place},", data, HookSettings.__struct_fields__)
    if isinstance(data.get("sampling"), Mapping):
        refuse_names(f"sampling in {where}", data["sampling"], [field.name for field in fields(Sampling)])
    found = checked(data, HookSettings, where)
    changes: dict[str, Any] = {}
    if found.plan is not None:
        file = place.parent / Path(found.plan).expanduser()
        changes["plan"] = _text(file, "make it with: fp8plan plan MODEL --gpu GPU --json plan.json")
    if found.run_file is not None:
        changes["run_file"] = str((place.parent / Path(found.run_file).expanduser()).absolute())
    found = msgspec.structs.replace(found, **changes)
    try:
        found.controller().initial(found.read_plan())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return found


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {path}: {why}; {hint}") from None


MEGATRON: Final = "megatron.core.parallel_state"


class MicroBatches:
    """Corrects micro-batches one by one, and lets its Monitor decide when an optimiser has stepped.

    last: what the Monitor found in the last whole step; None before there is one
    """

    def __init__(self, monitor: Monitor) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.monitor = monitor
        self.last: Step | None = None
        self._lock = threading.Lock()  # a trainer may step its optimiser in a thread
        self._sums, self._corrected = _nothing(self._settings())
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def correct(
        self,
        train_logprobs: Array,
        rollout_logprobs: Array,
        mask: Array | None = None,
        *,
        lengths: Sequence[int] | Array | None = None,
    ) -> Correction:
        """Weights and mask of a micro-batch, which are counted to the step that is under way.

        Arguments and errors are those of `pack`. Raises ConfigError, too, for log-probs that are none (above 0).
        """
        tokens = pack(train_logprobs, rollout_logprobs, mask, lengths)
        sums = measure(tokens)
        sums.check_units()
        with self._lock:
            found = correct(tokens, self._settings(), ALONE)
            self._sums += sums
            self._corrected = replace(self._corrected, sums=together([self._corrected.sums, found.sums]))
        return found

    def figures(self, correction: Correction) -> dict[str, float]:
        """Shares that a micro-batch's correction cut away, and the thresholds that did it, by the names of a record.

        A share of no token is 0. Trainers average the figures of micro-batches, and one NaN would spoil all others.
        Every rank has the same figures, as trainers reduce them over ranks.
        """
        thresholds = correction.settings.thresholds
        low, high = thresholds.band or (None, None)
        shares = {schemas.CLIP_FRACTION: correction.clip_fraction, schemas.LOST_TOKENS: 1.0 - correction.kept_tokens}
        bounds = {schemas.TIS: thresholds.tis, schemas.BAND_LOW: low, schemas.BAND_HIGH: high}
        return {name: 0.0 if isnan(share) else share for name, share in shares.items()} | {
            name: bound for name, bound in bounds.items() if bound is not None
        }

    def close(self) -> None:
        """Stop listening to optimisers, and close the run file."""
        self._hook.remove()
        self.monitor.close()

    def _settings(self) -> CorrectionSettings:
        return replace(self.monitor.settings, thresholds=self.monitor.thresholds)

    def _stepped(self, *_: Any) -> None:
        """End the step. Ranks that share do it together, also those without tokens."""
        with self._lock:
            step = self.monitor.conclude(self._sums, self._corrected)
            if step is not None:
                self.last = step
            self._sums, self._corrected = _nothing(self._settings())


def _nothing(settings: CorrectionSettings) -> tuple[MismatchSums, Correction]:
    """The sums before the first micro-batch of a step."""
    empty = np.zeros(0, np.float32)
    return MismatchSums(), correct(pack(empty, empty, lengths=[]), settings, ALONE)


_RUNNING: dict[HookSettings, MicroBatches] = {}


def running(settings: HookSettings, share: bool = True, sampling: Sampling | None = None) -> MicroBatches:
    """The one of this process for `settings`, made at the first call.

    share, sampling: what the settings' own are if the settings leave them open

    Raises ConfigError for what cannot work, such as a run file in a folder that does not exist.
    """
    if settings not in _RUNNING:
        group, writes = _data_parallel()
        wanted = share if settings.share is None else settings.share
        sinks = [JsonLines(settings.run_file)] if settings.run_file and writes else []
        _RUNNING[settings] = MicroBatches(
            Monitor(
                settings.correction(), settings.controller(), sinks, plan=settings.read_plan(),
                group=group if wanted else ALONE, sampling=settings.sampling or sampling,
            )
        )  # fmt: skip
    return _RUNNING[settings]


def stop() -> None:
    """Close all of this process and forget them."""
    while _RUNNING:
        _RUNNING.popitem()[1].close()


def megatron() -> Any:
    """Megatron's parallel state, where this process has it up; else None. Never imports it."""
    state = sys.modules.get(MEGATRON)
    return state if state is not None and state.model_parallel_is_initialized() else None


def _data_parallel() -> tuple[Any, bool]:
    """The group of ranks that see different data (None: all), and whether this one writes.

    Tensor- and context-parallel ranks see the same data, and only the last pipeline stage has a loss.
    """
    state = megatron()
    if state is None:
        return None, rank() == 0
    group = state.get_data_parallel_group()
    twin = state.get_tensor_model_parallel_rank() or state.get_context_parallel_rank()
    return group, rank(group) == 0 and not twin
