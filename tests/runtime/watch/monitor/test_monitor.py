"""Monitor.step: one call that measures, decides, corrects, judges and records, on one rank or several."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plans import choice, plan, saved
from simulated_run import simulated

from fp8plan import jsonl, schemas
from fp8plan.errors import ConfigError
from fp8plan.jsonl import plain
from fp8plan.model.limits import EngineLimits
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate
from fp8plan.runtime.measure.probe.results import Interval, Probe, Probed
from fp8plan.runtime.measure.probe.sampling import SampleSettings
from fp8plan.runtime.watch.controller.alarms import MEANINGS, Alarm
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.controller.state import Decision, Escalation
from fp8plan.runtime.watch.correction.correct import CorrectionSettings, Rejection, Thresholds, correct
from fp8plan.runtime.watch.correction.verl import from_verl
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.guard import Guard
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.record import Step
from fp8plan.runtime.watch.monitor.sinks import Callback, JsonLines
from fp8plan.runtime.watch.monitor.steps import RunReader
from fp8plan.runtime.watch.monitor.witness import Witness
from fp8plan.schemas import RunRecord, checked

FACTS = EngineFacts("Qwen/Qwen3-0.6B", "h200_sxm", "0.26.0", "fp8_block+fp8_kv", EngineLimits(max_num_seqs=64))
SEEN = Observation(seconds=0.9, prompt_lengths=[16] * 6, response_lengths=[64] * 6, prompt_ids=[0, 0, 0, 1, 1, 1])
LAWS = (LevelThresholds(), ConstantThresholds())
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


MASKING = CorrectionSettings(
    mode="mis",
    thresholds=Thresholds(None, (0.5, 2.0)),
    reject=(Rejection("seq_mean", "k3", 0.3), Rejection("token", "k1", 3.0, 0.2)),
    veto=1e-2,
)
BY_SEQUENCE = CorrectionSettings(level="sequence", thresholds=Thresholds(1.5), batch_normalize=True)


def batch(seed: int = 0, sigma: float = 0.05, rows: int = 6, length: int = 64) -> Batch:
    """(train, rollout, mask): log-probs whose difference is normal with -sigma^2/2, sigma^2; a third is padding."""
    chance = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(rows, length, generator=chance)
    train = rollout + sigma * torch.randn(rows, length, generator=chance) - sigma**2 / 2
    return train, rollout, torch.rand(rows, length, generator=chance) > 0.33


def rows_of(path: Path) -> list[dict[str, Any]]:
    reader = RunReader(path)
    reader.read()
    assert (reader.skipped, reader.replaced) == (0, 0)
    return jsonl.rows(path)


def same(one: Step, other: Step) -> None:
    assert one.weights is not None
    assert torch.equal(torch.as_tensor(one.weights), torch.as_tensor(other.weights))
    assert torch.equal(torch.as_tensor(one.mask), torch.as_tensor(other.mask))
    assert (one.thresholds, one.decided) == (other.thresholds, other.decided)


def test_a_step_is_its_parts_in_order() -> None:
    settings = CorrectionSettings(thresholds=Thresholds(tis=1.5))
    controller = LevelThresholds(tis=1.5)
    monitor = Monitor(settings, controller)
    state = controller.initial(None)
    for seed in range(8):
        given = batch(seed, sigma=0.2 + 0.1 * seed)
        step = monitor.step(*given)
        tokens = pack(*given)
        mismatch = measure(tokens).metrics()
        thresholds, state, decided = controller.update(state, mismatch)
        expected = correct(tokens, replace(settings, thresholds=thresholds))
        assert step.weights is not None
        assert torch.equal(step.weights, expected.weights)
        assert torch.equal(step.mask, expected.mask)
        assert (step.thresholds, step.decided, step.mismatch) == (thresholds, decided, mismatch)
        assert not step.weights.requires_grad
        for name, value in expected.metrics.items():
            assert step.metrics[name] == value
        assert step.metrics["rollout_corr/kl"] == mismatch.k1
        assert step.metrics["rollout_corr/k3_kl"] == mismatch.k3
        assert step.metrics[schemas.TIS] == thresholds.tis


def test_padded_packed_and_numpy_batches_are_one_batch() -> None:
    train, rollout, mask = batch(sigma=0.4)
    lengths = mask.sum(1)
    padded = Monitor().step(train, rollout, mask)
    packed = Monitor().step(train[mask], rollout[mask], lengths=lengths)
    array = Monitor().step(train.numpy(), rollout.numpy(), mask.numpy())
    assert padded.weights is not None
    assert torch.equal(padded.weights[mask], torch.as_tensor(packed.weights))
    assert isinstance(array.weights, np.ndarray)
    same(padded, array)
    timeless = {name for name in padded.metrics if name != "fp8plan/monitor_s"}
    assert {x: packed.metrics[x] for x in timeless} == {x: padded.metrics[x] for x in timeless}


def test_a_record_has_what_the_views_read_and_validate_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Monitor(sinks=[JsonLines(path)], guard=Guard(FACTS)) as monitor:
        for seed in range(3):
            own = {schemas.REWARD: 0.5, schemas.TIS: 9.0}  # the second is the Monitor's to say
            step = monitor.step(*batch(seed), versions=[seed] * 6, rollout=SEEN, metrics=own)
    assert monitor.failures == [0]
    row = json.loads(path.read_text().splitlines()[-1])  # as it stands there: RunReader drops the lengths
    model = simulated(1)[0]  # what the tests of the views show
    assert set(model) <= set(row)
    assert set(model["metrics"]) <= set(row["metrics"])
    assert set(model["profile"][0]) == set(row["profile"][0])
    assert set(model["guard"]) == set(row["guard"])
    assert set(model["guard"]["verdict"]) == set(row["guard"]["verdict"])
    assert (row["step"], row["decision"], row["reason"]) == (3, step.decided.decision, step.decided.reason)
    assert row["thresholds"] == {"tis": step.thresholds.tis, "band": None}
    assert row["metrics"] == json.loads(json.dumps(dict(step.metrics)))
    assert (row["metrics"][schemas.REWARD], row["metrics"][schemas.TIS]) == (0.5, step.thresholds.tis)
    assert list(row["versions"]) == ["2"]
    assert set(MEANINGS) == {*Alarm}
    for record in read_records(path):
        assert record.fields["precision"] == "fp8_block+fp8_kv"
        assert record.limits.max_num_seqs == 64
        assert record.batch.responses.tolist() == [64] * 6
    assert [x.get("first_rollout") for x in jsonl.rows(path)] == [True, None, None]
    assert len(read_records(path)) == 2  # an engine warms up in its first rollout
    found = validate(read_records(path)).records
    assert step.verdict is not None
    predicted = 6 * 64 / found[-1]["predicted_s"]
    assert step.verdict.predicted_tokens_per_s == pytest.approx(predicted)  # the same prediction, of the same record


def test_the_fields_of_a_rollout_record_do_as_well_as_an_observation() -> None:
    taken: list[Any] = []
    fields = {
        "seconds": 0.9, "prompt_lengths": [16] * 6, "response_lengths": [64] * 6, "prompt_ids": [0, 0, 0, 1, 1, 1],
        "preemptions": np.int64(0), "boot": "a1",
    }  # fmt: skip
    fields |= {"prompt_lengths": np.full(6, 16), "response_lengths": torch.full((6,), 64)}
    for rollout in (SEEN, fields):
        with Monitor(sinks=[Callback(taken.append)], guard=Guard(FACTS)) as monitor:
            step = monitor.step(*batch(), rollout=rollout)
            assert step.verdict is not None
    one, other = taken
    assert one["guard"] == other["guard"]
    assert one["metrics"][schemas.TOKENS_PER_S] == pytest.approx(6 * 64 / 0.9)
    assert (other["boot"], other["response_lengths"]) == ("a1", one["response_lengths"])


@pytest.mark.parametrize(
    "metrics", [{"reward": "high"}, {"reward": None}, {"reward": np.ones(2)}, {3: 0.5}, [("reward", 0.5)]]
)
def test_figures_of_the_loop_that_are_no_numbers_are_refused(metrics: Any) -> None:
    monitor = Monitor()
    with pytest.raises(ConfigError, match=r"metrics (has|is a) .*; allowed: "):
        monitor.step(*batch(0), metrics=metrics)
    assert monitor.steps == 0
    assert monitor.step(*batch(0), metrics={"reward": float("nan")}).metrics["reward"] is None  # a step stops for none


def test_without_a_guard_the_speed_is_told_and_what_runs() -> None:
    taken: list[Any] = []
    with Monitor(sinks=[Callback(taken.append)], facts=FACTS) as monitor:
        monitor.step(*batch(), rollout=SEEN)
        monitor.step(*batch(), rollout=SEEN, number=17)
    assert [(x["step"], x["precision"], x["guard"]) for x in taken] == [(n, FACTS.precision, None) for n in (1, 17)]
    assert taken[0]["metrics"][schemas.TOKENS_PER_S] == pytest.approx(6 * 64 / 0.9)
    assert schemas.PREDICTED not in taken[0]["metrics"]


class Engine:
    """The part of a RolloutEngine that a Monitor uses; test_engine_follow.py has a real one."""

    def __init__(self) -> None:
        self.guard, self.guard_off = Guard(FACTS), None
        self.verdict: Any = None
        self.observation: Observation | None = None
        self.told: list[float] = []

    def rollout(self, kl_k3: float) -> None:
        self.observation = replace(SEEN, kl_k3=kl_k3)
        self.verdict = self.guard.after_rollout(self.observation)

    def report_kl(self, kl_k3: float) -> None:
        self.told.append(kl_k3)

    def engine_facts(self) -> EngineFacts:
        return self.guard.facts


def test_an_engine_gives_rollout_verdict_and_what_runs_once_and_is_told_the_kl() -> None:
    taken: list[Any] = []
    engine = Engine()
    monitor = Monitor(sinks=[Callback(taken.append)], engine=engine)  # type: ignore[arg-type]
    engine.rollout(kl_k3=1.0)
    first, second = (monitor.step(*batch()) for _ in range(2))  # two steps on one rollout
    assert (first.verdict, second.verdict) == (engine.verdict, None)
    assert engine.told == [x.mismatch.k3_robust for x in (first, second)]
    assert taken[0]["guard"] == {
        "verdict": engine.verdict.to_dict(),
        "state": engine.guard.state.to_dict(),
        "off": None,
    }
    assert [x.get("seconds") for x in taken] == [0.9, None]
    assert [x["precision"] for x in taken] == [FACTS.precision] * 2
    assert engine.guard.state.mismatched == 1  # it was asked by the engine alone
    restored = Monitor(engine=Engine())  # type: ignore[arg-type]
    restored.load_state_dict(monitor.state_dict())
    assert restored.guard is not None
    assert restored.guard.state == engine.guard.state


MISMATCH = measure(pack(*batch())).metrics()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, [MISMATCH.k3_robust]),
        ({"k3_robust": float("nan")}, []),
        ({"k3_robust": float("inf")}, []),
        ({"tokens": 0}, []),
    ],
)
def test_an_engine_is_told_no_kl_that_is_no_number_or_of_no_token(changes: dict[str, Any], told: list[float]) -> None:
    engine = Engine()
    engine.rollout(kl_k3=1.0)
    found = Witness(engine, None, None).judged(None, replace(MISMATCH, **changes))  # type: ignore[arg-type]
    assert engine.told == told
    assert found == (engine.observation, engine.verdict, None)


@pytest.mark.parametrize(
    ("own", "tokens", "kl"), [(None, 9, MISMATCH.k3_robust), (0.5, 9, 0.5), (None, 0, None), (0.5, 0, 0.5)]
)
@pytest.mark.parametrize("guarded", [True, False])
def test_a_rollout_without_a_kl_gets_that_of_its_tokens(
    guarded: bool, own: float | None, tokens: int, kl: float | None
) -> None:
    guard = Guard(FACTS) if guarded else None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = Witness(None, guard, None).judged(replace(SEEN, kl_k3=own), replace(MISMATCH, tokens=tokens))
    assert found.observation == replace(SEEN, kl_k3=kl)
    assert (found.verdict is None, found.off, told) == (guard is None, None, [])


def test_a_rollout_knows_how_long_its_engine_waited_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0 + SEEN.seconds + 7.0])
    monkeypatch.setattr("fp8plan.runtime.watch.monitor.witness.time.perf_counter", lambda: next(clock))
    witness = Witness(None, Guard(FACTS), None)
    first, second = (witness.judged(SEEN, MISMATCH) for _ in range(2))
    assert first.observation is not None
    assert first.observation.idle_s is None
    assert second.observation is not None
    assert second.observation.idle_s == pytest.approx(7.0)
    assert second.verdict is not None
    assert any("idle for 7 s" in cause.sentence for cause in second.verdict.causes)


def test_of_a_rollout_that_cannot_be_read_only_a_guard_warns() -> None:
    unread = {"seconds": 1.0, "prompt_lengths": [1]}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for guard in (None, Guard(FACTS)):
            found = Witness(None, guard, None).judged(unread, MISMATCH)
            assert "lacks response_lengths" in str(found.off)
    assert [str(one.message) for one in told] == [f"fp8plan: {found.off}"]
    with pytest.raises(ConfigError, match=r"guard is .*Guard\(facts\)"):
        Monitor(guard=FACTS)  # type: ignore[arg-type]


class Launched(Engine):
    def __init__(self, precision: str) -> None:
        super().__init__()
        self.launch = SimpleNamespace(precision=precision)


KLS = {"bf16": 0.001, "fp8_block": 0.02, "fp8_block+fp8_kv": 0.2}
PLAN = plan(choices=tuple(choice(name, kl_k3=kl / 2, kl_k3_high=kl) for name, kl in KLS.items()), chosen=2)


def probe_of(**kls: float) -> Probe:
    """A probe of precisions with these KLs."""
    ends = {name: Interval(kl, kl / 2, 2 * kl) for name, kl in kls.items()}
    findings = [Probed(name, figures={"kl_k3": x}) for name, x in ends.items()]
    return Probe("a model", "cpu", "today", "0.30.0", "transformers", SampleSettings(), 1, findings)


def test_a_probe_says_what_kl_to_expect_of_the_precision_that_runs() -> None:
    """The engine's precision counts, also after a step down and without a plan. Without an engine, the guard's does."""

    def expected(monitor: Monitor) -> float:
        part = monitor.step(*batch(), fresh=True, sampling={}).attribution[-2]
        assert (part.causes[0], part.how) == ("precision", "expected")
        return part.kl

    probe, engine = probe_of(bf16=1e-7, fp8_block=1e-6), Launched("fp8_block")
    monitor = Monitor(engine=engine, probe=probe)  # type: ignore[arg-type]
    assert expected(monitor) == 1e-6
    engine.launch.precision = "bf16"  # stepped down
    assert expected(monitor) == 1e-7
    guarded = Monitor(guard=Guard(FACTS), probe=probe_of(**{FACTS.precision: 1e-5}))
    assert expected(guarded) == 1e-5


def test_a_probe_is_asked_for_the_remedies_that_run() -> None:
    """They are those of the plan, unless the Monitor is told whether the trainer replays."""
    asked: list[tuple[str | None, Remedies]] = []
    probe = SimpleNamespace(interval_of=lambda *question: asked.append(question))
    planned = replace(PLAN, remedies=Remedies(True, "fp8_block"))
    engine: Any = Launched("fp8_block")
    for router_replay in (False, True, None):
        Monitor(plan=planned, engine=engine, probe=probe, router_replay=router_replay)
    Monitor(guard=Guard(FACTS), probe=probe, router_replay=True)
    assert asked == [
        ("fp8_block", Remedies(False, "fp8_block")),
        ("fp8_block", Remedies(True, "fp8_block")),
        ("fp8_block", Remedies(True, "fp8_block")),
        (FACTS.precision, Remedies(True)),
    ]


def test_the_share_of_tokens_routed_differently_is_recorded() -> None:
    assert schemas.ROUTING_DIFFERS not in Monitor().step(*batch()).metrics
    for share, recorded in ((0.25, 0.25), (0, 0.0), (1, 1.0), (np.nan, None)):
        assert Monitor().step(*batch(), routing_differs=share).metrics[schemas.ROUTING_DIFFERS] == recorded
    monitor = Monitor()
    for wrong in (-0.1, 1.1, True, "0.1", np.inf):
        with pytest.raises(ConfigError, match=r"routing_differs is .*; allowed: the share of this rank's tokens"):
            monitor.step(*batch(), routing_differs=wrong)  # type: ignore[arg-type]
    assert monitor.steps == 0


@pytest.mark.parametrize("controller", LAWS)
def test_the_kl_that_is_expected_is_that_of_the_precision_that_runs(controller: Any) -> None:
    """The engine may run another choice than the plan's own, or step down. A checkpoint does not change this."""
    engine: Any = Launched("fp8_block")
    assert Monitor(controller=controller, plan=PLAN).state.limit_kl == 0.2
    monitor = Monitor(controller=controller, plan=PLAN, engine=engine)
    assert monitor.state.limit_kl == 0.03
    engine.launch.precision = "fp8_block+fp8_kv"
    assert monitor.step(*batch()).metrics[schemas.KL_LIMIT] == 0.2
    saved = monitor.state_dict()
    engine.launch.precision = "bf16"  # stepped down
    assert monitor.step(*batch()).metrics[schemas.KL_LIMIT] == 0.03
    assert monitor.state.target_kl == 0.001
    monitor.load_state_dict(saved)
    assert monitor.step(*batch()).metrics[schemas.KL_LIMIT] == 0.03
    assert monitor.state.steps == 2
    with pytest.raises(ConfigError, match="allowed"):
        Monitor(controller=controller, plan=PLAN, engine=Launched("fp4"))  # type: ignore[arg-type]
    engine.launch.precision = "fp4"  # of another plan
    with pytest.warns(RuntimeWarning, match="before the step down"):
        assert monitor.step(*batch()).metrics[schemas.KL_LIMIT] == 0.03


