"""The safetensors files of a checkpoint, as vLLM loads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.manifest import Entry, Manifest, Part
from fp8plan.schemas import parse

if TYPE_CHECKING:
    import torch

SAFETENSORS_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}


def local_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Find a model's files: the folder itself, or the Hugging Face cache's snapshot of a hub id. None: not found."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def checkpoint_manifest(folder: str | Path) -> Manifest | None:
    """Read the manifest of a Hugging Face folder from the headers of its safetensors files; None if it has none."""
    files = _files(Path(folder))
    if not files:
        return None
    from safetensors import safe_open

    entries = []
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a dict
                tensor = file.get_slice(name)
                entries.append(Entry(name, SAFETENSORS_DTYPES.get(tensor.get_dtype(), ""), tuple(tensor.get_shape())))
    return tuple(entries)


def local_manifest(model: str, revision: str | None = None, cache: str | None = None) -> Manifest | None:
    """Read the manifest of a model's files. None: they are not on this machine, or have no safetensors."""
    folder = local_folder(model, revision, cache)
    return None if folder is None else checkpoint_manifest(folder)


def checkpoint_tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each entry of `checkpoint_manifest`."""
    from safetensors import safe_open

    for path in _files(Path(folder)):
        with safe_open(path, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 -- not a dict


def _files(folder: Path) -> list[Path]:
    """The safetensors files that vLLM loads: those of the index, if there is one.

    A folder may also have the same weights under other names, as Mistral's consolidated.safetensors.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    data = parse(index.read_text(encoding="utf-8"), str(index))
    listed = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ConfigError(f"{index} has no weight_map; allowed: name of a tensor -> file, as save_pretrained writes it")
    files = [folder / name for name in sorted(set(listed.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{index} names {missing[0]}, which is not there; download the checkpoint again")
    return files


def not_zero(folder: Path, parts: Collection[Part]) -> list[str]:
    """Return the names of the parts that are not all zeros in a checkpoint's safetensors files.

    A tensor that the files do not have is left out. No other tensors are read.
    """
    from safetensors import safe_open

    names = []
    for path in _files(folder):
        with safe_open(path, "pt") as file:
            held = set(file.keys())
            for name, box in parts:
                if name in held and file.get_tensor(name)[tuple(slice(*extent) for extent in box or ())].any():
                    names.append(name)
    return list(dict.fromkeys(names))
