"""The answers of a `vllm serve`: types of the fields that the doctor reads, and their translation.

Other fields may be anything. The client has checked all fields of a type before their use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from types import SimpleNamespace
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fp8plan.errors import ConfigError
from fp8plan.model.precision import BLOCK
from fp8plan.runtime.apply.doctor.checks import VLLM_NAMES
from fp8plan.runtime.apply.doctor.over_http.client import GIVE_URL, CannotLook, shown
from fp8plan.schemas import checked

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], str]]]  # name -> (labels, value) of each sample

SAMPLE: Final = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.M)  # Prometheus's text format
LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Fact -> its place in vLLM's configuration. The last that a server has counts.
SETTINGS: Final = (
    ("enforce_eager", "model_config", "enforce_eager"),
    ("logprobs_mode", "model_config", "logprobs_mode"),
    ("quantization", "model_config", "quantization"),
    ("routed_experts", "model_config", "enable_return_routed_experts"),
    ("routed_experts", "aux_output_config", "enable_return_routed_experts"),  # from 0.31 on
    ("cudagraph_mode", "compilation_config", "cudagraph_mode"),
    ("device", "device_config", "device"),
    ("experts", "parallel_config", "is_moe_model"),
    ("weight_transfer", "weight_transfer_config", "backend"),
)
# Values of vLLM's CUDAGraphMode in JSON.
GRAPHS: Final = {
    "0": "NONE",
    "1": "PIECEWISE",
    "2": "FULL",
    "[2, 0]": "FULL_DECODE_ONLY",
    "[2, 1]": "FULL_AND_PIECEWISE",
}


class Model(Struct):
    """A model of /v1/models."""

    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None


class Models(Struct):
    """The answer of /v1/models."""

    data: Annotated[list[Model], Meta(min_length=1)]


class Version(Struct):
    """The answer of /version."""

    version: str


class Tokens(Struct):
    """The answer of /tokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]


class Facts(Struct, kw_only=True):
    """Facts of a worker, as runtime.apply.worker.facts names them; a server may answer only some."""

    vllm_version: str | UnsetType = UNSET
    device: str | UnsetType = UNSET
    layers: dict[str, int] | UnsetType = UNSET
    kernels: dict[str, str] | UnsetType = UNSET
    e8m0: bool | UnsetType | None = UNSET
    held_e8m0: bool | UnsetType = UNSET
    attention: list[str] | UnsetType = UNSET
    kv_cache_dtype: str | UnsetType | None = UNSET
    cudagraph_mode: str | UnsetType | None = UNSET
    enforce_eager: bool | UnsetType = UNSET
    logprobs_mode: str | UnsetType = UNSET
    quantization: str | UnsetType | None = UNSET
    routers: dict[str, int] | UnsetType = UNSET
    experts: bool | UnsetType = UNSET
    routed_experts: bool | UnsetType = UNSET
    prefix_caching: bool | UnsetType = UNSET
    weight_transfer: str | UnsetType | None = UNSET
    weights: int | UnsetType | None = UNSET


class Scales(Struct):
    """Scales of one layer's KV cache, on the device and on the host."""

    k: float
    v: float
    k_host: float | UnsetType = UNSET
    v_host: float | UnsetType = UNSET


class KvScales(Struct):
    """Scales of each layer."""

    scales: dict[str, Scales]


class Served(Struct):
    """The weights that serve."""

    version: int | None = None


class Status(Struct):
    """The answer of /fp8plan/status (runtime.apply.server.front.Front.status)."""

    precision: str | None = None
    facts: Facts = msgspec.field(default_factory=Facts)
    refusal: str | None = None
    paused: bool | None = None
    asleep: list[str] = msgspec.field(default_factory=list)
    weights: Served | None = None
    kv_scales: KvScales | None = None


class Info(Struct):
    """The answer of /server_info. vllm_config: text from a server that does not know config_format"""

    vllm_config: dict[str, Any] | str | None = None


class Entry(Struct):
    """The log-prob of one token of a prompt."""

    logprob: float | None


class Logprobs(Struct):
    """Log-probs of the tokens of a response."""

    top_logprobs: list[dict[str, float | None]] | None = None


class Choice(Struct):
    """One response."""

    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[dict[str, Entry | float | None] | None] | None = None


class Details(Struct):
    """The origin of a prompt's tokens."""

    cached_tokens: int | None = None


class Usage(Struct):
    """Counts of tokens."""

    prompt_tokens_details: Details | None = None


class Completion(Struct):
    """The answer of /v1/completions to one prompt."""

    choices: Annotated[list[Choice], Meta(min_length=1, max_length=1)]
    usage: Usage | None = None


def samples(text: str) -> Samples:
    """Read vLLM's metrics from a page of Prometheus's text format."""
    by_name: dict[str, list[tuple[dict[str, str], str]]] = {}
    for name, labels, value in SAMPLE.findall(text):
        by_name.setdefault(name, []).append((dict(LABEL.findall(labels)), value))
    return by_name


