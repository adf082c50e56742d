"""The procedure of a sync, driven over several replicas without Ray: all commit, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fleet_fakes import MANIFEST, FakeMembers
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import SyncError
from fp8plan.runtime.apply.engine.base import driven
from fp8plan.runtime.apply.fleet.members import Calls
from fp8plan.runtime.apply.fleet.sync import addressed, merged, packed, unpacked
from fp8plan.runtime.apply.weight_sync.calls import Generate, Rpc, rpc
from fp8plan.runtime.apply.weight_sync.kv_scales import MARGIN
from fp8plan.runtime.apply.weight_sync.procedure import replace_weights
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import SyncState

CALLS = 20  # more than a sync makes
PROMPTS = [[1, 2], [3]]


def sent(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), value, dtype=torch.bfloat16) for name, _, _ in MANIFEST}


def fresh(**settings: Any) -> SyncState:
    """The state of a fleet with an FP8 KV cache and weights 0, whose chunks are one tensor each."""
    state = SyncState(SyncSettings(chunk_bytes=1, **settings), None, fp8_kv=True)
    state.kv_scales = {"layer": [1.0, 1.0, 1.0]}
    return state


def synced(members: FakeMembers, state: SyncState, value: float, **more: Any) -> Calls:
    calls = Calls(members)  # type: ignore[arg-type]
    driven(replace_weights(state, sent(value), kv_prompts=PROMPTS, **more), calls.answer)
    return calls


# --- a Call's parts and its answers -----------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), min_size=1), max_size=9), st.integers(1, 4))
def test_prompts_that_are_dealt_out_come_back_in_order(prompts: list[list[int]], replicas: int) -> None:
    call = Generate(prompts, {})
    parts = {n: addressed(call, n, replicas, 1).prompts for n in range(replicas)}  # type: ignore[union-attr]
    assert merged(call, parts) == prompts


def test_a_sequence_is_scored_everywhere() -> None:
    call = Generate([[1, 2]], {}, everywhere=True)
    assert addressed(call, 1, 2, 1) == call
    assert merged(call, {0: [["a"]], 2: [["b"]]}) == [["a"], ["b"]]


def test_each_replicas_workers_have_ranks_of_their_own() -> None:
    call = Rpc("fp8plan_join", ({"first_rank": 1, "world_size": 7},))
    ranks = [addressed(call, at, 3, 2).arguments[0]["first_rank"] for at in range(3)]  # type: ignore[union-attr]
    assert ranks == [1, 3, 5]
    assert addressed(Rpc("fp8plan_finish"), 1, 3, 2) == Rpc("fp8plan_finish")


def test_an_error_says_whose_it_is() -> None:
    def told(answers: dict[int, Any]) -> str:
        with pytest.raises(ValueError) as error:
            driven(rpc("fp8plan_finish"), lambda call: merged(call, answers))
        return str(error.value)

    assert told({0: [{"ok": 1}], 3: [{"error": "no"}]}) == "replica 3: no"
    assert told({2: [{"ok": 1}, {"error": "no"}]}) == "replica 2, rank 1: no"


def test_one_replica_speaks_for_all_where_they_must_agree() -> None:
    call = Rpc("fp8plan_prepare")
    same = [{"ok": {"taken": [1]}}, {"ok": {"taken": [3]}}]
    assert merged(call, {0: same, 1: same}) == same  # the ranks of one replica: together they load each tensor once
    (answer,) = merged(call, {0: same, 2: [{"ok": {"taken": [4]}}, {"ok": {"taken": [3]}}]})
    assert answer["who"] == "replica 2"
    assert "in another way than replica 0" in answer["error"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (7,), ()])
def test_tensors_come_out_of_the_store_as_they_went_in(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    transposed = torch.randn(4, 6).to(dtype).T
    for one in (tensor, transposed, tensor.requires_grad_() if dtype == torch.float32 else tensor):
        parts = packed([one])
        parts[0].data.setflags(write=False)  # as the object store gives it
        (found,) = unpacked(parts)
        assert found.dtype == one.dtype
        assert found.shape == one.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), one.detach().contiguous().reshape(-1).view(torch.uint8))


# --- all or none ------------------------------------------------------------------------------------------------------


def test_a_sync_is_read_once_and_serves_everywhere() -> None:
    members, state = FakeMembers(3), fresh()
    calls = synced(members, state, 5.0)
    assert [replica.weights for replica in members.living.values()] == [{"w": 5.0, "v": 5.0}] * 3
    assert members.put_count == len(MANIFEST)  # one chunk for each tensor, whatever the number of replicas
    assert state.version == 1
    assert state.refusal is None
    assert calls.synced


def test_all_have_the_scales_of_the_largest_magnitudes() -> None:
    members, state = FakeMembers(2), fresh()
    synced(members, state, 5.0)
    largest = (2.0, 2.0, 3.0)  # replica 1's q, replica 0's v
    assert state.kv_scales == {"layer": [MARGIN * amax / 448 for amax in largest]}
    assert all(replica.scales == state.kv_scales for replica in members.living.values())


FAULTS = st.dictionaries(
    st.tuples(st.integers(0, CALLS), st.integers(0, 2)), st.sampled_from(["dies", "refuses"]), min_size=2, max_size=5
)


def check_who_serves(faults: dict[tuple[int, int], str], copy: str | None) -> None:
    """Sync with faults; whoever serves afterwards serves the same, complete."""
    members, state = FakeMembers(3, faults), fresh(rollback=copy)
    failed = False
    try:
        synced(members, state, 5.0)
    except SyncError:
        failed = True
    if not members.living:
        assert failed
        return
    held = [replica.weights for replica in members.living.values()]
    if state.refusal is None:
        value = float(state.version and 5.0)
        assert held == [{"w": value, "v": value}] * len(held)
        assert all(replica.scales == state.kv_scales for replica in members.living.values())
    else:
        assert "refuses" in faults.values()
    assert failed == (state.version == 0)
    assert failed or not any(replica.is_open for replica in members.living.values())


@pytest.mark.parametrize("copy", [None, "cpu"])
@pytest.mark.parametrize("fault", ["dies", "refuses"])
@pytest.mark.parametrize("call", range(CALLS))
def test_whenever_one_fails_whoever_serves_serves_the_same(call: int, fault: str, copy: str | None) -> None:
    for replica in range(3):
        check_who_serves({(call, replica): fault}, copy)


@given(FAULTS, st.sampled_from([None, "cpu"]))
def test_whatever_fails_together_whoever_serves_serves_the_same(
    faults: dict[tuple[int, int], str], copy: str | None
) -> None:
    check_who_serves(faults, copy)


@pytest.mark.parametrize("call", range(CALLS))
def test_a_death_alone_never_costs_the_others_the_sync(call: int) -> None:
    for replica in range(2):
        members, state = FakeMembers(2, {(call, replica): "dies"}), fresh()
        synced(members, state, 5.0)
        assert state.version == 1
        assert [one.weights for one in members.living.values()] == [{"w": 5.0, "v": 5.0}] * len(members.living)


def test_a_refusal_ends_the_sync_in_all() -> None:
    members = FakeMembers(2, {(2, 1): "refuses", (3, 1): "refuses"})  # both chunks; the first is seen with the second
    state = fresh(rollback="cpu")
    with pytest.raises(SyncError, match="replica 1: it says no; the old weights serve"):
        synced(members, state, 5.0)
    assert [replica.weights for replica in members.living.values()] == [{"w": 0.0, "v": 0.0}] * 2
    assert state.version == 0
    assert not [name for replica in members.living.values() for name, _ in replica.heard if name == "fp8plan_commit"]


def test_a_chunk_that_cannot_be_answered_does_not_keep_the_abort_away() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", sent(5.0)["w"]
        raise OSError("the trainer is gone")

    members, state = FakeMembers(2, {(2, 1): "raises"}), fresh(rollback="cpu")
    with pytest.raises(SyncError, match="the trainer is gone; the old weights serve"):
        driven(replace_weights(state, broken(), MANIFEST, kv_prompts=PROMPTS), Calls(members).answer)  # type: ignore[arg-type]
    assert [replica.is_open for replica in members.living.values()] == [False, False]
    assert [replica.weights for replica in members.living.values()] == [{"w": 0.0, "v": 0.0}] * 2


def test_without_a_copy_a_refusal_leaves_nobody_serving() -> None:
    members, state = FakeMembers(2, {(4, 0): "refuses"}), fresh()
    with pytest.raises(SyncError, match="replica 0: it says no; the engine refuses to generate until a complete sync"):
        synced(members, state, 5.0)
    assert state.refusal is not None
    synced(members, state, 6.0)
    assert [replica.weights for replica in members.living.values()] == [{"w": 6.0, "v": 6.0}] * 2
    assert state.refusal is None
