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
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from fp8plan.errors import ConfigError

DENSE_FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
MOE_FAMILIES = ("qwen3_moe", "mixtral")

# config.json keys whose presence (with a true value) means a feature that changes weights, KV cache or cost.
UNMODELLED_KEYS = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "vision_config": "a vision tower (multimodal model)",
    "audio_config": "an audio tower (multimodal model)",
    "text_config": "a nested text model (multimodal model)",
    "is_encoder_decoder": "an encoder (encoder-decoder model)",
    "ssm_cfg": "state-space layers (Mamba)",
    "mamba_d_state": "state-space layers (Mamba)",
    "linear_num_key_heads": "linear attention layers (hybrid model)",
    "hybrid_override_pattern": "hybrid layers",
    "mlp_bias": "biases in the MLP (mlp_bias)",
}


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


def refuse_unmodelled(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if the config describes something whose cost would come out wrong."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{source}: field 'model_type' is {model_type!r}; fp8plan needs it to know the architecture")
    features = [text for key, text in UNMODELLED_KEYS.items() if config.get(key)]
    kinds = {kind for kind in config.get("layer_types") or [] if kind != "full_attention"}
    features += [f"{kind} layers" for kind in sorted(map(str, kinds))]
    # Qwen configs carry a window size that only counts when use_sliding_window is true; Mistral's always counts.
    if config.get("sliding_window") and config.get("use_sliding_window", model_type in ("mistral", "mixtral")):
        features.append(f"sliding-window attention (sliding_window {config['sliding_window']})")
    supported = (*DENSE_FAMILIES, *MOE_FAMILIES)
    if features or model_type not in supported:
        what = " and ".join(features) or f"model_type {model_type!r}"
        raise ConfigError(
            f"{source}: {what} is not modelled; model types that are: {', '.join(supported)}, with full attention only"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{source}: this checkpoint is already quantised (quantization_config). fp8plan compares precisions from "
            "the BF16 weights: name the BF16 model instead, e.g. Qwen/Qwen3-8B for Qwen/Qwen3-8B-FP8"
        )


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

    def error(self, name: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.source}: field {name!r} is {value!r}; allowed: {allowed}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.source}: field {name!r} is missing; fp8plan needs it as a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, value, f"a whole number of at least {least}")
        return value

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value not in (True, False, None):
            raise self.error(name, value, "true or false")
        return bool(value)
