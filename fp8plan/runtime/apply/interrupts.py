"""Ctrl-C, held back while a call talks to an engine.

Python raises KeyboardInterrupt between any two instructions. A step of an engine would be left half done. A message to
the engine's process would be left half sent, and libzmq then aborts this process. So SIGINT is remembered, and let in
where it does no harm: between steps, between calls of workers, and at once in the caller's own code.

A second Ctrl-C interrupts at once and abandons the engine. So does the first one after threads.PATIENCE_S, if an
engine in another process has not ended its work by then. Signals reach Python's main thread only; calls from other
threads have nothing to hold back.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final

SAME_PRESS_S: Final = 1.0  # a launcher that passes Ctrl-C on makes two signals of one press, no longer apart than this

_open: list[Held] = []  # those of the main thread, the innermost last
this_thread = threading.local()  # `stop`, an Event, ends a thread of threads.py


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
    stop: threading.Event | None = getattr(this_thread, "stop", None)
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
