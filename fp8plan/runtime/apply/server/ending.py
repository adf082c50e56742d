"""The end of a server whose engine has died.

vLLM's server looks every 5 seconds whether its engine lives. It then waits for all open requests and threads, and ends
with exit code 0. Here it ends with an error, and after GRACE_S at the latest: a container or a launcher restarts what
has failed, and must not wait for what hangs. The same deadline holds for a server that was told to end (SIGTERM): vLLM
ends its engine first.

With VLLM_KEEP_ALIVE_ON_ENGINE_DEATH the server stays, as in vLLM.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Final

import vllm.envs

from fp8plan.runtime.apply.plugin import logger

GRACE_S: Final = 20.0  # for open requests to get their errors, and for vLLM to end its processes
LOOK_S: Final = 0.5


class Ending:
    """Watches the engine of a server. Make it in the server's event loop.

    engine: vLLM's AsyncLLM
    state:  that of the app; vLLM notes its HTTP server there once it listens
    leave:  ends this process at once, with an exit code

    ended: True once vLLM ends the engine itself
    """

    def __init__(
        self, engine: Any, state: Any, grace_s: float = GRACE_S, leave: Callable[[int], object] = os._exit
    ) -> None:
        self.ended = False
        self._engine, self._state = engine, state
        self._grace_s, self._leave = grace_s, leave
        self._shutdown = engine.shutdown
        engine.shutdown = self._end_engine
        if not vllm.envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            Thread(target=self._deadline, daemon=True, name="fp8plan-ending").start()
            self._task = asyncio.create_task(self._watch())

    def _end_engine(self, *args: Any, **kwargs: Any) -> Any:
        self.ended = True
        return self._shutdown(*args, **kwargs)

    async def _watch(self) -> None:
        while not hasattr(self._state, "server"):
            await asyncio.sleep(LOOK_S)
        server = self._state.server
        close = server.shutdown

        async def close_and_fail(*args: Any, **kwargs: Any) -> None:
            if self._engine.errored and not self.ended:
                logger.error("fp8plan: the engine's process has ended; the server ends, too")
            await close(*args, **kwargs)
            if self._engine.errored and not self.ended:
                raise self._engine.dead_error

        server.shutdown = close_and_fail
        while not self._engine.errored:
            await asyncio.sleep(LOOK_S)
        server.should_exit = True

    def _deadline(self) -> None:
        while not self._engine.errored:
            time.sleep(LOOK_S)
        time.sleep(self._grace_s)
        with suppress(Exception):
            logger.error("fp8plan: %g s after the end of its engine the server still waits; it leaves", self._grace_s)
        self._leave(1)
