"""The same syncs into an engine in a process of its own, which can be killed in the middle of one."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread, Timer
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tiny_models import (
    CALIBRATION,
    Outputs,
    generate,
    params,
    started_beside_references,
    weights,
)

from fp8plan.errors import NotServingError, SyncError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync import stream as transport
from fp8plan.runtime.apply.weight_sync.calls import Call, Rpc
from fp8plan.runtime.apply.weight_sync.state import DIED, State

pytestmark = pytest.mark.vllm

CHUNK = 300_000  # bytes: a few modules
START = 240.0  # seconds that an engine may take to start on a busy machine


class Subject(NamedTuple):
    kind: str
    engine: RolloutEngine
    references: dict[str, Outputs]


CASES = [("dense", "fp8_block"), ("moe", "fp8_block+fp8_kv")]


@pytest.fixture(scope="module", params=params(CASES, CASES[:1]))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """References are of engines in this process: a set of weights says the same wherever it runs."""
    import warm_processes  # noqa: F401 -- it imports vLLM

    with started_beside_references(*request.param, mode="multiprocess", chunk_bytes=CHUNK) as (engine, references):
        yield Subject(request.param[0], engine, references)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that the test's syncs put into shared memory."""
    found: list[Path] = []

    def mkstemp(*args: Any, **kwargs: Any) -> tuple[int, str]:
        handle, path = tempfile.mkstemp(*args, **kwargs)
        found.append(Path(path))
        return handle, path

    monkeypatch.setattr(transport, "tempfile", SimpleNamespace(mkstemp=mkstemp))
    return found


def test_syncs_alternate_between_two_sets_of_weights(subject: Subject) -> None:
    for which in "babab":
        report = subject.engine.sync_weights(weights(subject.kind, which), kv_prompts=CALIBRATION)
        assert generate(subject.engine) == subject.references[which]
    assert report.chunks > 1
    assert report.compared > 0
    assert report.weight_error == pytest.approx(0.0265, abs=0.0015)


def test_a_fault_in_another_process_is_named_here(subject: Subject, staged: list[Path]) -> None:
    kind, engine, references = subject
    with pytest.raises(SyncError, match=r"the manifest is empty.*the old weights serve"):
        engine.sync_weights({})
    assert generate(engine, cold=True) == references["b"]
    sent = weights(kind, "a")
    sent["model.layers.1.self_attn.q_proj.weight"][3, 5] = float("nan")
    with pytest.raises(SyncError, match=r"not finite: model.layers.1.self_attn.q_proj.weight; .*refuses to generate"):
        engine.sync_weights(sent, kv_prompts=CALIBRATION)
    with pytest.raises(NotServingError):
        generate(engine)
    engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION)
    assert generate(engine) == references["a"]
    assert staged
    assert not [path for path in staged if path.exists()]


@pytest.mark.slow
def test_a_process_killed_during_a_sync_is_healed_by_the_next(subject: Subject, staged: list[Path]) -> None:
    kind, engine, references = subject

    def stream() -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(weights(kind, "b").items()):
            if number == 24:  # some messages are out
                kill(engine, "worker" if kind == "dense" else "core")
            yield pair

    with pytest.raises(SyncError, match="the engine has died; the next sync_weights starts it again"):
        in_time(lambda: engine.sync_weights(stream(), kv_prompts=CALIBRATION))
    assert not engine.serving
    assert staged
    assert not [path for path in staged if path.exists()]
    with pytest.raises(NotServingError, match="the engine has died; the next sync_weights starts it again"):
        generate(engine)
    with pytest.raises(SyncError, match="the manifest is empty"):
        engine.sync_weights({})  # it starts, with the weights of its checkpoint, which are nobody's policy
    assert not engine.serving
    with pytest.raises(NotServingError, match="started again"):
        generate(engine)
    engine.sync_weights(weights(kind, "b"), kv_prompts=CALIBRATION)
    assert generate(engine) == references["b"]


