"""The manifest of a sync: names, dtypes and shapes of the tensors that a trainer is about to send.

Errors in it show before any byte is sent, while the old weights still serve. It is compared with the files of the
checkpoint that the engine was started with (weight_sync.checkpoint).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.errors import ConfigError, some
from fp8plan.runtime.apply.quantize.block_fp8 import scale_shape

if TYPE_CHECKING:
    import torch

# Formats of a sync. bf16: the trainer's tensors, quantised inside the engine. fp8_block: E4M3 weights and FP32 scales
# for the layers that the engine holds in FP8, and BF16 for the rest, which is half the bytes.
FORMATS: Final = ("bf16", "fp8_block")

SCALE_SUFFIX: Final = "_scale_inv"  # suffix of a weight's scales, as in DeepSeek's checkpoints and in vLLM

# Tensors that vLLM computes itself or does not use. A tied lm_head is in a trainer's state_dict and in no checkpoint.
# Layers for multi-token prediction are in a checkpoint and in no state_dict.
LEFT_OUT: Final = re.compile(r"lm_head\.|mtp\.|.*rotary_emb\.inv_freq$")


class Entry(NamedTuple):
    """One tensor: Hugging Face name, dtype as torch names it ("bfloat16"), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_named(self.dtype).itemsize


Manifest = tuple[Entry, ...]


def is_matrix(shape: Sequence[int]) -> bool:
    """Return False for a vector, such as a bias or a norm: fewer than two dimensions of more than one element."""
    return sum(size > 1 for size in shape) > 1


def dtype_named(name: str) -> torch.dtype:
    """Return torch.bfloat16 for "bfloat16". Raises ConfigError for a name of no dtype."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is no dtype of torch; allowed: 'bfloat16', 'float8_e4m3fn', 'float32', ...")
    return dtype


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """Return the entry of a tensor, with the full shape of a sharded one (a DTensor's shape is the global one)."""
    return Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def manifest_of(source: Any) -> Manifest | None:
    """Return the manifest of `source` without reading it; None for a bare iterator, whose tensors only reading shows.

    source: a mapping of names to tensors, a sequence of (name, tensor) pairs, a vLLM WeightSource (or another object
            with metadata() -> items with name, dtype and shape), or an iterator. From 0.33 on vLLM's metadata is a
            property

    Raises ConfigError for anything else, and as pair_of does.
    """
    if hasattr(source, "metadata"):
        try:
            items = source.metadata() if callable(source.metadata) else source.metadata
            return tuple(Entry(i.name, str(i.dtype).removeprefix("torch."), tuple(i.shape)) for i in items)
        except (TypeError, AttributeError) as error:
            raise ConfigError(
                f"metadata() of {type(source).__name__}: {error}; allowed: items with name, dtype and shape"
            ) from error
    _refuse_other(source)
    if isinstance(source, Mapping):
        source = list(source.items())
    return tuple(entry_of(*pair_of(pair)) for pair in source) if isinstance(source, Sequence) else None


def _refuse_other(source: Any) -> None:
    """Raises ConfigError for an object that holds no (name, tensor) pairs."""
    import torch

    single = isinstance(source, (str, bytes, torch.Tensor))
    if hasattr(source, "state_dict"):
        hint = "type model.state_dict()"
    elif callable(source):
        hint = "type its call"
    elif single or not isinstance(source, Iterable):
        hint = "e.g. model.state_dict()"
    else:
        return
    kind = "None" if source is None else f"of type {type(source).__name__}"
    raise ConfigError(
        f"the tensors are {kind}; allowed: a dict of names to tensors, (name, tensor) pairs in a list or an iterator, "
        f"or vLLM's WeightSource ({hint})"
    )


def pair_of(item: Any) -> tuple[str, torch.Tensor]:
    """Return the (name, tensor) in an item of a source.

    Raises ConfigError for another item, and for a tensor without plain values: on the meta device, sparse, or quantised
    by torch.
    """
    import torch

    try:
        name, tensor = item
    except (TypeError, ValueError):
        raise ConfigError(
            f"the source gave a value of type {type(item).__name__}; allowed: pairs of a name and a tensor"
        ) from None
    if not isinstance(name, str):
        raise ConfigError(f"the source gave a name of type {type(name).__name__}; allowed: Hugging Face names")
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} is of type {type(tensor).__name__}; allowed: a torch.Tensor")
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigError(f"{name} has no values yet, nor a shape; allowed: the tensor that was trained")
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; allowed: the tensor that was trained")
    if tensor.layout != torch.strided:
        raise ConfigError(f"{name} is sparse ({tensor.layout}); allowed: dense tensors (type tensor.to_dense())")
    if tensor.is_quantized:
        raise ConfigError(f"{name} is quantised ({tensor.dtype}); allowed: plain ones (type tensor.dequantize())")
    return name, tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values without its gradient; of a DTensor, all shards."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach() if whole.requires_grad else whole  # a model may have 20,000 tensors


