"""The config.json of a model: one of those bundled in this folder, a local folder's, or the Hugging Face hub's.

A bundled file holds one model, with only the fields that describe the shape. `_source` is the origin of the numbers.
`_aliases` has models of the same shape, each with the fields that differ, and with its own `_source` if it has one. A
quantised model has a BF16 copy beside it, as trainers keep one: fp8plan/NAME-bf16, unless the BF16 model is bundled.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fp8plan.checks import nearest_hint
from fp8plan.errors import ConfigError
from fp8plan.model.configs.fields import shown

ADVICE: Final = "give a hub id, such as Qwen/Qwen3-8B, or a folder with a config.json"
MOST_CHARACTERS: Final = 4096  # the longest path on Linux
# The address of a page on the hub, and its path.
HUB: Final = re.compile(r"(?is)(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)(?:/([^?#]*).*)?")
# The path of a model's page: its id, and the revision that a longer path names. The hub has other things in folders.
PAGE: Final = re.compile(
    r"(?!(?:datasets|spaces|collections|papers|docs)/)([^/]+/[^/]+)(?:/(?:tree|blob|raw|resolve)/([^/]+))?(?:/.*)?"
)
BF16_MODEL: Final = "give the hub id of the BF16 model that it was made from, or a folder with that model's config.json"

# File in a folder without config.json -> the contents of the folder, and advice.
OTHERS: Final = {
    "params.json": ("a model in Mistral's own format (params.json)", "give its version with a config.json"),
    "model_index.json": ("a diffusers pipeline (model_index.json)", "fp8plan plans language models: " + ADVICE),
    "*.gguf": ("weights that llama.cpp quantised (GGUF)", BF16_MODEL),
    "tokenizer.json": ("a tokenizer alone", ADVICE),
    "tokenizer_config.json": ("a tokenizer alone", ADVICE),
    "*.safetensors": ("weights alone", "put the model's config.json beside them, or give its hub id"),
}


def _spelt(text: str) -> str:
    """The hub id or path in a user's text: an address of the hub, or a name with spaces, slashes, backslashes.

    Raises ConfigError for any other text.
    """
    text = text.strip()
    if not text or len(text) > MOST_CHARACTERS or any(ord(x) < ord(" ") for x in text):
        long = f" ({len(text):,} characters)" if len(text) > MOST_CHARACTERS else ""
        raise ConfigError(f"model is {shown(text)}{long}; {ADVICE}")
    address = HUB.fullmatch(text)
    if address is not None or "://" in text:
        page = PAGE.fullmatch(address[1] or "") if address is not None else None
        if page is None:
            raise ConfigError(f"{shown(text)}: not a page of a model on the hub; {ADVICE}")
        if page[2] not in (None, "main"):
            advice = "give a folder with the config.json of that revision"
            raise ConfigError(f"{shown(text)}: names another revision, and fp8plan reads main; {advice}")
        return page[1]
    return text if _exists(Path(text)) else text.replace("\\", "/").rstrip("/") or text


def _is_path(text: str) -> bool:
    """True for a text that means a path: it exists, starts as one, or names a file."""
    starts = text.startswith((".", "/", "~")) or re.match(r"[A-Za-z]:/", text)
    return bool(starts) or text.endswith((".json", ".gguf", ".safetensors")) or _exists(Path(text))


def _exists(path: Path) -> bool:
    """True for a file or folder that this user can see."""
    try:
        return path.exists()
    except OSError:  # the name is too long, or the folder is not readable
        return False


def _config_file(text: str) -> Path:
    """The config.json of a folder, or the file itself. Raises ConfigError that names the folder's other contents."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: there is no such user here; {ADVICE}") from error
    if path.suffix == ".gguf":
        raise ConfigError(f"{path}: {OTHERS['*.gguf'][0]}; {BF16_MODEL}")
    if _exists(path) and path.is_file() and path.suffix != ".json":
        raise ConfigError(f"{path}: not a config.json; give the folder that holds the model's")
    folder, file = (path.parent, path) if path.suffix == ".json" else (path, path / "config.json")
    if path.name == "adapter_config.json" or not _exists(file):
        _check_contents(folder)
    return file


