"""The weight updates of one worker, as a client of vLLM's lifecycle makes them: start, any number of parts, finish.

A client announces each part when it sends it, and fp8plan checks a manifest before it writes. Nearly all clients send
the whole model as one part, which is checked and written as it comes. In a first update of several parts, all parts
wait on the host until `finish`. Later updates of the same sequence are written as they come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError, Fp8PlanError, LostEngineError, text_of
from fp8plan.runtime.apply.plugin import logger
from fp8plan.runtime.apply.weight_sync.manifest import Manifest, refuse, rounding
from fp8plan.runtime.apply.weight_sync.procedure import finished_report, refuse_leftovers
from fp8plan.runtime.apply.worker.live_weights import LiveWeights
from fp8plan.runtime.apply.worker.prepare import IncompleteError

if TYPE_CHECKING:
    import torch

SAMPLES: Final = 4  # tensors that are compared with what was sent, as in SyncSettings
NUMBER: Final = -1  # of the one manifest that is remembered; a sync by procedure has numbers from 0 on


class Staged:
    """A sink whose tensors wait on the host until the manifest is complete."""

    def __init__(self) -> None:
        self.manifest: Manifest = ()
        self.parts: list[tuple[list[int], list[torch.Tensor]]] = []

    def load(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self.parts.append((list(numbers), [tensor.to("cpu", copy=True) for tensor in tensors]))


Sink = LiveWeights | Staged  # `load` takes the tensors of a part, by their numbers in `manifest`


@dataclass(slots=True)
class _Update:
    """An update. announced: all its tensors so far"""

    begun: float
    announced: Manifest = ()
    sink: Sink | None = None
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Updates:
    """The updates of a worker's live weights.

    worker: vLLM's Worker, or what LiveWeights reads of it

    live:   the weights, which know whether an update is open
    report: report of the last complete update; None before it
    """

    def __init__(self, worker: Any) -> None:
        self.report: dict[str, Any] | None = None
        self.live = LiveWeights(worker)
        self._known: Manifest = ()  # of the last update
        self._said_rounded = False
        self._update = _Update(0.0)

    def start(self) -> None:
        """Open an update. An earlier one that is still open fails."""
        self.live.open()
        self._update = _Update(time.perf_counter())

    def announce(self, part: Manifest) -> Sink:
        """Check tensors that are about to be sent, and return the sink that takes them.

        Raises ConfigError for tensors that the model does not take. Until something is written, the old weights serve.
        """
        update, begun = self._opened(), time.perf_counter()
        update.announced += part
        if update.sink is None:
            update.sink = self._first(update)
        if isinstance(update.sink, Staged):
            update.sink.manifest = update.announced
        elif update.announced != update.sink.manifest[: len(update.announced)]:
            self._known = ()  # so the next update is checked anew
            raise ConfigError(
                f"{part[0].name if part else 'an empty part'} was not expected here; allowed: the parts of an update "
                "hold the same tensors in the same order each time"
            )
        _add(update.seconds, "prepare", begun)
        return update.sink

    def finish(self) -> None:
        """Close the update, and check it: all tensors came, are finite, and a sample equals the tensors sent.

        Raises ConfigError, after which the weights must not be used, unless nothing was written.
        """
        update = self._opened()
        try:
            if update.sink is None:
                raise ConfigError("nothing was sent between start and finish; allowed: every tensor of the model")
            if isinstance(update.sink, Staged):
                self._write(update, update.sink)
            begun = time.perf_counter()
            done = self.live.finish()
            self.live.commit()
        except Exception as error:
            self.fail(text_of(error))
            raise
        if done["rounded"] and not self._said_rounded:
            self._said_rounded = True
            logger.warning("fp8plan: %s", rounding(done["rounded"]))
        _add(update.seconds, "finish", begun)
        _add(update.seconds, "total", update.begun)
        self.report = finished_report(
            [done],
            version=self.live.version,
            seconds=update.seconds | {"check": done["check"]["seconds"]},
            tensors=len(update.announced),
            bytes=sum(entry.nbytes for entry in update.announced),
            chunks=update.messages,
            rounded=len(done["rounded"]),
        ).record()

    def fail(self, why: str) -> None:
        """End the open update, if there is one."""
        self.live.abort(f"the update of weights {self.live.version + 1} failed: {why}")

    def loaded(self, seconds: float, messages: int) -> None:
        """Note how long a part has taken to arrive and be written, and in how many broadcasts it came."""
        update = self._opened()
        update.seconds["load"] = update.seconds.get("load", 0.0) + seconds
        update.messages += messages

    def _opened(self) -> _Update:
        if not self.live.weights.is_open:
            raise ConfigError("no update is open; allowed: start_weight_update, update_weights, finish_weight_update")
        return self._update

    def _first(self, update: _Update) -> Sink:
        """Return the live weights for a known or complete manifest, else a Staged; the same on all ranks."""
        expected = self._known
        if update.announced != expected[: len(update.announced)] or not update.announced:
            try:
                self._check(update.announced)
            except IncompleteError:
                return Staged()
        self.live.begin(NUMBER, SAMPLES, self.live.version, None)
        return self.live

    def _check(self, sent: Manifest) -> None:
        """Let the live model, on every rank, check a whole manifest, and remember it."""
        # Text, as an error that is kept would keep its callers' frames, and with them the memory of the tensors.
        fault: tuple[bool, str] | None = None
        elements: tuple[int, ...] = ()
        try:
            weights_in = "fp8_block" if any(entry.dtype == "float8_e4m3fn" for entry in sent) else "bf16"
            refuse(sent, None, weights_in)
            elements = self.live.prepare(sent, True, NUMBER).taken
        except LostEngineError:
            raise
        except Fp8PlanError as error:
            fault = isinstance(error, IncompleteError), str(error)
        answers = over_ranks((fault, elements))  # all refuse what one of them refuses
        faults = [fault for fault, _ in answers if fault is not None]
        for kind, others in ((ConfigError, False), (IncompleteError, True)):
            for incomplete, text in faults:
                if incomplete is others:
                    raise kind(text)
        refuse_leftovers(sent, [elements for _, elements in answers])
        self._known = sent

    def _write(self, update: _Update, staged: Staged) -> None:
        begun = time.perf_counter()
        self._check(update.announced)
        self.live.begin(NUMBER, SAMPLES, self.live.version, None)
        update.sink = self.live
        for numbers, tensors in staged.parts:
            self.live.load(numbers, tensors)
        _add(update.seconds, "load", begun)


def over_ranks(mine: Any) -> list[Any]:
    """Gather `mine` from all ranks of the engine."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [mine]
    values = [None] * group.world_size
    torch.distributed.all_gather_object(values, mine, group=group.cpu_group)
    return values


def _add(seconds: dict[str, float], phase: str, begun: float) -> None:
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begun
