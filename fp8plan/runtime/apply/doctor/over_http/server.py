"""Observations of a `vllm serve` from its answers over HTTP. All questions to a server are here.

/v1/models, /metrics        every server
/v1/completions, /tokenize  every server: log-probs of a decode, of a prefill, with the prefix cache and without
/server_info                with VLLM_SERVER_DEV_MODE=1
/fp8plan/status             with fp8plan's weight-transfer backend

A missing page leaves its checks unknown. A page that breaks off, or is not vLLM's, ends the look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.apply.doctor.observe import Notes, Request, measured_on, observed_by_requests, refuse_given
from fp8plan.runtime.apply.doctor.observed import Observed
from fp8plan.runtime.apply.doctor.over_http import answers
from fp8plan.runtime.apply.doctor.over_http.client import CannotLook, Refused, Server, shown
from fp8plan.runtime.apply.engine.base import driven
from fp8plan.runtime.apply.engine.counters import SINCE_START
from fp8plan.runtime.apply.plugin import STATUS
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.runtime.apply.worker.facts import preset_of
from fp8plan.runtime.measure.probe.sampling import read_prompts
from fp8plan.runtime.watch.guard.observation import kernel_names

UNSEEN: Final = (
    """the server does not tell; type: vllm serve ... --weight-transfer-config '{"backend": "fp8plan"}', or for a """
    "part of it VLLM_SERVER_DEV_MODE=1"
)
FROM_INSIDE: Final = "a server does not show its weights; type: fp8plan.doctor(engine) in the engine's own process"


class NotGenerating(CannotLook):
    """A server that answers a plain request with an error of its own (HTTP 500 and above)."""


def observe_server(server: Server, request: Request) -> Observed:
    """Observe a server.

    Raises ConfigError for a server that cannot be looked at, and for a line of the prompt file that is no prompt.
    """
    model, notes = server.json("/v1/models", answers.Models).data[0], Notes()
    sequences = (request.prompts or ()) if request.prompt_file is None else _tokens_of(server, request.prompt_file)
    status = notes.of("status", lambda: server.json(STATUS, answers.Status)) or answers.Status()
    info = notes.of("server_info", lambda: server.json("/server_info?config_format=json", answers.Info))
    page = notes.of("counts", lambda: answers.samples(server.text("/metrics")))
    version = notes.of("version", lambda: server.json("/version", answers.Version))
    facts = answers.facts_of(info or answers.Info(), page or {})
    if version is not None:
        facts["vllm_version"] = version.version
    facts |= msgspec.to_builtins(status.facts)
    if status.weights is not None:
        facts["weights"] = status.weights.version
    inside = dict.fromkeys(("ranks", "kv_scales", "version", "kernels"), UNSEEN)
    notes.unseen |= inside | {"weights": FROM_INSIDE}
    counted: dict[str, Any] | None = None
    if page is not None:
        counted = notes.of("counts", lambda: {field: answers.total(page, name) for name, field in SINCE_START.items()})
    state = SyncState(SyncSettings(), None, fp8_kv=False)
    state.longest_prompt = None if model.max_model_len is None else model.max_model_len - 1
    refuse_given(request, sequences, state)
    refusal, heard = _refusal(status, server.url), dict[str, Any]()
    if refusal is None:
        try:
            heard = observed_by_requests(_answering(server, model.id), state, request, sequences, notes)
        except NotGenerating as error:
            refusal = str(error)
    runs = preset_of(facts)
    gpu, kernels = measured_on(request, facts, notes)
    names = facts.get("kernels")
    if names is not None and runs:
        names = kernel_names(facts, PRESETS[runs])
    return Observed(
        target=f"{server.url}, {shown(model.id)}",
        gpu=gpu,
        precision=request.precision or (status.precision if status.precision in PRESETS else None),
        runs=runs,
        ranks=[facts] if facts else [],
        kernels=names,
        measured_kernels=kernels,
        kv_scales=None if status.kv_scales is None else msgspec.to_builtins(status.kv_scales.scales),
        refusal=refusal,
        **(counted or {}),
        **heard,
        unseen=notes.unseen,
    )


def _refusal(status: answers.Status, url: str) -> str | None:
    """The reason why a server's status says that no request would be generated; None if one would."""
    if status.refusal is not None:
        return status.refusal
    if status.asleep:
        return f"{' and '.join(status.asleep)} sleep; type: curl -X POST {url}/wake_up"
    return f"generation is paused; type: curl -X POST {url}/resume" if status.paused else None


def _answering(server: Server, model: str) -> Any:
    """The function that runs procedures on a server, which generates and answers no rpc."""

    def generated(prompt: Sequence[int], settings: Mapping[str, Any]) -> Any:
        tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {"model": model, "prompt": [int(token) for token in prompt]} | dict(settings) | tokens
        try:
            answer = server.json("/v1/completions", answers.Completion, body)
        except Refused as error:
            if error.status < 500:
                raise
            raise NotGenerating(str(error)) from None
        return answers.output_of(answer, body["prompt"], settings)

    def answer(call: Call) -> Any:
        if not isinstance(call, Generate):
            raise ConfigError(UNSEEN)
        prompts, settings = call.prompts, call.sampling
        return [generated(prompt, settings) for prompt in prompts]

    return partial(driven, answer=answer)


def _tokens_of(server: Server, path: Path) -> list[list[int]]:
    """Prompts of a file, with texts as the server's token ids. Raises ConfigError for a line that is no prompt."""

    def tokens(prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        body = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        return server.json("/tokenize", answers.Tokens, body).tokens

    return [tokens(prompt) for prompt in read_prompts(path)]
