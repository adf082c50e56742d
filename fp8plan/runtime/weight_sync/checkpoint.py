"""The files of the checkpoint that an engine was started with: what they hold, and which of it is zero."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.jsonl import parse
from fp8plan.runtime.weight_sync.manifest import Entry, Manifest

SAFETENSORS_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}


class Part(NamedTuple):
    """A part of a tensor: its box has (start, stop) in each dimension. box: None: all of it"""

    name: str
    box: tuple[tuple[int, int], ...] | None = None


def local_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Find a model's files: the folder itself, or the Hugging Face cache's snapshot of a hub id. None: not here."""
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


def _files(folder: Path) -> list[Path]:
    """The safetensors files that vLLM loads: those of the index, where there is one. Beside them a folder may have the
    same weights under other names, as consolidated.safetensors of Mistral's.
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
    """Return the names of the parts of tensors that are not all zeros in a checkpoint's safetensors files.

    A tensor that the files do not have is left out. Only the tensors that are named are read.
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