def pairs_of(source: Any) -> Iterable[tuple[str, Any]]:
    """Return the (name, tensor) pairs of a source. vLLM's WeightSource gives them by `iter_full` from 0.33 on."""
    pairs: Iterable[tuple[str, Any]] = source.iter_full() if hasattr(source, "iter_full") else source
    return pairs.items() if isinstance(pairs, Mapping) else pairs


def read_manifest(triples: Any) -> Manifest:
    """Read a manifest that a caller wrote: (name, dtype, shape) triples. Raises ConfigError for anything else."""
    try:
        return tuple(Entry(str(n), str(d).removeprefix("torch."), tuple(map(int, s))) for n, d, s in triples)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            "the manifest is not a list of (name, dtype, shape); allowed: e.g. [('model.norm.weight', 'bfloat16', "
            "(4096,))]"
        ) from None


def refuse(manifest: Manifest, expected: Manifest | None, weights_in: str) -> None:
    """Raises ConfigError for errors that show without the engine: names sent twice, and dtypes of the other format.

    With the `expected` tensors (in the same format) it also refuses unknown names, other shapes and missing tensors.
    Only vLLM's dry run knows which tensors it leaves out.
    """
    names = [entry.name for entry in manifest]
    if doubles := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ConfigError(f"sent twice: {some(doubles)}; allowed: every tensor once")
    if not manifest:
        raise ConfigError("the manifest is empty; allowed: every tensor of the model's checkpoint")
    known = {entry.name: entry for entry in expected or ()}
    _refuse_format(manifest, known, weights_in)
    if expected is None:
        return
    if unknown := [name for name in names if name not in known and not LEFT_OUT.match(name)]:
        raise ConfigError(
            f"unknown: {some(unknown)}; allowed: the names of the model's checkpoint, as "
            f"{next((name for name in known if 'layers' in name), next(iter(known)))}{_fused_hint(unknown)}"
        )
    for entry in (entry for entry in manifest if entry.name in known):
        own = known[entry.name]
        fp8 = "float8_e4m3fn" in (entry.dtype, own.dtype) or entry.name.endswith(SCALE_SUFFIX)
        if fp8 and entry.dtype != own.dtype:
            maker = "fp8plan.runtime.apply.quantize.block_fp8.quantize"
            raise ConfigError(f"{entry.name} is {entry.dtype}; allowed: {own.dtype} ({maker})")
        if entry.shape != own.shape:
            shapes = f"has shape {list(entry.shape)}; allowed: {list(own.shape)}, as in the checkpoint"
            raise ConfigError(f"{entry.name} {shapes}")
    if missing := sorted(name for name in known.keys() - set(names) if not LEFT_OUT.match(name)):
        raise ConfigError(
            f"missing: {some(missing)}; send every tensor of the model, a fused layer needs all its parts"
        )


def _fused_hint(unknown: Sequence[str]) -> str:
    if not any(".experts." in name and name.endswith("_proj") for name in unknown):
        return ""
    return (
        ". Transformers 5 holds all experts of a layer in one tensor; for those of the checkpoint type "
        "revert_weight_conversion(model, model.state_dict()), from transformers.core_model_loading"
    )


