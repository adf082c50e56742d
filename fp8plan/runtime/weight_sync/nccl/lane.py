"""A thread that does one thing after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple
from weakref import finalize


class Lane:
    """A thread that does one thing after another, and ends with this object or with the process.

    That is what a ThreadPoolExecutor of one thread is not: the process waits at its end for whatever the pool still
    does, and a rank that waits in NCCL for others, which failed, waits for ever.
    """

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[_Call | None]()
        Thread(target=_done_in_turn, args=(self._work,), name=name, daemon=True).start()
        finalize(self, self._work.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function once all before it are done; the Future has its answer, or what it raised."""
        future = Future[Any]()
        self._work.put(_Call(future, function, arguments))
        return future


class _Call(NamedTuple):
    future: Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _done_in_turn(work: SimpleQueue[_Call | None]) -> None:
    while (call := work.get()) is not None:
        if call.future.set_running_or_notify_cancel():
            try:
                call.future.set_result(call.function(*call.arguments))
            except BaseException as error:
                call.future.set_exception(error)
        del call  # what it holds must not outlive it here: the trainer's tensors, or the last reference to the Lane
