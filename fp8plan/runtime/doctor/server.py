"""Observations of a `vllm serve`, by what it answers over HTTP. Everything that is asked of a server is here.

/v1/models, /metrics        every server
/v1/completions, /tokenize  every server: log-probs of a decode, of a prefill, with the prefix cache and without
/server_info                with VLLM_SERVER_DEV_MODE=1
/fp8plan/status             with fp8plan's weight-transfer backend
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import uuid4

from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.doctor.observe import Given, Notes, asked, measured_on
from fp8plan.runtime.doctor.observed import Observed
from fp8plan.runtime.guard.kernels import kernel_names
from fp8plan.runtime.probe.prompts import read_prompts
from fp8plan.runtime.server.plugin import PROBE, STATUS
from fp8plan.runtime.weight_sync.state import Call, SyncSettings, SyncState, driven
from fp8plan.runtime.worker.facts import preset_of

PATIENCE_S: Final = 120.0
SAMPLE: Final = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.M)  # of Prometheus's text format
LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Values of vLLM's CUDAGraphMode, as JSON has them.
GRAPHS: Final = {
    "0": "NONE",
    "1": "PIECEWISE",
    "2": "FULL",
    "[2, 0]": "FULL_DECODE_ONLY",
    "[2, 1]": "FULL_AND_PIECEWISE",
}

UNSEEN: Final = (
    """the server does not tell; type: vllm serve ... --weight-transfer-config '{"backend": "fp8plan"}', or for a """
    "part of it VLLM_SERVER_DEV_MODE=1"
)
FROM_INSIDE: Final = "a server does not show its weights; type: fp8plan.doctor(engine) in the engine's own process"


class Server:
    """A server's HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    def text(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Return the answer to a GET, or with a body to a POST. Raises ConfigError without one, or for an error."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": f"{PROBE}-{uuid4().hex}"}
        request = Request(self.url + path, data, headers if body is not None else {})
        try:
            with urlopen(request, timeout=PATIENCE_S) as answer:
                found: str = answer.read().decode()
        except HTTPError as error:
            said = error.read().decode(errors="replace")
            raise ConfigError(f"{self.url}{path} answers {error.code}: {said:.200}") from None
        except (URLError, OSError, ValueError) as error:
            raise ConfigError(f"{self.url} does not answer: {error}; give the URL of a vllm serve that runs") from None
        return found

    def json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Parse the answer as JSON. Raises ConfigError as `text` does, and for anything else."""
        text = self.text(path, body)
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(f"{self.url}{path} is no vllm serve: it answers {text[:60]!r}") from None


def observe_server(url: str, given: Given) -> Observed:
    """Observe a server. Raises ConfigError if there is none."""
    server, notes = Server(url), Notes()
    models = server.json("/v1/models")
    try:
        model = models["data"][0]
        name, longest = model["id"], model.get("max_model_len")
    except (LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models is not what a vllm serve answers; give the URL of one") from None
    status = notes.of("status", lambda: server.json(STATUS)) or {}
    info = notes.of("server_info", lambda: server.json("/server_info?config_format=json")) or {}
    metrics = notes.of("preemptions", lambda: samples(server.text("/metrics"))) or {}
    version = notes.of("version", lambda: server.json("/version")) or {}
    facts = facts_of(info, metrics) | ({"vllm_version": version["version"]} if "version" in version else {})
    facts |= status.get("facts") or {}
    facts |= {"weights": status["weights"]["version"]} if status.get("weights") else {}
    notes.unseen |= {"ranks": UNSEEN, "kv_scales": UNSEEN, "version": UNSEEN, "weights": FROM_INSIDE, "kernels": UNSEEN}
    state = SyncState(SyncSettings(), None, fp8_kv=False)
    state.longest_prompt = None if longest is None else longest - 1
    sequences = given.prompts or ()
    refusal = status.get("refusal")
    told = {} if refusal else asked(answering(server, name), state, given, sequences, notes)
    runs = preset_of(facts)
    gpu, kernels = measured_on(given, facts, notes)
    names = None if "kernels" not in facts else kernel_names(facts, PRESETS[runs]) if runs else facts["kernels"]
    return Observed(
        target=f"{server.url}, {name}",
        gpu=gpu,
        precision=given.precision or status.get("precision"),
        runs=runs,
        ranks=[facts] if facts else [],
        kernels=names,
        measured_kernels=kernels,
        kv_scales=(status.get("kv_scales") or {}).get("scales"),
        preemptions=total(metrics, "vllm:num_preemptions_total"),
        requests=total(metrics, "vllm:request_success_total"),
        refusal=refusal,
        **told,
        unseen=notes.unseen,
    )


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Read vLLM's metrics: name -> (labels, value) of each sample."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in SAMPLE.findall(text):
        found.setdefault(name, []).append((dict(LABEL.findall(labels)), float(value)))
    return found


def total(metrics: Mapping[str, list[tuple[dict[str, str], float]]], name: str) -> int | None:
    """Add a counter up over its labels; None without one."""
    return int(sum(value for _, value in metrics[name])) if name in metrics else None


def facts_of(info: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a server's own pages tell of it, as runtime.worker.facts names it."""
    config = info.get("vllm_config") or {}
    model, compilation = config.get("model_config") or {}, config.get("compilation_config") or {}
    facts = {name: model[name] for name in ("enforce_eager", "logprobs_mode") if name in model}
    if "cudagraph_mode" in compilation:
        facts["cudagraph_mode"] = GRAPHS.get(str(compilation["cudagraph_mode"]))
    if "device" in (config.get("device_config") or {}):
        facts["device"] = config["device_config"]["device"]
    if "quantization" in model and model["quantization"] is None:
        facts["e8m0"] = None  # no weights are FP8
    cache = [labels.get("cache_dtype") for labels, _ in metrics.get("vllm:cache_config_info", ())]
    return facts | ({"kv_cache_dtype": cache[0]} if cache and cache[0] else {})