def test_an_engine_that_cannot_say_what_runs_costs_no_step() -> None:
    class Dead(Engine):
        def engine_facts(self) -> EngineFacts:
            raise RuntimeError("it has died")

        def report_kl(self, kl_k3: float) -> None:
            raise RuntimeError("it has died")

    taken: list[Any] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monitor = Monitor(sinks=[Callback(taken.append)], engine=Dead())  # type: ignore[arg-type]
        for _ in range(2):
            monitor.step(*batch(), rollout=SEEN)
    said = [str(one.message).partition(": the engine does not say ")[2].partition(":")[0] for one in told]
    assert said == ["what runs", "how its rollout was"]  # each once
    assert [x["seconds"] for x in taken] == [0.9, 0.9]
    assert "model" not in taken[0]


@pytest.mark.parametrize(
    "rollout",
    [
        {"seconds": 1.0, "started": object()},
        {"seconds": 1.0, "prompt_lengths": [1, 2], "response_lengths": [3, None]},
        {"seconds": "1 s", "prompt_lengths": [1], "response_lengths": [[3]]},
        {"seconds": 1.0},
        {"seconds": 1.0, "prompt_lengths": [1], "response_lengths": [2], "preemptions": 1.5},
        {"max_num_seqs": "64"},
        {3: b"4"},
        {"model": 0},
        [{"seconds": 1.0}],
    ],
)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_rollout_that_is_not_what_it_should_be_costs_no_step(rollout: Any, guarded: bool) -> None:
    taken: list[Any] = []
    monitor = Monitor(sinks=[Callback(taken.append)], guard=Guard(FACTS) if guarded else None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = monitor.step(*batch(), rollout=rollout)
    assert len(told) == 1
    assert "left out of the record" in str(told[0].message)
    assert (monitor.steps, [x["step"] for x in taken]) == (1, [1])
    monitor.step(*batch())  # as if none had been given
    assert set(taken[0]) == set(taken[1])
    assert taken[0].get("model") == taken[1].get("model")
    checked(plain(taken[0]), RunRecord, "the record")
    assert step.verdict is None
    assert (taken[0]["guard"] is not None) == guarded
    assert schemas.TOKENS_PER_S not in step.metrics


def test_fields_of_a_rollout_that_are_the_monitors_own_are_not_the_callers() -> None:
    given = {"seconds": 1.0, "prompt_lengths": [3], "response_lengths": [5], "boot": "a1"}
    theirs = {"date": time.time(), "step": "seven", "metrics": {"mine": {}}, "profile": "fast", "alarms": 0}
    for guard in (None, Guard(FACTS)):
        taken: list[Any] = []
        Monitor(sinks=[Callback(taken.append)], guard=guard).step(*batch(), rollout=given | theirs)
        assert {name: taken[0][name] for name in given} == given
        checked(plain(taken[0]), RunRecord, "the record")
        assert taken[0]["step"] == 1


@pytest.mark.parametrize("guard", [None, Guard(FACTS)])
def test_a_rollout_that_was_not_timed_is_none(guard: Any) -> None:
    step = Monitor(guard=guard).step(*batch(), rollout={"seconds": None, "boot": "a1"})  # a warning would be an error
    assert step.verdict is None
    assert schemas.TOKENS_PER_S not in step.metrics


@pytest.mark.parametrize("number", [7, np.int64(7), torch.tensor(7)])
def test_a_number_of_a_step_is_whole_whatever_its_type(number: Any) -> None:
    monitor = Monitor()
    monitor.step(*batch(), number=number)
    restored = Monitor()
    restored.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert restored.steps == 7
    with pytest.raises(ConfigError, match="allowed: a whole number"):
        monitor.step(*batch(), number=7.0)  # type: ignore[arg-type]
    assert monitor.steps == 7


@pytest.mark.parametrize(
    ("mode", "controller", "says"),
    [
        ("tis", LevelThresholds(tis=None, band=(0.5, 5.0)), "LevelThresholds.tis=None"),
        ("tis", ConstantThresholds(None, (0.5, 5.0)), "ConstantThresholds.tis=None"),
        ("icepop", ConstantThresholds(), "ConstantThresholds.band=None"),
        ("mis", LevelThresholds(), "LevelThresholds.band=None"),
    ],
)
def test_a_controller_gives_what_the_settings_use(mode: Any, controller: Any, says: str) -> None:
    band = None if mode == "tis" else (0.5, 5.0)
    with pytest.raises(ConfigError, match=says):
        Monitor(CorrectionSettings(mode=mode, thresholds=Thresholds(2.0, band)), controller)


def test_constant_thresholds_are_those_of_the_settings_also_after_a_checkpoint_of_others() -> None:
    before, after = Monitor(controller=ConstantThresholds(2.0)), Monitor(controller=ConstantThresholds(5.0))
    before.step(*batch())
    after.load_state_dict(before.state_dict())
    assert after.step(*batch()).thresholds.tis == 5.0


def test_a_resumed_monitor_has_its_own_limit_and_bounds() -> None:
    for old in (ConstantThresholds(8.0, None, 0.01), LevelThresholds(tis=8.0, limit_kl=0.01)):
        before = Monitor(controller=old)
        before.step(*batch())
        saved = json.loads(json.dumps(before.state_dict()))
        found = []
        for controller in (ConstantThresholds(2.0, None, 0.5), LevelThresholds(tis=3.0, limit_kl=0.5)):
            after = Monitor(controller=controller)
            after.load_state_dict(saved)
            step = after.step(*batch())
            found.append(step.thresholds.tis)
            assert step.metrics[schemas.KL_LIMIT] == 0.5
            assert after.steps == 2
        assert found == [2.0, 3.0]


@pytest.mark.parametrize("controller", [LevelThresholds, ConstantThresholds])
def test_a_resumed_band_has_the_lower_end_of_the_settings(controller: Any) -> None:
    def monitor(low: float) -> Monitor:
        settings = CorrectionSettings(mode="mis", thresholds=Thresholds(None, (low, 2.0)))
        return Monitor(settings, controller(None, (low, 2.0)))

    for before, now in ((0.5, 0.1), (0.1, 0.5)):
        old, new, fresh = monitor(before), monitor(now), monitor(now)
        for seed in range(5):
            old.step(*batch(seed))
        new.load_state_dict(old.state_dict())
        bands = [[one.step(*batch(seed)).thresholds.band for seed in range(5, 11)][-1] for one in (new, fresh)]
        assert bands[0][0] == bands[1][0] == now


def test_only_the_threshold_that_the_mode_uses_is_controlled() -> None:
    settings = CorrectionSettings(mode="mis", thresholds=Thresholds(10.0, (0.5, 2.0)))
    for controller in (None, LevelThresholds(band=(0.5, 2.0), max_clipped=0.2)):
        monitor = Monitor(settings, controller)
        for seed in range(5):
            step = monitor.step(*batch(seed, sigma=1.2))
            assert step.thresholds.tis is None
            assert "weight" not in step.decided.reason


@pytest.mark.parametrize("threshold", [1.0, 0.5, "2.0_5.0"])
def test_settings_of_verl_that_cannot_tighten_stay_as_they_are(threshold: Any) -> None:
    settings = from_verl({"rollout_is": "token", "rollout_is_threshold": threshold})
    monitor = Monitor(settings)
    steps = [monitor.step(*batch(seed, sigma=1.0)) for seed in range(3)]
    used, other = ("tis", "band") if settings.mode == "tis" else ("band", "tis")
    assert {getattr(step.thresholds, used) for step in steps} == {getattr(settings.thresholds, used)}
    assert {getattr(step.thresholds, other) for step in steps} == {None}


def test_an_engine_whose_rollout_cannot_be_seen_says_why() -> None:
    taken: list[Any] = []
    engine = Engine()
    engine.guard_off = "boom"  # type: ignore[assignment]
    monitor = Monitor(sinks=[Callback(taken.append)], engine=engine)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="boom"):
        monitor.step(*batch())
    monitor.step(*batch())  # told already
    assert [x["guard"]["off"] for x in taken] == ["boom", "boom"]


