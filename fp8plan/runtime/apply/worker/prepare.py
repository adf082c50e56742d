"""The check of a manifest against a live model, and the writes of each chunk, made once and run every step.

Nothing live changes before a chunk is run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError, some
from fp8plan.runtime.apply.quantize.targets import CopyTargets, QuantizeTargets, content
from fp8plan.runtime.apply.weight_sync.manifest import (
    LEFT_OUT,
    SCALE_SUFFIX,
    Entry,
    Manifest,
    Part,
    dtype_name,
    dtype_named,
    held_dtype,
    is_matrix,
)
from fp8plan.runtime.apply.worker.binding import Binding, Move, Target, bind, derived_from, kind, refused
from fp8plan.runtime.apply.worker.load_map import LoadMap, joined, leaders, trace

if TYPE_CHECKING:
    import torch


class Program:
    """The writes of one chunk.

    entries, numbers: of the chunk's tensors
    moves:     name -> how it is written in place (fp8plan.runtime.apply.worker.binding)
    parts:     parts of tensors, for each of which `run` gives a flag (weight_sync.manifest.Part); the native ones last
    matrices:  which of the parts are matrices
    native:    (position in the chunk, name) of tensors that go through vLLM's loader
    positions: number in the manifest -> position in the chunk
    """

    def __init__(self, entries: Sequence[Entry], numbers: Sequence[int], moves: Mapping[str, tuple[Move, ...]]) -> None:
        self.positions = {number: at for at, number in enumerate(numbers)}
        self.native = [(at, e.name) for at, e in enumerate(entries) if e.name not in moves]
        writes = [(at, e, move) for at, e in enumerate(entries) for move in moves.get(e.name, ())]
        quantised = [write for write in writes if write[2].scale is not None]
        copied = [write for write in writes if write[2].scale is None]
        self._quantised, self._copied = ([(at, _part(m, e.shape)) for at, e, m in w] for w in (quantised, copied))
        scales = [move.scale for _, _, move in quantised if move.scale is not None]
        self._quantise = QuantizeTargets([move.target for _, _, move in quantised], scales)
        self._copy = CopyTargets([move.target for _, _, move in copied])
        whole = [e for e in entries if e.name not in moves]
        self.parts = [
            *(Part(e.name, move.source) for _, e, move in (*quantised, *copied)),
            *(Part(e.name) for e in whole),
        ]
        self.matrices = [is_matrix(move.target.shape) for _, _, move in (*quantised, *copied)]
        self.matrices += [is_matrix(e.shape) for e in whole]

    def run(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Queue the writes. Return the flag of each part, int32 [len(parts)] on the device (quantize.targets)."""
        import torch

        flags = torch.zeros(len(self.parts), dtype=torch.int32, device=device)
        counts = [len(self._quantised), len(self._copied), len(self.native)]
        quantised, copied, native = flags.split(counts)
        self._quantise.run([part(tensors[at]) if part else tensors[at] for at, part in self._quantised], quantised)
        self._copy.run([part(tensors[at]) if part else tensors[at] for at, part in self._copied], copied)
        for flag, (at, _) in zip(native, self.native, strict=True):
            flag.copy_(content(tensors[at]))
        return flags