def answering(server: Server, model: str) -> Any:
    """Return what runs procedures on a server: it generates, and answers no rpc."""

    def answer(call: Call) -> Any:
        if call.what != "generate":
            raise ConfigError(UNSEEN)
        prompts, settings = call.arguments
        return [_output(server.json("/v1/completions", _body(model, prompt, settings))) for prompt in prompts]

    return partial(driven, answer=answer)


def _body(model: str, prompt: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": model, "prompt": [int(token) for token in prompt]} | dict(settings) | tokens


def _output(answer: Mapping[str, Any]) -> Any:
    """A completion's answer as vLLM's own RequestOutput has it, as far as it is read."""
    (choice,) = answer["choices"]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    rows = [_row(row) for row in (choice.get("logprobs") or {}).get("top_logprobs") or ()]
    prompt = [None if row is None else _row(row) for row in choice.get("prompt_logprobs") or ()]
    completion = SimpleNamespace(token_ids=choice["token_ids"], logprobs=rows)
    return SimpleNamespace(outputs=[completion], prompt_logprobs=prompt, num_cached_tokens=details.get("cached_tokens"))


def _row(row: Mapping[str, Any]) -> dict[int, Any]:
    """Token id -> something with a logprob. Keys are "123", or "token_id:123"."""
    return {
        int(token.removeprefix("token_id:")): SimpleNamespace(logprob=x["logprob"] if isinstance(x, Mapping) else x)
        for token, x in row.items()
    }


def read_tokens(url: str, path: Path) -> list[list[int]]:
    """Read a file of prompts, and have the server turn texts into token ids. Raises ConfigError for a line that is no
    prompt, and for a target that is no server."""
    prompts = read_prompts(path)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--prompts are for a server, and {url} is none; leave them out")
    server = Server(url)
    return [_tokens(server, prompt) for prompt in prompts]


def _tokens(server: Server, prompt: Any) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    body = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    found: list[int] = server.json("/tokenize", body)["tokens"]
    return found
