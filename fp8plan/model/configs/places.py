"""A model as a user types it, brought to a hub id or a path; and the contents of a folder without config.json."""

from __future__ import annotations

import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from fp8plan.errors import ConfigError
from fp8plan.model.configs.fields import shown

ADVICE: Final = "give a hub id, such as Qwen/Qwen3-8B, or a folder with a config.json"
MOST_CHARACTERS: Final = 4096  # of a path on Linux
HUBS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
BF16_MODEL: Final = "give the hub id of the BF16 model that it was made from, or a folder with that model's config.json"

# File in a folder without config.json -> what the folder holds, and what to give instead.
OTHERS: Final = {
    "params.json": ("a model in Mistral's own format (params.json)", "give its version with a config.json"),
    "model_index.json": ("a diffusers pipeline (model_index.json)", "fp8plan plans language models: " + ADVICE),
    "*.gguf": ("weights that llama.cpp quantised (GGUF)", BF16_MODEL),
    "tokenizer.json": ("a tokenizer alone", ADVICE),
    "tokenizer_config.json": ("a tokenizer alone", ADVICE),
    "*.safetensors": ("weights alone", "put the model's config.json beside them, or give its hub id"),
}


def spelt(text: str) -> str:
    """The hub id or the path in what a user typed: in a URL of the hub's pages or files, in a file URL, with spaces or
    slashes around it, or with backslashes. Raises ConfigError for what can be neither.
    """
    text = text.strip()
    if text.partition("/")[0].lower() in HUBS:
        text = f"https://{text}"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        text = _of_url(text)
    if not text or len(text) > MOST_CHARACTERS or any(ord(x) < ord(" ") for x in text):
        long = f" ({len(text):,} characters)" if len(text) > MOST_CHARACTERS else ""
        raise ConfigError(f"model is {shown(text)}{long}; {ADVICE}")
    return text if exists(Path(text)) else text.replace("\\", "/").rstrip("/") or text


def is_path(text: str) -> bool:
    """Tell whether a text is meant as a path: it exists, starts as one, or names a file."""
    starts = text.startswith((".", "/", "~")) or re.match(r"[A-Za-z]:/", text)
    return bool(starts) or text.endswith((".json", ".gguf", ".safetensors")) or exists(Path(text))


def exists(path: Path) -> bool:
    """Tell whether there is a file or folder, and it can be looked at."""
    try:
        return path.exists()
    except OSError:  # its name is too long, or its folder closed to this user
        return False


def config_file(text: str) -> Path:
    """The config.json of a folder, or the file itself. Raises ConfigError with what else is there."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: there is no such user here; {ADVICE}") from error
    if path.suffix == ".gguf":
        raise ConfigError(f"{path}: {OTHERS['*.gguf'][0]}; {BF16_MODEL}")
    if exists(path) and path.is_file() and path.suffix != ".json":
        raise ConfigError(f"{path}: not a config.json; give the folder that holds the model's")
    folder, file = (path.parent, path) if path.suffix == ".json" else (path, path / "config.json")
    if path.name == "adapter_config.json" or not exists(file):
        _check_contents(folder)
    return file


def check_hub_id(name: str) -> None:
    """Raise ConfigError for the id of weights in GGUF, by the end that their ids have."""
    if name.lower().endswith("gguf"):
        raise ConfigError(f"model {shown(name)} is {OTHERS['*.gguf'][0]}; {BF16_MODEL}")


def _of_url(text: str) -> str:
    """The hub id of a URL of the hub, or the path of a file URL."""
    try:
        url = urlsplit(text)
    except ValueError as error:  # half an address of six parts
        raise ConfigError(f"model is {shown(text)}; {ADVICE}") from error
    if url.scheme == "file":
        return url2pathname(url.path)
    hubs = (*HUBS, urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname)
    parts = [unquote(part) for part in url.path.split("/") if part]
    if url.scheme == "hf":
        parts = [url.netloc, *parts]
    elif url.hostname not in hubs or url.scheme not in ("http", "https"):
        raise ConfigError(f"{shown(text)}: not a page of a model on the hub; {ADVICE}")
    if len(parts) < 2 or parts[0] in ("datasets", "spaces", "collections", "papers", "docs"):
        raise ConfigError(f"{shown(text)}: names no model; {ADVICE}")
    owner, name, *rest = parts
    if len(rest) > 1 and rest[0] in ("tree", "blob", "resolve", "raw") and rest[1] != "main":
        advice = "give a folder with the config.json of that revision"
        raise ConfigError(f"{shown(text)}: names another revision, and fp8plan reads main; {advice}")
    return f"{owner}/{name}"


def _check_contents(folder: Path) -> None:
    """Raise ConfigError with what a folder without config.json holds, if it is something known."""
    if not exists(folder):
        return
    adapter = folder / "adapter_config.json"
    if exists(adapter):
        base = _base_of(adapter)
        raise ConfigError(
            f"{folder}: holds a LoRA adapter (adapter_config.json); fp8plan plans the model that it is merged into; "
            + (f"type: fp8plan plan {base}" if base else ADVICE)
        )
    for pattern, (contents, advice) in OTHERS.items():
        if next(folder.glob(pattern), None) is not None:
            raise ConfigError(f"{folder}: holds {contents}, and no config.json; {advice}")
    below = sorted(islice((path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/config.json")), 3))
    if below:
        raise ConfigError(
            f"{folder}: holds no config.json itself; give the folder below that does: {' or '.join(map(str, below))}"
        )


def _base_of(adapter: Path) -> str:
    """The model that a LoRA adapter was trained on; "" if its file does not say."""
    try:
        fields: Any = json.loads(adapter.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    base = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    return base if isinstance(base, str) and base.isprintable() else ""