def _check_contents(folder: Path) -> None:
    """Raise ConfigError if a folder without config.json has known contents."""
    if not _exists(folder):
        return
    adapter = folder / "adapter_config.json"
    if _exists(adapter):
        base = _base_of(adapter)
        raise ConfigError(
            f"{folder}: holds a LoRA adapter (adapter_config.json); fp8plan plans the model that it is merged into; "
            + (f"type: fp8plan plan {base}" if base else ADVICE)
        )
    for pattern, (contents, advice) in OTHERS.items():
        if next(folder.glob(pattern), None) is not None:
            raise ConfigError(f"{folder}: holds {contents}, and no config.json; {advice}")
    nested = (path.parent for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/config.json"))
    below = sorted(islice(nested, 3))
    if below:
        raise ConfigError(
            f"{folder}: holds no config.json itself; give the folder below that does: {' or '.join(map(str, below))}"
        )


def _base_of(adapter: Path) -> str:
    """The base model of a LoRA adapter; "" if its file does not say."""
    try:
        fields: Any = json.loads(adapter.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    base = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    return base if isinstance(base, str) and base.isprintable() else ""


# The usual end of a quantised checkpoint's name.
_SUFFIX: Final = re.compile(
    r"-(fp8|fp4|nvfp4|mxfp4|mxfp8|awq|gptq|int[48]|w[48]a(4|8|16)|bnb|[48]bit|gguf|quantized)\b.*", re.IGNORECASE
)
QUANT_FILE: Final = "hf_quant_config.json"  # beside config.json, with the quantisation by ModelOpt up to 0.29


@cache
def bundled_configs() -> dict[str, dict[str, Any]]:
    """Hub id -> config, aliases and BF16 copies included, sorted by id. Treat as read-only."""
    configs: dict[str, dict[str, Any]] = {}
    for entry in files(__name__).iterdir():
        if not entry.name.endswith(".json"):
            continue
        config = json.loads(entry.read_text(encoding="utf-8"))
        aliases = config.pop("_aliases", {})
        name = entry.name.removesuffix(".json").replace("--", "/")
        configs[name] = config
        configs.update({alias: _changed(config, name, changes) for alias, changes in aliases.items()})
    for name, config in list(configs.items()):
        if config.get("quantization_config"):
            source = f"{config['_source']}, without its quantization_config"
            copy = _changed(config, name, {"quantization_config": None, "_source": source})
            copy["_note"] += " The hub has no such id: settings need the path of your own BF16 copy."
            configs.setdefault(_bf16_name(name), copy)
    return dict(sorted(configs.items()))


def _changed(config: dict[str, Any], name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that has the bundled model `name`'s but for `changes`, with a note that says so."""
    fields = [field for field in changes if not field.startswith("_")]
    note = f"The config is the bundled one of {name}{', but for ' if fields else ''}{' and '.join(fields)}."
    return config | changes | {"_note": note}


def _bf16_name(name: str) -> str:
    """The id of the BF16 model of a quantised one: without the usual end, or else of a copy that fp8plan names."""
    owner, _, last = name.rpartition("/")
    short = _SUFFIX.sub("", last)
    return f"fp8plan/{last}-bf16" if short == last else f"{owner}/{short}"


def bf16_twin(name: str) -> str:
    """The bundled BF16 model of a checkpoint with this name, such as Qwen3-8B-FP8, whoever owns it; "" without one."""
    last = _bf16_name(name).rpartition("/")[2].lower()
    return next((known for known in bundled_configs() if known.rpartition("/")[2].lower() == last), "")


def find_config(name_or_path: str | Path) -> tuple[dict[str, Any], str, str]:
    """The config, name and source of a bundled model, a local folder or file, or a hub id, tried in this order.

    Raises ConfigError if none of them exists or the file cannot be read.
    """
    text = _spelt(str(name_or_path))
    for name, config in bundled_configs().items():
        if text.lower() in (name.lower(), name.rpartition("/")[2].lower()):
            return config, name, f"bundled {name} ({config['_source']})"
    if _is_path(text):
        file = _config_file(text)
        beside = file.with_name(QUANT_FILE)
        config = _with_quant_file(_read_json(file), lambda: beside if beside.is_file() else None)
        return config, file.resolve().parent.name, str(file)
    config = _with_quant_file(_read_json(_download(text)), lambda: _fetch_quant_file(text))
    return config, text, f"Hugging Face hub: {text}/config.json"


def _with_quant_file(config: dict[str, Any], find: Callable[[], Path | None]) -> dict[str, Any]:
    """The config, with the fields of QUANT_FILE if quantization_config is null (vLLM's get_config)."""
    file = find() if config.get("quantization_config") is None else None
    return config if file is None else config | {QUANT_FILE: _read_json(file)}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())  # in UTF-8, 16 or 32, with or without a byte order mark
    except OSError as error:
        advice = "give a folder with a config.json, or a hub id"
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); {advice}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); download the model's config.json again") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deeply to be a config.json; download the model's again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: holds a {type(config).__name__}, not the fields of a config.json")
    return config


