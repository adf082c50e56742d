"""A Monitor for trainers that call a function for every micro-batch: slime, prime-rl and SkyRL.

    batches = running(settings_at())
    correction = batches.correct(train_logprobs, rollout_logprobs, mask)

A process has one MicroBatches for each HookSettings. A step ends when an optimiser of this process has stepped (torch's
post hook). Optimisers that step with no micro-batch in between count once. All micro-batches of a step get the same
thresholds. They follow from the steps before, so they come one step later than with `Monitor.step`. The controller's
limits (max_clipped, min_kept) hold in the batch that it saw. A loss that is computed twice (recomputation) counts
twice, which leaves every mean as it is. Nothing is saved with the trainer's checkpoints. The trainer's own words for a
correction become the same correction, or are refused by name.

Ranks that share add up their sums when their optimisers step. All have the same thresholds, and rank 0 writes the run
file of all. With Megatron these are the ranks of its data-parallel group, elsewhere all ranks. Each must have called
the function before its first optimiser step, and step equally often. Else the others wait for ever. Ranks that do not
share have thresholds for their own shard, and the run file has rank 0's shard only.

The settings are one JSON file, named by FP8PLAN_MONITOR or in the trainer's own configuration. Without a file all have
their defaults: token TIS under the default law.

    {"plan": "plan.json", "run_file": "run.jsonl"}
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fp8plan import schemas
from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import TrainerSettings, read_settings
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.watch.correction.correct import Correction, correct
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Level, Mode, Rejection, Thresholds
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.mismatch.metrics import MismatchSums
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.mismatch.sums import ALONE, rank, together
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.schemas import parse

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.watch.mismatch.measure import Array
    from fp8plan.runtime.watch.monitor.record import Step

VARIABLE: Final = "FP8PLAN_MONITOR"
MEGATRON: Final = "megatron.core.parallel_state"


class HookSettings(TrainerSettings, frozen=True):
    """Settings of the Monitor in a trainer's process, beside those of every trainer.

    level, mode, veto, floor: as in CorrectionSettings
    tis:         C that TIS begins with; null: that of the default law
    band:        (low, high) that MIS or IcePop begins with; null: 0.5 to 2
    reject:      Rejections, as {"over": "seq_mean", "estimator": "k1", "low": 0.99, "high": 1.01}
    sampling:    sampling of rollouts, as {"top_p": 0.9} (fp8plan.Sampling); null: read from the trainer's own settings
                 where the hook sees them
    share:       true: the ranks add up their sums (see the module); null: the hook decides
    router_replay: true: the trainer scores with the experts that the engine picked; a plan may say so, too

    Paths are relative to the settings' file. Once read, `plan` holds the file's text and `run_file` is absolute.
    """

    level: Level | None = "token"
    mode: Mode = "tis"
    tis: float | None = None
    band: tuple[float, float] | None = None
    veto: float | tuple[float, float] | None = None
    floor: float = 0.0
    reject: tuple[Rejection, ...] = ()
    sampling: Sampling | None = None
    share: bool | None = None
    router_replay: bool = False

    def correction(self) -> CorrectionSettings:
        """The correction of gradients, with the thresholds to begin with. Raises ConfigError for a contradiction."""
        if self.band is not None and self.mode == "tis":
            raise ConfigError('band with mode \'tis\', which has none; allowed: "mode": "mis", or tis alone')
        start = None if self.tis is None else Thresholds(self.tis)
        if self.mode != "tis":
            start = Thresholds(None, self.band or (0.5, 2.0))
        if self.level is None:
            start = Thresholds(None)
        return CorrectionSettings(self.level, self.mode, start, self.reject, self.veto, floor=self.floor)

    def read_plan(self) -> Plan | None:
        """The plan, or None without one. Raises ConfigError for a text that is no plan."""
        return None if self.plan is None else Plan.from_json(self.plan)

    def begun(self, own: CorrectionSettings | None, where: str) -> tuple[CorrectionSettings, Plan | None]:
        """The correction, and the plan without the thresholds that the trainer's own correction replaces.

        own:   the correction in the trainer's own configuration; None: there is none
        where: the trainer's words for it, for the error

        Raises ConfigError if these settings ask for a correction, too.
        """
        plan = self.read_plan()
        if own is None:
            return self.correction(), plan
        if self.correction() != HookSettings().correction():
            raise ConfigError(f"{where} asks for a correction, and so do the hook's settings; allowed: one of them")
        return own, None if plan is None else replace(plan, thresholds={})


def settings_at(path: str | os.PathLike[str] | None = None) -> HookSettings:
    """The settings of a file; None: the file that FP8PLAN_MONITOR names, or the defaults if it names none.

    Each file is read once in a process. Raises ConfigError, which begins with the file.
    """
    named = path or os.environ.get(VARIABLE)
    return _read(str(named)) if named else HookSettings()


@cache
def _read(path: str) -> HookSettings:
    place = Path(path).expanduser()
    where = f"the hook's settings file {place}"
    data = parse(_text(place, f"give {VARIABLE} the path of a JSON file"), where)
    if isinstance(data, Mapping):
        for name, kind in (("sampling", Sampling), ("reject", Rejection)):
            value = data.get(name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Mapping):
                    refuse_names(f"{name} in {where}", part, [field.name for field in fields(kind)])
    settings = read_settings(data, HookSettings, where, '{"tis": 2.0}')
    changes: dict[str, Any] = {}
    if settings.plan is not None:
        file = place.parent / Path(settings.plan).expanduser()
        changes["plan"] = _text(file, "make it with: fp8plan plan MODEL --gpu GPU --json plan.json")
    if settings.run_file is not None:
        changes["run_file"] = str((place.parent / Path(settings.run_file).expanduser()).absolute())
    settings = msgspec.structs.replace(settings, **changes)
    with errors_of(where):
        plan = settings.read_plan()
        settings.controller(settings.correction(), plan).initial(plan)
    return settings


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Let each ConfigError begin with `where`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {path}: {why}; {hint}") from None


class MicroBatches:
    """Corrects micro-batches one by one, and lets its Monitor decide when an optimiser has stepped.

    last: the Monitor's last whole step; None before the first
    """

    def __init__(self, monitor: Monitor) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.monitor = monitor
        self.last: Step | None = None
        self._lock = threading.Lock()  # as a trainer may step its optimiser in a thread
        self._sums, self._corrected = _nothing(monitor)
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def correct(
        self,
        train_logprobs: Array,
        rollout_logprobs: Array,
        mask: Array | None = None,
        *,
        lengths: Sequence[int] | Array | None = None,
    ) -> Correction:
        """The weights and the mask of a micro-batch, which counts in the current step.

        Arguments and errors are those of `pack`. Raises ConfigError also for log-probs above 0.
        """
        tokens = pack(train_logprobs, rollout_logprobs, mask, lengths)
        sums = measure(tokens)
        sums.check_units()
        with self._lock:
            correction = correct(tokens, self.monitor.settings, ALONE, self.monitor.thresholds)
            self._sums += sums
            self._corrected = replace(self._corrected, sums=together([self._corrected.sums, correction.sums]))
        return correction

    def figures(self, correction: Correction) -> dict[str, float]:
        """The shares that a micro-batch's correction cut away, and its thresholds, by the names of a record.

        A share of no token is 0: trainers average over micro-batches, and one NaN would spoil the mean. Every rank has
        figures of the same names, as trainers reduce them over ranks.
        """
        thresholds = correction.thresholds
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

    def _stepped(self, *_: Any) -> None:
        """End the step. Ranks that share end it together, also those without tokens."""
        with self._lock:
            step = self.monitor.conclude(self._sums, self._corrected)
            if step is not None:
                self.last = step
            self._sums, self._corrected = _nothing(self.monitor)


def tensors(correction: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and mask of a correction of tensors; without a level all weights are 1."""
    import torch

    mask = torch.as_tensor(correction.mask)
    if correction.weights is None:
        return torch.ones_like(mask, dtype=torch.float32), mask
    return torch.as_tensor(correction.weights), mask


