"""The weights of one worker's live model: checked against a manifest, then overwritten by a stream of tensors.

Runs inside vLLM's worker (fp8plan.runtime.live.worker). What is written in place and what goes through vLLM's layerwise
reload is decided once for each manifest (fp8plan.runtime.live.binding, fp8plan.runtime.live.shortcut).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.live.binding import Binding, Move, bind
from fp8plan.runtime.live.load_map import LoadMap, trace
from fp8plan.runtime.live.native_reload import NativeReload, repack_tied_head
from fp8plan.runtime.live.self_check import Samples
from fp8plan.runtime.live.shortcut import kind, refused
from fp8plan.runtime.live.snapshot import Snapshot
from fp8plan.runtime.manifest import NEVER_LOADED, SCALE_SUFFIX, Manifest, dtype_named
from fp8plan.runtime.quantize_groups import CopyTargets, QuantizeTargets

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A manifest that this model takes.

    specs:   shape and dtype of each tensor, as torch compares them fastest
    refused: kinds of modules that vLLM loads, with why
    ignored: tensors that vLLM leaves out: a tied lm_head
    groups:  which tensors must come together, by number
    layers:  dtype of their weights -> modules
    """

    manifest: Manifest
    binding: Binding
    specs: tuple[tuple[torch.Size, torch.dtype], ...]
    refused: dict[str, str]
    ignored: tuple[str, ...]
    groups: tuple[int, ...]
    layers: dict[str, int]
    programs: dict[tuple[int, ...], Program] = field(default_factory=dict)

    def program(self, numbers: Sequence[int]) -> Program:
        """The writes of a chunk; trainers send the same chunks every step."""
        key = tuple(numbers)
        if key not in self.programs:
            self.programs[key] = Program(self, key)
        return self.programs[key]


