"""The weights of one worker's live model, overwritten by a stream of tensors that a manifest has announced.

Runs inside vLLM's worker (runtime.worker.extension). runtime.worker.prepare decides once for each manifest which
tensors are written in place and which go through vLLM's layerwise reload.

After a sync a sample of the weights written in place is checked: a window of each sampled tensor is kept while the
stream passes. Tensors that are written as they come (BF16, or a trainer's E4M3 and scales) must be live bit for bit.
Quantised ones are multiplied with their live scales and compared with the sent ones, so that a wrong quantiser shows.

The bound on an element's error: a block's scale s is at most max(amax, AMAX_FLOOR) / 448. E4M3 has 3 bits of mantissa.
Between 2^e and 2^(e+1) its values are 2^(e-3) apart, and rounding misses by at most 1/17 of the element (halfway above
2^e). Below 2^-6 all values are 2^-9 apart, which misses by up to s / 1024. Hence

    |q s - w| <= |w| / 16 + max(amax of the window, AMAX_FLOOR) / 448 / 1024

1/16 leaves room for float32's roundings. The bound holds for all weights that were rounded once. Weights rounded twice
break it: with DeepGEMM's E8M0 scales, 9% of Gaussian elements do. A limit on the RMS error could not tell the two apart
(3.7% when rounded twice, up to 5.9% when rounded once), so the RMS error is reported and not judged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.precision import E4M3_MAX
from fp8plan.runtime.quantize.block_fp8 import AMAX_FLOOR, BLOCK
from fp8plan.runtime.quantize.targets import FINITE, NOT_FINITE, content
from fp8plan.runtime.weight_sync.kv_scales import keeping_scales
from fp8plan.runtime.weight_sync.manifest import (
    Entry,
    Manifest,
    Part,
    checkpoint_manifest,
    is_matrix,
    local_folder,
    not_zero,
)
from fp8plan.runtime.weight_sync.shared import Twins, refuse_apart
from fp8plan.runtime.weight_sync.stream import wait
from fp8plan.runtime.worker.binding import Binding, Move
from fp8plan.runtime.worker.patches import Patches
from fp8plan.runtime.worker.prepare import Prepared, prepare
from fp8plan.runtime.worker.untouched import Untouched, refuse_foreign
from fp8plan.runtime.worker.vllm_reload import NativeReload, Snapshot, refresh

if TYPE_CHECKING:
    import torch

VECTOR: Final = (BLOCK,)
MATRIX: Final = (BLOCK, 4 * BLOCK)  # one row of blocks: 1 MiB of BF16 in 8 samples

MOST_OF_ITSELF: Final = 1 / 16
MOST_OF_AMAX: Final = 2**-10 / E4M3_MAX


class _Window(NamedTuple):
    """The part of a tensor that is compared: `size` rows and columns from `corner` of the move's target on."""

    name: str
    move: Move
    corner: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the window of a tensor that was sent."""
        target = self.move.target
        if tensor.shape != target.shape:
            tensor = tensor[tuple(slice(*extent) for extent in self.move.source)].reshape(target.shape)
        return _cut(tensor, self.corner, self.size)

    def live(self) -> torch.Tensor:
        return _cut(self.move.target, self.corner, self.size)

    def scales(self) -> torch.Tensor:
        assert self.move.scale is not None
        blocks = tuple(-(-size // BLOCK) for size in self.size)
        return _cut(self.move.scale, tuple(start // BLOCK for start in self.corner), blocks)


class Samples:
    """A sample of `count` tensors of a manifest. Each `seed` chooses others.

    seconds: time that choosing, keeping and comparing have taken so far

    Only tensors written in place are chosen, so a model that vLLM reloads whole has no samples.
    """

    def __init__(self, manifest: Sequence[Entry], binding: Binding, count: int, seed: int) -> None:
        begun, chance = time.perf_counter(), random.Random(seed)
        # More are drawn than asked for, as vLLM may have to load some of them.
        numbers = chance.sample(range(len(manifest)), min(8 * count, len(manifest)))
        able = [number for number in numbers if binding.moves.get(manifest[number].name)]
        self._chosen = {
            number: _window(manifest[number].name, chance.choice(binding.moves[manifest[number].name]), chance)
            for number in able[:count]
        }
        self._kept: list[tuple[_Window, torch.Tensor]] = []
        self.seconds = time.perf_counter() - begun

    def take(self, positions: Mapping[int, int], tensors: Sequence[torch.Tensor]) -> None:
        """Keep a window of those tensors of a chunk that are among the chosen.

        positions: number in the manifest -> position in the chunk, which has hundreds of tensors; few are looked for
        """
        begun = time.perf_counter()
        for number, window in self._chosen.items():
            at = positions.get(number)
            if at is not None:
                self._kept.append((window, window.of(tensors[at]).clone()))
        self.seconds += time.perf_counter() - begun

    def compare(self) -> dict[str, Any]:
        """Return how many tensors were compared, which differ, and the quantised ones' RMS error (a fraction or None).

        Windows of one shape are compared together, as each launch takes longer than its work.
        """
        import torch

        begun = time.perf_counter()
        if not self._kept:
            return {"compared": 0, "differ": [], "weight_error": None}
        groups: dict[Any, list[tuple[_Window, torch.Tensor]]] = {}
        for window, sent in self._kept:
            groups.setdefault((window.move.scale is None, window.size, sent.dtype), []).append((window, sent))
        rows = [_bits(group) if plain else _errors(group) for (plain, *_), group in groups.items()]
        figures = torch.cat(rows).tolist()  # waits for the GPU
        names = [window.name for group in groups.values() for window, _ in group]
        error, size = (hypot(*(row[at] for row in figures)) for at in (2, 3))
        self.seconds += time.perf_counter() - begun
        return {
            "compared": len(names),
            "differ": [name for name, row in zip(names, figures, strict=True) if not _fits(*row)],
            "weight_error": error / size if size else None,
        }


def _fits(excess: float, amax: float, error: float, norm: float) -> bool:
    """Return True if a window equals the sent one, by its row of `_errors`. NaN does not. Zeros must stay zeros."""
    return excess <= MOST_OF_AMAX * max(amax, AMAX_FLOOR) if amax else excess <= 0


def _errors(group: Sequence[tuple[_Window, torch.Tensor]]) -> torch.Tensor:
    """Compare quantised windows: [windows, 4], largest |q s - w| - |w| / 16, largest |w|, norms of q s - w and of w."""
    import torch

    original = torch.stack([sent for _, sent in group]).float()
    scales = torch.stack([window.scales() for window, _ in group]).repeat_interleave(BLOCK, -1)
    error = torch.stack([window.live() for window, _ in group]).float()
    error.mul_(scales[..., : original.shape[-1]]).sub_(original)
    size, both = original.abs(), (1, 2)
    norms = [torch.linalg.vector_norm(matrix, dim=both) for matrix in (error, original)]
    return torch.stack([error.abs_().sub_(size, alpha=MOST_OF_ITSELF).amax(both), size.amax(both), *norms], -1)


def _bits(group: Sequence[tuple[_Window, torch.Tensor]]) -> torch.Tensor:
    """Compare copied windows: [windows, 4] as `_errors`, 1 if any bit differs, and zeros."""
    import torch

    live = torch.stack([window.live() for window, _ in group]).view(torch.uint8)
    differs = (live != torch.stack([sent for _, sent in group]).view(torch.uint8)).flatten(1).any(1, keepdim=True)
    return torch.nn.functional.pad(differs.float(), (0, 3))


def _window(name: str, move: Move, chance: random.Random) -> _Window:
    sides = [
        _side(size, most, chance)
        for size, most in zip(move.target.shape, (VECTOR, MATRIX)[move.target.dim() > 1], strict=False)
    ]
    return _Window(name, move, tuple(start for start, _ in sides), tuple(size for _, size in sides))


def _side(size: int, most: int, chance: random.Random) -> tuple[int, int]:
    """Choose a window's start, at a block, and its length, at most `most`.

    It is shorter only at the edge of a tensor of other than whole blocks. So most models' windows have one shape.
    """
    last = size if size % BLOCK else size - min(size, most) + 1
    start = chance.randrange(0, last, BLOCK)
    return start, min(most, size - start)


def _cut(tensor: torch.Tensor, corner: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return tensor[corner : corner + size] by one operation: a slice of each dimension would add microseconds."""
    strides = tensor.stride()
    at = tensor.storage_offset() + sum(start * stride for start, stride in zip(corner, strides, strict=True))
    return tensor.as_strided(size, strides, at)


