"""Patches of a tensor that ranks and fused layers have cut: each part gets its own values, and checks its own tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.delta import patch, places, tiles
from fp8plan.runtime.apply.weight_sync.delta.base import Base
from fp8plan.runtime.apply.weight_sync.delta.patch import changes, whole
from fp8plan.runtime.apply.weight_sync.delta.places import write_values
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits
from fp8plan.runtime.apply.weight_sync.manifest import Entry, dtype_name, quantised_manifest
from fp8plan.runtime.apply.worker.binding import Move
from fp8plan.runtime.apply.worker.patches import Patches, alike, target_of

SHAPES = ((513,), (300, 1100), (3, 257, 640))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[Move]]:
    """A tensor, the next one, and moves of it into parts of larger live tensors; together they take all of it."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from([torch.float8_e4m3fn, torch.bfloat16]))
    old = torch.randn(shape, generator=generator).to(dtype)
    new = old.clone()
    bits(new)[torch.rand(shape, generator=generator) < draw(st.sampled_from([1e-3, 0.05, 0.9]))] ^= 3
    spans = []
    for size in shape[-2:]:
        inner = draw(st.lists(st.integers(1, size - 1), max_size=2, unique=True).map(sorted))
        spans.append(list(zip([0, *inner], [*inner, size], strict=True)))
    moves = []
    for lead in range(shape[0] if len(shape) == 3 else 1):
        head = ((lead, lead + 1),) if len(shape) == 3 else ()
        part = old[lead] if head else old
        if len(shape) == 1:
            boxes = [(span,) for span in spans[0]]
        else:
            boxes = [(rows, columns) for rows in spans[0] for columns in spans[1]]
        for box in boxes:
            source = part[tuple(slice(*span) for span in box)]
            fused = torch.zeros([size + 9 for size in source.shape], dtype=torch.float32).to(dtype)
            target = fused[tuple(slice(4, 4 + size) for size in source.shape)]
            target.copy_(source)
            moves.append(Move((*head, *box), target, None))
    return old, new, moves


def expected(move: Move, tensor: torch.Tensor) -> torch.Tensor:
    return bits(tensor[tuple(slice(*span) for span in move.source)].reshape(move.target.shape))


