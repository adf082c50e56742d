"""The rollouts that a fleet opens, without Ray or vLLM: its own observation, and what its replicas are told."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_fakes import FakeLaunch, FakeReplica, made

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.engine.judge import How, Judge
from fp8plan.runtime.apply.fleet.members import Replica
from fp8plan.runtime.apply.fleet.report import Routing
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.watch.guard.guard import Judged
from fp8plan.runtime.watch.guard.observation import Observation, joined


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fleet of two whose responses have as many tokens as their prompts' first token says. told: what replicas were
    told."""

    def generate(replica: Any, prompts: Any, params: Any, more: Any, how: How) -> tuple[list[Any], float]:
        told.append(how)
        responses = [SimpleNamespace(token_ids=[1] * prompt[0], cumulative_logprob=-1.0) for prompt in prompts]
        pairs = zip(prompts, responses, strict=True)
        return [SimpleNamespace(prompt_token_ids=prompt, outputs=[each]) for prompt, each in pairs], 1.0

    told: list[Any] = []
    monkeypatch.setattr(FakeReplica, "generate", generate, raising=False)
    monkeypatch.setattr(FakeReplica, "close_rollout", lambda replica, broken: told.append(broken), raising=False)
    monkeypatch.setattr(FakeReplica, "judgement", lambda replica: Judged(), raising=False)
    monkeypatch.setattr(FakeReplica, "report_kl", lambda replica, kl_k3: None, raising=False)
    found, _ = made()
    vars(found)["told"] = told
    return found


def lengths(fleet: Any) -> list[int] | None:
    return None if fleet.observation is None else list(fleet.observation.response_lengths)


def test_a_fleets_rollout_is_all_calls_in_it_and_none_outside(fleet: Any) -> None:
    fleet.generate([[3, 1]])
    assert (lengths(fleet), fleet.told) == ([3], ["alone"])
    fleet.told.clear()
    with fleet.rollout():
        fleet.generate([[5, 1], [6, 1]])
        fleet.generate([[4, 2]])
    assert lengths(fleet) == [5, 6, 4]
    assert set(fleet.told) == {"open", False}
    fleet.generate([[40, 1]])
    assert fleet.told[-1] == "beside"
    assert lengths(fleet) == [5, 6, 4]
    assert [sequence[:2] for sequence in fleet.last_sequences] == [[5, 1], [6, 1], [4, 2]]
    with fleet.rollout():  # a second one before a step
        fleet.generate([[2, 2]])
    assert lengths(fleet) == [5, 6, 4, 2]
    fleet.report_kl(0.1)
    with suppress(KeyError), fleet.rollout():
        fleet.generate([[7, 7]])
        raise KeyError
    assert fleet.told[-1] is True
    assert lengths(fleet) == [5, 6, 4, 2]
    with fleet.rollout():
        fleet.generate([[8, 8]])
    assert lengths(fleet) == [8]


def test_turns_of_a_fleets_rollout_are_trajectories_wherever_they_ran(fleet: Any) -> None:
    """Prompts [tokens, n] are answered by ones. The second trajectory goes on at the other replica."""
    with fleet.rollout():
        fleet.generate([[2, 8], [3, 9]], trajectory_ids=["a", "b"])
        fleet.generate([[2, 8, 1, 1, 5], [3, 9, 1, 1, 1]], trajectory_ids=["a", "a"])
    seen = fleet.observation
    assert [[turn[:2] for turn in turns] for turns in seen.every_turn] == [[(2, 1), (2, 0)], [(3, 0), (3, 0)]]
    assert (list(seen.prompt_lengths), lengths(fleet)) == ([2, 2], [4, 6])
    assert all(turns[0][2] >= 0 for turns in seen.every_turn)
    assert (fleet.routing.tokens, fleet.routing.returning) == ([2, 3, 2, 3], 2)


def replicas(fleet: Any) -> list[int]:
    return list(fleet.routing.replicas)


def test_a_turn_returns_to_the_replica_of_the_turn_before(fleet: Any) -> None:
    prompts = [[2, 10], [2, 11], [2, 12], [2, 13]]
    with fleet.rollout():
        fleet.generate(prompts)
        assert [len(sequence) for sequence in fleet.last_sequences] == [4] * 4
        second = [[*prompt, 1, 1, 77] for prompt in reversed(prompts)]  # their answer, and a tool's token
        fleet.generate(second)
        fleet.generate([[*second[2], 1, 1], [3, 99]])
    assert replicas(fleet) == [0, 0, 1, 1, 1, 1, 0, 0, 0, 1]
    assert (fleet.routing.returning, fleet.routing.kept) == (5, 5)
    assert "5 of 5 returning trajectories came to their replica" in str(fleet.routing)
    fleet.state.version += 1  # a sync empties the prefix caches
    with fleet.rollout():
        fleet.generate(second)
    assert (replicas(fleet), fleet.routing.returning) == ([0, 0, 1, 1], 0)


