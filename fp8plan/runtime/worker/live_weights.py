"""The weights of one worker's live model, overwritten by a stream of tensors that a manifest has announced.

Runs inside vLLM's worker (runtime.worker.extension). What is written in place and what goes through vLLM's layerwise
reload is decided once for each manifest (fp8plan.runtime.worker.prepare).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.quantize.targets import FINITE, NOT_FINITE, content
from fp8plan.runtime.weight_sync.checkpoint import Part, checkpoint_manifest, local_folder, not_zero
from fp8plan.runtime.weight_sync.kv_scales import keeping_scales
from fp8plan.runtime.weight_sync.manifest import Manifest
from fp8plan.runtime.worker.prepare import Prepared, prepare
from fp8plan.runtime.worker.program import is_matrix
from fp8plan.runtime.worker.self_check import Samples
from fp8plan.runtime.worker.vllm_reload import NativeReload, Snapshot, refresh

if TYPE_CHECKING:
    import torch


class LiveWeights:
    """The live weights of a worker, and the sync that is open, if any.

    worker: vLLM's Worker, with its model loaded

    A sync is: prepare once for a manifest, then begin, load, finish and commit, or abort. Raises ConfigError from
    prepare, load and finish.

    version: number of the sync that serves; 0 before the first
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._device = next(self._model.parameters()).device
        self.version = 0
        self._prepared: dict[int, tuple[Prepared, bool]] = {}
        self._running: _Running | None = None
        self._touched = False  # by the sync that was begun last; stays so when that is committed

    def prepare(
        self, manifest: Manifest, in_place: bool = True, number: int | None = None, wide: Sequence[str] = ()
    ) -> tuple[int, Prepared]:
        """Check a manifest (runtime.worker.prepare); `begin` takes the number that this returns.

        number: the same for all ranks, of which some may have failed to prepare other manifests; None: the next of this
                rank
        wide:   tensors that the checkpoint has in FP32, which may be sent so whatever the model keeps of them
        """
        number = max(self._prepared, default=-1) + 1 if number is None else number
        with keeping_scales(self._model):  # a trial of the shortcut reloads layers
            self._prepared[number] = prepare(self._worker, manifest, in_place, wide), in_place
        return number, self._prepared[number][0]

    def begin(self, number: int, samples: int, version: int, keep: str | None) -> None:
        """Open a sync of a prepared manifest.

        samples: how many tensors to compare afterwards
        version: number of the sync that served before; other samples are chosen after each
        keep:    device of a copy of the weights to return to; None: no copy
        """
        self._touched = False
        prepared, in_place = self._prepared[number]
        if prepared.moved:
            _, prepared = self.prepare(prepared.manifest, in_place, number, prepared.wide)
        snapshot = None if keep is None else Snapshot(self._model, keep)
        reload = NativeReload(self._worker, prepared.past) if prepared.binding.native else None
        chosen = Samples(prepared.manifest, prepared.binding, samples, version)
        self._running = _Running(prepared, reload, chosen, version + 1, snapshot)
        if reload is not None:
            self._touched = True
            reload.open()

    def load(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors, by their numbers in the manifest. Raises ConfigError for one that is not as announced."""
        import torch

        running = self._open()
        program = running.prepared.program(numbers)
        specs = running.prepared.specs
        for number, tensor in zip(numbers, tensors, strict=True):
            shape, dtype = specs[number]
            if tensor.shape != shape or tensor.dtype != dtype:
                name, sent = running.prepared.manifest[number].name, f"{tensor.dtype} {list(tensor.shape)}"
                raise ConfigError(f"{name} is {sent}; announced: {dtype} {list(shape)}")
        moved = [t if t.device == self._device else t.to(self._device, non_blocking=True) for t in tensors]
        self._touched = True
        with torch.no_grad():
            running.flags.append((program.run(moved, self._device), program.parts, program.matrices))
            running.samples.take(program.positions, moved)
            if program.native and running.reload is not None:
                native = [(name, moved[at]) for at, name in program.native]
                flags = torch.stack([content(tensor) for _, tensor in native])
                parts = [Part(name) for name, _ in native]
                running.flags.append((flags, parts, [is_matrix(tensor.shape) for _, tensor in native]))
                running.reload.load(native)
        running.done.update(numbers)

    def finish(self) -> dict[str, Any]:
        """Close the sync, and report what was written and what the self-check found.

        Raises ConfigError for tensors that are missing or not finite, and for matrices of zeros that the checkpoint has
        otherwise.
        """
        running = self._open()
        prepared = running.prepared
        if len(running.done) < len(prepared.manifest):
            missing = [entry.name for number, entry in enumerate(prepared.manifest) if number not in running.done]
            raise ConfigError(f"announced and not sent: {', '.join(missing[:4])} ({len(missing)} in all)")
        self._close(running)
        self._refuse_content(running)
        checked = running.samples.compare()
        return {
            "in_place": len(prepared.binding.direct),
            "reloaded": len(prepared.binding.native),
            "why_reloaded": prepared.why,
            "ignored": list(prepared.ignored),
            "layers": prepared.layers,
            "check": checked | {"seconds": running.samples.seconds},
        }

    def _refuse_content(self, running: _Running) -> None:
        """Raises ConfigError for what no policy holds.

        That is NaN, Inf, and a matrix of zeros which the checkpoint has otherwise: the trainer has not gathered it, or
        has lost it. Zeros that training begins with (biases, gates, new parts) are zeros in the checkpoint, too.
        Vectors are never refused. Without the checkpoint's files here, zeros are refused only if all matrices are zero.
        """
        import torch

        flags = torch.cat([flag for flag, _, _ in running.flags])
        odd = (flags != FINITE).nonzero().flatten().tolist()  # the wait
        if not odd:
            return
        parts = [part for _, some, _ in running.flags for part in some]
        matrices = [matrix for _, _, some in running.flags for matrix in some]
        held = dict(zip(odd, flags[odd].tolist(), strict=True))
        if bad := list(dict.fromkeys(parts[at].name for at in odd if held[at] == NOT_FINITE)):
            raise ConfigError(f"not finite: {', '.join(bad[:4])} ({len(bad)} in all); allowed: no NaN, no Inf")
        zeros = [parts[at] for at in odd if matrices[at] and parts[at].name not in running.prepared.ignored]
        if not zeros:
            return
        folder = self._checkpoint()
        wrong = not_zero(folder, zeros) if folder else [x.name for x in zeros if len(zeros) == sum(matrices)]
        if wrong:
            raise ConfigError(
                f"all zeros: {', '.join(wrong[:4])} ({len(wrong)} in all), and not in the checkpoint; allowed: the "
                "policy's weights, gathered from where the trainer keeps them"
            )

    def _checkpoint(self) -> Path | None:
        """The folder of the checkpoint's safetensors files; None if they are not on this machine."""
        config, loading = self._worker.model_runner.model_config, self._worker.vllm_config.load_config
        folder = local_folder(config.model, config.revision, loading.download_dir)
        return folder if folder and checkpoint_manifest(folder) else None

    @property
    def announced(self) -> Manifest:
        """The manifest of the open sync."""
        return self._open().prepared.manifest

    def commit(self) -> None:
        """Keep the new weights, and let go of the copy of the old ones."""
        self.version = self._open().version
        self._running = None

    def compare(self, number: int) -> Comparison:
        """Begin to compare the live weights with tensors of a prepared manifest, which are not written."""
        prepared, in_place = self._prepared[number]
        if prepared.moved:
            _, prepared = self.prepare(prepared.manifest, in_place, number, prepared.wide)
        return Comparison(prepared, self._device)

    def _open(self) -> _Running:
        if self._running is None:
            raise ConfigError("no sync is open; allowed: begin, load, finish")
        return self._running

    def _close(self, running: _Running) -> None:
        if running.reload is not None:
            running.reload.close(running.prepared.binding.native)
        else:
            refresh(self._model)
        running.reload = None
        self._wait()

    def abort(self) -> bool:
        """End a sync that failed. Return whether the weights are sure to be those of before it: a copy came back, or
        the sync had begun and written nothing, as where the copy did not fit into memory."""
        running, self._running = self._running, None
        if running is None:
            return not self._touched
        if running.reload is not None:
            running.reload.abandon()
        if running.snapshot is not None:
            running.snapshot.restore()
            refresh(self._model)
        self._wait()
        return running.snapshot is not None or not self._touched

    def _wait(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()


class Comparison:
    """The live weights beside tensors that stream past: a window of each tensor that is written in place."""

    def __init__(self, prepared: Prepared, device: torch.device) -> None:
        self._prepared, self._device = prepared, device
        self._samples = Samples(prepared.manifest, prepared.binding, len(prepared.manifest), seed=0)

    def take(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors, by their numbers in the manifest."""
        moved = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        self._samples.take({number: at for at, number in enumerate(numbers)}, moved)

    def result(self) -> dict[str, Any]:
        """Return how many tensors were compared, and the names of those that differ."""
        found = self._samples.compare()
        return {"compared": found["compared"], "differ": found["differ"], "of": len(self._prepared.manifest)}


@dataclass(slots=True)
class _Running:
    prepared: Prepared
    reload: NativeReload | None
    samples: Samples
    version: int
    snapshot: Snapshot | None
    flags: list[tuple[torch.Tensor, list[Part], list[bool]]] = field(default_factory=list)  # and which are matrices
    done: set[int] = field(default_factory=set)