class LiveWeights:
    """The live weights of a worker, and the sync that is open, if any.

    worker:  vLLM's Worker, with its model loaded
    version: number of the sync that serves; 0 before the first
    stamp:   name of the weights, which patches start from; None: they have none

    A sync is: prepare once for a manifest, then begin, load, finish and commit, or abort. prepare, load and finish
    raise ConfigError.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._device = next(self._model.parameters()).device
        self.version = 0
        self._prepared: dict[int, tuple[Prepared, bool]] = {}
        self._running: _Running | None = None
        self._untouched: Untouched | None = None
        self._touched = False  # True once the sync that was begun last has written, even after its commit
        self.stamp: str | None = None

    def prepare(self, manifest: Manifest, in_place: bool = True, number: int | None = None) -> tuple[int, Prepared]:
        """Check a manifest (runtime.worker.prepare); `begin` takes the number that this returns.

        number: a number for the manifest that is the same on all ranks; None: the next one of this rank
        """
        number = max(self._prepared, default=-1) + 1 if number is None else number
        with keeping_scales(self._model):  # a trial of the shortcut reloads layers
            self._prepared[number] = prepare(self._worker, manifest, in_place), in_place
        return number, self._prepared[number][0]

    def begin(
        self, number: int, samples: int, version: int, keep: str | None, base: str | None = None, look_every: int = 0
    ) -> None:
        """Open a sync of a prepared manifest.

        samples: how many tensors to compare afterwards
        version: number of the sync that served before; each version compares other samples
        keep:    device of a copy of the weights to return to; None: no copy
        base:    stamp of the weights that patches will change, "" for any; None: no patches, all tensors will come
        look_every: as in SyncSettings; 0: no patches follow

        Raises ConfigError for patches of other weights than these, and of weights that something else has written to.
        """
        self._touched = False
        prepared = self.still_prepared(number)
        if base and base != self.stamp:
            raise ConfigError("the patches start from other weights than these; allowed: a sync of all weights")
        if base and look_every and self._untouched is not None:
            refuse_foreign(self._untouched.changed(version, look_every))
        snapshot = None if keep is None else Snapshot(self._model, keep)
        chosen = Samples(prepared.manifest, prepared.binding, samples, version)
        self._running = _Running(prepared, chosen, version + 1, snapshot, self.stamp)
        self._running.look_every = look_every
        self._running.twins = Twins(prepared.shared) if prepared.shared else None
        if base is not None:
            self._running.patches = Patches(prepared, self._device, partial(NativeReload, self._worker, prepared.past))
            return
        reload = NativeReload(self._worker, prepared.past) if prepared.binding.native else None
        self._running.reload = reload
        if reload is not None:
            self._touched, self.stamp = True, None
            reload.open()

    def load(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors, by their numbers in the manifest. FP32 is rounded to BF16 where the model keeps that.

        Raises ConfigError for one that is not as announced, and for two of one storage that differ.
        """
        import torch

        running = self._open()
        program = running.prepared.program(numbers)
        running.rounded += running.prepared.refuse_unlike(numbers, tensors)
        moved = running.prepared.as_written(numbers, tensors, self._device)
        if running.twins is not None:
            refuse_apart(running.twins.take(running.prepared.sharing(numbers, moved)))
        self._touched, self.stamp = True, None
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

    def patch(self, numbers: Sequence[int], patches: Sequence[torch.Tensor]) -> None:
        """Write patches, by their tensors' numbers in the manifest. Raises ConfigError as Patches.load does."""
        running = self._open()
        assert running.patches is not None
        self._touched, self.stamp = True, None
        running.patches.load(numbers, patches)

    def finish(self, patches: int = 0) -> dict[str, Any]:
        """Close the sync, and return its report with the self-check's result. patches: number of them that were sent

        Raises ConfigError for missing tensors, and as _refuse_content and Patches.finish do.
        """
        running = self._open()
        prepared = running.prepared
        if running.patches is not None:
            running.reload = running.patches.reload()
            self._close(running, running.patches.modules)
            checked, seconds = running.patches.finish(patches), running.patches.seconds
        else:
            if len(running.done) < len(prepared.manifest):
                missing = [entry.name for number, entry in enumerate(prepared.manifest) if number not in running.done]
                raise ConfigError(f"announced and not sent: {', '.join(missing[:4])} ({len(missing)} in all)")
            self._close(running, prepared.binding.native)
            self._refuse_content(running)
            checked, seconds = running.samples.compare(), running.samples.seconds
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

        flags = torch.cat([flag for flag, _, _ in running.flags])
        odd = (flags != FINITE).nonzero().flatten().tolist()  # waits for the GPU
        if not odd:
            return
        parts = [part for _, parts, _ in running.flags for part in parts]
        matrices = [matrix for _, _, matrices in running.flags for matrix in matrices]
        held = dict(zip(odd, flags[odd].tolist(), strict=True))
        if bad := list(dict.fromkeys(parts[at].name for at in odd if held[at] == NOT_FINITE)):
            raise ConfigError(f"not finite: {', '.join(bad[:4])} ({len(bad)} in all); allowed: no NaN, no Inf")
        zeros = [parts[at] for at in odd if matrices[at] and parts[at].name not in running.prepared.ignored]
        if not zeros:
            return
        folder = self._checkpoint()
        wrong = not_zero(folder, zeros) if folder else [part.name for part in zeros if len(zeros) == sum(matrices)]
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
        """The manifest of the open sync, as it was sent."""
        return self._open().prepared.sent

    def commit(self, stamp: str | None = None) -> None:
        """Keep the new weights, and let go of the copy of the old ones. stamp: a name for them, as patches' base"""
        running, self._running = self._open(), None
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
        if prepared.moved:
            _, prepared = self.prepare(prepared.sent, in_place, number)
        return prepared

    def _open(self) -> _Running:
        if self._running is None:
            raise ConfigError("no sync is open; allowed: begin, load, finish")
        return self._running

    def _close(self, running: _Running, reloaded: Collection[str]) -> None:
        """End vLLM's part of a sync. reloaded: modules that its reload must have got weights for"""
        if running.reload is not None:
            running.reload.close(reloaded)
        else:
            refresh(self._model)
        running.reload = None
        wait(self._device)

    def abort(self) -> bool:
        """End a sync that failed. Return True if the weights are certainly those from before it.

        They are if a copy was restored, or if the sync wrote nothing, e.g. because the copy did not fit into memory.
        """
        running, self._running = self._running, None
        if running is None:
            return not self._touched
        if running.reload is not None:
            running.reload.abandon()
        if running.snapshot is not None:
            running.snapshot.restore()
            self.stamp = running.stamp
            refresh(self._model)
        wait(self._device)
        return running.snapshot is not None or not self._touched


@dataclass(slots=True)
class _Running:
    prepared: Prepared
    samples: Samples
    version: int
    snapshot: Snapshot | None
    stamp: str | None  # of the weights before
    reload: NativeReload | None = None
    patches: Patches | None = None
    flags: list[tuple[torch.Tensor, list[Part], list[bool]]] = field(default_factory=list)  # True: a matrix
    done: set[int] = field(default_factory=set)
    rounded: list[str] = field(default_factory=list)  # names of tensors that came in FP32
    look_every: int = 0
    twins: Twins | None = None  # None: no storage has two names