def test_a_caller_names_trajectories(fleet: Any) -> None:
    """Such as those whose chat template drops the reasoning, so that no prompt begins with the last answer."""
    fleet.generate([[2, 10], [2, 11], [2, 12], [2, 13]], trajectory_ids=["a", "b", "c", "d"])
    fleet.generate([[2, 13], [2, 77], [2, 10]], trajectory_ids=["d", "new", "a"])
    assert (replicas(fleet), fleet.routing.returning, fleet.routing.kept) == ([1, 0, 0], 2, 2)
    assert fleet.routing.to_dict()["kept"] == 2
    with pytest.raises(ConfigError, match="trajectory_ids has 1 entries for 2 prompts"):
        fleet.generate([[2, 13], [2, 77]], trajectory_ids=["d"])


def test_a_prompt_of_embeddings_is_continued_by_none(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(replica: Any, prompts: Any, *_: Any) -> tuple[list[Any], float]:
        aborted = [SimpleNamespace(token_ids=[], cumulative_logprob=0.0)]
        return [SimpleNamespace(prompt_token_ids=None, outputs=aborted) for _ in prompts], 1.0

    with monkeypatch.context() as patch:
        patch.setattr(FakeReplica, "generate", generate)
        fleet.generate([{"prompt_embeds": 0.5}])
    fleet.generate([[2, 10], [2, 11]])
    assert (replicas(fleet), fleet.routing.returning) == ([0, 1], 0)


def test_trajectories_of_a_lost_replica_return_to_none(fleet: Any) -> None:
    fleet.generate([[2, 10], [2, 11], [2, 12], [2, 13]], trajectory_ids=range(4))
    fleet._members.lose(1, "it was killed")
    fleet.generate([[2, 10], [2, 13]], trajectory_ids=[0, 3])
    assert (replicas(fleet), fleet.routing.returning, fleet.routing.kept) == ([0, 0], 2, 1)
    fleet.replace(1)
    fleet.replace(0)
    fleet.generate([[2, 10], [2, 13]], trajectory_ids=[0, 3])
    assert fleet.routing.returning == 0


def test_one_replica_does_not_keep_all_that_return(fleet: Any) -> None:
    prompts = [[2, number] for number in range(60)]
    fleet._members.lose(1, "it was killed")
    fleet.generate(prompts)
    fleet.replace(1)
    second = [[*prompt, 1, 1] for prompt in prompts]
    fleet.generate(second)
    assert (replicas(fleet).count(0), fleet.routing.returning, fleet.routing.kept) == (37, 60, 37)
    fleet.generate([[*prompt, 1, 1] for prompt in second])  # those that moved stay where they are now
    assert (fleet.routing.returning, fleet.routing.kept) == (60, 60)


def test_calls_of_a_rollout_are_one_in_the_report() -> None:
    earlier, later = Observation(3.0, [1, 1, 1], [4, 5, 6]), Observation(2.0, [1], [7])
    first = Routing(2, earlier, {0: [0], 1: [1]}, [4, 11], [9.0, 9.0], {0: 3.0, 1: 2.0}, 1, returning=2, kept=1)
    last = Routing(2, later, {1: [0]}, [7], [8.0], {1: 2.0}, 0, returning=1, kept=1)
    both = Routing.joined([first, last], joined([earlier, later]))
    assert (both.parts, both.tokens, both.expected) == ({0: [0], 1: [1, 2]}, [4, 11, 7], [9.0, 9.0, 8.0])
    assert (both.replica_seconds, both.rerouted) == ({0: 3.0, 1: 4.0}, 1)
    assert (both.returning, both.kept) == (3, 2)
    assert (both.observation.seconds, list(both.observation.response_lengths)) == (5.0, [4, 5, 6, 7])


def test_a_replica_opens_and_closes_the_fleets_rollouts() -> None:
    """Also one that has replaced another while a rollout was open, or after."""

    def started() -> tuple[Replica, Judge, list[How]]:
        judge, seen = Judge(SimpleNamespace(guard=None)), list[How]()
        replica = Replica(FakeLaunch(), SyncSettings())  # type: ignore[arg-type]
        replica._engine = SimpleNamespace(  # type: ignore[assignment]
            rollout=judge.rollout, generate=lambda prompts, params: seen.append(judge.how) or []
        )
        return replica, judge, seen

    replica, judge, seen = started()
    for how in ("alone", "open", "open"):
        replica.generate([], None, {}, how)
    assert judge.how == "open"
    replica.close_rollout(False)
    replica.generate([], None, {}, "beside")
    replica.generate([], None, {}, "open")
    replica.close_rollout(True)
    assert judge.how == "beside"
    replica.close_rollout(False)  # it had no request of this one
    assert seen == ["alone", "open", "open", "beside", "open"]
    replica, judge, seen = started()
    replica.generate([], None, {}, "beside")
    assert seen == ["beside"]


def test_experts_are_asked_of_replicas_that_return_them_alone(fleet: Any) -> None:
    fleet.facts = {"experts": True, "routed_experts": False}
    with pytest.raises(ConfigError, match="enable_return_routed_experts=True"):
        fleet.generate([[3, 1]], routed_experts=True)
    assert fleet.told == []
    fleet.facts["routed_experts"] = True
    assert len(fleet.generate([[3, 1]], routed_experts=True)) == 1