def _nothing(monitor: Monitor) -> tuple[MismatchSums, Correction]:
    """The sums before the first micro-batch of a step."""
    empty = np.zeros(0, np.float32)
    return MismatchSums(), correct(pack(empty, empty, lengths=[]), monitor.settings, ALONE, monitor.thresholds)


_RUNNING: dict[HookSettings, MicroBatches] = {}


def running(
    settings: HookSettings,
    share: bool = True,
    sampling: Sampling | None = None,
    router_replay: bool = False,
    own: CorrectionSettings | None = None,
    where: str = "the trainer",
) -> MicroBatches:
    """This process's MicroBatches for `settings`, made at the first call.

    share, sampling: values for settings that leave them open
    router_replay:   the trainer's own settings have it on
    own, where:      the trainer's own correction, as in HookSettings.begun

    Raises ConfigError for settings that cannot work, such as a run file in a folder that does not exist.
    """
    if settings not in _RUNNING:
        group, writes = _data_parallel()
        if not (share if settings.share is None else settings.share):
            group = ALONE
        correction, plan = settings.begun(own, where)
        _RUNNING[settings] = MicroBatches(
            Monitor(
                correction, settings.controller(correction, plan), settings.sinks() if writes else [], plan=plan,
                group=group, sampling=settings.sampling or sampling,
                router_replay=settings.router_replay or router_replay or None,
            )
        )  # fmt: skip
    return _RUNNING[settings]


def stop() -> None:
    """Close and forget all MicroBatches of this process."""
    while _RUNNING:
        _RUNNING.popitem()[1].close()


def megatron() -> Any:
    """Megatron's parallel state if this process has initialised it, else None. Never imports Megatron."""
    state = sys.modules.get(MEGATRON)
    return state if state is not None and state.model_parallel_is_initialized() else None


def _data_parallel() -> tuple[Any, bool]:
    """The group of ranks that see different data (None: all), and true if this rank writes.

    Tensor- and context-parallel ranks see the same data, and only the last pipeline stage has a loss.
    """
    state = megatron()
    if state is None:
        return None, rank() == 0
    group = state.get_data_parallel_group()
    twin = state.get_tensor_model_parallel_rank() or state.get_context_parallel_rank()
    return group, rank(group) == 0 and not twin