def total(metrics: Samples, name: str) -> int:
    """The sum of a counter over its labels. Raises ConfigError without one, and CannotLook for a value that is no
    count."""
    if name not in metrics:
        raise ConfigError(f"/metrics has no {name}")
    return int(sum(_count(name, value) for _, value in metrics[name]))


def _count(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not (isfinite(value) and 0 <= value < 1 << 63):
        raise CannotLook(f"/metrics has {name} {shown(text):.40}; allowed: a count; {GIVE_URL}")
    return value


def facts_of(info: Info, metrics: Samples) -> dict[str, Any]:
    """Facts from a server's own pages, under the names of runtime.apply.worker.facts.

    Raises CannotLook for a setting of another type than vLLM's.
    """
    settings = info.vllm_config if isinstance(info.vllm_config, dict) else {}
    facts: dict[str, Any] = {}
    for fact, config, field in SETTINGS:
        part = settings.get(config)
        if isinstance(part, dict) and field in part:
            facts[fact] = part[field]
    if settings.get("weight_transfer_config", "unknown") is None:
        facts["weight_transfer"] = None
    if "cudagraph_mode" in facts:
        facts["cudagraph_mode"] = GRAPHS.get(str(facts["cudagraph_mode"]))
    if facts.get("experts", True) is None:
        del facts["experts"]
    if facts.get("quantization", "") is None:
        facts["e8m0"] = None  # no weights are FP8
    elif facts.get("quantization") == "online" and _in_blocks(settings["model_config"].get("quantization_config")):
        facts["quantization"] = VLLM_NAMES["fp8_block"]
    for labels, _ in metrics.get("vllm:cache_config_info", ())[:1]:
        if labels.get("cache_dtype"):
            facts["kv_cache_dtype"] = labels["cache_dtype"]
        if "enable_prefix_caching" in labels:
            facts["prefix_caching"] = labels["enable_prefix_caching"] == "True"
    try:
        checked(facts, Facts, "/server_info")
    except ConfigError as error:
        raise CannotLook(f"{shown(error)}; {GIVE_URL}") from None
    return facts


def _in_blocks(config: Any) -> bool:
    """True if a configuration of online quantisation, as fp8plan emits it, has FP8 blocks for linears and experts."""
    return all(
        _at(config, kind, "weight", "dtype") == "torch.float8_e4m3fn"
        and _at(config, kind, "weight", "scale", "group_shape") == BLOCK
        for kind in ("linear", "moe")
    )


def _at(value: Any, *keys: str) -> Any:
    """The value in nested objects; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def output_of(answer: Completion, prompt: Sequence[int], settings: Mapping[str, Any]) -> Any:
    """A completion in the form of vLLM's RequestOutput, with the fields that the doctor reads.

    Raises ConfigError for a completion without token ids, or without the log-probs that were asked for.
    """
    (choice,) = answer.choices
    if not choice.token_ids:
        raise ConfigError("/v1/completions answers no token ids, which vllm serve does if asked for return_token_ids")
    logprobs = None if choice.logprobs is None else choice.logprobs.top_logprobs
    response = _rows("logprobs", logprobs, choice.token_ids, settings)
    scored = _rows("prompt_logprobs", choice.prompt_logprobs, prompt, settings)
    details = None if answer.usage is None else answer.usage.prompt_tokens_details
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=choice.token_ids, logprobs=response)],
        prompt_logprobs=scored,
        num_cached_tokens=None if details is None else details.cached_tokens,
    )


def _rows(
    what: str,
    answered: Sequence[Mapping[str, Entry | float | None] | None] | None,
    tokens: Sequence[int],
    settings: Mapping[str, Any],
) -> list[dict[int, Any] | None]:
    """Token id -> object with a logprob, for each token except a prompt's first, which has none."""
    rows = [None if row is None else _row(what, row) for row in answered or ()]
    if what not in settings:
        return rows
    pairs = list(zip(tokens, rows, strict=False))[what == "prompt_logprobs" :]
    if len(rows) != len(tokens) or not all(row is not None and token in row for token, row in pairs):
        raise ConfigError(f"/v1/completions does not answer the {what} of {len(tokens)} tokens, which it was asked for")
    return rows


def _row(what: str, row: Mapping[str, Entry | float | None]) -> dict[int, Any]:
    """Token id -> object with a logprob, NaN for JSON's null. Keys are "123", or "token_id:123"."""
    values = {name: entry.logprob if isinstance(entry, Entry) else entry for name, entry in row.items()}
    try:
        tokens = [int(name.removeprefix("token_id:")) for name in row]
    except ValueError:
        raise ConfigError(f"/v1/completions answers {what} of {next(iter(row))!r:.40}; allowed: token ids") from None
    logprobs = [SimpleNamespace(logprob=nan if value is None else value) for value in values.values()]
    return dict(zip(tokens, logprobs, strict=True))