class Program:
    """The writes of one chunk of tensors, made once and run every step."""

    def __init__(self, prepared: Prepared, numbers: Sequence[int]) -> None:
        moves = prepared.binding.moves
        entries = [prepared.manifest[number] for number in numbers]
        self.specs = [prepared.specs[number] for number in numbers]
        self.native = [(at, e.name) for at, e in enumerate(entries) if e.name not in moves]
        found = [(at, e, move) for at, e in enumerate(entries) for move in moves.get(e.name, ())]
        quantised, copied = ([x for x in found if (x[2].scale is None) == plain] for plain in (False, True))
        self._quantised, self._copied = ([(at, _part(move, e.shape)) for at, e, move in x] for x in (quantised, copied))
        scales = [move.scale for _, _, move in quantised if move.scale is not None]
        self._quantise = QuantizeTargets([move.target for _, _, move in quantised], scales)
        self._copy = CopyTargets([move.target for _, _, move in copied])
        self.names = [e.name for _, e, _ in (*quantised, *copied)]

    def run(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Queue the writes; a flag for each of `names` that is 1 if it was not finite (int32, on the device)."""
        import torch

        bad = torch.zeros(len(self.names), dtype=torch.int32, device=device)
        count = len(self._quantised)
        self._quantise.run([part(tensors[at]) if part else tensors[at] for at, part in self._quantised], bad[:count])
        self._copy.run([part(tensors[at]) if part else tensors[at] for at, part in self._copied], bad[count:])
        return bad


def _part(move: Move, shape: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What of a tensor a move takes, as a vector or matrix; None for all of it, as it is."""
    if tuple(move.target.shape) == shape and all(
        extent == (0, n) for extent, n in zip(move.source, shape, strict=True)
    ):
        return None
    window = tuple(slice(*extent) for extent in move.source)
    return lambda tensor: tensor[window].reshape(move.target.shape)


class LiveWeights:
    """worker: vLLM's Worker, with its model loaded. Raises ConfigError from prepare, load and finish."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._layers = dict(self._model.named_modules())
        self._device = next(self._model.parameters()).device
        self._prepared: list[Prepared] = []
        self._running: _Running | None = None

    def prepare(self, manifest: Manifest, in_place: bool = True) -> tuple[int, Prepared]:
        """Check a manifest against the model and decide how each tensor is written; nothing live changes.

        in_place: False leaves every module to vLLM's reload. Raises ConfigError naming what is wrong. `begin` takes the
        number.
        """
        self._prepared.append(self._prepare(manifest, in_place))
        return len(self._prepared) - 1, self._prepared[-1]

    def _prepare(self, manifest: Manifest, in_place: bool) -> Prepared:
        import torch

        native_fp8 = any(name.endswith(SCALE_SUFFIX) for _, name in self._checkpoint_parameters())
        found = (
            trace(self._model, manifest)
            if native_fp8
            else _with_scales(trace(self._model, _in_bf16(manifest)), manifest)
        )
        ignored = tuple(entry.name for entry in manifest if not found.modules[entry.name])
        self._refuse(found, ignored)
        if in_place:
            binding = bind(self._model, found, manifest, frozenset())
            reasons = refused(self._worker, manifest, found, binding)
            not_these = {module for module in binding.direct if kind(self._layers[module]) in reasons}
            binding = bind(self._model, found, manifest, frozenset(not_these))
        else:
            reasons, everywhere = {}, frozenset(m for of in found.modules.values() for m in of)
            binding = bind(self._model, found, manifest, everywhere)
        in_fp8 = {module for e in manifest if e.dtype == "float8_e4m3fn" for module in found.modules[e.name]}
        if stuck := {} if native_fp8 else {kind(self._layers[module]) for module in binding.native & in_fp8}:
            raise ConfigError(
                f"FP8 tensors can only be written in place, and vLLM lays out {', '.join(sorted(stuck))} in another "
                "way; allowed: weights_in='bf16'"
            )
        specs = tuple((torch.Size(entry.shape), dtype_named(entry.dtype)) for entry in manifest)
        layers = self._precisions(binding)
        return Prepared(manifest, binding, specs, reasons, ignored, _groups(manifest, found), layers)

    def _checkpoint_parameters(self) -> Iterable[tuple[str, str]]:
        from fp8plan.runtime.live.load_map import checkpoint_format

        with checkpoint_format(self._model) as parameters:
            return list(parameters)

    def _refuse(self, found: LoadMap, ignored: Sequence[str]) -> None:
        """Raises ConfigError for tensors that go nowhere and for parameters that are not filled."""
        tied = bool(getattr(self._worker.model_runner.model_config.hf_config, "tie_word_embeddings", False))
        unknown = [name for name in ignored if not name.endswith(NEVER_LOADED)]
        unknown = [name for name in unknown if not (tied and name.startswith("lm_head."))]
        if unknown:
            raise ConfigError(f"unknown: {', '.join(unknown[:4])}; allowed: the names of the model's checkpoint")
        filled = {
            self._layers[m]._parameters[p].data_ptr() for (m, p), n in found.covered.items() if n and self._live(m, p)
        }
        for (module, param), shape in found.shapes.items():
            count, whole = found.covered[module, param], self._wanted(module, shape)
            alias = self._live(module, param) and self._layers[module]._parameters[param].data_ptr() in filled
            if count < whole and not (count == 0 and alias):
                got = [name for name, copies in found.copies.items() if any(c[:2] == (module, param) for c in copies)]
                raise ConfigError(
                    f"missing: {whole - count} of {whole} elements of {module}.{param}, which got "
                    f"{', '.join(got) or 'nothing'}; send every tensor of the model, a fused layer needs all its parts"
                )

    def _live(self, module: str, param: str) -> bool:
        live = self._layers[module]._parameters.get(param)
        return live is not None and live.numel() > 0

    def _wanted(self, module: str, shape: Sequence[int]) -> int:
        """Elements that a checkpoint fills: padding of vocabularies and experts is vLLM's own."""
        layer, whole = self._layers[module], prod(shape)
        padded, real = getattr(layer, "num_embeddings_per_partition", None), getattr(layer, "shard_indices", None)
        if padded and real and shape[0] == padded:
            return whole // padded * real.num_org_elements
        moe = getattr(layer, "moe_config", None)
        if moe is None or len(shape) != 3:
            return whole
        hidden = getattr(moe, "hidden_dim_unpadded", moe.hidden_dim) / moe.hidden_dim
        inner = moe.intermediate_size_per_partition
        return round(whole * hidden * getattr(moe, "intermediate_size_per_partition_unpadded", inner) / inner)

    def begin(self, number: int, samples: int, seed: int, keep: str | None) -> None:
        """Open a sync of a prepared manifest. samples: tensors to compare afterwards; keep: device of a copy of the
        weights to return to, or None."""
        prepared = self._prepared[number]
        snapshot = None if keep is None else Snapshot(self._model, keep)
        reload = NativeReload(self._worker) if prepared.binding.native else None
        if reload is not None:
            reload.open()
        chosen = Samples(prepared.manifest, prepared.binding, samples, seed)
        self._running = _Running(prepared, reload, chosen, snapshot)

    def load(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors, by their numbers in the manifest. Raises ConfigError for one that is not as announced."""
        import torch

        running = self._open()
        program = running.prepared.program(numbers)
        for number, tensor, (shape, dtype) in zip(numbers, tensors, program.specs, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                name, sent = running.prepared.manifest[number].name, f"{tensor.dtype} {list(tensor.shape)}"
                raise ConfigError(f"{name} is {sent}; announced: {dtype} {list(shape)}")
        moved = [t if t.device == self._device else t.to(self._device, non_blocking=True) for t in tensors]
        with torch.no_grad():
            running.flags.append((program.run(moved, self._device), program.names))
            running.samples.take(numbers, moved)
            if program.native and running.reload is not None:
                native = [(name, moved[at]) for at, name in program.native]
                bad = torch.stack([(~torch.isfinite(tensor).all()).int() for _, tensor in native])
                running.flags.append((bad, [name for name, _ in native]))
                running.reload.load(native)
        running.done.update(numbers)

    def finish(self) -> dict[str, Any]:
        """All has been sent: what was written, what the self-check found. Raises ConfigError for what is not finite."""
        import torch

        running = self._open()
        prepared = running.prepared
        if len(running.done) < len(prepared.manifest):
            missing = [entry.name for number, entry in enumerate(prepared.manifest) if number not in running.done]
            raise ConfigError(f"announced and not sent: {', '.join(missing[:4])} ({len(missing)} in all)")
        self._close(running)
        flags = torch.cat([flag for flag, _ in running.flags])
        if found := flags.nonzero().flatten().tolist():
            names = [name for _, some in running.flags for name in some]
            bad = list(dict.fromkeys(names[at] for at in found))
            raise ConfigError(f"not finite: {', '.join(bad[:4])} ({len(bad)} in all); allowed: no NaN, no Inf")
        checked = running.samples.compare()
        return {
            "in_place": len(prepared.binding.direct),
            "reloaded": len(prepared.binding.native),
            "why_reloaded": prepared.refused,
            "ignored": list(prepared.ignored),
            "layers": prepared.layers,
            "check": checked,
        }

    @property
    def announced(self) -> Manifest:
        """What the open sync is to bring."""
        return self._open().prepared.manifest

    def commit(self) -> None:
        """The new weights stay; the copy of the old ones is let go."""
        self._running = None

    def _open(self) -> _Running:
        if self._running is None:
            raise ConfigError("no sync is open; allowed: begin, load, finish")
        return self._running

    def _close(self, running: _Running) -> None:
        if running.reload is not None:
            running.reload.close()
        else:
            repack_tied_head(self._model)
        running.reload = None
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def abort(self) -> bool:
        """End a sync that failed. Whether the weights of before it are back (a copy was kept)."""
        running, self._running = self._running, None
        if running is None:
            return False
        self._close(running)
        if running.snapshot is None:
            return False
        running.snapshot.restore()
        return True

    def _precisions(self, binding: Binding) -> dict[str, int]:
        """dtype of their weights -> modules."""
        counts: Counter[str] = Counter()
        for module in binding.direct | binding.native:
            dtypes = {
                str(t.dtype).removeprefix("torch.")
                for n, t in self._layers[module]._parameters.items()
                if t is not None and not n.endswith(SCALE_SUFFIX)
            }
            counts.update(sorted(dtypes))
        return dict(counts)


@dataclass(slots=True)
class _Running:
    prepared: Prepared
    reload: NativeReload | None
    samples: Samples
    snapshot: Snapshot | None
    flags: list[tuple[torch.Tensor, list[str]]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)


def _in_bf16(manifest: Manifest) -> Manifest:
    """What vLLM's loaders are asked about: the tensors before they were quantised."""
    weights = [entry for entry in manifest if not entry.name.endswith(SCALE_SUFFIX)]
    return tuple(e._replace(dtype="bfloat16") if e.dtype == "float8_e4m3fn" else e for e in weights)


def _with_scales(found: LoadMap, manifest: Manifest) -> LoadMap:
    """Scales go where their weights go."""
    scales = {e.name: e.name.removesuffix(SCALE_SUFFIX) for e in manifest if e.name.endswith(SCALE_SUFFIX)}
    if lost := [name for name, weight in scales.items() if weight not in found.copies]:
        raise ConfigError(
            f"scales without their weight: {', '.join(lost[:4])}; send {lost[0].removesuffix(SCALE_SUFFIX)}"
        )
    quantised = [entry.name for entry in manifest if entry.dtype == "float8_e4m3fn"]
    if bare := [name for name in quantised if name not in scales.values()]:
        raise ConfigError(f"FP8 weights without scales: {', '.join(bare[:4])}; send {bare[0]}{SCALE_SUFFIX}")
    return replace(
        found,
        copies={**found.copies, **{name: found.copies[weight] for name, weight in scales.items()}},
        modules={**found.modules, **{name: found.modules[weight] for name, weight in scales.items()}},
        sent={**found.sent, **{name: found.sent[weight] for name, weight in scales.items()}},
    )


def _groups(manifest: Manifest, found: LoadMap) -> tuple[int, ...]:
    """Number of each tensor's group: tensors of one module belong together."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault((found.modules[e.name] or (e.name,))[0], len(numbers)) for e in manifest)
