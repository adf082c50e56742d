"""Finding and vetting a config.json: the bundled ones of this folder, a local folder's, or the Hugging Face hub's.

Bundled files hold one model each, only the fields that describe the shape. `_source` says where the numbers come
from; `_aliases` names models of the same shape, each with the fields that differ.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from fp8plan.errors import ConfigError

# What the field of the key is called in other families. The first that a config has counts.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_layers", "num_hidden_layers"),  # LongCat has both, and the latter is twice the former
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "max_position_embeddings": ("max_position_embeddings", "model_max_length"),
    "tie_word_embeddings": ("tie_word_embeddings", "tie_embedding"),
}
MOST: Final = 10**12  # a size beyond it is a slip, and would not fit a float


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
    text = str(name_or_path)
    if not text.strip():
        raise ConfigError(f"model is {text!r}; give a hub id, such as Qwen/Qwen3-8B, or a folder with a config.json")
    for name, config in bundled_configs().items():
        if text.lower() in (name.lower(), name.rpartition("/")[2].lower()):
            return config, name, f"bundled {name} ({config['_source']})"
    path = Path(text).expanduser()
    if path.exists() or text.startswith((".", "/", "~")) or text.endswith(".json"):
        file = path if path.suffix == ".json" else path / "config.json"
        return _read_json(file), file.resolve().parent.name, str(file)
    return _read_json(_download(text)), text, f"Hugging Face hub: {text}/config.json"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        advice = "give a folder with a config.json, or a hub id"
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); {advice}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); download the model's config.json again") from error
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
    if name.count("/") != 1:
        raise ConfigError(f"unknown model {name!r}; {advice}")
    try:
        return _fetch(name)
    except ImportError as error:
        missing = "is not bundled and huggingface_hub is not installed (pip install huggingface_hub)"
        raise ConfigError(f"model {name!r} {missing}; {advice}") from error
    except (OSError, ValueError) as error:  # every hub error is one of the two: not found, gated, offline, malformed id
        reason = str(error).strip().partition("\n")[0]
        missing = f"is neither bundled nor to be had from the hub ({reason})"
        raise ConfigError(f"model {name!r} {missing}; {advice}") from error


def _fetch(name: str) -> Path:
    """config.json of a hub id, from the local cache or the network."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    if not constants.HF_HUB_OFFLINE and not getproxies():
        # The library would retry an unreachable host for 20 s, with a warning each time.
        hub = urlsplit(constants.ENDPOINT)
        socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()
    return Path(hf_hub_download(name, "config.json"))


class Fields:
    """Typed access to a config, with errors that name the file and the field."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def value(self, name: str) -> Any:
        """The value of a field, whatever its family calls it; None if it is absent or null."""
        return self.config.get(self._spelt(name))

    def error(self, name: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.source}: field {self._spelt(name)!r} is {value!r}; allowed: {allowed}")

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        value = self.value(name)
        layers = self.value("num_hidden_layers")
        if isinstance(value, list) and 0 < len(value) == layers and all(x == value[0] for x in value):
            value = value[0]  # the same for every layer (Hunyuan)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.source}: field {name!r} is missing; fp8plan needs it as a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, value, f"a whole number of at least {least}")
        if value > most:
            raise self.error(name, value, f"at most {most:,}")
        return value

    def number(self, name: str) -> float:
        """A number; 0 if the field is absent or null."""
        value = self.value(name) or 0
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self.error(name, value, "a number of at least 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if value not in (True, False, None):
            raise self.error(name, value, "true or false")
        return bool(value)

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers; None if the field is absent or null."""
        value = self.value(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(x, int) for x in value)):
            raise self.error(name, value, "a list of layer numbers")
        return value

    def words(self, name: str, length: int) -> list[str] | None:
        """A list of `length` words, one for each layer; None if the field is absent or null."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(x, str) for x in value):
            raise self.error(name, value, f"a list of {length} words, one for each layer")
        return value

    def _spelt(self, name: str) -> str:
        """The name of a field in this config."""
        return next((other for other in SYNONYMS.get(name, ()) if self.config.get(other) is not None), name)
