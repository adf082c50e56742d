"""Engines of this process that answer procedures: fp8plan's own, and a plain vllm.LLM."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.engine.base import requests
from fp8plan.runtime.weight_sync.state import Call, driven
from fp8plan.runtime.worker.extension import EXTENSION, Fp8PlanWorker

if TYPE_CHECKING:
    from vllm import LLM

Counts = tuple[int, int]  # preemptions, finished requests

PREEMPTIONS: Final = "vllm:num_preemptions"
FINISHED: Final = "vllm:request_success"
ATTACH: Final = f"LLM(..., worker_extension_cls={EXTENSION!r}), or export VLLM_ALLOW_INSECURE_SERIALIZATION=1"


class Ask(Protocol):
    """Runs a procedure of Calls to its end. Raises an Fp8PlanError for a Call that this engine does not answer."""

    def __call__(self, procedure: Generator[Call, Any, Any]) -> Any: ...


def asking_llm(llm: LLM) -> Ask:
    """Ask a plain vllm.LLM.

    Its workers need not have fp8plan's methods: vLLM hands them a function, where it runs in this process or allows
    that. Raises ConfigError while requests run.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise ConfigError("requests are running, which would be mixed up with the doctor's; wait for them")
    ours = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls == EXTENSION

    def answer(call: Call) -> Any:
        if call.what == "generate":
            prompts, params = requests(call)
            return llm.generate(prompts, params, use_tqdm=False)
        if call.what != "rpc":
            raise ConfigError(f"{call.what} is not for an engine that is only looked at")
        method, arguments = call.arguments
        try:
            return llm.collective_rpc(method if ours else getattr(Fp8PlanWorker, method), args=arguments)
        except Exception as error:  # another process takes no functions, or the engine is dead
            if "EngineDead" in type(error).__name__:
                raise NotServingError("the engine has died; start another") from error
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"its workers do not answer ({first:.120}); type: {ATTACH}") from error

    return partial(driven, answer=answer)


def counts_of(llm: LLM) -> Counts:
    """Count a plain LLM's preemptions and finished requests since its start. Raises ConfigError if it keeps no
    statistics."""
    try:
        metrics = llm.get_metrics()
    except Exception:  # an AssertionError in 0.30
        raise ConfigError("the LLM keeps no statistics; type: LLM(..., disable_log_stats=False)") from None
    totals = [int(sum(getattr(m, "value", 0) for m in metrics if m.name == name)) for name in (PREEMPTIONS, FINISHED)]
    return totals[0], totals[1]
