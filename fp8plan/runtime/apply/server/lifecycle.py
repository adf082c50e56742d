"""The Front of `vllm serve`: updates by vLLM's own lifecycle (start, parts, finish), or pulled from a store.

A pull is one call, and so is the start of an update. Nothing that changes the permission to generate may run beside
them: `_exclusively` refuses it. Only the download of a pull runs beside all others.

A trainer that begins an update may die before it ends it. After some seconds without a call the server ends the update:
the old weights serve, or the server refuses to generate if they are half overwritten.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

from fp8plan.errors import SyncError
from fp8plan.runtime.apply.engine.async_engine import driven
from fp8plan.runtime.apply.plugin import LIMIT, STORE, logger, transfer_limit_s
from fp8plan.runtime.apply.server.front import Front, UpdateError
from fp8plan.runtime.apply.weight_sync.calls import Call, Procedure, Reset, Rpc, rpc
from fp8plan.runtime.apply.weight_sync.checkpoint import local_manifest
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised, replace_weights
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import Event

PAUSE: Final = "pause generation before (POST /pause?mode=keep)"
POLL_S: Final = 0.01  # seconds between two looks at whether requests still run
PULL: Final = "a pull"
LOOK_S: Final = 0.2  # seconds between two looks at whether a trainer is still silent


class LifecycleFront(Front):
    """A Front that also wraps the lifecycle's calls. New weights serve at the end of `finish_weight_update` or `pull`.

    follower: reads versions of the weights from a store; None: there is no store
    limit_s:  seconds without a call after which an open update is ended
    """

    wrapped: ClassVar = (
        *Front.wrapped, "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
    )  # fmt: skip
    asks_facts: ClassVar = "fp8plan_attach"

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.follower: Follower | None = None
        self.limit_s = transfer_limit_s()
        self._begun = self._heard = 0.0  # monotonic seconds: start of the last update, end of its trainer's last call
        self._silence: asyncio.Task[None] | None = None  # ends that update if its trainer is silent
        self._finish: asyncio.Task[None] | None = None  # closes that update
        self._exclusive: str | None = None  # the call that refuses others meanwhile
        self._pulls = asyncio.Lock()  # held by a pull, its download included
        self._switching = 0  # calls that pause, resume, sleep or wake up

    # ------------------------------------------------------------------------------------ the lifecycle

    async def init_weight_transfer_engine(self, *args: Any, **kwargs: Any) -> None:
        """Let the workers meet a trainer."""
        self._refuse_beside("connect a trainer")
        await self._called("init_weight_transfer_engine", *args, **kwargs)

    async def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Open an update, after closing one that a trainer has left open. Raises UpdateError while requests run, unless
        generation is paused."""
        with self._exclusively("the start of an update"):
            self._refuse_finishing("begin another")
            await self._refuse_running(PAUSE)
            if self._updating:
                await self._end("a trainer has begun another")
            self._note(Event.BEGIN)
            self._begun = self._heard = time.monotonic()
            if self._silence is not None:
                self._silence.cancel()
            self._silence = asyncio.create_task(self._until_silent())  # also if this call is cancelled
            try:
                await self._called("start_weight_update", *args, **kwargs)
            except Exception as error:
                raise await self._failed(error) from error

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take one part of an update."""
        self._refuse_beside("send tensors")
        self._refuse_ended()
        self._refuse_finishing("send tensors")
        self._note(Event.WRITE)
        try:
            await self._called("update_weights", *args, **kwargs)
        except Exception as error:
            raise await self._failed(error) from error

    async def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Close an update: the workers check it, then KV scales are measured, and the new weights serve.

        If the call is cancelled, this goes on: the update ends with weights that serve or are refused.
        """
        self._refuse_beside("finish an update")
        self._refuse_ended()
        self._refuse_finishing("finish it again")
        self._finish = asyncio.create_task(self._finished(*args, **kwargs))
        await asyncio.shield(self._finish)

    async def _finished(self, *args: Any, **kwargs: Any) -> None:
        try:
            await self._called("finish_weight_update", *args, **kwargs)
            self._note(Event.CHECK)
            await self._serve()
        except Exception as error:
            raise await self._failed(error) from error
        self.failure = self.pulled = None
        await self._changes()

    def open_update(self) -> dict[str, float] | None:
        """Return the age of the open update and of its last call, in seconds, and the limit of the latter."""
        if not self._updating or self._finishing or self._exclusive == PULL:
            return None
        now = time.monotonic()
        silent = 0.0 if self._under_way else now - self._heard
        return {"age_s": round(now - self._begun, 1), "silent_s": round(silent, 1), "limit_s": self.limit_s}

    @property
    def refusal(self) -> str | None:
        refusal = super().refusal
        if refusal is None or (update := self.open_update()) is None or self.engine.errored:
            return refusal
        return (
            f"an update of the weights is open for {update['age_s']:.0f} s, and its trainer silent for "
            f"{update['silent_s']:.0f} s; after {self.limit_s:g} s of silence ({LIMIT}) it is ended"
        )

    def _refuse_ended(self) -> None:
        """Raise UpdateError unless an update is open: none has begun, or it has failed or was ended."""
        if not self._updating:
            last = "" if self.failure is None else f". The last one: {self.failure}"
            raise UpdateError(f"no update is open{last}; begin one (start_weight_update)")

    @property
    def _finishing(self) -> bool:
        return self._finish is not None and not self._finish.done()

    def _refuse_finishing(self, what: str) -> None:
        """Raise UpdateError while an update is being finished: a call beside that would end it, though it is sound."""
        if self._measuring or self._finishing:
            raise UpdateError(f"an update is being finished; wait for it before you {what}")

    async def _until_silent(self) -> None:
        """End an update once its trainer has been silent for too long, unless it is being finished."""
        while self._updating and not self._finishing and not self.engine.errored:
            left = self._heard + self.limit_s - time.monotonic()
            if left > 0 or self._under_way or self._switching or self._exclusive is not None:
                await asyncio.sleep(max(left, LOOK_S))
            else:
                await self._end_silent()

    async def _end_silent(self) -> None:
        """End the open update. The weights from before it serve, unless some are overwritten."""
        text = f"the update was ended, as its trainer was silent for {self.limit_s:g} s ({LIMIT})"
        with self._exclusively("the end of an update that nobody ended"):
            failure = await self._failed(SyncError(text))
            if self.refusal is None and await self.engine.is_paused():
                await self._own["resume_generation"]()  # the trainer paused for the update, and is gone
        logger.warning("fp8plan: %s", failure)

    # ------------------------------------------------------------------------------------ a store

    async def follow(self, url: str) -> None:
        """Take the newest weights of a store, if it has any. A later `pull` goes on from there."""
        config = self.engine.vllm_config
        model, download = config.model_config, config.load_config.download_dir
        self.state.expected = local_manifest(model.model, model.revision, download)
        self.state.settings = SyncSettings(weights_in="fp8_block")
        self.state.staged_on, self.state.workers = "cpu", config.parallel_config.world_size
        self.follower = Follower(url)
        await self.pull()

    async def pull(self) -> dict[str, Any] | None:
        """Bring the weights to the newest version of the store, and return the record of the update.

        Returns None if they are that already. Requests run until the files are here. Then new ones wait; those that run
        are let end, unless a pause keeps them. Raises UpdateError if the weights could not be synced. Its task must not
        be cancelled.
        """
        if self.follower is None:
            raise UpdateError(f"this server follows no store; type: {STORE}=URL vllm serve MODEL ...")
        if self._pulls.locked():
            raise UpdateError("a pull is under way; wait for it before you begin a pull")
        async with self._pulls:
            async with self._beside_none(), self._noting():
                await self.drive(self.follower.announcing(self))
            report, refused = None, None
            while report is None:
                async with self._noting():
                    with TemporaryDirectory(prefix="fp8plan-") as folder:
                        fetched = await self.drive(self.follower.fetching(self, folder, refused))
                        if fetched is None:
                            self.failure = None
                            return None
                        report, refused = await self._write(self.follower.writing(self, fetched))
            self.failure, self.pulled = None, report.record() | {"store_version": self.follower.version}
            await self.engine.update_weight_version(str(self.follower.version))
            return self.pulled

    @asynccontextmanager
    async def _beside_none(self) -> AsyncGenerator[None]:
        """Ask which weights serve, and refuse other calls meanwhile. Raises UpdateError unless a pull may write now."""
        with self._exclusively(PULL), self._noted("pull"):
            self._refuse_open("pull")
            if self.state.asleep:
                raise UpdateError(f"{' and '.join(sorted(self.state.asleep))} sleep; wake them up (POST /wake_up)")
            status = (await self.drive(rpc("fp8plan_status")))[0]
            self.state.version, self.state.stamp = status["version"], status["stamp"]
            yield

    @asynccontextmanager
    async def _noting(self) -> AsyncGenerator[None]:
        """Note an error of a pull, and raise an UpdateError for it."""
        try:
            yield
        except SyncError as error:  # it says which weights serve
            raise self._failing(UpdateError(str(error))) from error
        except Exception as error:
            raise self._failing(error) from error

    async def _write(self, procedure: Procedure) -> Any:
        """Run a procedure that writes weights, once no request runs or a pause keeps them. New requests wait."""
        async with self._holding():
            while self._switching or (self._unfinished() and not await self.engine.is_paused()):
                if self.engine.errored:
                    raise self.engine.dead_error
                await asyncio.sleep(POLL_S)
            async with self._beside_none():
                if not self._unfinished():
                    async with self._pause_lifted():
                        return await driven(procedure, self._answer, threads=True)
                try:
                    return await driven(procedure, self._sparing, threads=True)
                finally:
                    self.state.soiled = True  # the cache was not zeroed; a later update does it

    @property
    def serving(self) -> bool:
        return self.refusal is None

    @staticmethod
    def asking(procedure: Procedure) -> Procedure:
        return procedure

    def syncing(self, chain: Any, *_: Any) -> Generator[Call, Any, SyncReport]:
        """Write the patches of a chain. KV scales stay while a pause keeps requests; else they are measured."""
        state = self.state
        yield from learn_quantised(state)
        known, prompts, source = state.kv_scales, None, self._kept_scales()
        if not self._unfinished():
            known, (prompts, source) = None, self._prompts()
        report = yield from replace_weights(state, chain, kv_prompts=prompts, kv_known=known)
        self.kv_source, self.sampling = source, None
        return report

    async def _sparing(self, call: Call) -> Any:
        """Do a Call. Requests that a pause keeps still need their blocks, so they are neither emptied nor zeroed."""
        if call in (Reset(), Rpc("fp8plan_zero_kv")):
            return [{"ok": None}]
        return await self._answer(call)

    # ------------------------------------------------------------------------------------ calls beside each other

    def _refuse_beside(self, what: str) -> None:
        if self._exclusive is not None:
            raise UpdateError(f"{self._exclusive} is under way; wait for it before you {what}")

    @contextmanager
    def _exclusively(self, name: str) -> Iterator[None]:
        """Refuse other calls meanwhile. Raises UpdateError while one is under way."""
        self._refuse_beside(f"begin {name}")
        if self._switching:
            raise UpdateError(f"a call to pause, resume, sleep or wake up is under way; wait for it before {name}")
        self._exclusive = name
        try:
            yield
        finally:
            self._exclusive = None

    @contextmanager
    def _switch(self, what: str) -> Iterator[None]:
        """Count a call that switches generation on or off. Raises UpdateError beside an exclusive one."""
        self._refuse_beside(what)
        self._switching += 1
        try:
            yield
        finally:
            self._switching -= 1

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """Let the status name a call meanwhile, as the workers cannot answer."""
        self._under_way.append(name)
        try:
            yield
        finally:
            self._under_way.remove(name)

    async def _called(self, name: str, *args: Any, **kwargs: Any) -> None:
        with self._noted(name):
            await self._own[name](*args, **kwargs)
        self._heard = time.monotonic()

    async def _end(self, why: str) -> None:
        """End the open update, and let vLLM's workers count it as closed."""
        await super()._end(why)
        with suppress(Exception):
            await self._called("finish_weight_update")