def test_a_checkpoint_of_other_thresholds_or_of_no_law_is_refused() -> None:
    band = CorrectionSettings(mode="icepop", thresholds=Thresholds(None, (0.5, 5.0)))
    saved = Monitor().state_dict()
    with pytest.raises(ConfigError, match="of the same thresholds"):
        Monitor(band, LevelThresholds(band=(0.5, 5.0))).load_state_dict(saved)
    saved["controller"] |= {"start": {"tis": 2.0, "band": None}, "reach": 1.0, "recent": [0.01]}
    for controller in LAWS:
        monitor = Monitor(controller=controller)
        before = monitor.state_dict()
        with pytest.raises(ConfigError, match="saved ControllerState has unknown or missing: recent;"):
            monitor.load_state_dict(saved)
        assert monitor.state_dict() == before


def test_an_engine_that_does_not_judge_itself_is_refused() -> None:
    class AsyncRolloutEngine:
        guard = None

    with pytest.raises(ConfigError, match=r"AsyncRolloutEngine.*guard=engine\.guard"):
        Monitor(engine=AsyncRolloutEngine())  # type: ignore[arg-type]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as where it is not installed
import numpy as np
import fp8plan
from fp8plan.runtime.watch.mismatch.measure import pack

for name in fp8plan.__all__:
    getattr(fp8plan, name)
