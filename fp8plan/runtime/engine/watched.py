"""Calls to an engine in another process, which may be killed meanwhile, and their caller interrupted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing import active_children
from multiprocessing.resource_tracker import ensure_running
from threading import Event, Thread
from typing import Any, Final, TypeVar

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
    """Return what `act` gives. Raises vLLM's EngineDeadError if the engine's process is killed meanwhile: an LLM itself
    would wait for ever for its outputs.

    dead:    returns whether the engine's process has ended
    give_up: ends that process, for a call that does not end by itself

    `act` runs in a thread of its own, so that no exception of the caller's meets it in the middle of a message. Nobody
    but this thread may use the engine until `act` has ended. An interrupt of the caller is raised once it has, or after
    patience_s seconds at most: then the engine is given up, although nobody has insisted.
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


def started_apart(start: Callable[[], Answer]) -> Answer:
    """Return the vLLM that `start` gives, which runs in processes that Ctrl-C in a terminal does not reach.

    Ctrl-C ends a start at once. Under asyncio.run only the second one does: the first cancels the task, which happens
    when the start has ended.
    """
    before, over = set(active_children()), Event()

    def begun() -> Answer:
        found = start()
        if over.is_set():  # nobody waits for it any more, and its processes came too late to be killed
            vllm: Any = found
            getattr(vllm, "llm_engine", vllm).engine_core.shutdown()
        return found

    def give_up() -> None:
        over.set()
        for process in set(active_children()) - before:
            process.kill()

    ensure_running()  # or Python starts it now, and lets SIGINT through again
    return watched(begun, lambda: False, give_up, patience_s=0.0)
