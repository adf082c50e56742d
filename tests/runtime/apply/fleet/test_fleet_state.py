"""A fleet's own state, without Ray or vLLM: who serves, who waits, and what a new replica is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_fakes import MANIFEST, FakeLaunch, FakeMembers, FakeReplica, made

from fp8plan.errors import ConfigError, LostEngineError, NotServingError, SyncError
from fp8plan.model.limits import EngineLimits
from fp8plan.runtime.apply.engine.base import EngineBase, driven
from fp8plan.runtime.apply.fleet.fleet import RolloutFleet
from fp8plan.runtime.apply.weight_sync.delta.follower import Fetched, Follower
from fp8plan.runtime.apply.weight_sync.delta.listing import Store
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.nccl import RemoteSource, Rendezvous
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import Action, GuardState
from fp8plan.runtime.watch.guard.observation import EngineFacts

PROMPTS = [[1, 2], [3]]


def sync(fleet: RolloutFleet, value: float) -> Any:
    tensors = {name: torch.full((2,), value, dtype=torch.bfloat16) for name, _, _ in MANIFEST}
    return fleet.sync_weights(tensors, kv_prompts=PROMPTS)


def step_down(fleet: RolloutFleet, members: FakeMembers) -> None:
    """Step down to BF16, which starts both replicas again."""
    stepped = FakeLaunch()
    stepped.precision, stepped.fp8_kv = "bf16", False
    vars(fleet.launch)["with_precision"] = {"bf16": stepped}.__getitem__
    before = members.born
    fleet.apply(Action.KV_TO_BF16)
    assert members.born == before + 2


def weights(members: FakeMembers) -> dict[int, Any]:
    return {number: replica.weights["w"] for number, replica in members.living.items()}


def test_a_replacement_serves_from_the_next_sync_on() -> None:
    fleet, members = made()
    sync(fleet, 5.0)
    members.lose(1, "it was killed")
    assert (fleet.serves, fleet.deaths) == ([0], {1: "it was killed"})
    fleet.replace(1)
    assert (fleet.serves, fleet.waiting, fleet.deaths, fleet.state.version) == ([0], [1], {}, 1)
    assert sync(fleet, 6.0).version == 2  # the newcomer checks the manifest, too
    assert weights(members) == {0: 6.0, 1: 6.0}
    assert members.living[1].scales == fleet.state.kv_scales == members.living[0].scales
    assert (fleet.serves, fleet.waiting) == ([0, 1], [])


def test_a_replacement_gets_all_tensors_of_a_store_whose_newest_version_the_others_have(tmp_path: Path) -> None:
    fleet, _ = made()
    sync(fleet, 5.0)
    Publisher(str(tmp_path), fp8=()).publish({"w": torch.full((2,), 5.0, dtype=torch.bfloat16)})
    latest = Store(str(tmp_path)).latest()
    assert latest is not None
    fleet.state.stamp = latest.newest.stamp

    def fetched() -> Fetched | None:
        files = Follower(str(tmp_path)).fetching(fleet, str(tmp_path / "here"), None)
        return driven(files, lambda call: None)

    (tmp_path / "here").mkdir()
    assert fetched() is None
    fleet.replace(1)
    whole = fetched()
    assert whole is not None
    assert whole.base is None


def test_before_the_first_sync_a_replacement_has_the_checkpoint_and_the_scales() -> None:
    fleet, members = made()
    fleet.recalibrate_kv(kv_prompts=PROMPTS)
    fleet.replace(0)
    assert fleet.serves == [0, 1]
    assert members.living[0].scales == fleet.state.kv_scales != {"layer": [1.0, 1.0, 1.0]}


def test_one_that_waits_is_not_asked() -> None:
    fleet, members = made()
    sync(fleet, 5.0)
    fleet.replace(1)
    members.lose(0, "it was killed")
    with pytest.raises(NotServingError, match=r"has the weights is left; .*Dead: .*it was killed"):
        fleet.generate(["a prompt"])
    sync(fleet, 6.0)
    assert (fleet.serves, weights(members)) == ([1], {1: 6.0})


def test_weights_serve_only_where_somebody_has_them() -> None:
    fleet, members = made()
    sync(fleet, 5.0)
    fleet.replace(1)
    assert fleet.serving
    members.lose(0, "it was killed")
    assert not fleet.serving
    sync(fleet, 6.0)
    assert fleet.serving


def test_a_newcomer_waits_whatever_fails_before_it_has_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(replica: FakeReplica, rung: Any) -> None:
        raise OSError("it was not told")

    fleet, members = made()
    sync(fleet, 5.0)
    monkeypatch.setattr(fleet, "_remind", lambda: fleet._every("remember", Action.NONE))
    monkeypatch.setattr(FakeReplica, "remember", fails)
    with pytest.raises(OSError, match="it was not told"):
        fleet.replace(1)
    assert (fleet.serves, fleet.waiting) == ([0], [1])
    sync(fleet, 6.0)
    assert (fleet.serves, weights(members)) == ([0, 1], {0: 6.0, 1: 6.0})
    assert next(name for name, _ in members.living[1].heard) == "fp8plan_prepare"


def test_another_generate_is_refused_however_late_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken:
        """A lock that another generate's thread has just had."""

        def __enter__(self) -> None:
            fleet.state.generating += 1

        def __exit__(self, *_: object) -> None: ...

    fleet, _ = made()
    monkeypatch.setattr(fleet.state, "lock", Taken())
    with pytest.raises(NotServingError, match="another generate is running"):
        fleet.generate(["a prompt"])


