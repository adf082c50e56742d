"""The weights of one worker's live model, overwritten by a stream of tensors that a manifest has announced.

Runs inside vLLM's worker (apply.worker.extension). apply.worker.prepare decides once for each manifest which
tensors are written in place and which go through vLLM's layerwise reload.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError, some
from fp8plan.runtime.apply.quantize.targets import FINITE, NOT_FINITE
from fp8plan.runtime.apply.weight_sync.checkpoint import checkpoint_manifest, local_folder, not_zero
from fp8plan.runtime.apply.weight_sync.kv_scales import Scales, keeping_scales, scales_of, set_scales
from fp8plan.runtime.apply.weight_sync.manifest import Manifest
from fp8plan.runtime.apply.weight_sync.shared import Twins, refuse_apart
from fp8plan.runtime.apply.weight_sync.state import Event, State, Weights, after
from fp8plan.runtime.apply.worker.comparison import Samples
from fp8plan.runtime.apply.worker.patches import Patches, Untouched, refuse_foreign
from fp8plan.runtime.apply.worker.prepare import Prepared, Program, prepare
from fp8plan.runtime.apply.worker.vllm_reload import NativeReload, Snapshot, refresh

if TYPE_CHECKING:
    import torch


class LiveWeights:
    """The live weights of a worker, and the sync that is open, if any.

    worker:  vLLM's Worker, with its model loaded
    version: number of the sync that serves; 0 before the first
    stamp:   name of the weights, which patches start from; None: they have none

    weights: their state; a sync by procedure and a client's update change it alike

    A sync is: prepare once for a manifest, then open, begin, load, finish and commit, or abort. prepare, load and
    finish raise ConfigError.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._device = next(self._model.parameters()).device
        self.version = 0
        self._prepared: dict[int, tuple[Prepared, bool]] = {}
        self._running: _Running | None = None
        self._untouched: Untouched | None = None
        self.weights = Weights()
        self.stamp: str | None = None

    def prepare(self, manifest: Manifest, in_place: bool, number: int) -> Prepared:
        """Check a manifest (runtime.apply.worker.prepare). number: of the manifest, the same on all ranks"""
        with keeping_scales(self._model):  # a trial of the shortcut reloads layers
            self._prepared[number] = prepare(self._worker, manifest, in_place), in_place
        return self._prepared[number][0]

    @property
    def refusal(self) -> str | None:
        """The reason why the weights must not be used; None while they may. A sync changes it by its first write."""
        weights = self.weights
        return weights.why if weights.before is None or not weights.whole else weights.before.why

    def open(self) -> None:
        """Open a sync. An earlier one that is still open fails."""
        if self.weights.is_open:
            self.abort(f"the sync of weights {self.version + 1} failed: another has begun")
        self.weights = after(self.weights, Event.BEGIN)

    def begin(
        self, number: int, samples: int, version: int, keep: str | None, base: str | None = None, look_every: int = 0
    ) -> None:
        """Expect the tensors of a prepared manifest, in the open sync.

        samples: how many tensors to compare afterwards
        version: number of the sync that served before; each version compares other samples
        keep:    device of a copy of the weights to return to; None: no copy
        base:    stamp of the weights that patches will change, "" for any; None: no patches, all tensors will come
        look_every: as in SyncSettings; 0: no patches follow

        Raises ConfigError for patches of other weights than these, and of weights that something else has written to.
        """
        prepared = self.still_prepared(number)
        if base and base != self.stamp:
            raise ConfigError("the patches start from other weights than these; allowed: a sync of all weights")
        if base and look_every and self._untouched is not None:
            refuse_foreign(self._untouched.changed(version, look_every))
        snapshot = None if keep is None else Snapshot(self._model, keep)
        chosen = Samples(prepared.manifest, prepared.binding, samples, version)
        running = _Running(prepared, chosen, version + 1, snapshot, self.stamp, scales_of(self._model), look_every)
        if prepared.shared:
            running.twins = Twins(prepared.shared)
        if base is not None:
            running.patches = Patches(prepared, self._device, partial(NativeReload, self._worker, prepared.past))
        self._running = running

    def load(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors, by their numbers in the manifest. FP32 is rounded to BF16 where the model keeps that.

        Raises ConfigError for one that is not as announced, and for two of one storage that differ.
        """
        import torch

        running = self._expecting()
        program = running.prepared.program(numbers)
        running.rounded += running.prepared.refuse_unlike(numbers, tensors)
        moved = running.prepared.as_written(numbers, tensors, self._device)
        if running.twins is not None:
            refuse_apart(running.twins.take(running.prepared.sharing(numbers, moved)))
        self._note_write()
        with torch.no_grad():
            running.flags.append((program.run(moved, self._device), program))
            running.samples.take(program.positions, moved)
            if program.native:
                self._reload(running).load([(name, moved[at]) for at, name in program.native])
        running.done.update(numbers)

    def patch(self, numbers: Sequence[int], patches: Sequence[torch.Tensor]) -> None:
        """Write patches, by their tensors' numbers in the manifest. Raises ConfigError as Patches.load does."""
        running = self._expecting()
        assert running.patches is not None
        self._note_write()
        running.patches.load(numbers, patches)

    def finish(self, patches: int = 0) -> dict[str, Any]:
        """Close the sync, and return its report with the self-check's result. patches: number of them that were sent

        Raises ConfigError for missing tensors, and as _refuse_content and Patches.finish do.
        """
        running = self._expecting()
        prepared = running.prepared
        if running.patches is not None:
            running.reload = running.patches.reload()
            self._close(running, running.patches.modules)
            checked, seconds = running.patches.finish(patches), running.patches.seconds
        else:
            if len(running.done) < len(prepared.manifest):
                missing = [entry.name for number, entry in enumerate(prepared.manifest) if number not in running.done]
                raise ConfigError(f"announced and not sent: {some(missing)}")
            self._close(running, prepared.binding.native)
            self._refuse_content(running)
            checked, seconds = running.samples.compare(), running.samples.seconds
        if differ := checked["differ"]:
            raise ConfigError(f"the live weights differ from what was sent: {', '.join(differ)}")
        self.weights = after(self.weights, Event.CHECK)
        return {
            "in_place": len(prepared.binding.direct),
            "reloaded": len(prepared.binding.native),
            "why_reloaded": prepared.why,
            "ignored": list(prepared.ignored),
            "layers": prepared.layers,
            "rounded": running.rounded,
            "check": checked | {"seconds": seconds},
        }

    def _refuse_content(self, running: _Running) -> None:
        """Raises ConfigError for NaN, Inf, and matrices of zeros that are not zeros in the checkpoint.

        Such a matrix was not gathered by the trainer, or was lost. Zeros at the start of training (biases, gates, new
        parts) are zeros in the checkpoint, too. Vectors of zeros are allowed. Without the checkpoint's files,
        zeros are refused only if all matrices are zero.
        """
        import torch

        flags = torch.cat([flag for flag, _ in running.flags])
        odd = (flags != FINITE).nonzero().flatten().tolist()  # waits for the GPU
        if not odd:
            return
        parts = [part for _, program in running.flags for part in program.parts]
        matrices = [matrix for _, program in running.flags for matrix in program.matrices]
        held = dict(zip(odd, flags[odd].tolist(), strict=True))
        if bad := list(dict.fromkeys(parts[at].name for at in odd if held[at] == NOT_FINITE)):
            raise ConfigError(f"not finite: {some(bad)}; allowed: no NaN, no Inf")
        zeros = [parts[at] for at in odd if matrices[at] and parts[at].name not in running.prepared.ignored]
        if not zeros:
            return
        folder = self._checkpoint()
        wrong = not_zero(folder, zeros) if folder else [part.name for part in zeros if len(zeros) == sum(matrices)]
        if wrong:
            raise ConfigError(
                f"all zeros: {some(wrong)}, and not in the checkpoint; allowed: the "
                "policy's weights, gathered from where the trainer keeps them"
            )

    def _checkpoint(self) -> Path | None:
        """The folder of the checkpoint's safetensors files; None if they are not on this machine."""
        config, loading = self._worker.model_runner.model_config, self._worker.vllm_config.load_config
        folder = local_folder(config.model, config.revision, loading.download_dir)
        return folder if folder and checkpoint_manifest(folder) else None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the open sync, as it was sent."""
        return self._expecting().prepared.sent

    def commit(self, stamp: str | None = None) -> None:
        """Keep the new weights, and let go of the copy of the old ones. stamp: a name for them, as patches' base"""
        running = self._expecting()
        self.weights = after(self.weights, Event.SERVE)
        self._running = None
        self.version, self.stamp = running.version, stamp
        if not running.look_every:
            self._untouched = None
            return
        native = running.prepared.binding.native
        self._untouched = self._untouched or Untouched(self._model)
        self._untouched.note(native, native if running.patches is None else running.patches.modules)

    def still_prepared(self, number: int) -> Prepared:
        """Return a prepared manifest, prepared anew if live tensors have moved."""
        prepared, in_place = self._prepared[number]
        return self.prepare(prepared.sent, in_place, number) if prepared.moved else prepared

    def _expecting(self) -> _Running:
        if self._running is None:
            raise ConfigError("no sync is open; allowed: begin, load, finish")
        return self._running

    def _note_write(self) -> None:
        self.weights, self.stamp = after(self.weights, Event.WRITE), None

    def _reload(self, running: _Running) -> NativeReload:
        """Return vLLM's reload of an open sync. Only the first tensors open it, as announced ones may never come."""
        if running.reload is None:
            running.reload = NativeReload(self._worker, running.prepared.past)
            running.reload.open()
        return running.reload

    def _close(self, running: _Running, reloaded: Collection[str]) -> None:
        """End vLLM's part of a sync. reloaded: modules that its reload must have got weights for"""
        import torch

        if running.reload is not None:
            running.reload.close(reloaded)
            set_scales(self._model, running.scales)
        else:
            refresh(self._model)
        running.reload = None
        torch.get_device_module(self._device).synchronize(self._device)

    def lose(self, why: str) -> None:
        """Count the engine as dead. why: what it did not survive"""
        self.weights = after(self.weights, Event.DIE, why)

    def abort(self, why: str) -> bool:
        """End a sync that failed, if one is open. Return True if the weights from before it are here, and may serve.

        They are if a copy was restored, or if the sync wrote nothing, e.g. because the copy did not fit into memory.

        why: its failure
        """
        import torch

        running, self._running = self._running, None
        event = Event.END
        if running is not None:
            if running.reload is not None:
                running.reload.abandon()
            if running.snapshot is not None:
                running.snapshot.restore()
                self.stamp, event = running.stamp, Event.RESTORE
                refresh(self._model)
            set_scales(self._model, running.scales)
            torch.get_device_module(self._device).synchronize(self._device)
        self.weights = after(self.weights, event, why)
        return self.weights.state is State.SERVING and self.weights.whole


@dataclass(slots=True)
class _Running:
    prepared: Prepared
    samples: Samples
    version: int
    snapshot: Snapshot | None
    stamp: str | None  # of the weights before, as are the scales
    scales: Scales
    look_every: int
    reload: NativeReload | None = None
    patches: Patches | None = None
    flags: list[tuple[torch.Tensor, Program]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    rounded: list[str] = field(default_factory=list)  # names of tensors that came in FP32
    twins: Twins | None = None  # None: no storage has two names
