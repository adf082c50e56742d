"""Syncs that send only what has changed leave the very bits of a sync of everything, whatever goes wrong on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import planted
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import CALIBRATION, generate, params, started, weights

from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.calls import Call, Rpc
from fp8plan.runtime.apply.weight_sync.delta.base import Base
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.listing import HELD, Store
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.watch.guard.rollout_record import rollout_fields

pytestmark = pytest.mark.vllm

Tensors = dict[str, torch.Tensor]
CASES = [("dense", "fp8_block+fp8_kv"), ("moe", "fp8_block"), ("tied", "bf16"), ("dense", "fp8_kv")]


class Subject(NamedTuple):
    kind: str
    engine: RolloutEngine


@pytest.fixture(scope="module", params=params(CASES))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    kind, precision = request.param
    with started(kind, "a", precision, delta="cpu", chunk_bytes=1 << 12) as engine:
        yield Subject(kind, engine)


@pytest.fixture
def fp8() -> Iterator[RolloutEngine]:
    with started("dense", "a", "fp8_block", delta="cpu", chunk_bytes=1 << 10) as engine:
        yield engine


def stepped(tensors: Tensors, seed: int, share: float = 0.05) -> Tensors:
    """The weights after a step that changes about a share of them, all of one norm, and no value of another."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in tensors.items():
        moved = tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))
        chosen = torch.rand(tensor.shape, generator=generator) < share
        new[name] = torch.where(chosen, moved, tensor).to(tensor.dtype)
    new["model.norm.weight"] = tensors["model.norm.weight"] + 0.25
    first = next(name for name in tensors if "input_layernorm" in name)
    new[first] = tensors[first]
    return new


def sync(engine: RolloutEngine, tensors: Any) -> SyncReport:
    return engine.sync_weights(tensors, kv_prompts=CALIBRATION)


def digests(engine: RolloutEngine) -> Any:
    return engine.answer(Rpc("fp8plan_digests"))


def dense(engine: RolloutEngine, tensors: Any) -> Any:
    """The digests of all live tensors after a sync of everything."""
    engine.state.base = None
    report = sync(engine, tensors)
    assert not report.patched
    assert engine.engine_facts().delta_bytes is None
    return digests(engine)


def test_each_step_has_the_bits_of_a_sync_of_everything(subject: Subject) -> None:
    engine, tensors = subject.engine, weights(subject.kind, "b")
    assert not sync(engine, tensors).patched  # nothing to start from
    states = []
    for step in range(4):
        tensors = stepped(tensors, step)
        report = sync(engine, tensors.items() if step % 2 else tensors)
        assert report.patched
        assert report.healed is None
        assert report.compared > 0
        assert rollout_fields(None, engine.engine_facts())["delta_bytes"] == report.bytes
        assert 0 < report.tensors < len(engine.state.base.manifest)  # a norm has not changed
        if "fp8_block" in engine.launch.precision:  # on a CPU vLLM reloads most BF16 layers, from all values
            assert report.bytes < sum(entry.nbytes for entry in engine.state.base.manifest) / 2
        states.append((tensors, digests(engine), generate(engine, cold=True)))
    for sent, live, outputs in states:
        assert dense(engine, sent) == live
        assert generate(engine, cold=True) == outputs


def test_a_step_that_changes_nothing_sends_nothing(subject: Subject) -> None:
    tensors = weights(subject.kind, "a")
    sync(subject.engine, tensors)
    report = sync(subject.engine, tensors)
    assert (report.patched, report.tensors) == (True, 0)
    state = subject.engine.state
    share = sum(entry.nbytes for entry in state.base.manifest) / state.settings.look_every
    assert report.bytes < share / 50  # digests of a share of the tensors
    assert dense(subject.engine, tensors) == digests(subject.engine)


def test_a_policy_in_fp32_leaves_the_bits_of_one_in_bf16(subject: Subject) -> None:
    engine, tensors = subject.engine, weights(subject.kind, "a")
    sync(engine, tensors)
    new = stepped(tensors, 3)
    wide = {name: tensor.float() for name, tensor in new.items()}
    for source in (wide, iter(wide.items())):
        report = sync(engine, source)
        assert report.patched
        assert report.rounded == len(wide)
    live = digests(engine)
    assert dense(engine, new) == live