settings = fp8plan.from_verl({"rollout_is": "token"})
assert settings == fp8plan.CorrectionSettings(thresholds=fp8plan.Thresholds(2.0))
assert fp8plan.LevelThresholds().initial().thresholds.tis == 4.0
work = fp8plan.Workload(8, 4, fp8plan.Fixed(128), fp8plan.Fixed(256))
plan = fp8plan.plan("Qwen/Qwen3-8B", "h200_sxm", work)
zeros = np.zeros((2, 3))
for needs in (
    lambda: fp8plan.Monitor(),
    lambda: pack(zeros, zeros),
    lambda: fp8plan.RolloutEngine.from_plan(plan),
    lambda: fp8plan.AsyncRolloutEngine.from_plan(plan).send(None),
    lambda: fp8plan.probe("Qwen/Qwen3-8B", gpu="cpu"),
):
    try:
        needs()
    except fp8plan.Fp8PlanError as error:
        assert "needs torch" in str(error) and "pip install 'fp8plan[vllm]'" in str(error), error
    else:
        raise AssertionError("it worked")
"""


def test_without_torch_what_needs_it_says_so_and_the_rest_works() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_TORCH], check=True)


LOOSE = CorrectionSettings(mode="icepop", thresholds=Thresholds(None, (0.5, 5.0)))


OF_EVERY_KIND = (
    CorrectionSettings(),
    LOOSE,
    replace(LOOSE, mode="mis"),
    CorrectionSettings(level="sequence", thresholds=Thresholds(5.0)),
    CorrectionSettings(level="geometric", thresholds=Thresholds(1.5)),
    replace(LOOSE, level="geometric", thresholds=Thresholds(None, (0.6, 1.7))),
)


@pytest.mark.parametrize("settings", OF_EVERY_KIND[1:])
def test_constants_hold_whatever_the_kl_and_the_alarm_sounds(settings: CorrectionSettings) -> None:
    """Normal log ratios of k3 1e-3 and 0.1."""
    monitor = Monitor(settings)
    steps = [monitor.step(*batch(n, sigma=(2 * kl) ** 0.5, rows=64)) for n, kl in enumerate([1e-3] * 3 + [0.1] * 8)]
    assert {one.thresholds for one in steps} == {settings.thresholds}
    assert ["kl" in one.decided.alarms for one in (steps[2], steps[-1])] == [False, True]
    assert {one.decided.escalate for one in steps} == {None}


def test_by_default_c_of_token_tis_falls_from_4_to_2_and_no_step_down_is_asked_for() -> None:
    """Normal log ratios of k3 1e-3, 0.1 and 0.5."""
    monitor, kls = Monitor(), [1e-3] * 3 + [0.1] * 8 + [0.5] * 12
    steps = [monitor.step(*batch(n, sigma=(2 * kl) ** 0.5, rows=64)) for n, kl in enumerate(kls)]
    found = [step.thresholds.tis or 0.0 for step in steps]
    assert found[:3] == [4.0] * 3
    assert found == sorted(found, reverse=True)
    assert 2.0 < found[10] < 3.0
    assert found[-1] == pytest.approx(2.0, rel=0.01)  # within the dead band
    assert steps[-1].decided.decision is Decision.AT_BOUND
    assert {step.decided.escalate for step in steps} == {None, Escalation.RECALIBRATE_KV}


def test_a_checkpoint_of_constants_goes_on_under_the_default_law_with_its_kl() -> None:
    """Its steps and KLs count, and C begins at 4 again; the KL of the first batch then tightens it."""
    before = Monitor(controller=ConstantThresholds())
    for n in range(9):
        before.step(*batch(n, sigma=(2 * 0.5) ** 0.5, rows=64))
    assert before.thresholds == Thresholds(2.0)
    after = Monitor()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert (after.steps, after.state.kl, after.thresholds) == (9, before.state.kl, Thresholds(4.0))
    assert after.step(*batch(9, sigma=(2 * 0.5) ** 0.5, rows=64)).thresholds.tis == pytest.approx(2.0)


@pytest.mark.parametrize(("settings", "planned"), [(CorrectionSettings(), 1.5), (CorrectionSettings(level=None), 2.0)])
def test_the_default_holds_what_the_plan_recommends_where_something_is_corrected(
    settings: CorrectionSettings, planned: float
) -> None:
    monitor = Monitor(settings, plan=saved(thresholds={"token_tis": 1.5}))
    assert monitor.step(*batch(0, sigma=1.0)).thresholds == Thresholds(planned)


@pytest.mark.parametrize("settings", OF_EVERY_KIND)
def test_level_thresholds_tighten_when_the_kl_rises_and_never_loosen(settings: CorrectionSettings) -> None:
    """At every level and in every mode, k3 of normal log ratios from 1e-4 to 0.3."""
    first = settings.thresholds or Thresholds(4.0)
    monitor = Monitor(settings, LevelThresholds(first.tis, first.band))
    upper, kept = [], []
    for number, kl in enumerate((1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.1, 0.3, 0.3, 0.3)):
        step = monitor.step(*batch(number, sigma=(2 * kl) ** 0.5, rows=64))
        found = step.thresholds
        upper.append(found.tis if found.band is None else found.band[1])
        assert upper[-1] <= max(upper[:-1], default=99.0)
        if upper[-1] > min(upper):
            assert step.decided.decision is Decision.AT_BOUND
        if kl <= 0.01:
            assert found == first
        kept.append(step.metrics[schemas.CLIPPED_MASS if found.band is None else schemas.LOST_TOKENS])
    assert upper[-1] < upper[0]
    assert max(x for x in kept if x is not None) <= 0.5  # as the correction says of its own weights, at its own level


@pytest.mark.parametrize("level", ["sequence", "geometric", None])
def test_a_law_has_the_level_of_the_settings(level: Any) -> None:
    settings = CorrectionSettings(level=level, thresholds=Thresholds(tis=3.0))
    if level is not None:
        assert Monitor(settings, LevelThresholds()).controller.level == level
        return
    assert [Monitor(settings).step(*batch(n, sigma=1.0)).thresholds for n in range(3)] == [Thresholds(tis=3.0)] * 3
    with pytest.raises(ConfigError, match="which has no weights"):
        Monitor(settings, LevelThresholds())


@pytest.mark.parametrize(
    ("running", "asked"),
    [
        (None, ["recalibrate_kv"]),
        ("fp8_kv", ["recalibrate_kv"]),
        ("fp8_block", []),
        ("bf16", []),
        ("of another stack", ["recalibrate_kv"]),
    ],
)
def test_what_thresholds_cannot_do_is_in_the_record_if_the_engine_can(running: str | None, asked: list[str]) -> None:
    taken: list[Any] = []
    facts = None if running is None else replace(FACTS, precision=running)
    monitor = Monitor(controller=LevelThresholds(max_clipped=0.01), sinks=[Callback(taken.append)], facts=facts)
    for seed in range(9):
        monitor.step(*batch(seed, sigma=0.8, rows=32))
    assert [row["escalate"] for row in taken if row["escalate"]] == asked
    reasons = [row["reason"] for row in taken if "beyond what thresholds can do" in row["reason"]]
    assert len(reasons) == len(asked)
    assert all("; 3 steps in a row beyond what thresholds can do: recalibrate the scales" in x for x in reasons)


def test_what_the_guard_has_done_already_is_not_advised_again() -> None:
    monitor = Monitor(controller=LevelThresholds(max_clipped=0.01), guard=Guard(FACTS))
    assert monitor.guard is not None
    monitor.guard.took(Action.RECALIBRATE_KV)
    asked = [monitor.step(*batch(seed, sigma=0.8, rows=32)).decided.escalate for seed in range(9)]
    assert set(asked) == {None}


@pytest.mark.parametrize("more", [{"guard": Guard(FACTS)}, {"facts": FACTS}])
def test_an_engine_has_its_own_guard_and_facts(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="alone"):
        Monitor(engine=Engine(), **more)  # type: ignore[arg-type]


def test_the_guard_hears_of_the_mismatch_and_steps_down() -> None:
    monitor = Monitor(guard=Guard(FACTS))
    actions = [monitor.step(*batch(n, sigma=0.9), rollout=SEEN).verdict.action for n in range(3)]  # type: ignore[union-attr]
    assert actions == ["none", "none", "recalibrate_kv"]


def test_a_rollout_that_cannot_be_judged_costs_no_step() -> None:
    taken: list[Any] = []
    monitor = Monitor(sinks=[Callback(taken.append)], guard=Guard(FACTS))
    with pytest.warns(RuntimeWarning, match="cannot be compared.*KV cache"):
        step = monitor.step(*batch(), rollout={"seconds": 1.0, "prompt_lengths": [16], "response_lengths": [10**7]})
    assert step.verdict is None
    assert taken[-1]["guard"]["off"]
    monitor.step(*batch(), rollout={"seconds": 1.0})  # told already: a second warning would be an error here
    assert monitor.step(*batch(), rollout=SEEN).verdict is not None
    assert taken[-1]["guard"]["off"] is None


def test_a_sink_that_always_fails_changes_no_step() -> None:
    def broken(_: Any) -> None:
        raise OSError(28, "No space left on device")

    told: list[Any] = []
    silent, noisy = Monitor(), Monitor(sinks=[Callback(broken), Callback(told.append)])
    with pytest.warns(RuntimeWarning, match="No space"):
        same(silent.step(*batch(0)), noisy.step(*batch(0)))
    for seed in range(1, 5):
        same(silent.step(*batch(seed)), noisy.step(*batch(seed)))  # a second warning would be an error
    assert noisy.failures == [5, 0]
    assert [x["metrics"]["fp8plan/sink_failures"] for x in told] == [0, 1, 2, 3, 4]


def test_a_monitor_that_is_restored_goes_on_as_if_nothing_had_happened() -> None:
    whole, first = (Monitor(guard=Guard(FACTS)) for _ in range(2))
    batches = [batch(n, sigma=0.1 + 0.15 * (n % 7)) for n in range(14)]
    expected = [whole.step(*given, rollout=SEEN) for given in batches]
    for given in batches[:6]:
        first.step(*given, rollout=SEEN)
    saved = json.loads(json.dumps(first.state_dict()))  # as a checkpoint would hold it
    second = Monitor(guard=Guard(FACTS))
    second.load_state_dict(saved)
    for given, wanted in zip(batches[6:], expected[6:], strict=True):
        same(second.step(*given, rollout=SEEN), wanted)
    assert second.state_dict() == whole.state_dict()
    assert second.steps == 14


@pytest.mark.parametrize("wrong", [{}, {"steps": 3}, {"steps": "3", "controller": {}, "guard": None}])
def test_a_state_that_is_none_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    monitor = Monitor()
    before = monitor.state_dict()
    with pytest.raises(ConfigError):
        monitor.load_state_dict(wrong)
    assert monitor.state_dict() == before


def test_log_probs_that_do_not_fit_change_nothing() -> None:
    taken: list[Any] = []
    monitor = Monitor(sinks=[Callback(taken.append)])
    monitor.step(*batch())
    before = monitor.state_dict()
    train, rollout, _ = batch()
    with pytest.raises(ConfigError, match="shape"):
        monitor.step(train, rollout[:-1])
    assert (monitor.state_dict(), len(taken)) == (before, 1)


def broken_batches() -> Iterator[tuple[str, Batch]]:
    train, rollout, mask = batch()
    yield "empty mask", (train, rollout, torch.zeros_like(mask))
    yield "no rows", (train[:0], rollout[:0], mask[:0])
    yield "all NaN", (train * torch.nan, rollout, mask)
    outlier = train.clone()
    outlier[0, 0], mask[0, 0] = rollout[0, 0] + 20, True
    yield "an outlier", (outlier, rollout, mask)
    holes = train.clone()
    holes[1], holes[2] = -torch.inf, torch.nan
    yield "NaN and -inf", (holes, rollout, mask)


@pytest.mark.parametrize(("name", "given"), broken_batches())
@pytest.mark.parametrize("controller", LAWS)
def test_a_broken_batch_gives_finite_weights_and_a_record(name: str, given: Batch, controller: Any) -> None:
    taken: list[Any] = []
    monitor = Monitor(controller=controller, sinks=[Callback(taken.append)])
    for _ in range(3):
        step = monitor.step(*given)
        assert step.weights is not None
        assert step.weights.shape == given[0].shape
        assert bool(torch.as_tensor(step.weights).isfinite().all())
        assert not bool((torch.as_tensor(step.mask).bool() & ~given[2]).any())
    assert [x["step"] for x in taken] == [1, 2, 3]
    assert monitor.failures == [0]
    assert taken[-1]["metrics"]["fp8plan/tokens"] == len(pack(*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("settings", [CorrectionSettings(), MASKING, BY_SEQUENCE])
def test_torchs_defaults_are_not_asked(dtype: torch.dtype, settings: CorrectionSettings) -> None:
    """Trainers set them: a dtype to compute with, a device (meta stands for a GPU, and fails where it is asked)."""
    train, rollout, mask = batch(sigma=0.5)
    packed, lengths = (train[mask], rollout[mask]), mask.sum(1).tolist()
    expected = Monitor(settings).step(train, rollout, mask)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            padded = Monitor(settings).step(train, rollout, mask)
            step = Monitor(settings).step(*packed, lengths=lengths, versions=list(range(6)))
    finally:
        torch.set_default_dtype(before)
    same(padded, expected)
    assert step.weights is not None
    assert step.weights.dtype == torch.float32
    assert torch.equal(torch.as_tensor(expected.weights)[mask], torch.as_tensor(step.weights))


def test_a_step_of_eight_million_tokens_takes_at_most_two_seconds_of_a_core(tmp_path: Path) -> None:
    """The best of five, in CPU seconds of one thread, so that other work on the machine hardly counts."""
    tokens, threads = 8_000_000, torch.get_num_threads()
    shares = np.random.default_rng(0).lognormal(0, 0.9, 1536)
    lengths = (shares / shares.sum() * tokens).astype(int)
    lengths[0] += tokens - lengths.sum()
    rollout = -3 * torch.rand(tokens)
    train = rollout + 0.05 * torch.randn(tokens)
    took = []
    torch.set_num_threads(1)
    try:
        with Monitor(sinks=[JsonLines(tmp_path / "run.jsonl")]) as monitor:
            for _ in range(5):
                start = time.thread_time()
                monitor.step(train, rollout, lengths=lengths)
                took.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    print(f"Monitor.step of {tokens:,} tokens: {min(took):.2f} s")
    assert min(took) <= 2.0


RANK = """
import json, os, sys, warnings
from datetime import timedelta
import torch
from torch import distributed
from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.controller.laws import LevelThresholds
from fp8plan.runtime.watch.correction.correct import CorrectionSettings
from fp8plan.runtime.watch.monitor.sinks import Prometheus
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import JsonLines
rank, ranks, folder, port, metrics = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
os.environ["RANK"] = str(rank)  # as a launcher does: monitors may be made before the group is
monitor = Monitor(sinks=[JsonLines(folder + "/run.jsonl"), Prometheus(metrics)])  # only one can have the port
distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                               timeout=timedelta(seconds=60))
batches, settings = torch.load(folder + "/batches.pt", weights_only=False)
others = [Monitor(one) for one in settings]
for number, (train, rollout, mask) in enumerate(batches):
    mine = slice(rank, None, ranks)
    if number == 2 and rank == 1:
        mask = torch.zeros_like(mask)  # this rank has no tokens in this step
    steps = [one.step(train[mine], rollout[mine], mask[mine]) for one in (monitor, *others)]
    print(json.dumps([step.metrics for step in steps]))
