"""Patches: what comes back of a change, how many bytes it takes, and that a damaged one is refused or shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.delta.base import Base, in_format
from fp8plan.runtime.apply.weight_sync.delta.patch import (
    BITMAP,
    DENSE,
    FORMS,
    GAPS_1,
    GAPS_2,
    HEADER,
    Change,
    apply,
    changes,
    packed,
    unpacked,
    whole,
)
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits, digests, flat
from fp8plan.runtime.apply.weight_sync.manifest import Entry, dtype_name

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
SHAPES = ((1,), (5,), (300, 700), (3, 130, 515), (129, 1), (1024, 1024))


def pair(seed: int, shape: tuple[int, ...], dtype: torch.dtype, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and one in which about a share of the values has other bits."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator).to(dtype)
    new = base.clone()
    chosen = torch.rand(shape, generator=generator) < share
    bits(new)[chosen] ^= 1
    return base, new


def sent(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    (made,) = changes([(base, new)])
    return None if made is None else packed(["w"], [made], [new])[0]


def read(patch: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Change:
    (made,) = unpacked([patch], [Entry("w", dtype_name(dtype), shape)], torch.device("cpu"))
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1e-4, 1e-3, 0.02, 0.2, 0.6, 1.0]),
)
def test_a_patch_makes_the_new_tensor_of_the_base(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, share: float
) -> None:
    base, new = pair(seed, shape, dtype, share)
    patch = sent(base, new)
    if patch is None:
        assert torch.equal(bits(base), bits(new))
        return
    assert patch.numel() <= new.nbytes + HEADER.size + 4 * digests([bits(new).view(flat(shape))])[0].numel()
    made = read(patch, dtype, shape)
    assert torch.equal(made.digests, digests([bits(new).view(flat(shape))])[0])
    for _ in range(2):  # again does no harm
        apply([base], [made])
        assert torch.equal(bits(base), bits(new))


@pytest.mark.parametrize(
    ("share", "dtype", "form"),
    [
        (5e-4, torch.float8_e4m3fn, GAPS_2),
        (0.01, torch.bfloat16, GAPS_1),
        (0.3, torch.bfloat16, BITMAP),
        (0.99, torch.float8_e4m3fn, DENSE),
    ],
)
def test_each_form_is_the_shortest_somewhere(share: float, dtype: torch.dtype, form: int) -> None:
    patch = sent(*pair(0, (1024, 1024), dtype, share))
    assert patch is not None
    assert int(patch[0]) % FORMS == form


def test_a_step_at_3e_6_takes_less_than_twice_the_entropy_of_its_change() -> None:
    """0.06% of the codes change, each by one code up or down."""
    share, size = 6e-4, 4096 * 4096
    patch = sent(*pair(1, (4096, 4096), torch.float8_e4m3fn, share))
    assert patch is not None
    entropy = size * -(share * log2(share) + (1 - share) * log2(1 - share)) + size * share
    assert 8 * patch.numel() < 2 * entropy
    assert patch.numel() < size / 50
    assert patch.numel() < 0.01 * size


def test_long_gaps_are_skipped_in_both_sizes() -> None:
    for far in (254, 255, 256, 510, 65534, 65535, 65536, 2 * 65535 + 7):
        base = torch.zeros(2 * far + 3, dtype=torch.bfloat16)
        new = base.clone()
        new[[0, far, far + 1, -1]] = 1.0
        patch = sent(base, new)
        assert patch is not None
        apply([base], [read(patch, base.dtype, base.shape)])
        assert torch.equal(base, new)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES), st.sampled_from([1e-3, 0.02, 0.3, 1.0]), st.data())
def test_a_damaged_patch_is_refused_or_its_digests_tell(
    seed: int, dtype: torch.dtype, share: float, data: st.DataObject
) -> None:
    base, new = pair(seed, (140, 600), dtype, share)
    patch = sent(base, new)
    assert patch is not None
    at = data.draw(st.integers(0, patch.numel() - 1))
    patch[at] ^= data.draw(st.integers(1, 255))
    try:
        made = read(patch, dtype, new.shape)
    except ConfigError:
        return
    apply([base], [made])
    right = torch.equal(bits(base), bits(new)) and torch.equal(made.digests, digests([bits(new)])[0])
    assert right or not torch.equal(made.digests, digests([bits(base)])[0])


@pytest.mark.parametrize("cut", [0, 23, 60, -1])
def test_a_patch_that_was_cut_is_refused(cut: int) -> None:
    patch = sent(*pair(0, (140, 600), torch.bfloat16, 0.02))
    assert patch is not None
    with pytest.raises(ConfigError, match="patch"):
        read(patch[:cut], torch.bfloat16, (140, 600))
    with pytest.raises(ConfigError, match="another tensor's"):
        read(patch, torch.bfloat16, (14000, 600))


def test_a_digest_sees_any_change_and_any_exchange() -> None:
    base, _ = pair(0, (200, 900), torch.float8_e4m3fn, 0)
    own = digests([bits(base)])[0]
    assert own.shape == (2, 2)
    for row, column in ((0, 0), (127, 511), (128, 512), (199, 899)):
        for flip in (1, 128):
            new = base.clone()
            bits(new)[row, column] ^= flip
            differs = (digests([bits(new)])[0] != own).nonzero().tolist()
            assert differs == [[row // 128, column // 512]]
    exchanged = base.clone()
    exchanged[[3, 5]] = base[[5, 3]]
    assert (digests([bits(exchanged)])[0] != own).any()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(SHAPES),
            st.sampled_from(DTYPES),
            st.sampled_from([0.0, 1e-4, 1e-3, 0.02, 0.2, 0.6, 1.0, None]),
        ),
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_patches_of_many_tensors_are_those_of_each(
    cases: list[tuple[tuple[int, ...], torch.dtype, float | None]], seed: int
) -> None:
    """A share of None: all values are sent, as for tensors that vLLM reloads."""
    pairs = [pair(seed + number, shape, dtype, share or 0.5) for number, (shape, dtype, share) in enumerate(cases)]
    made = [
        whole(new) if share is None else each
        for (_, _, share), (_, new), each in zip(cases, pairs, changes(pairs), strict=True)
    ]
    kept = [number for number, each in enumerate(made) if each is not None]
    some = [each for each in made if each is not None]
    news, bases = ([pairs[number][which] for number in kept] for which in (1, 0))
    names = [f"w{number}" for number in kept]
    patches = packed(names, some, news)
    for name, patch, each, new in zip(names, patches, some, news, strict=True):
        assert torch.equal(patch, packed([name], [each], [new])[0])
    entries = [Entry(name, dtype_name(new.dtype), tuple(new.shape)) for name, new in zip(names, news, strict=True)]
    apply(bases, unpacked(patches, entries, torch.device("cpu")))
    for base, new in zip(bases, news, strict=True):
        assert torch.equal(bits(base), bits(new))


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_patch_among_others_is_named(damaged: int) -> None:
    pairs = [pair(number, (140, 600), torch.float8_e4m3fn, 0.01) for number in range(3)]
    names = [f"w{number}" for number in range(3)]
    patches = packed(names, [each for each in changes(pairs) if each is not None], [new for _, new in pairs])
    entries = [Entry(name, "float8_e4m3fn", (140, 600)) for name in names]
    patches[damaged][-1] ^= 1
    with pytest.raises(ConfigError, match=f"w{damaged}: the bytes of a patch are damaged"):
        unpacked(patches, entries, torch.device("cpu"))


@pytest.mark.parametrize("dense", [False, True])
def test_a_patch_is_not_taken_for_another_tensors_of_that_shape(dense: bool) -> None:
    """Not even where it holds all values, and so brings digests that fit them."""
    base, new = pair(0, (140, 600), torch.bfloat16, 0.01)
    (patch,) = packed(["up"], [whole(new)] if dense else [made for made in changes([(base, new)]) if made], [new])
    own, other = (Entry(name, "bfloat16", (140, 600)) for name in ("up", "gate"))
    assert unpacked([patch], [own], torch.device("cpu"))
    with pytest.raises(ConfigError, match="gate: the bytes of a patch are damaged, or another tensor's"):
        unpacked([patch], [other], torch.device("cpu"))


def forged(form: int, changed: int, places: list[int], values: list[int], shape: tuple[int, int]) -> torch.Tensor:
    """A patch of E4M3 with a right checksum."""
    body = bytes(4 * digests([torch.zeros(shape, dtype=torch.uint8)])[0].numel()) + bytes(places) + bytes(values)
    data = HEADER.pack(form + FORMS * changed, len(places), crc32(b"w" + body)) + body
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("form", "places", "message"),
    [
        (GAPS_1, [0, 0, 0], "other places than values"),
        (GAPS_1, [0, 255], "other places than values"),
        (GAPS_1, [255, 255], "other places than values"),
        (GAPS_1, [3, 250], "outside of its tensor"),
        (GAPS_2, [1, 0, 0, 9], "outside of its tensor"),
        (GAPS_2, [1, 0, 0], "no multiple of 2"),
        (BITMAP, [1] + 24 * [0], "other places than values"),
        (BITMAP, [1] + 24 * [0] + [1], "outside of its tensor"),
    ],
)
def test_places_that_do_not_fit_are_refused_before_anything_is_written(
    form: int, places: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(forged(form, 2, places, [1, 2], (10, 20)), torch.float8_e4m3fn, (10, 20))


def by_copy(buffer: torch.Tensor, values: torch.Tensor) -> None:
    buffer.copy_(values)


def by_data(buffer: torch.Tensor, values: torch.Tensor) -> None:
    buffer.data.copy_(values)


def by_inference(buffer: torch.Tensor, values: torch.Tensor) -> None:
    with torch.inference_mode():
        buffer.copy_(values)


def by_numpy(buffer: torch.Tensor, values: torch.Tensor) -> None:
    bits(buffer).numpy()[:] = bits(values).numpy()


@pytest.mark.parametrize("fill", [by_copy, by_data, by_inference, by_numpy])
def test_an_iterator_may_reuse_its_buffer(fill: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """A trainer that gathers one tensor after the other into the same memory."""
    generator = torch.Generator().manual_seed(0)
    states = [
        {name: torch.randn(128, 256, generator=generator).bfloat16() for name in ("a", "b", "c")} for _ in range(3)
    ]
    buffer = torch.empty(128, 256, dtype=torch.bfloat16)

    def reused(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, values in state.items():
            fill(buffer, values)
            yield name, buffer

    base = Base((), "cpu", {"a"})
    held = {name: tensor.clone() for name, tensor in base.recorded(reused(states[0]))}
    base.commit("0")
    for number, state in enumerate(states[1:]):
        patches = dict(base.patches(reused(state), {}))
        entries = [Entry(name, dtype_name(held[name].dtype), tuple(held[name].shape)) for name in patches]
        changes_sent = unpacked(list(patches.values()), entries, torch.device("cpu"))
        apply([held[name] for name in patches], changes_sent)
        base.commit(str(number))
        assert base.complete
        wanted = {name: x for parts in in_format(state, {"a"}).values() for name, x in parts.items()}
        assert all(torch.equal(bits(held[name]), bits(x)) for name, x in wanted.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_only_bf16_and_fp32_are_quantised(dtype: torch.dtype) -> None:
    """So that a delta refuses what a sync of everything refuses."""
    tensor = torch.ones(130, 140)
    for good in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        assert in_format({"a": tensor.to(good)}, {"a"})["a"]["a"].dtype == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"^a is \w+; allowed: bfloat16"):
        in_format({"a": tensor.to(dtype)}, {"a"})
    base = Base((), "cpu", {"a"})
    with pytest.raises(ConfigError, match=r"^a is \w+; allowed: bfloat16"):
        list(base.recorded({"a": tensor.to(dtype)}.items()))
