"""One thread for many small operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8plan.runtime.vllm_versions import check_torch


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's CPU operations on one thread inside; also a decorator.

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