monitor.close()
late = distributed.new_group([1])  # without the first rank of all
if rank == 1:
    with Monitor(sinks=[JsonLines(folder + "/group.jsonl")], group=late) as actor:
        actor.step(train, rollout, mask)
with warnings.catch_warnings(record=True):  # a rollout that is no data is left out, and no rank waits for ever
    Monitor().step(train, rollout, mask, rollout={"seconds": 1.0, "date": object()} if rank == 0 else None)
for name, value in (("veto", 1e-4), ("batch_normalize", True)):
    other = Monitor(CorrectionSettings(**({name: value} if rank else {})))
    for _ in range(2):
        try:
            other.step(train, rollout, mask)
        except ConfigError as error:
            assert f"ranks correct with different settings: rank 0 has {name}=" in str(error), error
        else:
            raise AssertionError("different settings were taken")
    assert other.steps == 0
# One rank alone has a checkpoint: the first decides for all.
one = Monitor(controller=LevelThresholds())
if rank:
    one.load_state_dict(dict(monitor.state_dict(), steps=0))
for train, rollout, mask in batches * 5:
    step = one.step(train, rollout, mask)
    print(json.dumps([{"tis": step.thresholds.tis, "steps": one.state.steps, "kl": one.state.kl}]))
distributed.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


@pytest.mark.slow
def test_figures_of_ranks_are_those_of_one_process_and_one_rank_writes(tmp_path: Path) -> None:
    """Ranks that differ: in the mismatch of their rows, in their lengths, and one that has no token."""
    pytest.importorskip("prometheus_client")
    batches = []
    for seed in range(4):
        train, rollout, mask = batch(seed, sigma=0.2 + 0.2 * seed, rows=10)
        train[1::2] += 0.3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
        mask[::2, 40:], mask[3] = False, False  # and a sequence without tokens
        if seed == 2:
            mask[1::2] = False
        batches.append((train, rollout, mask))
    settings = (MASKING, BY_SEQUENCE)
    torch.save((batches, settings), tmp_path / "batches.pt")
    ports = str(free_port()), str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(n), "2", str(tmp_path), *ports], stdout=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    one, other = ([json.loads(x) for x in text.splitlines() if x.startswith("[")] for text in said)
    assert one[4:] == other[4:]
    assert len({step["tis"] for (step,) in one[4:]}) > 3
    one, other = one[:4], other[:4]
    alone = [Monitor(), *(Monitor(x) for x in settings)]
    rows = rows_of(tmp_path / "run.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]  # by one rank alone
    assert len(rows_of(tmp_path / "group.jsonl")) == 1
    for given, told, heard, row in zip(batches, one, other, rows, strict=True):
        for monitor, mine, theirs in zip(alone, told, heard, strict=True):
            expected = dict(monitor.step(*given).metrics)
            assert all(found.pop("fp8plan/monitor_s") > 0 for found in (expected, mine, theirs))
            assert mine == theirs
            absent = {name for name, x in expected.items() if x is None}
            assert absent == {name for name, x in mine.items() if x is None}
            assert set(mine) == set(expected)
            for name in set(expected) - absent:
                assert mine[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
        assert row["thresholds"]["tis"] == told[0][schemas.TIS]