def _refuse_format(manifest: Manifest, known: Mapping[str, Entry], weights_in: str) -> None:
    """Raises ConfigError for FP8 tensors sent to an engine that wants BF16, and for dtypes that no format has.

    FP32 is rounded where the engine does not keep it (held_dtype).
    """
    for entry in manifest:
        quantised = entry.dtype == "float8_e4m3fn" or entry.name.endswith(SCALE_SUFFIX)
        if quantised and weights_in == "bf16":
            raise ConfigError(
                f"{entry.name} is {entry.dtype}, and this engine takes BF16 and quantises itself; send BF16, or "
                "start it with weights_in='fp8_block'"
            )
        if entry.name.endswith(SCALE_SUFFIX) and entry.dtype != "float32":
            raise ConfigError(f"{entry.name} is {entry.dtype}; allowed: float32")
        as_known = entry.name in known and entry.dtype == known[entry.name].dtype
        if not quantised and entry.dtype not in ("bfloat16", "float32") and not as_known:
            raise ConfigError(only_bf16(entry))


def only_bf16(entry: Entry) -> str:
    """Return the error for a tensor of another dtype than BF16."""
    return f"{entry.name} is {entry.dtype}; allowed: bfloat16 (type tensor.to(torch.bfloat16))"


def refuse_quantising(manifest: Manifest, quantised: Collection[str]) -> None:
    """Raise ConfigError for a tensor that is to be quantised, and is neither BF16 nor FP32. E4M3 is quantised already.

    quantised: names of the tensors that an engine holds in FP8
    """
    for entry in manifest:
        if entry.name in quantised and entry.dtype not in ("bfloat16", "float32", "float8_e4m3fn"):
            raise ConfigError(only_bf16(entry))


def held_dtype(name: str, dtype: str, wide: Collection[str]) -> str:
    """Return the dtype in which an engine holds a tensor that comes in BF16 or FP32; another dtype as it is.

    wide: names of the tensors that it keeps in FP32

    FP32 is exact there, and rounded to BF16 elsewhere, as vLLM rounds a checkpoint in FP32.
    """
    if dtype not in ("bfloat16", "float32") or name.endswith(SCALE_SUFFIX):
        return dtype
    return "float32" if name in wide else "bfloat16"


def held_manifest(manifest: Manifest, quantised: Iterable[str], wide: Collection[str]) -> Manifest:
    """Return a manifest in the formats that an engine holds. quantised: names of its tensors in FP8"""
    unquantised = (entry._replace(dtype=held_dtype(entry.name, entry.dtype, wide)) for entry in manifest)
    return quantised_manifest(tuple(unquantised), quantised)


def as_held(pairs: Iterable[Any], wide: Collection[str], rounded: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a trainer's pairs, gathered, in the dtypes in which an engine holds them (held_dtype).

    rounded: gets the names of tensors whose FP32 is rounded

    Raises ConfigError as pair_of does.
    """
    for item in pairs:
        name, tensor = pair_of(item)
        came = dtype_name(tensor.dtype)
        dtype = held_dtype(name, came, wide)
        if came == "float32" != dtype:
            rounded.append(name)
        yield name, gathered(tensor).to(dtype_named(dtype))


def rounding(names: Sequence[str]) -> str:
    """Return a note on tensors that came in FP32 and were rounded."""
    return f"the engine holds these in BF16, so their FP32 is rounded: {some(names)}"


def quantised_manifest(manifest: Manifest, quantised: Iterable[str]) -> Manifest:
    """Return the fp8_block manifest of another: each tensor in `quantised` becomes E4M3, followed by its scales."""
    chosen, entries = set(quantised), list[Entry]()
    for entry in manifest:
        if entry.name not in chosen or entry.dtype == "float8_e4m3fn":
            entries.append(entry)
            continue
        scales = (*entry.shape[:-2], *scale_shape(*entry.shape[-2:]))
        entries += [entry._replace(dtype="float8_e4m3fn"), Entry(entry.name + SCALE_SUFFIX, "float32", scales)]
    return tuple(entries)


class Part(NamedTuple):
    """A part of a tensor: its box has (start, stop) in each dimension. box: None: all of it"""

    name: str
    box: tuple[tuple[int, int], ...] | None = None
