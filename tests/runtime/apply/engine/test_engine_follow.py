"""A live engine follows the guard's advice: it recalibrates, or starts again in a safer precision."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import (
    CALIBRATION,
    PROMPTS,
    answer,
    checkpoint,
    cpu_plan,
    generate,
    started,
    started_beside_references,
    weights,
)

from fp8plan.errors import ConfigError, NotServingError, SyncError
from fp8plan.runtime.apply.engine.async_engine import AsyncRolloutEngine
from fp8plan.runtime.apply.engine.base import EngineBase
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.judge import Judge
from fp8plan.runtime.apply.engine.launch import Launch
from fp8plan.runtime.apply.weight_sync.calls import Call, Restart, Rpc
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings, GuardState
from fp8plan.runtime.watch.guard.guard import Guard, Judged, Verdict
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

pytestmark = pytest.mark.vllm


def verdict(action: Action) -> Verdict:
    return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, as_fast=False, causes=(), action=action, reason="a test")


@pytest.mark.parametrize(
    ("before", "action", "after"),
    [
        ("fp8_block+fp8_kv", Action.KV_TO_BF16, "fp8_block"),
        ("fp8_block", Action.ALL_BF16, "bf16"),
    ],
)
def test_an_engine_that_steps_down_is_the_safer_one_after_the_next_sync(
    before: str, action: Action, after: str
) -> None:
    with started_beside_references("dense", after) as (_, expected):
        pass
    with started("dense", "a", before) as engine:
        assert generate(engine) != expected["a"]
        engine.apply(verdict(action))
        assert engine.launch.precision == after
        assert engine.state.fp8_kv == after.endswith("fp8_kv")
        with pytest.raises(NotServingError, match="started again"):
            generate(engine)
        engine.sync_weights(weights("dense", "b"))
        assert generate(engine) == expected["b"]


def test_a_step_down_that_fails_is_made_up_for_by_the_next_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(launch: Launch, facts: object) -> None:
        raise ConfigError("not as planned")

    with started_beside_references("dense", "bf16") as (_, expected):
        pass
    with started("dense", "a", "fp8_kv") as engine:
        monkeypatch.setattr(Launch, "refuse_other", refused)
        for attempt in range(2):  # neither the step down nor a sync makes an engine serve that is not as planned
            with pytest.raises(ConfigError, match="not as planned"):
                engine.apply(verdict(Action.KV_TO_BF16)) if attempt == 0 else engine.sync_weights(weights("dense", "b"))
            assert not engine.serving
            with pytest.raises(NotServingError, match="the next sync_weights starts it again"):
                generate(engine)
        monkeypatch.undo()
        engine.sync_weights(weights("dense", "b"))
        assert generate(engine) == expected["b"]


def test_the_whole_way_from_the_trainers_log_probs_to_a_safer_engine() -> None:
    """Nothing here is made up but the mismatch: the guard sees real rollouts and hears the KL of the one before from
    the monitor, which records what it says; that is followed."""
    settings = GuardSettings(patience=1, kl_limit=0.01)
    chance = torch.Generator().manual_seed(0)
    with started("dense", "a", "fp8_kv", guard=settings) as engine:
        said, records = [], list[Any]()
        monitor = Monitor(engine=engine, sinks=[Callback(records.append)])
        for sigma in (0.03, 1.0, 1.0, 0.03, 0.03):  # a KL of 0.0005 and 0.5
            answer(engine, PROMPTS[0])
            rollout = -torch.rand(8, 100, generator=chance)
            step = monitor.step(rollout + sigma * torch.randn(8, 100, generator=chance) - sigma**2 / 2, rollout)
            assert step.verdict is not None, engine.guard_off
            said.append(step.verdict.action)
            engine.sync_weights(weights("dense", "b"))
            engine.apply(step.verdict)
            if not engine.serving:
                engine.sync_weights(weights("dense", "b"))
        assert said == [Action.NONE, Action.NONE, Action.RECALIBRATE_KV, Action.KV_TO_BF16, Action.NONE]
        assert [x["guard"]["verdict"]["action"] for x in records] == said
        assert [x["precision"] for x in records] == ["fp8_kv"] * 4 + ["bf16"]
        assert all(x["seconds"] > 0 and x["prompt_lengths"] == [len(PROMPTS[0])] for x in records)
        assert (engine.launch.precision, engine.state.kv_scales) == ("bf16", None)
        with pytest.raises(ConfigError, match="kl_k3 is nan; allowed: a finite number"):
            engine.report_kl(float("nan"))


def test_a_rollout_that_the_guard_cannot_compare_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with started("dense", "a", "bf16") as engine:
        with monkeypatch.context() as changed:
            changed.setattr(Guard, "after_rollout", lambda self, observed: 1 / 0)
            assert generate(engine)
            assert engine.verdict is None
            assert "cannot be compared: division by zero" in str(engine.guard_off)
        generate(engine)
        assert (engine.verdict is not None, engine.guard_off) == (True, None)


def test_recalibrating_leaves_the_engine_serving_with_the_scales_of_its_last_rollout() -> None:
    with started("dense", "a", "fp8_kv") as engine:
        generate(engine)
        first = engine.kv_scales()
        engine.apply(verdict(Action.RECALIBRATE_KV))
        assert engine.serving
        assert engine.kv_scales() != first
        engine.apply(verdict(Action.NONE))
        engine.apply(None)
        assert engine.serving


def test_what_a_controller_escalates_is_done_where_the_guard_advises_nothing() -> None:
    with started("dense", "a", "fp8_kv") as engine:
        generate(engine)
        first = engine.kv_scales()
        engine.apply(None, Escalation.RECALIBRATE_KV)
        assert engine.kv_scales() != first
        assert engine.serving
        engine.apply(verdict(Action.NONE), Escalation.STEP_DOWN)
        assert engine.launch.precision == "bf16"
        engine.sync_weights(weights("dense", "b"))
        engine.apply(None, Escalation.STEP_DOWN)  # nothing is left
        assert engine.serving


def test_an_action_that_changes_nothing_is_an_error() -> None:
    with started("dense", "a", "bf16") as engine, pytest.raises(ConfigError, match="all_bf16 changes nothing in bf16"):
        engine.apply(verdict(Action.ALL_BF16))


def test_a_rollout_is_compared_with_the_prediction_for_it() -> None:
    """fp8plan/dense-50m's CPU profile predicts any small dense model; how well is not the point here."""
    with started("dense", "a", "fp8_kv") as engine:
        assert isinstance(engine.guard, Guard), engine.guard_off
        assert engine.verdict is None
        generate(engine)
        found = engine.verdict
        assert found is not None
        assert found.tokens_per_s > 0
        assert found.predicted_tokens_per_s > 0


