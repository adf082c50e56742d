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
from fp8plan.runtime.apply.doctor.over_http.client import GIVE_URL, CannotLook, shown

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], str]]]  # name -> (labels, value) of each sample

SAMPLE: Final = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.M)  # Prometheus's text format
LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
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
    attention: list[str] | UnsetType = UNSET
    kv_cache_dtype: str | UnsetType | None = UNSET
    cudagraph_mode: str | UnsetType | None = UNSET
    enforce_eager: bool | UnsetType = UNSET
    logprobs_mode: str | UnsetType = UNSET
    quantization: str | UnsetType | None = UNSET
    routers: dict[str, int] | UnsetType = UNSET
    experts: bool | UnsetType = UNSET
    routed_experts: bool | UnsetType = UNSET
    weight_transfer: str | UnsetType | None = UNSET
    weights: int | UnsetType | None = UNSET


class Scales(Struct):
    """Scales of one layer's KV cache, on the device and on the host."""

    k: float
    v: float
    q: float | UnsetType = UNSET
    k_host: float | UnsetType = UNSET
    v_host: float | UnsetType = UNSET
    q_host: float | UnsetType = UNSET


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


class ModelConfig(Struct):
    """vLLM's configuration of a model."""

    enforce_eager: bool | UnsetType = UNSET
    logprobs_mode: str | UnsetType = UNSET
    quantization: str | UnsetType | None = UNSET
    enable_return_routed_experts: bool | UnsetType = UNSET


class AuxOutputConfig(Struct):
    """vLLM's configuration of what is returned beside tokens, which has a field of the model's from 0.31 on."""

    enable_return_routed_experts: bool | UnsetType = UNSET


class CompilationConfig(Struct):
    """vLLM's configuration of CUDA graphs."""

    cudagraph_mode: int | str | list[int] | UnsetType | None = UNSET


class DeviceConfig(Struct):
    """vLLM's configuration of the device."""

    device: str | UnsetType = UNSET


class ParallelConfig(Struct):
    """vLLM's configuration of ranks."""

    is_moe_model: bool | UnsetType | None = UNSET


class TransferConfig(Struct):
    """vLLM's configuration of weight updates."""

    backend: str | None = None


class Config(Struct):
    """vLLM's configuration."""

    model_config: ModelConfig | None = None
    aux_output_config: AuxOutputConfig | None = None
    compilation_config: CompilationConfig | None = None
    device_config: DeviceConfig | None = None
    parallel_config: ParallelConfig | None = None
    weight_transfer_config: TransferConfig | UnsetType | None = UNSET


class Info(Struct):
    """The answer of /server_info. vllm_config: text from a server that does not know config_format"""

    vllm_config: Config | str | None = None


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
    """Facts from a server's own pages, under the names of runtime.apply.worker.facts."""
    config = info.vllm_config if isinstance(info.vllm_config, Config) else Config()
    model, transfer = config.model_config or ModelConfig(), config.weight_transfer_config
    graphs = (config.compilation_config or CompilationConfig()).cudagraph_mode
    experts = (config.parallel_config or ParallelConfig()).is_moe_model
    facts = Facts(
        enforce_eager=model.enforce_eager,
        logprobs_mode=model.logprobs_mode,
        quantization=model.quantization,
        e8m0=None if model.quantization is None else UNSET,  # no weights are FP8
        cudagraph_mode=UNSET if graphs is UNSET else GRAPHS.get(str(graphs)),
        device=(config.device_config or DeviceConfig()).device,
        experts=UNSET if experts is None else experts,
        routed_experts=(config.aux_output_config or model).enable_return_routed_experts,
        weight_transfer=transfer.backend if isinstance(transfer, TransferConfig) else transfer,
    )
    cache = [labels.get("cache_dtype") for labels, _ in metrics.get("vllm:cache_config_info", ())]
    fields = plain(facts)
    if cache and cache[0]:
        fields["kv_cache_dtype"] = cache[0]
    return fields


def plain(answer: Struct) -> dict[str, Any]:
    """The fields of an answer as plain data."""
    fields: dict[str, Any] = msgspec.to_builtins(answer)
    return fields


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
