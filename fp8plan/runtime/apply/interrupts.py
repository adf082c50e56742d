"""Ctrl-C, held back while a call talks to an engine, and calls to an engine in another process.

Python raises KeyboardInterrupt between any two instructions. A step of an engine would be left half done. A message to
the engine's process would be left half sent, and libzmq then aborts this process. So SIGINT is remembered, and let in
where it does no harm: between steps, between calls of workers, and at once in the caller's own code.

A second Ctrl-C interrupts at once and abandons the engine. So does the first one after PATIENCE_S, if an engine in
another process has not ended its work by then. Signals reach Python's main thread only; calls from other threads have
nothing to hold back.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from multiprocessing import active_children
from multiprocessing.resource_tracker import ensure_running
from threading import Event, Thread
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

SAME_PRESS_S: Final = 1.0  # a launcher that passes Ctrl-C on makes two signals of one press, no longer apart than this

_open: list[Held] = []  # those of the main thread, the innermost last
_thread = threading.local()


class Stopped(BaseException):
    """The end of a thread whose caller has been interrupted."""


class Held:
    """A `with` that holds SIGINT back, at most until its end.

    give_up: called at a second Ctrl-C; the engine must count as lost afterwards
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._handler: Any = None  # the caller's handler: Python's, which raises KeyboardInterrupt, or its own
        self._first: float | None = None  # arrival of the SIGINT that is being dealt with
        self._waiting = False
        self._callers = False  # True while the caller's own code runs

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._arrived)
            _open.append(self)  # last, so that no interrupt can leave it there

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is None:
            return
        _open.remove(self)
        if signal.getsignal(signal.SIGINT) == self._arrived:  # else the caller's code has set another handler
            signal.signal(signal.SIGINT, self._handler)  # it may raise at once
        self.let_in()

    def let_in(self) -> None:
        """Let the caller's handler know of a SIGINT that has arrived; Python's own raises KeyboardInterrupt."""
        if self._waiting:
            self._waiting = False
            self._handler(signal.SIGINT, None)
            self._first = None  # the handler has not raised, so the call goes on

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let SIGINT in at once, inside of this `with`."""
        self.let_in()
        self._callers = True
        try:
            yield
        finally:
            self._callers = False

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._callers:
            self._first, self._callers = now, False  # if it raises, the caller's code has ended
            self._handler(number, frame)
            self._first, self._callers = None, True
        elif self._first is None or self not in _open:  # a moment before the call begins, or after it has ended
            self._first, self._waiting = now, True
        elif now - self._first > SAME_PRESS_S:
            self._waiting = False
            try:
                self._handler(number, frame)
            except BaseException:
                self._give_up()
                raise
            self._first = None


def let_in() -> None:
    """Mark a place where an interrupt does no harm.

    Raises KeyboardInterrupt if one waits, or Stopped in a thread whose caller has been interrupted.
    """
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Stopped
    if _open and threading.current_thread() is threading.main_thread():
        _open[-1].let_in()


@contextmanager
def released() -> Iterator[None]:
    """Let SIGINT in at once: around the caller's own code, and around what can be broken off anywhere."""
    if _open and threading.current_thread() is threading.main_thread():
        with _open[-1].released():
            yield
    else:
        yield


Answer = TypeVar("Answer")

WATCH_S: Final = 0.1  # seconds between two checks that the engine's process lives
LAST_WORDS_S: Final = 5.0  # wait for the last answers of a dead process
PATIENCE_S: Final = 60.0  # wait for a call whose caller is interrupted


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

    def run() -> None:
        # A terminal sends Ctrl-C to the processes that this thread starts, too, and vLLM's would shut down.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _thread.stop = stop
        try:
            let_in()
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=run, daemon=True, name="fp8plan-engine")
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

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, daemon=True, name="fp8plan-store").start()
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
        _thread.stop = stop
        try:
            let_in()
            return act(*arguments)
        finally:
            _thread.stop = None  # the thread is used again

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