def test_an_engine_that_no_profile_can_predict_says_so_and_works() -> None:
    with started("dense", "a", "fp8_block") as engine:
        assert engine.guard is None
        assert "cannot be predicted on cpu" in str(engine.guard_off)
        generate(engine)
        assert engine.verdict is None


def test_a_plan_without_the_safer_precision_cannot_step_down() -> None:
    alone = cpu_plan("fp8_kv")
    alone = replace(alone, choices=(alone.choices[alone.chosen],), chosen=0)
    engine = RolloutEngine.from_plan(alone, str(checkpoint("dense", "a")), skip_tokenizer_init=True)
    try:
        with pytest.raises(ConfigError, match="the plan has no bf16"):
            engine.apply(verdict(Action.KV_TO_BF16))
        engine.sync_weights(weights("dense", "a"), kv_prompts=CALIBRATION)
        assert engine.serving
    finally:
        engine.shutdown()


# --- without an engine ----------------------------------------------------------------------------------------------


class Answers:
    """An engine's answers to Calls. busy: requests that run; does: what it was asked for; broken: it does not start"""

    def __init__(self) -> None:
        self.busy, self.broken, self.does = 0, False, list[str]()

    def answer(self, call: Call) -> Any:
        self.does.append(type(call).__name__)
        if isinstance(call, Restart) and self.broken:
            raise NotServingError("it does not start")
        amax = {"layer": [1.0, 1.0, 1.0]}
        return [{"ok": amax}] if isinstance(call, Rpc) else None

    async def answer_later(self, call: Call) -> Any:
        return self.answer(call)


