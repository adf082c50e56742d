"""Names that share one storage: two values are found in every order and cut of the stream, and equal values pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.delta.base import Base
from fp8plan.runtime.apply.weight_sync.delta.listing import HELD, Formats, Store
from fp8plan.runtime.apply.weight_sync.delta.patch import changed_values
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.manifest import manifest_of
from fp8plan.runtime.apply.weight_sync.shared import Twins, apart_by_digests, refuse_apart

GROUPS = [("embed", "head"), ("a", "b", "c")]
NAMES = [name for group in GROUPS for name in group]


def tensors(odd: str | None = None) -> dict[str, torch.Tensor]:
    """One tensor for each name, equal within a group; the odd one differs in one bit."""
    made = {}
    for group in GROUPS:
        values = torch.randn(130, 40, generator=torch.Generator().manual_seed(len(group))).bfloat16()
        made |= {name: values.clone() for name in group}
    if odd is not None:
        made[odd].view(torch.int16)[129, 39] ^= 1
    return made


@given(st.sampled_from([None, *NAMES]), st.randoms(use_true_random=False), st.sets(st.integers(1, len(NAMES) - 1)))
def test_two_values_are_found_however_the_stream_is_cut(odd: str | None, order: random.Random, cuts: set[int]) -> None:
    sent, twins = tensors(odd), Twins(GROUPS)
    names = order.sample(NAMES, len(NAMES))
    found = []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(names)], strict=True):
        found += twins.take({name: sent[name].clone() for name in names[start:stop]} | {"norm": torch.ones(3)})
    assert bool(found) == (odd is not None)
    for pair in found:
        assert any(set(pair) <= set(group) for group in GROUPS)
    if odd is not None and odd in GROUPS[0]:
        assert set(found[0]) == set(GROUPS[0])


def test_fp32_beside_bf16_counts_as_rounded() -> None:
    exact = torch.randn(8, 8)
    for chunks in ([{"embed": exact.bfloat16(), "head": exact}], [{"embed": exact.bfloat16()}, {"head": exact}]):
        twins = Twins(GROUPS)
        assert [pair for chunk in chunks for pair in twins.take(chunk)] == []
    for chunks in ([{"embed": exact, "head": exact + 1e-5}], [{"embed": exact}, {"head": exact + 1e-5}]):
        twins = Twins(GROUPS)
        assert [pair for chunk in chunks for pair in twins.take(chunk)] == [("embed", "head")]
    codes = exact.to(torch.float8_e4m3fn)
    assert Twins(GROUPS).take({"embed": codes, "head": codes.bfloat16()}) == [("embed", "head")]


def test_patches_must_change_all_names_of_a_storage_alike() -> None:
    one, other = torch.tensor([[1]], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
    assert apart_by_digests(GROUPS, {}, set()) == []
    assert apart_by_digests(GROUPS, {"embed": one}, set()) == []  # looked at, and unchanged
    assert apart_by_digests(GROUPS, {"embed": one, "head": one}, {"embed", "head"}) == []
    assert apart_by_digests(GROUPS, {"embed": one, "head": other}, {"embed", "head"}) == [("embed", "head")]
    assert apart_by_digests(GROUPS, {"head": one}, {"head"}) == [("head", "embed")]
    assert apart_by_digests(GROUPS, {"a": one, "b": one}, {"a", "b"}) == [("a", "c")]


def test_the_error_names_both_and_what_to_do() -> None:
    refuse_apart([])
    with pytest.raises(ConfigError, match=r"embed and head differ, and the engine has one storage.*Tie them"):
        refuse_apart([("embed", "head")])


@pytest.mark.parametrize("odd", ["embed", "head"])
def test_a_base_refuses_two_values_before_it_gives_a_patch(odd: str) -> None:
    """For a delta and for a store: its file is not begun, and the next good state goes on from the last one."""
    base = Base((), "cpu")
    base.twins = [*GROUPS, ("embed", "never sent")]
    with pytest.raises(ConfigError, match="differ, and the engine has one storage for both"):
        list(base.recorded(tensors(odd).items()))
    base = Base((), "cpu")
    base.twins = [*GROUPS, ("embed", "never sent")]
    list(base.recorded(tensors().items()))
    base.commit("0")
    with pytest.raises(ConfigError, match="embed and head differ"):
        next(base.patches(tensors(odd).items(), {}))
    assert dict(base.patches(tensors().items(), {})) == {}
    new = {name: tensor * 2 for name, tensor in tensors().items()}
    assert set(dict(base.patches(new.items(), {}))) == set(NAMES)


def test_unchanged_tensors_are_looked_at_in_turn() -> None:
    """Each of them once in so many states, by digests alone; what changes is compared in any case."""
    names = [f"t{number}" for number in range(7)]
    state = {name: torch.full((3, 5), float(number)) for number, name in enumerate(names)}
    base = Base((), "cpu")
    base.look_every = 3
    list(base.recorded(state.items()))
    base.commit("0")
    looked, sent = [], []
    for step in range(3):
        state = state | {"t0": state["t0"] + 1}
        patches = dict(base.patches(state.items(), {}))
        looked += [name for name, patch in patches.items() if not changed_values(patch)]
        sent += [name for name, patch in patches.items() if changed_values(patch)]
        base.drop()
        assert dict(base.patches(state.items(), {})).keys() == patches.keys()  # a turn ends with the commit
        base.commit(str(step))
    assert sorted(looked) == names[1:]
    assert sent == ["t0"] * 3
    base.look_every = 0
    assert dict(base.patches(state.items(), {})) == {}


def test_a_publisher_refuses_two_values_and_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    held = Formats(manifest_of(tensors()) or (), frozenset(), {}, (("embed", "head"),))
    store.write_json(HELD, held)
    assert store.held() == held
    publisher = Publisher(str(tmp_path))
    for version in (1, 2):
        before = files(tmp_path)
        with pytest.raises(ConfigError, match="embed and head differ"):
            publisher.publish(tensors("head"))
        assert files(tmp_path) == before
        assert publisher.publish({name: tensor * version for name, tensor in tensors().items()}).version == version


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