def same(move: Move, sent: torch.Tensor, shape: torch.Size) -> bool:
    tiles = target_of(move, shape).tiles
    return tiles is None or all(alike([tiles.live], [sent[tiles.sent]]))


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_every_part_gets_its_own_values(case: tuple[torch.Tensor, torch.Tensor, list[Move]]) -> None:
    old, new, moves = case
    (made,) = changes([(old, new)])
    if made is None:
        return
    assert made.places is not None
    windows = [target_of(move, new.shape).window for move in moves]
    write_values(windows, [made.places] * len(windows), [made.words] * len(windows))
    for move in moves:
        assert torch.equal(bits(move.target), expected(move, new))
        assert same(move, made.digests, new.shape)


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 300), (0, 1100)), ((128, 256), (512, 1024)), ((256, 300), (0, 512))]
)
def test_a_tile_that_lies_whole_in_a_part_shows_a_wrong_value(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    new = torch.randn(300, 1100).to(torch.float8_e4m3fn)
    live = new[slice(*rows), slice(*columns)].clone()
    move, sent = Move((rows, columns), live, None), whole(new).digests
    assert same(move, sent, new.shape)
    bits(live)[-1, -1] ^= 1
    assert not same(move, sent, new.shape)


def test_a_part_without_a_whole_tile_has_none_to_compare() -> None:
    new = torch.randn(300, 1100).to(torch.bfloat16)
    move = Move(((5, 120), (0, 1100)), new[5:120].clone(), None)
    assert target_of(move, new.shape).tiles is None


def prepared_for(manifest: Any, moves: dict[str, tuple[Move, ...]], shared: Any = ()) -> Any:
    """A Prepared, as far as Patches read it."""
    binding = SimpleNamespace(moves=moves)
    return SimpleNamespace(manifest=manifest, reloads={}, targets={}, binding=binding, shared=shared)


def test_a_look_at_unchanged_tensors_names_one_that_something_else_has_written_to() -> None:
    names = ["a", "b"]
    state = {name: torch.randn(200, 300).bfloat16() for name in names}
    base = Base((), "cpu")
    base.look_every = 1
    live = {name: tensor.clone() for name, tensor in base.recorded(state.items())}
    base.commit("0")
    manifest = [Entry(name, "bfloat16", (200, 300)) for name in names]
    moves = {name: (Move(((0, 200), (0, 300)), live[name], None),) for name in names}

    def patched(new: dict[str, torch.Tensor]) -> dict[str, Any]:
        received = Patches(prepared_for(manifest, moves), torch.device("cpu"), pytest.fail)
        patches = dict(base.patches(new.items(), {}))
        received.load([names.index(name) for name in patches], list(patches.values()))
        result = received.finish(len(patches))
        base.commit("1")
        return result

    state = state | {"a": state["a"] * 2}
    assert patched(state) == {"compared": 2, "differ": [], "weight_error": None}
    bits(live["b"])[150, 7] ^= 1
    with pytest.raises(ConfigError, match="something else than a sync has written to b of the live weights"):
        patched(state | {"a": state["a"] * 2})


def test_patches_that_give_one_storage_two_values_are_refused() -> None:
    """So they are where the trainer's end does not know that two names share it."""
    manifest = [Entry(name, "bfloat16", (64, 64)) for name in ("embed", "head")]
    live = torch.zeros(64, 64).bfloat16()
    moves = {"embed": (Move(((0, 64), (0, 64)), live, None),)}

    def packed(name: str, value: torch.Tensor) -> torch.Tensor:
        return patch.packed([name], [whole(value)], [value])[0]

    one = packed("embed", live + 1)
    same, two = (packed("head", live + more) for more in (1, 2))
    for sent, good in (([one, same], True), ([one, two], False), ([one], False)):
        received = Patches(prepared_for(manifest, moves, [("embed", "head")]), torch.device("cpu"), pytest.fail)
        received.load(range(len(sent)), sent)
        if good:
            assert received.finish(len(sent))["differ"] == []
        else:
            with pytest.raises(ConfigError, match="embed and head differ"):
                received.finish(len(sent))


BF16, FP32 = torch.bfloat16, torch.float32
TENSORS = {  # shape, dtype and the share of values that a step changes
    "q.weight": ((256, 640), BF16, 0.01),
    "bias": ((3, 100), FP32, 0.02),
    "norm.weight": ((512,), BF16, 0.02),
    "head.weight": ((130, 512), BF16, 0.001),
    "gate.weight": ((9, 64), BF16, 1.0),
}


@pytest.mark.parametrize(
    ("device", "pinned_bytes"),
    [
        pytest.param("cpu", 0, marks=pytest.mark.triton),
        pytest.param("cuda", 0, marks=pytest.mark.gpu),
        pytest.param("cuda", 2**28, marks=pytest.mark.gpu),
    ],
)
def test_a_step_goes_through_the_kernels_from_end_to_end(
    device: str, pinned_bytes: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values have 1, 2 and 4 bytes, patches all forms, and `q.weight` is cut in two.

    On a CPU the kernels run in Triton's interpreter.
    """
    if device == "cpu":
        request.getfixturevalue("interpreter")
        from fp8plan.runtime.apply.weight_sync.delta import triton_kernels

        monkeypatch.setattr(triton_kernels, "STEP", 64)
        for module in (places, tiles):
            monkeypatch.setattr(module, "_for_kernel", lambda _: True)
    monkeypatch.setattr(patch, "PINNED_BYTES", pinned_bytes)
    generator = torch.Generator().manual_seed(0)
    weights, news = {}, {}
    for name, (shape, dtype, share) in TENSORS.items():
        old = torch.randn(shape, generator=generator)
        new = torch.where(torch.rand(shape, generator=generator) < share, old * 1.5, old)
        weights[name], news[name] = old.to(device, dtype), new.to(device, dtype)
    entries = tuple(Entry(name, dtype_name(dtype), shape) for name, (shape, dtype, _) in TENSORS.items())
    manifest = quantised_manifest(entries, ["q.weight"])
    base = Base(manifest, device, ["q.weight"])
    live = {name: tensor.clone() for name, tensor in base.recorded(weights.items())}
    base.commit("0")

    moves: dict[str, tuple[Move, ...]] = {}
    for entry in manifest:
        box = tuple((0, size) for size in entry.shape)
        halves = [((0, 128), box[1]), ((128, 256), box[1])] if entry.name == "q.weight" else [box]
        moves[entry.name] = tuple(Move(each, live[entry.name][slice(*each[0])], None) for each in halves)
    prepared = prepared_for(manifest, moves)
    sent = dict(base.patches(news.items(), {}))
    forms = {patch.HEADER.unpack_from(each.numpy().data)[0] % patch.FORMS for each in sent.values()}
    assert forms == {patch.DENSE, patch.GAPS_1, patch.GAPS_2, patch.BITMAP}

    received = Patches(prepared, torch.device(device), pytest.fail)
    received.load(range(len(manifest)), [sent[entry.name] for entry in manifest])
    result = received.finish(len(sent))
    base.commit("1")
    assert (result["compared"], result["differ"]) == (len(manifest) + 1, [])
    for name, tensor in Base(manifest, device, ["q.weight"]).recorded(news.items()):
        assert torch.equal(bits(live[name]), bits(tensor))
    for name, tensor in base.pairs():
        assert torch.equal(bits(live[name]), bits(tensor))