def _part(move: Move, shape: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that cuts out a move's source, as a vector or matrix; None if it is all, as it is."""
    if tuple(move.target.shape) == shape and move.source == tuple((0, size) for size in shape):
        return None
    window = tuple(slice(*extent) for extent in move.source)
    return lambda tensor: tensor[window].reshape(move.target.shape)


class IncompleteError(ConfigError):
    """A parameter that a manifest does not fill, although its entries are right."""


ONE_EXPERTS: Final = re.compile(r"\.experts\.\d+\.")  # in the name of one expert's tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A manifest that this model takes.

    manifest: in the dtypes that are written: FP32 is rounded to BF16 where the model does not keep it
    sent:     as it was announced
    binding:  the way of each tensor
    specs:    shape and dtype of each tensor, as torch compares them fastest
    homes:    (module, parameter, address) of each live tensor that is written in place
    why:      kinds of modules that vLLM loads -> why
    ignored:  tensors that vLLM leaves out: a tied lm_head
    groups:   number of each tensor's group, which must come together
    layers:   dtype of their weights -> how many modules
    taken:    elements of each tensor that this rank loads
    reloads:  tensor that goes through vLLM's reload -> modules that it feeds. One that vLLM leaves out feeds none, and
              is here if it shares a storage with such a tensor, so that both are sent alike
    shared:   groups of tensors that share one storage (weight_sync.shared)
    twins:    the same, with names that this manifest does not have: a trainer may send them
    wide:     tensors that the model keeps in FP32
    past:     (module, parameter) that vLLM's reload must be told of (vllm_reload.NativeReload)
    programs: the writes of each chunk that has come
    targets:  the live parts of each tensor that came as a patch
    """

    manifest: Manifest
    sent: Manifest
    binding: Binding
    specs: tuple[tuple[torch.Size, torch.dtype], ...]
    homes: tuple[tuple[torch.nn.Module, str, int], ...]
    why: dict[str, str]
    ignored: tuple[str, ...]
    groups: tuple[int, ...]
    layers: dict[str, int]
    taken: tuple[int, ...]
    reloads: Mapping[str, tuple[str, ...]]
    wide: tuple[str, ...]
    past: frozenset[tuple[str, str]]
    shared: tuple[tuple[str, ...], ...]
    twins: tuple[tuple[str, ...], ...]
    programs: dict[tuple[int, ...], Program] = field(default_factory=dict)
    targets: dict[str, tuple[Target, ...]] = field(default_factory=dict)

    def program(self, numbers: Sequence[int]) -> Program:
        """Return the writes of a chunk, made once: trainers send the same chunks every step."""
        key = tuple(numbers)
        if key not in self.programs:
            self.programs[key] = Program([self.manifest[number] for number in key], key, self.binding.moves)
        return self.programs[key]

    def refuse_unlike(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of those of a chunk's tensors that are FP32 and will be rounded.

        Raises ConfigError for a tensor that is not as announced.
        """
        names = []
        for number, tensor in zip(numbers, tensors, strict=True):
            shape, dtype = self.specs[number]
            if tensor.shape == shape and tensor.dtype == dtype:
                continue
            name = self.manifest[number].name
            if tensor.shape != shape or held_dtype(name, dtype_name(tensor.dtype), ()) != dtype_name(dtype):
                actual = f"{tensor.dtype} {list(tensor.shape)}"
                raise ConfigError(f"{name} is {actual}; announced: {dtype} {list(shape)}")
            names.append(name)
        return names

    def as_written(
        self, numbers: Sequence[int], tensors: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """Return a chunk's tensors on the device, in the dtypes that are written."""
        dtypes = [self.specs[number][1] for number in numbers]
        return [
            tensor if tensor.device == device and tensor.dtype == dtype else tensor.to(device, dtype, non_blocking=True)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
        ]

    def sharing(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of a chunk's tensors that share a storage with others, by name."""
        names = {name for group in self.shared for name in group}
        pairs = zip((self.manifest[number].name for number in numbers), tensors, strict=True)
        return {name: tensor for name, tensor in pairs if name in names}

    @property
    def moved(self) -> bool:
        """Return True if a live tensor has moved: writes would go to memory that now holds something else."""
        live = ((layer._parameters.get(name), address) for layer, name, address in self.homes)
        return any(tensor is None or tensor.data_ptr() != address for tensor, address in live)


def prepare(worker: Any, sent: Manifest, in_place: bool) -> Prepared:
    """Check a manifest, and find the way of each tensor.

    in_place: False leaves every module to vLLM's reload

    Raises ConfigError for a tensor that the model does not take, a parameter that is not filled, FP8 that cannot be
    written in place, and tensors of different shapes for one storage.
    """
    import torch

    model = worker.model_runner.get_model()
    layers = dict(model.named_modules())
    traced = trace(model, meta_tensors(_in_bf16(sent)))
    wide = tuple(
        name
        for name, homes in traced.homes.items()
        if homes and all(traced.dtypes[home] == torch.float32 for home in homes)
    )
    # BF16 stays so where the model keeps FP32: its loader widens it.
    rounded = {entry.name: held_dtype(entry.name, "float32", wide) for entry in sent if entry.dtype == "float32"}
    manifest = tuple(entry._replace(dtype=rounded.get(entry.name, entry.dtype)) for entry in sent)
    plain = _in_bf16(manifest)
    if manifest != sent:  # vLLM's loaders treat rounded tensors otherwise than those that they must round
        traced = trace(model, meta_tensors(plain))
    load_map = _with_scales(traced, manifest)
    ignored = tuple(entry.name for entry in manifest if not load_map.modules[entry.name])
    parallel = worker.model_runner.vllm_config.parallel_config
    shares = parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1
    _refuse_unknown(ignored, worker.model_runner.model_config.hf_config, shares)
    _refuse_missing(load_map, layers)
    twins = _twins(load_map, layers, manifest, worker.model_runner.model_config.hf_config)
    shared = _shared(twins, manifest)
    every = {module for modules in load_map.modules.values() for module in modules}
    if in_place:  # tried in BF16: with E4M3 and scales vLLM's loaders would have nothing to quantise
        derived = {module: why for module, why in derived_from(model).items() if module in every}
        reasons = refused(worker, traced, bind(model, traced, plain, derived))
        native = {m: reasons[kind(layers[m])] for m in every if kind(layers[m]) in reasons} | derived
    else:
        native = dict.fromkeys(every, "in_place=False")
    binding = bind(model, load_map, manifest, native)
    in_fp8 = {module for e in manifest if e.dtype == "float8_e4m3fn" for module in load_map.modules[e.name]}
    if stuck := sorted({kind(layers[module]) for module in in_fp8.intersection(binding.native)}):
        raise ConfigError(
            f"FP8 tensors can only be written in place, and vLLM lays out {', '.join(stuck)} in another way; allowed: "
            "weights_in='bf16'"
        )
    written = [(layers[m], *item) for m in sorted(binding.direct) for item in layers[m]._parameters.items()]
    return Prepared(
        manifest=manifest,
        sent=sent,
        binding=binding,
        specs=tuple((torch.Size(entry.shape), dtype_named(entry.dtype)) for entry in manifest),
        homes=tuple((layer, name, tensor.data_ptr()) for layer, name, tensor in written if tensor is not None),
        why={kind(layers[module]): why for module, why in sorted(binding.native.items(), reverse=True)},
        ignored=ignored,
        groups=_groups(manifest, load_map, shared),
        layers=_precisions(binding, layers),
        reloads=_reloads(load_map, binding, shared),
        taken=tuple(entry.numel if entry.name in ignored else load_map.taken[entry.name] for entry in manifest),
        wide=wide,
        past=load_map.past,
        shared=shared,
        twins=twins,
    )


def meta_tensors(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return name -> a tensor without memory, of each entry."""
    import torch

    return {e.name: torch.empty(e.shape, dtype=dtype_named(e.dtype), device="meta") for e in manifest}


def _refuse_unknown(ignored: Sequence[str], config: Any, shares_experts: bool = False) -> None:
    """Raises ConfigError for tensors that vLLM ignores, unless it is known to leave them out.

    With expert parallelism the experts of other ranks pass, too. `_refuse_missing` finds missing experts of this
    rank.
    """
    if shares_experts:
        ignored = [name for name in ignored if not ONE_EXPERTS.search(name)]
    tied = bool(getattr(config, "tie_word_embeddings", False))
    unknown = [name for name in ignored if not LEFT_OUT.match(name) or (name.startswith("lm_head.") and not tied)]
    if unknown:
        raise ConfigError(f"unknown: {some(unknown)}; allowed: the names of the model's checkpoint")


def _refuse_missing(load_map: LoadMap, layers: Mapping[str, torch.nn.Module]) -> None:
    """Raises IncompleteError for a parameter that is not filled, unless it is another name of one that is."""

    def address(module: str, param: str) -> int | None:
        live = layers[module]._parameters.get(param)
        return live.data_ptr() if live is not None and live.numel() else None

    filled = {address(*home) for home, count in load_map.covered.items() if count} - {None}
    for (module, param), shape in load_map.shapes.items():
        count, whole = load_map.covered[module, param], _wanted(layers[module], shape)
        if count >= whole or (count == 0 and address(module, param) in filled):
            continue
        sources = [name for name, copies in load_map.copies.items() if any(c[:2] == (module, param) for c in copies)]
        raise IncompleteError(
            f"missing: {whole - count} of {whole} elements of {module}.{param}, which got "
            f"{', '.join(sources) or 'nothing'}; send every tensor of the model, a fused layer needs all its parts"
        )


def _wanted(layer: torch.nn.Module, shape: Sequence[int]) -> int:
    """Count the elements that a checkpoint fills: padding of vocabularies and experts is vLLM's own."""
    whole: int = prod(shape)
    padded, real = getattr(layer, "num_embeddings_per_partition", None), getattr(layer, "shard_indices", None)
    if padded and real and shape[0] == padded:
        return whole // int(padded) * int(real.num_org_elements)
    moe: Any = getattr(layer, "moe_config", None)
    if moe is None or len(shape) != 3:
        return whole
    hidden = float(getattr(moe, "hidden_dim_unpadded", moe.hidden_dim) / moe.hidden_dim)
    inner = moe.intermediate_size_per_partition
    return round(float(whole * hidden * getattr(moe, "intermediate_size_per_partition_unpadded", inner) / inner))


def _precisions(binding: Binding, layers: Mapping[str, torch.nn.Module]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for module in binding.direct.union(binding.native):
        weights = {n: t for n, t in layers[module]._parameters.items() if t is not None and SCALE_SUFFIX not in n}
        counts.update({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    return dict(counts)


def _in_bf16(manifest: Manifest) -> Manifest:
    """Return the manifest before quantisation, for vLLM's loaders."""
    weights = [entry for entry in manifest if not entry.name.endswith(SCALE_SUFFIX)]
    return tuple(e._replace(dtype="bfloat16") if e.dtype == "float8_e4m3fn" else e for e in weights)


def _with_scales(load_map: LoadMap, manifest: Manifest) -> LoadMap:
    """Send scales where their weights go. Raises ConfigError for a weight or scales without the other."""
    scales = {e.name: e.name.removesuffix(SCALE_SUFFIX) for e in manifest if e.name.endswith(SCALE_SUFFIX)}
    if lost := [name for name, weight in scales.items() if weight not in load_map.copies]:
        raise ConfigError(f"scales without their weight: {some(lost)}; send {lost[0].removesuffix(SCALE_SUFFIX)}")
    quantised = [entry.name for entry in manifest if entry.dtype == "float8_e4m3fn"]
    if plain := [weight for weight in scales.values() if weight not in quantised]:
        raise ConfigError(f"scales for weights that are not float8_e4m3fn: {some(plain)}; quantise them")
    if bare := [name for name in quantised if name not in scales.values()]:
        raise ConfigError(f"FP8 weights without scales: {some(bare)}; send {bare[0]}{SCALE_SUFFIX}")
    return replace(
        load_map,
        copies={**load_map.copies, **{name: load_map.copies[weight] for name, weight in scales.items()}},
        modules={**load_map.modules, **{name: load_map.modules[weight] for name, weight in scales.items()}},
        sent={**load_map.sent, **{name: load_map.sent[weight] for name, weight in scales.items()}},
        taken={**load_map.taken, **{name: load_map.taken[weight] for name, weight in scales.items()}},
    )


HEAD: Final = "lm_head.weight"  # in a tied model's state_dict, and mostly not in its checkpoint


def _twins(
    load_map: LoadMap, layers: Mapping[str, torch.nn.Module], manifest: Manifest, config: Any
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that share one storage, with a tied head that vLLM leaves out or nobody sends."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    def embeds(module: str) -> bool:
        layer = layers[module]
        return isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)

    twins = list(load_map.shared)
    if getattr(config, "tie_word_embeddings", False) and not load_map.modules.get(HEAD):
        embeddings = [name for name, modules in load_map.modules.items() if any(map(embeds, modules))]
        if (head := load_map.sent.get(HEAD)) is not None:
            embeddings = [name for name in embeddings if load_map.sent[name].shape == head.shape]
        if len(embeddings) == 1:
            twins.append((embeddings[0], HEAD))
    names = {entry.name for entry in manifest}
    twins += [tuple(n + SCALE_SUFFIX for n in group if n + SCALE_SUFFIX in names) for group in tuple(twins)]
    return joined([group for group in twins if group])


def _shared(twins: Sequence[Sequence[str]], manifest: Manifest) -> tuple[tuple[str, ...], ...]:
    """Return the groups of twins that a manifest has. Raises ConfigError for tensors of different shapes in one."""
    shapes = {entry.name: entry.shape for entry in manifest}
    groups = [tuple(name for name in group if name in shapes) for group in twins]
    for first, *others in filter(None, groups):
        for other in others:
            if shapes[first] != shapes[other]:
                raise ConfigError(
                    f"{first} {list(shapes[first])} and {other} {list(shapes[other])} are written to one place of the "
                    "engine; allowed: one of them"
                )
    return tuple(group for group in groups if len(group) > 1)


def _reloads(load_map: LoadMap, binding: Binding, shared: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    reloads = {name: fed for name, fed in load_map.modules.items() if not binding.native.keys().isdisjoint(fed)}
    for group in shared:
        if not reloads.keys().isdisjoint(group):
            reloads |= {name: load_map.modules[name] for name in group}
    return reloads


def _groups(manifest: Manifest, load_map: LoadMap, shared: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Number the groups: tensors of one module belong together, and those of one storage."""
    first = leaders([*((entry.name, *load_map.modules[entry.name][:1]) for entry in manifest), *shared])
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(first[entry.name], len(numbers)) for entry in manifest)