def test_memory_that_something_else_has_written_to_is_noticed_named_and_healed(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no sync changes that tensor again: within so many syncs each has been looked at."""
    engine, tensors = subject.engine, weights(subject.kind, "a")
    monkeypatch.setattr(engine.state, "settings", replace(engine.state.settings, look_every=3))
    changing = "model.norm.weight"
    live = dense(engine, tensors)
    names = live[0]["ok"].keys() - {changing}
    in_place = next(name for name in sorted(names) if "layernorm" in name)
    on_its_way_by_vllm = "lm_head.weight" if subject.kind == "dense" else "model.embed_tokens.weight"
    for name in (in_place, on_its_way_by_vllm):
        before = digests(engine)
        engine.llm.collective_rpc(planted.overwrite, args=(name,))
        reports = []
        for _ in range(3):
            tensors = tensors | {changing: tensors[changing] + 0.25}
            reports.append(sync(engine, tensors))
        (healed,) = [report for report in reports if report.healed]
        assert f"something else than a sync has written to {name}" in str(healed.healed)
        assert not healed.patched
        assert "all sent because something else" in str(healed)
        after = digests(engine)
        assert {n for n in names if before[0]["ok"][n] != after[0]["ok"][n]} == set()
        assert generate(engine, cold=True)


def test_a_tied_model_takes_one_value(subject: Subject, tmp_path: Path) -> None:
    if subject.kind != "tied":
        pytest.skip("has a head of its own")
    engine, names = subject.engine, ("lm_head.weight", "model.embed_tokens.weight")

    def states() -> Iterator[Tensors]:
        tensors = weights("tied", "b")
        for step in range(3):
            yield tensors | {names[0]: tensors[names[1]].clone()}
            tensors = stepped(tensors, step)

    for patched, tensors in enumerate(states()):
        assert sync(engine, tensors).patched == bool(patched)
        live = digests(engine)
        for odd in names:
            with pytest.raises(SyncError, match=f"{names[0]} and {names[1]} differ.*the old weights serve"):
                sync(engine, tensors | {odd: tensors[odd] * 1.5})
        assert digests(engine) == live
        assert sync(engine, tensors).patched
    engine.state.base = None
    with pytest.raises(SyncError, match=f"{names[0]} and {names[1]} differ"):
        sync(engine, tensors | {names[0]: tensors[names[0]] * 1.5})
    sync(engine, tensors)
    # By a store: the trainer's end refuses, and an engine does whose trainer was not told.
    follower = Follower(str(tmp_path))
    assert follower.pull(engine) is None
    apart = tensors | {names[0]: tensors[names[0]] * 1.5}
    with pytest.raises(ConfigError, match=f"{names[0]} and {names[1]} differ"):
        Publisher(str(tmp_path)).publish(apart)
    store = Store(str(tmp_path))
    store.write_json(HELD, msgspec.structs.replace(store.held(), twins=()))
    publisher = Publisher(str(tmp_path))
    for state, good in ((tensors, True), (apart, False), (stepped(apart, 9) | {names[1]: apart[names[1]]}, False)):
        publisher.publish(state)
        if good:
            follower.pull(engine, kv_prompts=CALIBRATION)
            continue
        with pytest.raises(SyncError, match=f"{names[0]} and {names[1]} differ"):
            follower.pull(engine, kv_prompts=CALIBRATION)
    sync(engine, tensors)
    assert digests(engine) == dense(engine, tensors)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda t: {n: x for n, x in t.items() if "up_proj" not in n}, "announced and not sent|missing"),
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"] * float("nan")}, "not finite"),
        (lambda t: t | {n: x * 0 for n, x in t.items() if "down_proj" in n}, "all zeros"),
        (lambda t: [*list(t.items())[:3], ("model.norm.weight", None)], "NoneType"),
        (lambda t: t | {n: x.half() for n, x in t.items() if "q_proj" in n}, "q_proj.weight is (torch.)?float16"),
    ],
    ids=["a tensor less", "NaN", "zeros", "no tensor", "float16"],
)
def test_bad_tensors_of_a_trainer_are_refused_as_in_a_sync_of_everything(
    subject: Subject, damage: Callable[[Tensors], Any], problem: str
) -> None:
    engine, tensors = subject.engine, weights(subject.kind, "a")
    sync(engine, tensors)
    with pytest.raises(SyncError, match=problem):
        sync(engine, iter(dict(damage(stepped(tensors, 7))).items()))
    new = stepped(tensors, 8)
    sync(engine, new)
    live = digests(engine)
    assert dense(engine, new) == live


def test_weights_that_are_not_those_of_the_base_get_everything(fp8: RolloutEngine) -> None:
    tensors = weights("dense", "b")
    sync(fp8, tensors)
    fp8.state.base.stamp = "that of others"
    report = sync(fp8, new := stepped(tensors, 1))
    assert not report.patched
    assert "start from other weights" in str(report.healed)
    live = digests(fp8)
    assert sync(fp8, stepped(new, 2)).patched
    assert sync(fp8, new).patched
    assert digests(fp8) == live == dense(fp8, new)


Fault = tuple[str, int]


class Faulty:
    """An engine's way of answering, with faults in the chunks of patches; the number of a fault is the chunk's."""

    def __init__(self, engine: RolloutEngine, faults: Sequence[Fault]) -> None:
        self._answer, self._faults, self._chunk = engine.answer, {at: kind for kind, at in faults}, -1
        self._held: Call | None = None

    def __call__(self, call: Call) -> Any:
        if not isinstance(call, Rpc) or call.method != "fp8plan_patch":
            held, self._held = self._held, None
            if held is not None and isinstance(call, Rpc) and call.method == "fp8plan_finish":
                self._answer(held)
            return self._answer(call)
        self._chunk += 1
        fault = self._faults.get(self._chunk)
        numbers, patches = call.arguments
        if fault == "lost":
            return [{"ok": None}]
        if fault == "killed":
            raise RuntimeError("the transport has died")
        if fault == "late":
            self._held = call
            return [{"ok": None}]
        if fault == "twice":
            self._answer(call)
        if fault == "damaged":
            patches = [patch.clone() for patch in patches]
            patches[0][-1] ^= 64
        if fault == "misplaced":
            numbers = [(number + 1) % 3 for number in numbers]
        return self._answer(Rpc(call.method, (numbers, patches)))


@pytest.fixture(scope="module")
def shaken() -> Iterator[RolloutEngine]:
    with started("dense", "a", "fp8_block", delta="cpu", chunk_bytes=1 << 10) as engine:
        yield engine


KINDS = ("lost", "twice", "late", "damaged", "misplaced", "killed")


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 12)), max_size=4), st.integers(0, 10**6))
def test_no_schedule_of_faults_leaves_garbage(shaken: RolloutEngine, faults: list[Fault], seed: int) -> None:
    tensors = weights("dense", "a")
    sync(shaken, tensors)
    before, new = digests(shaken), stepped(tensors, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shaken, "answer", Faulty(shaken, faults))
        try:
            report = sync(shaken, new)
            assert report.patched == (report.healed is None)
        except SyncError:
            assert any(kind == "killed" for kind, _ in faults)
            assert not shaken.serving or digests(shaken) == before  # nothing had been written
            sync(shaken, new)
    live = digests(shaken)
    assert live == dense(shaken, new)


def test_a_heal_that_fails_before_it_writes_leaves_nothing_serving(fp8: RolloutEngine) -> None:
    tensors = weights("dense", "a")
    sync(fp8, tensors)
    answer, chunks = fp8.answer, 0

    def full(call: Call) -> Any:
        nonlocal chunks
        method = call.method if isinstance(call, Rpc) else None
        chunks += method == "fp8plan_patch"
        if method == "fp8plan_load" or (method == "fp8plan_patch" and chunks == 2):
            raise ConfigError("no space is left")
        return answer(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "answer", full)
        with pytest.raises(SyncError, match="no space is left; the engine refuses to generate"):
            sync(fp8, new := stepped(tensors, 1))
    assert not fp8.serving
    assert not sync(fp8, new).patched
    live = digests(fp8)
    assert live == dense(fp8, new)


def test_after_a_rollback_the_next_step_is_patched() -> None:
    with started("dense", "a", "fp8_block", delta="cpu", rollback="cpu") as engine:
        tensors = weights("dense", "a")
        sync(engine, tensors)
        before = digests(engine)
        with pytest.raises(SyncError, match="the old weights serve"):
            sync(engine, stepped(tensors, 1) | {"model.norm.weight": tensors["model.norm.weight"] * float("nan")})
        assert digests(engine) == before
        report = sync(engine, new := stepped(tensors, 2))
        assert report.patched
        live = digests(engine)
        assert live == dense(engine, new)


@pytest.mark.parametrize("odd", [torch.zeros(0, 4), torch.tensor(1.0), torch.zeros(4, dtype=torch.float64)])
def test_a_tensor_that_no_patch_can_hold_is_refused(odd: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="allowed with delta: values of 1, 2 or 4 bytes, and not empty"):
        list(Base((), "cpu").recorded([("a", odd)]))


def test_places_for_the_base_are_checked() -> None:
    with pytest.raises(ConfigError, match="delta is 'disk'; allowed: None, 'cpu', 'cuda'"):
        SyncSettings(delta="disk")
    assert SyncSettings(delta="cpu").weights_in == "fp8_block"
    for odd in (-1, 2.5):
        with pytest.raises(ConfigError, match=f"look_every is {odd}; allowed: a whole number of at least 0"):
            SyncSettings(look_every=odd)  # type: ignore[arg-type]
