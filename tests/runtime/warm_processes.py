"""vLLM's processes, and programs that use vLLM, forked from a process that has imported it: that takes 8 s of CPU.

On a CPU vLLM spawns them. Importing this module makes it take Python's forkserver instead, here and in them.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context, parent_process, set_forkserver_preload
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from runpy import run_path

import vllm.v1.engine.utils as engines
import vllm.v1.executor.multiproc_executor as executor
from frozen_imports import freeze_imports
from vllm.distributed.device_communicators import shm_broadcast

freeze_imports()
shm_broadcast.sched_yield = partial(time.sleep, 5e-4)  # one who waits for a message would look for it without pause


class WarmProcess(ForkServerProcess):
    """Has the environment and blocked signals of whoever starts it, as one that is spawned has, not the server's."""

    def start(self, env: Mapping[str, str] = os.environ) -> None:
        self._environment, self._blocked = dict(env), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        super().start()

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess


WARM = WarmContext()


def program(
    main: Callable[..., object],
    *words: str,
    log: Path,
    errors: Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> WarmProcess:
    """Start main(*words) as a shell would: the leader of a session.

    log: gets what it prints, a file or a named pipe. errors: gets stderr; None: the log gets it, too
    """
    process = WarmProcess(target=_run, args=(main, words, log, errors))
    process.start(env)
    return process


def output(main: Callable[..., object], *words: str, log: Path, timeout_s: float = 600) -> tuple[int | None, str]:
    """The exit code of a program, and what it printed. Code -9: it was still running after timeout_s"""
    process = program(main, *words, log=log)
    process.join(timeout_s)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode, log.read_text(errors="replace")


def script(*words: str) -> None:
    """Run a file as `python FILE ...` does."""
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    run_path(words[0], run_name="__main__")


def command(*words: str) -> None:
    """Run the command `fp8plan`."""
    from fp8plan import cli

    sys.argv = ["fp8plan", *words]
    cli.main()


def _run(main: Callable[..., object], words: tuple[str, ...], log: Path, errors: Path | None) -> None:
    os.setsid()
    tempfile.tempdir = None  # TMPDIR may be another than the server's
    with log.open("wb") as out, errors.open("wb") if errors else nullcontext(out) as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    try:
        main(*words)
    finally:
        atexit._run_exitfuncs()  # which Python 3.11 leaves out in what it forks: temporary folders would stay


def context() -> BaseContext:
    """The forkserver's, but in a process of its own making: that would start another, and has imported all it takes."""
    return WARM if parent_process() is None else get_context("fork")


# The server sees PYTHONPATH, not sys.path.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
set_forkserver_preload([__name__])
for module in (engines, executor):
    module.get_mp_context = context
