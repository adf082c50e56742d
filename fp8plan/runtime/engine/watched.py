"""A call to an engine in another process, which may be killed meanwhile, and its caller interrupted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Event, Thread
from typing import Final, TypeVar

from fp8plan.runtime.engine.interrupts import let_in, stoppable

Answer = TypeVar("Answer")

# How often it is asked whether the engine's process lives, how long a dead one's last answers may take, and how long a
# call that is under way may, once its caller has been interrupted.
WATCH_S: Final = 0.1
LAST_WORDS_S: Final = 5.0
PATIENCE_S: Final = 60.0


def watched(
    act: Callable[[], Answer], dead: Callable[[], bool], give_up: Callable[[], None], patience_s: float = PATIENCE_S
) -> Answer:
    """What `act` gives, or vLLM's EngineDeadError: an LLM waits for ever for the outputs of a process that was killed.

    It runs in a thread of its own, so that no exception of the caller's meets it in the middle of a message; nobody but
    this thread may use the engine until it has ended. What interrupts the caller is raised once that is so, or after
    patience_s at most: then the engine is given up, although nobody has insisted.

    dead: whether the engine's process has ended; give_up: ends it, for a call that does not end by itself
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    found: Future[Answer] = Future()
    stop = Event()

    def run() -> None:
        stoppable(stop)
        try:
            let_in()
            found.set_result(act())
        except BaseException as error:
            found.set_exception(error)

    thread = Thread(target=run, daemon=True, name="fp8plan-engine")
    try:
        thread.start()
        while not wait([found], WATCH_S).done:
            let_in()
            if dead() and not wait([found], LAST_WORDS_S).done:
                raise EngineDeadError
    except EngineDeadError:
        raise
    except BaseException:
        stop.set()
        if thread.is_alive() and not wait([found], patience_s).done:
            give_up()
            wait([found], LAST_WORDS_S)
        raise
    return found.result()
