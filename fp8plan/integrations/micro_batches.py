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
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fp8plan import schemas
from fp8plan.integrations.settings import HookSettings
from fp8plan.runtime.correction.correct import Correction, correct
from fp8plan.runtime.correction.settings import CorrectionSettings
from fp8plan.runtime.mismatch.measure import measure
from fp8plan.runtime.mismatch.metrics import MismatchSums
from fp8plan.runtime.mismatch.moments import together
from fp8plan.runtime.mismatch.ranks import ALONE, rank
from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.mismatch.tokens import pack
from fp8plan.runtime.monitor.monitor import Monitor
from fp8plan.runtime.monitor.sinks import JsonLines

if TYPE_CHECKING:
    from fp8plan.runtime.mismatch.tokens import Array
    from fp8plan.runtime.monitor.record import Step

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
