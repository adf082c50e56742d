"""Ctrl-C, held back while a call talks to an engine.

Python raises KeyboardInterrupt between any two instructions: while a message to the engine's process is half sent,
which libzmq answers by aborting ours, or a step of an engine in this one half done. So SIGINT is remembered, and let in
where it does no harm: between steps, between calls of workers, and at once in the caller's own code. Who presses Ctrl-C
again while that takes too long gets out there and then, and the engine is given up. So it is after a single press, if
what an engine in another process is at does not end within watched.PATIENCE_S.

Signals reach Python's main thread only; calls from other threads have nothing to hold back.

Calls to an engine in another process, which may be killed meanwhile, and their caller interrupted.
"""

from __future__ import annotations

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

# A launcher that passes Ctrl-C on makes two signals of one press; another one after this insists.
SAME_PRESS_S: Final = 1.0

_open: list[Held] = []  # of the main thread, the innermost last
_thread = threading.local()


class Stopped(BaseException):
    """The end of a thread whose caller has been interrupted."""


class Held:
    """A `with` that holds SIGINT back; what Python's handler raises comes at its end at the latest.

    give_up: called for a user who insists; the engine must count as lost afterwards
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._handler: Any = None  # of the caller: Python's, which raises KeyboardInterrupt, or one of its own
        self._first: float | None = None  # when it arrived that is still being dealt with
        self._waiting = False
        self._callers = False  # the caller's own code runs

    def __enter__(self) -> None:
        found = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(found):
            self._handler = found
            signal.signal(signal.SIGINT, self._arrived)
            _open.append(self)  # only once nothing can come between, which would leave it there

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is None:
            return
        _open.remove(self)
        if signal.getsignal(signal.SIGINT) == self._arrived:  # else the caller's code has set another
            signal.signal(signal.SIGINT, self._handler)  # which may raise there and then
        self.let_in()

    def let_in(self) -> None:
        """Let the caller's handler know of a SIGINT that has arrived; Python's own raises KeyboardInterrupt."""
        if self._waiting:
            self._waiting = False
            self._handler(signal.SIGINT, None)
            self._first = None  # it has not raised: the call goes on

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
            self._first, self._callers = now, False  # what follows if it raises is not the caller's code
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


def stoppable(stop: threading.Event) -> None:
    """Make this thread stop at the next `let_in` once `stop` is set. SIGINT is blocked in it and so in the processes
    that it starts: a terminal sends Ctrl-C to all of them, and vLLM's would shut down."""
    _thread.stop = stop
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


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
