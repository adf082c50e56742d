"""The kernel that compares and digests tiles gives what torch gives."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from fp8plan.runtime.apply.weight_sync.delta import tiles
from fp8plan.runtime.apply.weight_sync.delta.patch import changes
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits, compared, constants, digests, matrix

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
SHAPES = ((300, 704), (128, 512), (5, 48), (257, 1324), (3, 130, 512))  # the last number in bytes
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def pairs(dtype: torch.dtype, share: float, device: str = "cpu") -> Pairs:
    """(base, new) of each shape, on a device."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for *rows, row_bytes in SHAPES:
        shape = (*rows, row_bytes // dtype.itemsize)
        base = torch.randn(shape, generator=generator).to(dtype)
        new = base.clone()
        for bit in (1, 1 << 4):
            bits(new)[torch.rand(shape, generator=generator) < share] ^= bit
        made.append((base.to(device), new.to(device)))
    return made


@pytest.fixture
def interpreted(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels in Triton's interpreter, which takes a millisecond for each line: so with few steps a tile."""
    from fp8plan.runtime.apply.weight_sync.delta import triton_kernels

    monkeypatch.setattr(triton_kernels, "STEP", 64)
    return triton_kernels


@pytest.mark.triton
@pytest.mark.parametrize("share", [0.001, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 0.5))])
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in DTYPES[1:])])
def test_the_kernel_finds_what_torch_finds(interpreted: Any, dtype: torch.dtype, share: float) -> None:
    made = [(matrix(new), matrix(base)) for base, new in pairs(dtype, share)]
    numbers = constants(torch.device("cpu"))
    for together in (made, made[:2]):  # with rows whose marks are padded, and without
        for (new, base), (places, own) in zip(together, interpreted.compared(together, numbers), strict=True):
            assert torch.equal(places, (new != base).flatten().nonzero().flatten())
            assert torch.equal(own, digests([new])[0])
    # Parts of live matrices have gaps between their rows.
    parts = [new[:, 8:] for new, _ in made if new.shape[1] > 8]
    for part, own in zip(parts, interpreted.digests(parts, numbers), strict=True):
        assert torch.equal(own, digests([part])[0])


@pytest.mark.slow
@pytest.mark.triton
def test_matrices_of_several_dtypes_are_digested_together(interpreted: Any) -> None:
    matrices = [matrix(new)[:, 4:-4] for dtype in DTYPES for _, new in pairs(dtype, 0.0)]
    for each, own in zip(matrices, interpreted.digests(matrices, constants(torch.device("cpu"))), strict=True):
        assert torch.equal(own, digests([each])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("aligned", [False, True])
def test_a_gpu_digests_several_dtypes_as_a_cpu_does(aligned: bool) -> None:
    """Aligned matrices are read 16 bytes at a time."""
    whole = [matrix(new) for dtype in DTYPES for _, new in pairs(dtype, 0.0)[:2]]
    matrices = whole if aligned else [each[:, 4:-4] for each in whole]
    for here, there in zip(digests(matrices), digests([each.cuda() for each in matrices]), strict=True):
        assert torch.equal(here, there.cpu())


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


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.usefixtures("interpreted")
def test_tensors_of_several_dtypes_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
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


COMPILE = """
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8plan.runtime.apply.weight_sync.delta import triton_kernels as kernels

def compiled(kernel, signature, **constants):
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

tiles = {"table": "*i64", "owners": "*i64", "constants": "*i64", "digests": "*i32", "marks": "*u8"}
for values, compare, vector in product((4, 2, 1), (True, False), (1, kernels.VECTOR)):
    ptx = compiled(kernels._tiles, tiles, ROWS=128, WORDS=128, VALUES=values, MARKED=8, COMPARE=compare,
                   VECTOR=vector, STEP=kernels.STEP)
    vectors = ptx.count("v4.b32")
    assert (vectors > 0) == (vector == kernels.VECTOR), (values, compare, vector, vectors)
scanned = {"marks": "*u8", "table": "*i64", "owners": "*i64", "ends": "*i64", "places": "*i64"}
compiled(kernels._count, {"marks": "*u8", "counts": "*i32"}, BYTES=kernels.SCANNED)
for values, padded in product((4, 2, 1), (True, False)):
    compiled(kernels._find, scanned, BYTES=kernels.SCANNED, MARKED=8, VALUES=values, PADDED=padded)
for (item, words), write in product({1: "*u8", 2: "*i16", 4: "*i32"}.items(), (True, False)):
    single = {"table": "*i64", "owners": "*i64", "places": "*i64", "words": words, "count": "i32"}
    compiled(kernels._values, single, ITEM=item, SIZE=kernels.BLOCK, WRITE=write)
"""


@pytest.mark.triton
def test_the_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    """Aligned matrices are read 16 bytes at a time."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
