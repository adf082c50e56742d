"""Nothing gets past a sync, and nothing that has gone wrong is left behind for the next rollout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any, NamedTuple

import pytest
from tiny_models import (
    CALIBRATION,
    LONG_PROMPT,
    PROMPTS,
    Outputs,
    answer,
    generate,
    started,
    started_beside_references,
    weights,
)

from fp8plan.errors import ConfigError, LostEngineError, NotServingError, SyncError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.sleeping import TAGS, asleep_of, falling_asleep
from fp8plan.runtime.apply.weight_sync.state import Event, SyncState, alone, generating, refuse_asleep

# --- the gate itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def state() -> SyncState:
    return SyncState(SyncSettings(), None, fp8_kv=True)


def test_rollouts_and_procedures_exclude_each_other(state: SyncState) -> None:
    with generating(state), generating(state):
        with pytest.raises(SyncError, match="2 requests are running"), alone(state, busy=0):
            pass
        assert not state.running
    with alone(state, busy=0):
        with pytest.raises(NotServingError, match="a sync is running"), generating(state):
            pass
        with pytest.raises(SyncError, match="another sync is running"), alone(state, busy=0):
            pass
        assert state.running
    with pytest.raises(SyncError, match=r"3 requests are running.*the old weights serve"), alone(state, busy=3):
        pass
    state.note(Event.REFUSE, "bad")
    with pytest.raises(SyncError, match="still refuses to generate"), alone(state, busy=1):
        pass
    assert (state.running, state.generating) == (False, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.note(Event.DIE), "has died"),
        (lambda state: setattr(state, "asleep", frozenset(TAGS)), "sleeps; call wake_up"),
        (lambda state: state.note(Event.REFUSE, "x"), "x; call"),
    ],
    ids=["dead", "asleep", "refused"],
)
def test_nothing_generates_unless_the_weights_serve(
    state: SyncState, change: Callable[[SyncState], object], says: str
) -> None:
    change(state)
    with pytest.raises(NotServingError, match=says), generating(state):
        pass
    assert state.generating == 0


def test_a_sleep_that_fails_leaves_nothing_that_serves(state: SyncState) -> None:
    with pytest.raises(RuntimeError), falling_asleep(state, 1):
        raise RuntimeError
    assert "put to sleep" in str(state.refusal)


def test_a_sleep_that_was_broken_off_may_have_happened(state: SyncState) -> None:
    """An engine in another process falls asleep although its caller is interrupted: it must be woken up."""
    with pytest.raises(KeyboardInterrupt), falling_asleep(state, 1):
        raise KeyboardInterrupt
    assert asleep_of(state, None) == list(TAGS)
    with pytest.raises(SyncError, match=r"sleeps.*call wake_up"):
        refuse_asleep(state, {}, None)
    with pytest.raises(SyncError, match=r"perhaps not all of it\); call wake_up"), falling_asleep(state, 1):
        pass
    state.asleep = frozenset()  # woken up
    with falling_asleep(state, 1) as needed:
        assert needed
    assert "put to sleep" in str(state.refusal)  # until a complete sync


@pytest.mark.parametrize(
    ("asleep", "amax", "scored", "refused"),
    [
        (TAGS, {}, None, True),
        (["weights"], {}, None, True),
        (["kv_cache"], None, None, True),
        (["kv_cache"], {}, None, False),
        (["kv_cache"], {}, "a sequence", True),
        ([], None, "a sequence", False),
    ],
)
def test_a_sync_needs_awake_what_it_writes_or_runs_on(
    state: SyncState, asleep: list[str], amax: Any, scored: Any, refused: bool
) -> None:
    state.asleep = frozenset(asleep)
    if refused:
        with pytest.raises(SyncError, match=r"sleeps.*call wake_up.*Nothing was sent"):
            refuse_asleep(state, amax, scored)
    else:
        refuse_asleep(state, amax, scored)


# --- a live engine --------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    engine: RolloutEngine
    references: dict[str, Outputs]

    def sync(self, which: str, **changes: Any) -> None:
        self.engine.sync_weights(weights("dense", which) | changes, kv_prompts=CALIBRATION)


@pytest.fixture(scope="module", params=["bf16", "fp8_kv"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with started_beside_references("dense", request.param) as (engine, references):
        yield Subject(engine, references)


vllm = pytest.mark.vllm


@vllm
def test_weights_that_overflow_leave_nothing_in_the_kv_cache(subject: Subject) -> None:
    """Kernels multiply what is masked by 0, and 0 * NaN is NaN: a block that held it would poison its next owner."""
    subject.sync("a")
    assert generate(subject.engine) == subject.references["a"]
    huge = {name: tensor * 3e38 for name, tensor in weights("dense", "b").items() if "v_proj" in name}
    assert all(tensor.isfinite().all() for tensor in huge.values())
    if subject.engine.state.fp8_kv:
        with pytest.raises(SyncError, match="refuses to generate until a complete sync"):
            subject.sync("b", **huge)
    else:
        subject.sync("b", **huge)
        ((_, logprobs), *_) = generate(subject.engine)
        assert any(x != x for x in logprobs)
    assert subject.engine.state.soiled
    subject.sync("b")
    assert generate(subject.engine) == subject.references["b"]


@vllm
def test_a_rollout_that_is_interrupted_leaves_no_requests(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    subject.sync("a")
    core = subject.engine.llm.llm_engine
    step, left = core.step, iter(range(3))

    def interrupted() -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(subject.engine)
    monkeypatch.undo()
    assert core.get_num_unfinished_requests() == 0
    assert generate(subject.engine, cold=True) == subject.references["a"]
    subject.sync("b")
    assert generate(subject.engine) == subject.references["b"]


@vllm
def test_requests_of_others_are_not_mixed_up_with_a_rollout(subject: Subject) -> None:
    from vllm import SamplingParams

    core = subject.engine.llm.llm_engine
    core.add_request("7", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True))
    try:
        with pytest.raises(NotServingError, match="another generate is running"):
            subject.engine.generate([{"prompt_token_ids": PROMPTS[0]}])
    finally:
        core.abort_request(["7"])


@vllm
def test_an_iterator_that_reuses_its_buffers_is_found_out(subject: Subject) -> None:
    import torch

    buffers: dict[Any, Any] = {}

    def stream() -> Iterator[tuple[str, Any]]:
        for name, tensor in weights("dense", "b").items():
            buffer = buffers.setdefault(tensor.shape, torch.empty_like(tensor))
            buffer.copy_(tensor)
            yield name, buffer

    with pytest.raises(SyncError, match=r"was written to after it was given.*clone.*the old weights serve"):
        subject.engine.sync_weights(stream(), kv_prompts=CALIBRATION)
    copies = ((name, tensor.clone()) for name, tensor in stream())
    subject.engine.sync_weights(copies, kv_prompts=CALIBRATION)
    assert generate(subject.engine) == subject.references["b"]


@vllm
def test_a_rollout_of_another_thread_waits_outside_a_sync(subject: Subject) -> None:
    subject.sync("a")
    found: list[BaseException] = []
    half = threading.Event()

    def rollout() -> None:
        half.wait(60)
        try:
            subject.engine.generate([{"prompt_token_ids": PROMPTS[0]}])
        except BaseException as error:
            found.append(error)

    def stream() -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(weights("dense", "b").items()):
            if number == 20:
                half.set()
                other.join(60)
            yield pair

    other = Thread(target=rollout)
    other.start()
    subject.engine.sync_weights(stream(), kv_prompts=CALIBRATION)
    assert [type(error) for error in found] == [NotServingError]
    assert generate(subject.engine) == subject.references["b"]


@vllm
def test_a_sleeping_engine_neither_generates_nor_syncs(subject: Subject) -> None:
    engine = subject.engine
    subject.sync("a")
    engine.sleep(1)  # a CPU only logs that it has none
    with pytest.raises(NotServingError, match="sleeps"):
        generate(engine)
    with pytest.raises(SyncError, match="sleeps"):
        subject.sync("b")
    engine.wake_up(["weights"])
    if engine.state.fp8_kv:
        with pytest.raises(SyncError, match=r"sleeps.*or give kv_amax"):
            subject.sync("b")
    else:
        subject.sync("b")
    with pytest.raises(NotServingError, match="sleeps"):
        generate(engine)
    engine.wake_up(["kv_cache"])
    subject.sync("b")
    assert generate(engine) == subject.references["b"]


@vllm
def test_a_sleep_or_a_wake_up_too_many_changes_nothing(subject: Subject) -> None:
    engine = subject.engine
    subject.sync("a")
    cached = [answer(engine, LONG_PROMPT) for _ in range(2)][-1]
    engine.wake_up()  # nothing sleeps: what is cached must not be zeroed
    assert answer(engine, LONG_PROMPT) == cached
    engine.sleep(1)
    engine.sleep(1)
    with pytest.raises(SyncError, match=r"sleeps already \(kv_cache, weights, level 1\); call wake_up before"):
        engine.sleep(2)
    with pytest.raises(ConfigError, match="tags: 'cache'; allowed: a list of weights, kv_cache"):
        engine.wake_up(["cache"])
    engine.wake_up(["weights"])
    engine.wake_up(["weights"])
    with pytest.raises(SyncError, match=r"sleeps already \(kv_cache, level 1\)"):
        engine.sleep(1)
    with pytest.raises(NotServingError, match="sleeps"):
        generate(engine)
    engine.wake_up()
    with pytest.raises(ConfigError, match="level is 3; allowed: 1"):
        engine.sleep(3)
    assert generate(engine, cold=True) == subject.references["a"]


@vllm
def test_prompts_that_are_none_or_bad_leave_the_engine_as_it_was(subject: Subject) -> None:
    engine = subject.engine
    subject.sync("a")
    assert engine.generate([]) == []
    (request,) = engine.generate([{"prompt_token_ids": PROMPTS[0]}], None)  # vLLM's own settings
    assert len(request.outputs[0].token_ids) > 0
    with pytest.raises(Exception, match="prompt"):
        engine.generate([{"prompt_token_ids": PROMPTS[0]}, {"prompt_token_ids": [1] * 5000}])
    assert engine.llm.llm_engine.get_num_unfinished_requests() == 0
    assert generate(engine, cold=True) == subject.references["a"]


@vllm
def test_a_sync_of_another_thread_waits_outside_a_rollout(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    subject.sync("a")
    core, found = subject.engine.llm.llm_engine, list[BaseException]()
    step = core.step

    def sync() -> None:
        try:
            subject.sync("b")
        except BaseException as error:
            found.append(error)

    def meanwhile() -> Any:
        if not found:
            other = Thread(target=sync)
            other.start()
            other.join(60)
        return step()

    monkeypatch.setattr(core, "step", meanwhile)
    assert generate(subject.engine) == subject.references["a"]
    monkeypatch.undo()
    assert [type(error) for error in found] == [SyncError]
    assert "requests are running" in str(found[0])
    subject.sync("b")
    assert generate(subject.engine) == subject.references["b"]


@vllm
def test_an_engine_whose_step_was_broken_off_refuses(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what no handler of signals can hold back; nobody knows what is left of a step."""

    class Late(BaseException):
        pass

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise Late

    subject.sync("a")
    engine = subject.engine
    monkeypatch.setattr(engine.llm.llm_engine.engine_core, "get_output", broken)
    with pytest.raises(Late):
        generate(engine)
    assert not engine.serving
    with pytest.raises(NotServingError, match="has died; the next sync_weights starts it again"):
        generate(engine)
    subject.sync("b")
    assert generate(engine) == subject.references["b"]


def after_shutdown(engine: Any) -> dict[str, Any]:
    """Every call that asks something of the engine."""
    return {
        "generate": lambda: engine.generate([{"prompt_token_ids": PROMPTS[0]}]),
        "sync_weights": lambda: engine.sync_weights(weights("dense", "b")),
        "recalibrate_kv": engine.recalibrate_kv,
        "kv_scales": engine.kv_scales,
        "sleep": engine.sleep,
        "wake_up": engine.wake_up,
        "join_transfer": lambda: engine.join_transfer(None),
    }


@vllm
def test_a_shut_down_engine_says_so() -> None:
    with started("dense", "a", "fp8_kv") as engine:
        assert engine.serving
        engine.shutdown()
        assert not engine.serving
        for name, call in after_shutdown(engine).items():
            with pytest.raises(LostEngineError, match="the engine was shut down; make another with from_plan"):
                call()
            assert not engine.serving, name
        assert engine.verdict is None
        engine.shutdown()
