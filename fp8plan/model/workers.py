"""A `map` over forked processes that ends with all of them at Ctrl-C.

The pools of concurrent.futures have threads. An interrupt of their workers broke those threads, and the program hung.
Here one thread sends and receives. Workers take no notice of SIGINT, which a terminal sends to every process. They end
with their parent, however that ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, cast

from fp8plan.errors import Fp8PlanError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

FORK: Final = "fork"


@contextmanager
def mapper(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` over `workers` processes. They are forked, so the caller's script needs no `__main__` guard.

    The results come in the order of the items. At the end of the `with`, or an error in it, no process is left.
    """
    from multiprocessing import get_all_start_methods

    if workers < 2 or FORK not in get_all_start_methods():
        yield map
        return
    crew = _Crew(workers)
    try:
        yield crew.map
    finally:
        crew.end()


class _Crew:
    """The processes of a `mapper`, which the first item starts."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        from multiprocessing.connection import wait

        todo = list(items)
        done: dict[int, Any] = {}
        working: dict[Connection, int] = {}
        with _interrupt_held():
            self._start(function, todo)
        order = iter(range(len(todo)))
        for end in self._ends:
            _next(end, order, working)
        for number in range(len(todo)):
            while number not in done:
                for ready in wait(list(working)):
                    end = cast("Connection[Any, Any]", ready)
                    done[working.pop(end)] = _received(end)
                    _next(end, order, working)
            yield done.pop(number)
        self.end()

    def _start(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        from multiprocessing import get_context

        context = get_context(FORK)
        for _ in range(min(self._workers, len(items))):
            end, far = context.Pipe()
            self._ends.append(end)
            process = context.Process(target=_work, args=(far, tuple(self._ends), function, items), daemon=True)
            self._processes.append(process)
            process.start()
            far.close()

    def end(self) -> None:
        """Kill the processes, which hold nothing that can be lost."""
        with _interrupt_held():
            for process in self._processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for end in self._ends:
                end.close()
            self._processes, self._ends = [], []


def _next(end: Connection, order: Iterator[int], working: dict[Connection, int]) -> None:
    """Send a worker the number of the next item, if there is one."""
    if (number := next(order, None)) is not None:
        working[end] = number
        with suppress(OSError):  # the worker is gone, which `_received` then says
            end.send(number)


def _received(end: Connection) -> Any:
    """The result of a worker. Raises its error, or Fp8PlanError if it has ended."""
    try:
        result, error = end.recv()
    except (EOFError, OSError):
        raise Fp8PlanError(
            "a worker process ended early, perhaps for lack of memory; free some and try again"
        ) from None
    if error is not None:
        raise error
    return result


def _work(far: Connection, ends: Sequence[Connection], function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """The life of a worker: results of the items that it is sent, until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in ends:  # copies of the parent's ends would keep the pipes open after it
        end.close()
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            far.send(_result(function, items[far.recv()]))


def _result(function: Callable[[Any], Any], item: Any) -> tuple[Any, Exception | None]:
    try:
        return function(item), None
    except Exception as error:
        return None, error


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Hold SIGINT back for an instant, so that no process starts or ends by halves. Workers inherit the deafness."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    arrived: list[Any] = []
    signal.signal(signal.SIGINT, lambda *call: arrived.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        before(*arrived[0])
