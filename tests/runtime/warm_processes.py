"""vLLM's processes, forked from one that has imported vLLM: importing it takes 7 s, twice for each engine.

On a CPU vLLM spawns them. Importing this module makes it take Python's forkserver instead, here and in them.
"""

from __future__ import annotations

import os
from multiprocessing import get_context, parent_process, set_forkserver_preload
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path

import vllm.v1.engine.utils as engines
import vllm.v1.executor.multiproc_executor as executor
from frozen_imports import freeze_imports

freeze_imports()


class WarmProcess(ForkServerProcess):
    """Has the environment of whoever starts it, as one that is spawned has, not the server's."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess


WARM = WarmContext()


def context() -> BaseContext:
    """An engine's process would start a server of its own for its worker; it has imported all that it takes."""
    return WARM if parent_process() is None else get_context("fork")


# The server sees PYTHONPATH, not sys.path.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
set_forkserver_preload([__name__])
for module in (engines, executor):
    module.get_mp_context = context
