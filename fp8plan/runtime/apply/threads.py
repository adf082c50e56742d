"""Calls in threads of their own, to an engine's process and to a store, which an interrupt of the caller ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing import active_children
from multiprocessing.resource_tracker import ensure_running
from threading import Event, Thread
from typing import Any, Final, TypeVar

from fp8plan.runtime.apply.interrupts import let_in, this_thread

Answer = TypeVar("Answer")

WATCH_S: Final = 0.1  # seconds between two checks that the engine's process lives
LAST_WORDS_S: Final = 5.0  # wait for the last answers of a dead process
PATIENCE_S: Final = 60.0  # wait for a call whose caller is interrupted


def _thread(act: Callable[[], Answer], result: Future[Answer], stop: Event) -> Thread:
    """Return a thread that calls `act`. Neither the process's end nor its caller need wait for it.

    stop: ends it at its next `let_in`, once it is set
    """

    def run() -> None:
        # A terminal sends Ctrl-C to the processes that this thread starts, too, and vLLM's would shut down.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        this_thread.stop = stop
        try:
            let_in()
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    return Thread(target=run, daemon=True, name="fp8plan")


def watched(
    act: Callable[[], Answer], dead: Callable[[], bool], give_up: Callable[[], None], patience_s: float = PATIENCE_S
) -> Answer:
    """Return what `act` returns. Raises vLLM's EngineDeadError if the engine's process is killed meanwhile.

    An LLM itself would wait for its outputs for ever.

    dead:       returns True once the engine's process has ended
    give_up:    ends that process, for a call that does not end by itself
    patience_s: seconds until an interrupt is raised and the engine is given up, if `act` does not end before

    `act` runs in a thread of its own, so that an exception in the caller cannot break off a message. No other thread
    may use the engine until `act` has ended.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    result: Future[Answer] = Future()
    stop = Event()
    thread = _thread(act, result, stop)
    try:
        thread.start()
        while not wait([result], WATCH_S).done:
            let_in()
            if dead() and not wait([result], LAST_WORDS_S).done:
                raise EngineDeadError
    except EngineDeadError:
        raise
    except BaseException:
        stop.set()
        if thread.is_alive() and not wait([result], patience_s).done:
            give_up()
            wait([result], LAST_WORDS_S)
        raise
    return result.result()


def within(seconds: float, act: Callable[[], Answer], advice: str) -> Answer:
    """Return what `act` returns. Raises TimeoutError, with the advice, if it takes longer.

    `act` runs in a thread of its own, which nobody waits for any more after an interrupt or that time.
    """
    result: Future[Answer] = Future()
    _thread(act, result, Event()).start()
    until = time.monotonic() + seconds
    while not wait([result], WATCH_S).done:
        let_in()
        if time.monotonic() > until:
            raise TimeoutError(f"no answer for {seconds:g} s; {advice}")
    return result.result()


async def in_thread(act: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return what `act` returns, while the event loop goes on. If the task is cancelled, `act` ends at its next
    `let_in`, and the task once it has."""
    stop = Event()

    def run() -> Answer:
        this_thread.stop = stop
        try:
            let_in()
            return act(*arguments)
        finally:
            this_thread.stop = None  # the thread is used again

    work = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)
        raise
    finally:
        stop.set()  # also if the event loop is closed meanwhile


def started_apart(start: Callable[[], Answer]) -> Answer:
    """Return the vLLM that `start` returns. Ctrl-C in a terminal does not reach its processes.

    Ctrl-C ends a start at once. Under asyncio.run only the second one does: the first cancels the task, after the
    start.
    """
    before, over = set(active_children()), Event()

    def begun() -> Answer:
        llm = start()
        if over.is_set():  # its caller has given up, and its processes came too late to be killed
            vllm: Any = llm
            getattr(vllm, "llm_engine", vllm).engine_core.shutdown()
        return llm

    def give_up() -> None:
        over.set()
        for process in set(active_children()) - before:
            process.kill()

    ensure_running()  # else Python starts it later, and lets SIGINT through again
    return watched(begun, lambda: False, give_up, patience_s=0.0)