def test_after_a_failed_sync_a_replacement_waits_as_all_do() -> None:
    fleet, members = made()
    sync(fleet, 5.0)
    members.calls, members.faults = 0, {(3, 0): "refuses"}
    with pytest.raises(SyncError, match="refuses to generate until a complete sync"):
        sync(fleet, 6.0)
    members.faults = {}
    fleet.replace(1)
    assert fleet.waiting == [1]
    assert members.living[1].weights["w"] == 0.0
    sync(fleet, 7.0)
    assert (fleet.serves, weights(members)) == ([0, 1], {0: 7.0, 1: 7.0})


def test_once_all_are_dead_the_next_sync_starts_all() -> None:
    fleet, members = made()
    sync(fleet, 5.0)
    members.calls, members.faults = 0, {(1, 0): "dies", (2, 1): "dies"}
    with pytest.raises(SyncError, match="the engine has died; the next sync_weights starts it again"):
        sync(fleet, 6.0)
    members.faults = {}
    assert not fleet.serving
    with pytest.raises(NotServingError, match="the engine has died"):
        fleet.replace(0)
    sync(fleet, 7.0)
    assert (fleet.serves, weights(members)) == ([0, 1], {0: 7.0, 1: 7.0})
    assert fleet.serving


def test_what_came_over_nccl_came_to_those_who_met_the_trainer() -> None:
    fleet, members = made()
    remote = RemoteSource((), lambda: None)
    with pytest.raises(SyncError, match=r"connect\(fleet.join_transfer, workers=2\)\. Nothing was sent"):
        fleet.sync_weights(remote)
    fleet._met = members.lineup
    members.lose(1, "it was killed")
    with pytest.raises(SyncError, match="workers=1"):
        fleet.sync_weights(remote)
    members.lose(0, "it was killed")
    with pytest.raises(SyncError, match="workers=2"):  # all start again where they meet
        fleet.sync_weights(remote)


def test_who_died_while_idle_is_noticed_before_a_trainer_sends() -> None:
    fleet, members = made()
    where = Rendezvous("127.0.0.1", 1, world_size=3)
    fleet.join_transfer(where)
    members.calls, members.faults = 0, {(0, 1): "dies"}
    with pytest.raises(SyncError, match=r"workers=1\)\. Nothing was sent"):
        fleet.sync_weights(RemoteSource((), lambda: pytest.fail("it was told to send")))
    assert (fleet.serves, list(fleet.deaths)) == ([0], [1])


def test_who_died_while_idle_is_noticed_before_a_trainer_is_met() -> None:
    fleet, members = made()
    members.faults = {(0, 1): "dies"}
    with pytest.raises(ConfigError, match=r"world_size is 3; allowed: 2, .*fleet.join_transfer, workers=1\)"):
        fleet.join_transfer(Rendezvous("127.0.0.1", 1, world_size=3))
    fleet.join_transfer(Rendezvous("127.0.0.1", 1, world_size=2))
    assert [name for name, _ in members.living[0].heard].count("fp8plan_join") == 1
    members.lose(0, "it was killed")
    fleet.join_transfer(Rendezvous("127.0.0.1", 1, world_size=3))  # all start again
    assert fleet.serves == [0, 1]


def test_stepping_down_starts_all_in_the_safer_precision() -> None:
    fleet, members = made()
    sync(fleet, 5.0)
    step_down(fleet, members)
    assert (fleet.launch.precision, fleet.state.fp8_kv) == ("bf16", False)
    with pytest.raises(NotServingError, match="started again, with the weights of its checkpoint"):
        fleet.generate(["a prompt"])
    sync(fleet, 6.0)
    assert fleet.serving


def test_every_replica_knows_the_rungs_that_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = EngineFacts("Qwen/Qwen3-8B", "h200_sxm", "0.26.0", "fp8_kv", EngineLimits())
    monkeypatch.setattr(FakeLaunch, "not_predicted", ())
    monkeypatch.setattr(EngineBase, "engine_facts", lambda fleet: replace(facts, precision=fleet.launch.precision))

    def known() -> set[Any]:
        return {replica.rung for replica in members.living.values()}

    fleet, members = made()
    assert fleet.guard is not None
    assert known() == {Action.NONE}
    assert fleet._advised(None, Escalation.RECALIBRATE_KV) == Action.RECALIBRATE_KV
    fleet._remembered.sequences = PROMPTS
    fleet.apply(None, Escalation.RECALIBRATE_KV)
    assert known() == {Action.RECALIBRATE_KV}
    assert fleet._advised(None, Escalation.RECALIBRATE_KV) == Action.NONE
    fleet.replace(1)
    assert known() == {Action.RECALIBRATE_KV}
    fleet.guard.load_state_dict(GuardState().to_dict() | {"rollouts": []})  # of a Monitor's checkpoint
    assert known() == {Action.NONE}
    step_down(fleet, members)
    assert known() == {fleet.guard.state.rung} == {Action.KV_TO_BF16}
    fleet.shutdown()
    fleet.guard.load_state_dict(GuardState().to_dict() | {"rollouts": []})  # nobody is left to be told


def test_after_shutdown_nothing_is_done() -> None:
    fleet, _ = made()
    with fleet:
        pass
    for call in (lambda: sync(fleet, 5.0), lambda: fleet.replace(0), lambda: fleet.generate(["a"]), fleet.kv_scales):
        with pytest.raises(LostEngineError, match="shut down"):
            call()
