"""A call to an engine in another process, which may have been killed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, Final, TypeVar

Answer = TypeVar("Answer")

# How often it is asked whether the engine's process lives, and how long a dead one's last answers may take.
WATCH_S: Final = 1.0
LAST_WORDS_S: Final = 5.0


def watched(act: Callable[[], Answer], engine_core: Any) -> Answer:
    """What `act` gives, or vLLM's EngineDeadError: an LLM waits for ever for the outputs of a process that was killed.

    engine_core: vLLM's client of that process
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    found: Future[Answer] = Future()

    def run() -> None:
        try:
            found.set_result(act())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, daemon=True, name="fp8plan-engine").start()
    while not wait([found], WATCH_S).done:
        if engine_core.resources.engine_dead and not wait([found], LAST_WORDS_S).done:
            raise EngineDeadError
    return found.result()
