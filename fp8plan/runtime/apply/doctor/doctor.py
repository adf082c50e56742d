"""`fp8plan.doctor` finds the real settings of an engine, and its faults."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import find_precision
from fp8plan.model.risk.remedies import Remedies
from fp8plan.runtime.apply.doctor.checks import findings
from fp8plan.runtime.apply.doctor.observe import Request, observe_engine, observe_llm
from fp8plan.runtime.apply.doctor.observed import Finding, Observed, State
from fp8plan.runtime.apply.doctor.over_http.client import TIMEOUT_S, Server
from fp8plan.runtime.apply.weight_sync.calls import Call
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.watch.mismatch.sampling import sampled_at

if TYPE_CHECKING:
    from fp8plan.runtime.apply.engine.async_engine import AsyncRolloutEngine

ALLOWED = "a RolloutEngine, a vllm.LLM, the URL of a vllm serve, a Monitor's run file, or a trainer's log"
URL: Final = re.compile("https?://", re.IGNORECASE)
HOST_AND_PORT: Final = re.compile(r"[\w.-]+:\d+/?")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings on one engine, one for each check and for each alarm in a log, and the observations behind them."""

    target: str
    findings: tuple[Finding, ...]
    observed: Observed

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.state == State.FAULT)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are risks, and need not be faults."""
        return tuple(finding for finding in self.findings if finding.state == State.WARNING)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the output of `fp8plan doctor --json`."""
        return {"target": self.target, "findings": [finding.to_dict() for finding in self.findings]}

    def __str__(self) -> str:
        """A line for each finding, and the remedy of each fault and warning."""
        lines = [f"{finding.check}: {finding.state.value}: {finding.says}" for finding in self.findings]
        todo = [f"{finding.fault}: {finding.todo}" for finding in (*self.faults, *self.warnings)]
        if todo:
            lines += ["to mend it, type", *todo]
        return "\n".join([self.target, *lines])


def doctor(
    target: Any,
    *,
    prompts: Sequence[Sequence[int]] | str | Path | None = None,
    weights: Any = None,
    scored: Scored | Sequence[Scored] = (),
    temperature: float = 1.0,
    gpu: str | None = None,
    precision: str | None = None,
    trainer_precision: str | None = None,
    api_key: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Diagnosis:
    """Find the real settings of an engine, and its faults. It takes seconds, and changes neither weights nor scales.

    target:      a RolloutEngine, a vllm.LLM, the URL of a `vllm serve`, a Monitor's run file, or a trainer's log
    prompts:     token ids of recent prompts of the engine, to check the prefix cache against the weights; None: those
                 of a RolloutEngine's last rollout. For a server also a file of JSON lines with prompt_token_ids,
                 messages or prompt
    weights:     the trainer's tensors, in a form that `sync_weights` takes, to compare with the live ones
    scored:      sequences with the trainer's log-probs at `temperature`, one for each token except the first
    temperature: that of the rollouts
    gpu, precision: the planned GPU and preset, if the target does not know them
    trainer_precision: one of TRAINER_PRECISIONS: how the trainer computes its linears
    api_key:     that of a server; None: VLLM_API_KEY of the environment, else OPENAI_API_KEY
    timeout_s:   seconds for all questions to a server

    Raises ConfigError for another target, and for arguments that the engine does not take. Raises it, too, for a server
    that breaks off, is late, or does not answer like a `vllm serve`. Raises SyncError or ConfigError while requests
    run.
    """
    request = _request(prompts, weights, scored, temperature, gpu, precision, trainer_precision)
    if isinstance(target, str) and URL.match(target):
        from fp8plan.runtime.apply.doctor.over_http.server import observe_server

        return _diagnosis(observe_server(Server(target, api_key, timeout_s), request), request)
    if request.prompt_file is not None:
        raise ConfigError(f"--prompts are for a server, and {target} is none; leave them out")
    return _diagnosis(_observed(target, request), request)


async def async_doctor(
    engine: AsyncRolloutEngine,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    weights: Any = None,
    scored: Scored | Sequence[Scored] = (),
    temperature: float = 1.0,
    gpu: str | None = None,
    precision: str | None = None,
    trainer_precision: str | None = None,
) -> Diagnosis:
    """`doctor` for an AsyncRolloutEngine of this event loop, which goes on meanwhile.

    Arguments and errors are those of `doctor`. Raises ConfigError for another engine.
    """
    if not inspect.iscoroutinefunction(getattr(engine, "drive", None)):
        raise ConfigError(
            f"the engine is a {type(engine).__name__}; allowed: an AsyncRolloutEngine. For {ALLOWED} type: "
            "fp8plan.doctor(...)"
        )
    request = _request(prompts, weights, scored, temperature, gpu, precision, trainer_precision)
    loop = asyncio.get_running_loop()

    def ask(procedure: Generator[Call, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(engine.ask(procedure), loop).result()

    return _diagnosis(await asyncio.to_thread(observe_engine, engine, ask, request), request)


def _request(
    prompts: Sequence[Sequence[int]] | str | Path | None,
    weights: Any,
    scored: Scored | Sequence[Scored],
    temperature: float,
    gpu: str | None,
    precision: str | None,
    trainer_precision: str | None,
) -> Request:
    if not (is_number(temperature) and temperature > 0):
        raise ConfigError(f"temperature is {temperature!r}; allowed: a number above 0")
    if precision is not None:
        find_precision(precision)
    if trainer_precision is not None:
        Remedies(trainer_precision=trainer_precision)  # refuses an unknown one
    card = None if gpu is None else find_gpu(gpu).name
    file = Path(prompts) if isinstance(prompts, str | Path) else None
    tokens = None if isinstance(prompts, str | Path) else prompts
    sequences = [scored] if isinstance(scored, Scored) else scored
    return Request(tokens, weights, sequences, sampled_at(temperature), card, precision, file, trainer_precision)


def _diagnosis(seen: Observed, request: Request) -> Diagnosis:
    seen = replace(seen, trainer_precision=request.trainer_precision)
    return Diagnosis(seen.target, tuple(findings(seen)), seen)


def _observed(target: Any, request: Request) -> Observed:
    if isinstance(target, str) and HOST_AND_PORT.fullmatch(target) and not Path(target).exists():
        raise ConfigError(f"there is no file {target}; for a server type: http://{target}")
    if isinstance(target, str | Path):
        from fp8plan.runtime.apply.doctor.files import observe_file

        return observe_file(Path(target), request)
    if inspect.iscoroutinefunction(getattr(target, "drive", None)):
        raise ConfigError("the target is an AsyncRolloutEngine; type: await fp8plan.async_doctor(engine, ...)")
    if hasattr(target, "replicas"):
        raise ConfigError("the target is a RolloutFleet, which the doctor does not know; allowed: " + ALLOWED)
    if hasattr(target, "last_sequences") and hasattr(target, "ask"):
        return observe_engine(target, target.ask, request)
    if hasattr(target, "llm_engine") and hasattr(target, "collective_rpc"):
        return observe_llm(target, request)
    raise ConfigError(f"the target is a {type(target).__name__}; allowed: {ALLOWED}")
