"""A thread that does one thing after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize


class Lane:
    """A thread that does one thing after another, and ends with this object or with the process.

    That is what a ThreadPoolExecutor of one thread is not: the process waits at its end for whatever the pool still
    does, and a rank that waits in NCCL for others, which failed, waits for ever.
    """

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[Callable[[], None] | None]()
        Thread(target=_done_in_turn, args=(self._work,), name=name, daemon=True).start()
        finalize(self, self._work.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function once all before it are done; the Future has its answer, or what it raised."""
        future = Future[Any]()

        def call() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(call)
        return future


def _done_in_turn(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        call()
        del call  # it may hold the last reference to the Lane