def unstarted(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Answers]:
    """An engine in fp8_block+fp8_kv whose vLLM is Answers."""
    answers, engine = Answers(), kind.__new__(kind)
    lower = {"fp8_block": SimpleNamespace(precision="fp8_block", fp8_kv=False, workers=1)}
    first = SimpleNamespace(precision="fp8_block+fp8_kv", fp8_kv=True, workers=1, with_precision=lower.__getitem__)
    engine.mode, engine._half_done, engine.llm = "multiprocess", False, None
    EngineBase.__init__(engine, first, SyncSettings(), None, GuardSettings())  # type: ignore[arg-type]
    engine.guard = Guard.__new__(Guard)
    engine.guard.state, engine.guard.facts = GuardState(), SimpleNamespace(precision=first.precision, kv_fixed=False)
    engine._remembered.sequences, engine.state.kv_scales = [[1, 2, 3]], {"layer": [1.0] * 3}
    monkeypatch.setattr(engine, "_busy", lambda: answers.busy)
    later = kind is AsyncRolloutEngine
    monkeypatch.setattr(engine, "answer", answers.answer_later if later else answers.answer)
    return engine, answers


def followed(engine: Any, escalate: Escalation) -> None:
    done = engine.apply(None, escalate)
    if done is not None:
        asyncio.run(done)


@pytest.mark.parametrize("kind", [RolloutEngine, AsyncRolloutEngine])
def test_an_escalation_that_fails_is_done_the_next_time(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answers = unstarted(kind, monkeypatch)
    answers.busy = 1
    with pytest.raises(SyncError, match="1 requests are running"):
        followed(engine, Escalation.RECALIBRATE_KV)
    assert not answers.does
    assert engine.guard.state.rung == Action.NONE
    answers.busy = 0
    followed(engine, Escalation.RECALIBRATE_KV)
    assert "Generate" in answers.does
    assert engine.guard.state.rung == Action.RECALIBRATE_KV
    answers.does.clear()
    followed(engine, Escalation.RECALIBRATE_KV)  # each is asked for once
    assert not answers.does


def test_a_step_down_that_does_not_start_is_taken_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next sync starts the engine in the precision that it stepped down to."""
    engine, answers = unstarted(RolloutEngine, monkeypatch)
    answers.broken = True
    with pytest.raises(NotServingError, match="does not start"):
        followed(engine, Escalation.STEP_DOWN)
    assert (engine.launch.precision, engine.guard.state.rung) == ("fp8_block", Action.KV_TO_BF16)


class Process:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def running(process: Process, shutdown: Any) -> Any:
    """A vLLM whose engine runs in a process."""
    manager = SimpleNamespace(processes=[process])
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager), shutdown=shutdown)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core), engine_core=core, shutdown=shutdown)


@pytest.mark.parametrize("kind", [RolloutEngine, AsyncRolloutEngine])
def test_a_shutdown_that_is_interrupted_leaves_no_process_and_can_be_repeated(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = unstarted(kind, monkeypatch)
    engine._judge, process, calls = Judge(engine), Process(), list[int]()

    def shutdown() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    engine.llm = running(process, shutdown)
    with pytest.raises(KeyboardInterrupt):
        engine.shutdown()
    assert process.killed
    engine.shutdown()
    assert (len(calls), engine.llm) == (2, None)


def test_a_shut_down_engine_judges_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = unstarted(RolloutEngine, monkeypatch)
    judge = engine._judge = Judge(engine)
    go_on, begun = Event(), Event()
    under_way = judge._thread.submit(lambda: begun.set() or go_on.wait(30))
    judge._since.append(judge._thread.submit(Judged))
    begun.wait(30)
    engine.shutdown()
    assert engine.verdict is None
    assert judge._since[0].cancelled()
    go_on.set()
    assert under_way.result(30)
    with pytest.raises(RuntimeError, match="after shutdown"):
        judge._thread.submit(Judged)


def test_a_new_engine_is_not_taken_for_one_that_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    engine, _ = unstarted(RolloutEngine, monkeypatch)
    engine._judge, engine.mode, engine._half_done = Judge(engine), "inprocess", True
    engine.launch.prepare, engine.launch.kwargs = lambda: None, {}
    core = SimpleNamespace(add_request=None, step=None)
    monkeypatch.setattr(vllm, "LLM", lambda: SimpleNamespace(llm_engine=core))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine._start()
    gc.unfreeze()
    assert not engine._half_done