def _download(name: str) -> Path:
    """The cached or downloaded config.json of a hub id. Raises ConfigError, with the nearest bundled names, if none."""
    names = {n.rpartition("/")[2].lower(): n for n in bundled_configs()} | {n.lower(): n for n in bundled_configs()}
    hint = nearest_hint(name.lower(), names, 4, 0.5, "nearest bundled")
    last = name.rpartition("/")[2].lower()
    if alike := names.get(last) or bf16_twin(name):
        hint = f"{alike} is bundled: type that if this is a copy of it, or was quantised from it; "
    advice = f"{hint}all bundled: fp8plan models; otherwise give a folder with a config.json or a hub id (owner/name)"
    if name.lower().endswith("gguf"):
        raise ConfigError(f"model {shown(name)} is {OTHERS['*.gguf'][0]}; {BF16_MODEL}")
    if name.count("/") != 1:
        raise ConfigError(f"unknown model {shown(name)}; {advice}")
    try:
        return _fetch(name)
    except ImportError as error:
        missing = "is not bundled and huggingface_hub is not installed (pip install huggingface_hub)"
        raise ConfigError(f"model {shown(name)} {missing}; {advice}") from error
    except (OSError, ValueError) as error:  # every error of the hub: not found, gated, offline, malformed id
        reason = str(error).strip().partition("\n")[0]
        missing = f"is neither bundled nor available from the hub ({reason})"
        raise ConfigError(f"model {shown(name)} {missing}; {advice}") from error


def _fetch(name: str) -> Path:
    """config.json of a hub id, from the local cache or the network."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    if not constants.HF_HUB_OFFLINE:
        _knock(constants.ENDPOINT)
    return Path(hf_hub_download(name, "config.json"))


def _knock(endpoint: str) -> None:
    """Raise OSError if the hub cannot be reached. Otherwise the library would retry for 20 s, with warnings."""
    from urllib.request import getproxies

    if not getproxies():
        hub = urlsplit(endpoint)
        socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()


def _fetch_quant_file(name: str) -> Path | None:
    """QUANT_FILE of a hub id, from the local cache or the network.

    None if it does not exist or the hub cannot be reached, as in vLLM (file_or_path_exists).
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, QUANT_FILE)
    if cached is not None or constants.HF_HUB_OFFLINE:
        return Path(cached) if isinstance(cached, str) else None
    try:
        _knock(constants.ENDPOINT)
        return Path(hf_hub_download(name, QUANT_FILE))
    except (OSError, ValueError):
        return None
