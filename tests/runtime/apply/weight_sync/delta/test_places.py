"""The kernel that reads and writes values at places gives what torch gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp8plan.runtime.apply.weight_sync.delta import places
from fp8plan.runtime.apply.weight_sync.delta.places import Window, values_at, whole_window, write_values
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits, matrix

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
SHAPES = ((300, 704), (5, 8), (3, 130, 512), (97,))
Cases = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def cases(device: str = "cpu", shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Cases:
    """Tensors of all dtypes, some of their places, and other values for these."""
    generator = torch.Generator().manual_seed(0)
    tensors, where, words = [], [], []
    for dtype in DTYPES:
        for shape in shapes:
            tensor = torch.randn(shape, generator=generator).to(dtype)
            chosen = (torch.rand(tensor.numel(), generator=generator) < 0.03).nonzero().flatten()
            tensors.append(tensor.to(device))
            where.append(chosen.to(device))
            words.append((bits(tensor).flatten()[chosen] ^ 5).to(device))
    return tensors, where, words


def boxes(tensors: list[torch.Tensor]) -> list[Window]:
    """A box of each matrix, within a live tensor with gaps between its rows."""
    parts = []
    for tensor in tensors:
        live = torch.zeros(200, 640, dtype=tensor.dtype, device=tensor.device)[7:107, 3:503]
        parts.append(Window(bits(live), (20, 120), (100, 600), tensor.shape[-1]))
    return parts


def check(use: Callable[[], None], device: str) -> None:
    tensors, where, words = cases()
    before = [tensor.clone() for tensor in tensors]
    write_values([whole_window(matrix(tensor)) for tensor in tensors], where, words)
    for base, tensor, at, new in zip(before, tensors, where, words, strict=True):
        bits(base).view(-1)[at] = new
        assert torch.equal(bits(base), bits(tensor))
    matrices, at, new = cases(shapes=((300, 704), (130, 1000)))
    by_torch = boxes(matrices)
    write_values(by_torch, at, new)
    use()
    there, at_there, new_there = cases(device)
    for new_words, theirs in zip(words, values_at([matrix(each) for each in there], at_there), strict=True):
        assert torch.equal(new_words ^ 5, theirs.cpu())
    write_values([whole_window(matrix(tensor)) for tensor in there], at_there, new_there)
    for mine, theirs in zip(tensors, there, strict=True):
        assert torch.equal(bits(mine), bits(theirs).cpu())
    for values, mine in zip(new_there, values_at([matrix(each) for each in there], at_there), strict=True):
        assert torch.equal(values, mine)
    there, at_there, new_there = cases(device, ((300, 704), (130, 1000)))
    by_kernel = boxes(there)
    write_values(by_kernel, at_there, new_there)
    for mine, theirs in zip(by_torch, by_kernel, strict=True):
        assert mine.matrix.any()
        assert torch.equal(mine.matrix, theirs.matrix.cpu())


@pytest.mark.triton
@pytest.mark.usefixtures("interpreter")
def test_the_kernel_writes_and_reads_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: monkeypatch.setattr(places, "_for_kernel", lambda _: True), "cpu")


@pytest.mark.gpu
def test_a_gpu_writes_and_reads_what_a_cpu_does() -> None:
    check(lambda: None, "cuda")


def test_nothing_is_written_for_no_parts() -> None:
    write_values([], [], [])
    assert values_at([], []) == []
