"""Choice of what computes: fused kernels or torch's operations, and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fp8plan.runtime.vllm_versions import check_torch

if TYPE_CHECKING:
    import torch


def by_triton(tensor: torch.Tensor) -> bool:
    """Return True if fp8plan.runtime.mismatch.fused computes with `tensor`: on a GPU, if Triton can be imported."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations on one thread inside; also a decorator.

    Threads meet after each operation, and beside other work they wait long for one another. 8 million tokens on two
    cores that three other jobs shared: `measure` took 2.5 s with two threads and 0.2 s with one; alone, 0.1 s with two.
    A thread that starts to use torch meanwhile stays at one, as torch has it.
    Nothing changes in a process in which vLLM runs on the CPU: it binds the threads to cores, and has put a warning in
    the place of torch's function.
    Raises ConfigError without torch: what is decorated with it is where users come in.
    """
    check_torch("the correction")
    import torch

    if torch.set_num_threads is not torch._C.set_num_threads:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
