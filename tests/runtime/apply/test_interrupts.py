"""Ctrl-C waits for places where it does no harm, and gets everybody out in the end."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from threading import Event, Thread
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from fp8plan.runtime.apply import interrupts, threads
from fp8plan.runtime.apply.interrupts import SAME_PRESS_S, Held, Stopped, let_in, released
from fp8plan.runtime.apply.threads import started_apart, watched


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler() -> Iterator[Any]:
    """Python's own, whatever runs the tests has; it is back after each of them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupts._open
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def given_up() -> list[int]:
    return []


@pytest.fixture
def held(given_up: list[int]) -> Held:
    return Held(lambda: given_up.append(1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    return now


def broken_off(held: Held, act: Callable[[], None]) -> BaseException:
    """The KeyboardInterrupt that comes out of a call."""
    with pytest.raises(KeyboardInterrupt) as caught, held:
        act()
    return caught.value


def test_an_interrupt_waits_for_the_next_place_that_lets_it_in(held: Held) -> None:
    reached = []

    def steps() -> None:
        let_in()
        press()
        reached.append("a step")
        let_in()
        reached.append("the next step")

    broken_off(held, steps)
    assert reached == ["a step"]


def test_it_waits_for_the_end_at_most(held: Held, given_up: list[int]) -> None:
    reached = []

    def step() -> None:
        press()
        reached.append("the last line")

    broken_off(held, step)
    assert reached
    assert not given_up


def test_an_error_of_the_call_is_its_context(held: Held) -> None:
    def fails() -> None:
        press()
        raise ValueError("bad")

    assert isinstance(broken_off(held, fails).__context__, ValueError)


def test_it_comes_at_once_in_the_callers_own_code(held: Held) -> None:
    reached = []

    def callers() -> None:
        with released():
            press()
            reached.append("more of it")

    broken_off(held, callers)
    assert not reached


def test_what_follows_the_callers_code_is_not_interrupted_again(held: Held, clock: list[float]) -> None:
    cleaned = []

    def clean_up() -> None:
        press()
        let_in()
        cleaned.append(1)

    def call() -> None:
        with held:
            try:
                with released():
                    press()
            except KeyboardInterrupt:
                clean_up()
                raise

    with pytest.raises(KeyboardInterrupt):
        call()
    assert cleaned


def test_one_press_may_come_as_two_signals(held: Held, given_up: list[int], clock: list[float]) -> None:
    def twice() -> None:
        press()
        clock[0] += SAME_PRESS_S / 2
        press()

    broken_off(held, twice)
    assert not given_up


@pytest.mark.parametrize("let", [False, True], ids=["in a call that hangs", "while it is cleared up"])
def test_who_insists_gets_out_and_the_engine_is_given_up(
    held: Held, given_up: list[int], clock: list[float], let: bool
) -> None:
    reached = []

    def call() -> None:
        with held:
            press()
            try:
                if let:
                    let_in()
            finally:
                clock[0] += 2 * SAME_PRESS_S
                press()
                reached.append("after it")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert given_up
    assert not reached


def test_a_handler_of_the_callers_that_only_notes_it_lets_the_call_go_on(
    held: Held, given_up: list[int], clock: list[float]
) -> None:
    noted = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    signal.signal(signal.SIGINT, note)
    with held:
        for _ in range(3):
            press()
            clock[0] += 2 * SAME_PRESS_S
            let_in()
        with released():
            press()
    assert noted == [signal.SIGINT] * 4
    assert not given_up
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_calls_inside_of_the_callers_code_hold_it_back_for_themselves(held: Held) -> None:
    reached = []

    def callers() -> None:
        with released(), Held(lambda: None):
            press()
            reached.append("the inner call's end")

    broken_off(held, callers)
    assert reached


@pytest.mark.parametrize("last", [False, True], ids=["as it begins", "as it ends"])
def test_an_interrupt_at_either_edge_of_a_call_leaves_nothing_behind(
    held: Held, given_up: list[int], monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """It arrives just before the handler is set, and just after the caller's own is back."""
    install = signal.signal

    def edge(number: int, new: Any) -> Any:
        if not last and new == held._arrived:
            press()
        before = install(number, new)
        if last and new is signal.default_int_handler:
            press()
        return before

    monkeypatch.setattr(interrupts.signal, "signal", edge)
    with pytest.raises(KeyboardInterrupt), held:
        pass
    monkeypatch.undo()
    left = list(interrupts._open)
    interrupts._open.clear()
    assert not left
    assert not given_up


def test_who_insists_as_a_call_ends_leaves_no_handler_behind(
    held: Held, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    install = signal.signal

    def edge(number: int, new: Any) -> Any:
        if new is signal.default_int_handler:
            clock[0] += 2 * SAME_PRESS_S
            press()
        return install(number, new)

    monkeypatch.setattr(interrupts.signal, "signal", edge)
    broken_off(held, press)
    monkeypatch.undo()
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler
    interrupts._open.clear()


def test_other_threads_hold_nothing_back(held: Held) -> None:
    found = []

    def run() -> None:
        with held, released():
            found.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


# --- calls to an engine in another process --------------------------------------------------------------------------

vllm = pytest.mark.vllm


class Engine:
    """Steps until it is told to stop, and can hang."""

    def __init__(self) -> None:
        self.steps, self.ended, self.killed, self.go_on = 0, Event(), Event(), Event()

    def generate(self) -> None:
        try:
            while True:
                let_in()
                self.steps += 1
                if self.steps == 3:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(0.02)
        except Stopped:
            self.ended.set()
            raise

    def hang(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.go_on.wait(30)

    def kill(self) -> None:
        self.killed.set()
        self.go_on.set()


@vllm
def test_nobody_uses_the_engine_until_the_interrupted_call_has_ended(held: Held) -> None:
    engine = Engine()
    with pytest.raises(KeyboardInterrupt), held:
        watched(engine.generate, lambda: False, engine.kill)
    assert engine.ended.is_set()
    assert not engine.killed.is_set()


@vllm
def test_a_call_that_does_not_end_after_an_interrupt_is_ended(held: Held) -> None:
    engine = Engine()
    with pytest.raises(KeyboardInterrupt), held:
        watched(engine.hang, lambda: False, engine.kill, patience_s=0.2)
    assert engine.killed.is_set()


@vllm
def test_an_exception_that_another_thread_raises_here_is_treated_alike() -> None:
    """As PyThreadState_SetAsyncExc does, and handlers of other signals."""
    import ctypes

    class Late(BaseException):
        pass

    engine, ident = Engine(), threading.main_thread().ident

    def generate() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(Late))
        engine.steps = 4
        try:
            engine.generate()
        finally:
            time.sleep(0.1)
            engine.go_on.set()

    with pytest.raises(Late):
        watched(generate, lambda: False, engine.kill)
    assert engine.go_on.is_set()


@vllm
@pytest.mark.parametrize("kind", ["LLM", "AsyncLLM"])
def test_an_engine_that_starts_after_its_caller_was_interrupted_is_shut_down(
    held: Held, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, ended = Event(), Event()
    started = SimpleNamespace(engine_core=SimpleNamespace(shutdown=ended.set))

    def start() -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        go_on.wait(30)
        return SimpleNamespace(llm_engine=started) if kind == "LLM" else started

    monkeypatch.setattr(threads, "LAST_WORDS_S", 0.1)
    with pytest.raises(KeyboardInterrupt), held:
        started_apart(start)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(30)


# --- a live engine --------------------------------------------------------------------------------------------------

INTERRUPTS = 21


@pytest.mark.slow
@vllm
def test_an_interrupted_engine_says_the_same_as_ever_or_refuses(tmp_path: Path) -> None:
    """See interrupted_run.py; in a process of its own, as libzmq aborts that when a message is broken off."""
    import interrupted_run
    import warm_processes  # it imports vLLM

    code, said = warm_processes.output(interrupted_run.main, str(INTERRUPTS), "17", log=tmp_path / "log")
    assert code == 0, said[-4000:]
    found = Counter(line for line in said.splitlines() if line.endswith(("served", "refused")))
    assert sum(found.values()) == INTERRUPTS, said
    assert found["generate served"] == found["recalibrate served"] == INTERRUPTS // 3


@vllm
def test_a_program_blocks_the_signals_of_whoever_starts_it(tmp_path: Path) -> None:
    """An engine's thread blocks SIGINT. If it is the first to start the server of them, that one blocks it, too."""
    import warm_processes

    ensure_running()  # as started_apart does; else Python unblocks SIGINT when it starts the server
    tell = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    answers: list[str] = []

    def start(log: str) -> None:
        answers.append(warm_processes.output(exec, tell, log=tmp_path / log)[1])

    def engine() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        start("blocked")

    thread = Thread(target=engine)
    thread.start()
    thread.join()
    start("free")
    assert answers == ["True\n", "False\n"]
