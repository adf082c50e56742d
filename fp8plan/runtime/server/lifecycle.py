"""The front end of a server that is synced by vLLM's own weight-transfer lifecycle: start, parts, finish."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from fp8plan.runtime.server.front import Front


class LifecycleFront(Front):
    """A Front before the lifecycle's calls.

    `start_weight_update` is refused while requests run, unless generation is paused. At the end of
    `finish_weight_update` the new weights serve.
    """

    wrapped: ClassVar = (
        *Front.wrapped, "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
    )  # fmt: skip
    asks_facts: ClassVar = "fp8plan_attach"

    async def init_weight_transfer_engine(self, *args: Any, **kwargs: Any) -> None:
        """Have the workers meet a trainer."""
        await self._called("init_weight_transfer_engine", *args, **kwargs)

    async def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Open an update. One that a trainer has left open is ended first."""
        await self._refuse_running("pause generation before (POST /pause?mode=keep)")
        if self._updating:
            await self._release()
        self._updating = True
        try:
            await self._called("start_weight_update", *args, **kwargs)
        except Exception as error:
            raise await self._failed(error) from error

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take one part of an update."""
        try:
            await self._called("update_weights", *args, **kwargs)
        except Exception as error:
            raise await self._failed(error) from error

    async def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Close an update: what the workers check, then KV scales and prefix cache. Then the new weights serve."""
        try:
            await self._called("finish_weight_update", *args, **kwargs)
            await self._serve()
        except Exception as error:
            await self._release()
            raise await self._failed(error) from error
        self.failure = None
        await self._let(updating=False)

    async def _called(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call vLLM's own. The status says so meanwhile, as the workers do not."""
        self._under_way.append(name)
        self._kept.set()
        try:
            await self._own[name](*args, **kwargs)
        finally:
            self._under_way.remove(name)
            if not self._under_way:
                self._kept.clear()

    async def _release(self) -> None:
        """End what vLLM's workers still count as an open update."""
        for _ in range(2):  # the first fails where the backend has an update open, too
            with suppress(Exception):
                await self._called("finish_weight_update")
