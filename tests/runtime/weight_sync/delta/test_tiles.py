"""The kernel that compares and digests tiles gives what torch gives."""

from __future__ import annotations

import os

import pytest
import torch

from fp8plan.runtime.weight_sync.delta import tiles
from fp8plan.runtime.weight_sync.delta.patch import changes
from fp8plan.runtime.weight_sync.delta.tiles import MARKED, bits, compared, constants, digests, matrix

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
SHAPES = ((300, 704), (128, 512), (5, 8), (257, 1320), (3, 130, 512))
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def pairs(dtype: torch.dtype, share: float, device: str = "cpu") -> Pairs:
    """(base, new) of each shape, on a device."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES:
        base = torch.randn(shape, generator=generator).to(dtype)
        new = base.clone()
        for bit in (1, 1 << 4):
            bits(new)[torch.rand(shape, generator=generator) < share] ^= bit
        made.append((base.to(device), new.to(device)))
    return made


@pytest.mark.triton
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_finds_what_torch_finds(dtype: torch.dtype, share: float) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    from fp8plan.runtime.weight_sync.delta import triton_kernels

    made = [(matrix(new), matrix(base)) for base, new in pairs(dtype, share)]
    numbers = constants(torch.device("cpu"))
    for (new, base), (places, own) in zip(made, triton_kernels.compared(made, numbers, MARKED), strict=True):
        assert torch.equal(places, (new != base).flatten().nonzero().flatten())
        assert torch.equal(own, digests([new])[0])
    # Parts of live matrices have gaps between their rows.
    parts = [new[:, 8:] for new, _ in made if new.shape[1] > 8]
    for part, own in zip(parts, triton_kernels.digests(parts, numbers), strict=True):
        assert torch.equal(own, digests([part])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_finds_what_a_cpu_finds(dtype: torch.dtype, share: float) -> None:
    for here, there in zip(changes(pairs(dtype, share)), changes(pairs(dtype, share, "cuda")), strict=True):
        assert (here is None) == (there is None)
        if here is not None and there is not None:
            assert here.places is not None
            assert there.places is not None
            assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.triton
def test_tensors_of_several_dtypes_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    made = [pair for each in zip(*(pairs(dtype, 0.01)[2:4] for dtype in DTYPES), strict=True) for pair in each]
    bases, news = ([matrix(each) for each in some] for some in zip(*made, strict=True))
    by_torch = compared(news, bases)
    monkeypatch.setattr(tiles, "_for_kernel", lambda _: True)
    for kernels, torchs in zip(compared(news, bases), by_torch, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kernels, torchs, strict=True))


def test_nothing_to_compare_is_no_change() -> None:
    assert changes([]) == []
    base, _ = pairs(torch.bfloat16, 0.01)[0]
    assert changes([(base, base.clone())]) == [None]