# The worker's method that the engine's process, killed, does not answer in a state.
UNANSWERED = {
    State.OPEN: "fp8plan_begin",
    State.WRITING: "fp8plan_load",
    State.CHECKED: "fp8plan_commit",
    State.DEAD: "fp8plan_facts",  # of an engine that is being started again
}


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
@pytest.mark.parametrize("subject", CASES[:1], indirect=True, ids=["dense-fp8_block"])
def test_killed_in_any_state_an_engine_refuses_until_a_whole_sync(
    subject: Subject, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, engine, references = subject
    in_time(lambda: engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION), START)
    answer, seen, calls = engine.answer, list[State](), list[str]()

    def killed(call: Call) -> Any:
        method = call.method if isinstance(call, Rpc) else None
        calls.append(str(method))
        if method == UNANSWERED[state] and calls.count(method) == (2 if state is State.WRITING else 1):
            seen.append(engine.state.weights.state)
            kill(engine, "core")
        return answer(call)

    if state is State.REFUSED:
        bad = weights(kind, "b") | {"model.norm.weight": weights(kind, "b")["model.norm.weight"] * math.nan}
        with pytest.raises(SyncError, match="not finite"):
            engine.sync_weights(bad, kv_prompts=CALIBRATION)
    if state in (State.REFUSED, State.SERVING, State.DEAD):
        assert engine.state.weights.state == (State.REFUSED if state is State.REFUSED else State.SERVING)
        kill(engine, "core")
    if state in UNANSWERED:
        monkeypatch.setattr(engine, "answer", killed)
        with pytest.raises(SyncError, match=DIED):
            in_time(lambda: engine.sync_weights(weights(kind, "b"), kv_prompts=CALIBRATION), START)
        monkeypatch.undo()
        assert seen == [state]
        assert engine.state.weights.state is State.DEAD
    with pytest.raises(NotServingError):
        in_time(lambda: generate(engine))
    assert not engine.serving
    in_time(lambda: engine.sync_weights(weights(kind, "b"), kv_prompts=CALIBRATION), START)
    assert generate(engine) == references["b"]


@pytest.mark.slow
@pytest.mark.parametrize("subject", CASES[:1], indirect=True, ids=["dense-fp8_block"])
def test_a_process_killed_during_a_rollout_is_healed_by_the_next_sync(subject: Subject) -> None:
    kind, engine, references = subject
    in_time(lambda: engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION), START)
    killer = Timer(0.5, lambda: kill(engine, "core"))
    killer.start()
    with pytest.raises(NotServingError, match="the engine has died; the next sync_weights starts it again"):
        in_time(lambda: [generate(engine) for _ in range(1000)])
    killer.join()
    assert not engine.serving
    engine.sync_weights(weights(kind, "b"), kv_prompts=CALIBRATION)
    assert generate(engine) == references["b"]


@pytest.mark.parametrize("subject", CASES[:1], indirect=True, ids=["dense-fp8_block"])
def test_a_call_that_meets_a_closed_socket_says_that_the_engine_has_died(subject: Subject) -> None:
    """vLLM closes its sockets between the check of a call that is under way and its send."""
    kind, engine, references = subject
    in_time(lambda: engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION), START)
    client = engine.llm.llm_engine.engine_core
    kill(engine, "core")
    in_time(lambda: closed(client.input_socket))
    client.ensure_alive = lambda: None
    with pytest.raises(NotServingError, match="the engine has died; the next sync_weights starts it again") as refused:
        in_time(lambda: generate(engine))
    assert type(refused.value.__cause__).__name__ == "ZMQError"
    in_time(lambda: engine.sync_weights(weights(kind, "b"), kv_prompts=CALIBRATION), START)
    assert generate(engine) == references["b"]


@pytest.mark.parametrize("subject", CASES[:1], indirect=True, ids=["dense-fp8_block"])
def test_a_process_that_has_died_before_a_sync_is_started_by_it(subject: Subject) -> None:
    kind, engine, references = subject
    kill(engine, "worker")
    in_time(lambda: engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION), START)
    assert generate(engine) == references["a"]


@pytest.mark.slow
@pytest.mark.parametrize("subject", CASES[:1], indirect=True, ids=["dense-fp8_block"])
def test_who_presses_ctrl_c_twice_gets_out_of_a_call_that_hangs(subject: Subject) -> None:
    import psutil

    kind, engine, references = subject
    in_time(lambda: engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION), START)
    (core,) = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
    psutil.Process(core.pid).suspend()  # it hangs
    presses = [Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)) for delay in (0.5, 2.0)]
    for press in presses:
        press.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        generate(engine)
    assert 2.0 <= time.monotonic() - begun < 15.0
    assert not engine.serving
    with pytest.raises(NotServingError, match="the engine has died; the next sync_weights starts it again"):
        generate(engine)
    in_time(lambda: engine.sync_weights(weights(kind, "b"), kv_prompts=CALIBRATION), START)
    assert generate(engine) == references["b"]


def in_time(act: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what `act` returns, or raise what it raises.

    Fails if `act` is still waiting after `seconds`, as it would be for an answer of a process that is gone.
    """
    results: list[Future[Any]] = []

    def run() -> None:
        results.append(future := Future())
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still waiting after {seconds:.0f} s"
    return results[0].result()


def closed(socket: Any) -> None:
    """Wait until vLLM's thread has closed it."""
    while not socket.closed:
        time.sleep(0.05)


def kill(engine: RolloutEngine, what: str) -> None:
    """End vLLM's EngineCore, or the worker that it has started, as the kernel does when memory runs out."""
    import psutil

    (core,) = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
    workers = [child for child in psutil.Process(core.pid).children() if child.name() != "resource_tracker"]
    victim = psutil.Process(core.pid) if what == "core" else max(workers, key=lambda child: child.memory_info().rss)
    victim.kill()
    victim.wait(timeout=30)
