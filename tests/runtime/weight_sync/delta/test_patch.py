"""Patches: what comes back of a change, how many bytes it takes, and that a damaged one is refused or shows."""

from __future__ import annotations

from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.runtime.weight_sync.delta.patch import (
    BITMAP,
    DENSE,
    FORMS,
    GAPS_1,
    GAPS_2,
    HEADER,
    _on_cpu,
    apply,
    change,
    packed,
    unpacked,
)
from fp8plan.runtime.weight_sync.delta.tiles import bits, digests, flat

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
    made = change(base, new)
    if made is None:
        return None
    return packed(made, new.numel())


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
    assert patch.numel() <= new.nbytes + 8 * HEADER + 4 * digests([bits(new).view(flat(shape))])[0].numel()
    made = unpacked(patch, dtype, shape)
    assert torch.equal(made.digests, digests([bits(new).view(flat(shape))])[0])
    for _ in range(2):  # again does no harm
        apply(base, made)
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
        apply(base, unpacked(patch, base.dtype, base.shape))
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
        made = unpacked(patch, dtype, new.shape)
    except ConfigError:
        return
    apply(base, made)
    right = torch.equal(bits(base), bits(new)) and torch.equal(made.digests, digests([bits(new)])[0])
    assert right or not torch.equal(made.digests, digests([bits(base)])[0])


@pytest.mark.parametrize("cut", [0, 23, 60, -1])
def test_a_patch_that_was_cut_is_refused(cut: int) -> None:
    patch = sent(*pair(0, (140, 600), torch.bfloat16, 0.02))
    assert patch is not None
    with pytest.raises(ConfigError, match="patch"):
        unpacked(patch[:cut], torch.bfloat16, (140, 600))
    with pytest.raises(ConfigError, match="another tensor's"):
        unpacked(patch, torch.bfloat16, (14000, 600))


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


def test_tensors_of_several_dtypes_come_to_the_cpu_in_their_order() -> None:
    tensors = [torch.arange(6).view(2, 3), torch.arange(4, dtype=torch.uint8), torch.arange(0), torch.arange(5) + 7]
    for mine, moved in zip(tensors, _on_cpu(tensors), strict=True):
        assert mine.dtype == moved.dtype
        assert torch.equal(mine, moved)
