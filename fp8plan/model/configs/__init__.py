"""Finding and vetting a config.json: the bundled ones of this folder, a local folder's, or the Hugging Face hub's.

Bundled files hold one model each, only the fields that describe the shape. `_source` says where the numbers come
from; `_aliases` names models of the same shape, each with the fields that differ.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from fp8plan.errors import ConfigError
from fp8plan.model.configs.fields import shown
from fp8plan.model.configs.places import check_hub_id, config_file, is_path, spelt

QUANT_FILE: Final = "hf_quant_config.json"  # beside config.json, where ModelOpt up to 0.29 says how weights are stored


@cache
def bundled_configs() -> dict[str, dict[str, Any]]:
    """Hub id -> config, aliases included, sorted by id. Treat as read-only."""
    configs: dict[str, dict[str, Any]] = {}
    for entry in files(__name__).iterdir():
        if not entry.name.endswith(".json"):
            continue
        config = json.loads(entry.read_text(encoding="utf-8"))
        aliases = config.pop("_aliases", {})
        name = entry.name.removesuffix(".json").replace("--", "/")
        configs[name] = config
        configs.update({alias: config | changes for alias, changes in aliases.items()})
    return dict(sorted(configs.items()))


def find_config(name_or_path: str | Path) -> tuple[dict[str, Any], str, str]:
    """The config, the model's name and the source of a bundled model, a local folder or file, or a hub id, looked for
    in this order.

    Raises ConfigError when nothing is found or the file cannot be read.
    """
    text = spelt(str(name_or_path))
    for name, config in bundled_configs().items():
        if text.lower() in (name.lower(), name.rpartition("/")[2].lower()):
            return config, name, f"bundled {name} ({config['_source']})"
    if is_path(text):
        file = config_file(text)
        beside = file.with_name(QUANT_FILE)
        config = _with_quant_file(_read_json(file), lambda: beside if beside.is_file() else None)
        return config, file.resolve().parent.name, str(file)
    config = _with_quant_file(_read_json(_download(text)), lambda: _fetch_quant_file(text))
    return config, text, f"Hugging Face hub: {text}/config.json"


def _with_quant_file(config: dict[str, Any], find: Callable[[], Path | None]) -> dict[str, Any]:
    """A config with the fields of QUANT_FILE under its name, which counts where quantization_config is null (vLLM's
    get_config).
    """
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
    """The cached or downloaded config.json of a hub id. Raises ConfigError with the nearest bundled names if there is
    none.
    """
    names = {n.rpartition("/")[2].lower(): n for n in bundled_configs()} | {n.lower(): n for n in bundled_configs()}
    near = list(dict.fromkeys(names[match] for match in get_close_matches(name.lower(), names, n=4, cutoff=0.5)))
    hint = f"nearest bundled: {', '.join(near)}; " if near else ""
    advice = f"{hint}all bundled: fp8plan models; otherwise give a folder with a config.json or a hub id (owner/name)"
    check_hub_id(name)
    if name.count("/") != 1:
        raise ConfigError(f"unknown model {shown(name)}; {advice}")
    try:
        return _fetch(name)
    except ImportError as error:
        missing = "is not bundled and huggingface_hub is not installed (pip install huggingface_hub)"
        raise ConfigError(f"model {shown(name)} {missing}; {advice}") from error
    except (OSError, ValueError) as error:  # every hub error is one of the two: not found, gated, offline, malformed id
        reason = str(error).strip().partition("\n")[0]
        missing = f"is neither bundled nor to be had from the hub ({reason})"
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
    """Raise OSError if the hub cannot be reached: the library would retry for 20 s, with a warning each time."""
    if not getproxies():
        hub = urlsplit(endpoint)
        socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()


def _fetch_quant_file(name: str) -> Path | None:
    """QUANT_FILE of a hub id, from the local cache or the network; None if there is none. Where the hub cannot be asked
    there is none, as in vLLM (file_or_path_exists).
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
