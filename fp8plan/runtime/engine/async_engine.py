"""AsyncRolloutEngine: the same setup and procedures with vLLM's AsyncLLM, for trainers with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import uuid4

from fp8plan.errors import NotServingError, SyncError
from fp8plan.runtime.engine.access import alone, asleep_of, falling_asleep, generating, refuse_shut_down
from fp8plan.runtime.engine.base import EngineBase
from fp8plan.runtime.engine.engine import RESET_TRIES, RESET_WAIT_S, started_apart
from fp8plan.runtime.engine.launch import Launch, launch
from fp8plan.runtime.engine.warm_up import freeze_garbage
from fp8plan.runtime.engine.watched import LAST_WORDS_S, PATIENCE_S
from fp8plan.runtime.guard.fallback import Action, GuardSettings
from fp8plan.runtime.weight_sync.state import Call, Scored, SyncReport, SyncSettings, rpc

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.setup import EngineSetup
    from fp8plan.runtime.controller.state import Escalation
    from fp8plan.runtime.guard.guard import Verdict
    from fp8plan.runtime.weight_sync.nccl import Rendezvous

Answer = TypeVar("Answer")


class AsyncRolloutEngine(EngineBase):
    """A vllm AsyncLLM in one of fp8plan's precisions; `from_plan` or `from_setup` makes one. Its engine runs in a
    process of its own.

    `engine.llm` is vLLM's AsyncLLM. Generate through the engine: only it knows when the weights must not be used. The
    guard is fed by the caller, who knows which requests make a rollout: guard.after_rollout(observation_of(...)).
    """

    def __init__(self, launched: Launch, settings: SyncSettings, guard: GuardSettings | None = None) -> None:
        super().__init__(launched, settings, launched.device, guard or GuardSettings())
        self.llm: Any = None

    @classmethod
    async def from_setup(
        cls,
        setup: EngineSetup,
        model_path: str | None = None,
        *,
        sync: SyncSettings | None = None,
        remote: bool = False,
        guard: GuardSettings | None = None,
        keep_bf16: tuple[int, int] = (0, 0),
        precisions: Sequence[str] | None = None,
        **vllm_kwargs: Any,
    ) -> AsyncRolloutEngine:
        """As RolloutEngine.from_setup, with arguments of vLLM's AsyncEngineArgs."""
        launched = launch(setup, model_path, keep_bf16, vllm_kwargs, precisions)
        engine = cls(launched, sync or SyncSettings.planned(launched.precision, remote), guard)
        try:
            await engine._start()
            await engine._drive(engine._opening())
        except BaseException:
            engine.shutdown()
            raise
        return engine

    @classmethod
    async def from_plan(
        cls, plan: Plan, model_path: str | None = None, *, choice: int | str | None = None, **settings: Any
    ) -> AsyncRolloutEngine:
        """As RolloutEngine.from_plan, with the settings of `from_setup`."""
        precisions = plan.precisions_beside(choice)
        return await cls.from_setup(plan.setup(choice), model_path, precisions=precisions, **settings)

    async def sync_weights(
        self,
        tensors: Any,
        *,
        manifest: Any = None,
        kv_amax: Mapping[str, Sequence[float]] | None = None,
        kv_prompts: Sequence[Sequence[int]] | None = None,
        scored: Scored | None = None,
    ) -> SyncReport:
        """As RolloutEngine.sync_weights. Requests must have ended, or been aborted, before."""
        report: SyncReport = await self._drive(self._sync(self._busy(), tensors, manifest, kv_amax, kv_prompts, scored))
        return report

    async def join_transfer(self, where: Rendezvous) -> None:
        """As RolloutEngine.join_transfer."""
        await self._drive(self._join(self._busy(), where))

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str | None = None) -> AsyncGenerator[Any]:
        """AsyncLLM's generate, one request. Raises NotServingError while the weights are not to be used. One that is
        cancelled, or left before its end, leaves no request behind."""
        refuse_shut_down(self.state)
        with generating(self.state):
            output = None
            async with aclosing(self._request(prompt, sampling_params, request_id)) as outputs:
                async for output in outputs:
                    yield output
            if output is not None:
                self._remember([output])

    async def apply(self, verdict: Verdict | None, escalate: Escalation | None = None) -> None:
        """As RolloutEngine.apply."""
        if (action := self._advised(verdict, escalate)) != Action.NONE:
            await self._drive(self._apply(self._busy(), action))

    follow = apply  # its name until 0.1

    async def recalibrate_kv(self, *, kv_amax: Any = None, kv_prompts: Any = None) -> str | None:
        """Measure or set the KV scales anew, without new weights; where they come from."""
        source: str | None = await self._drive(self._recalibrate(self._busy(), kv_amax, kv_prompts))
        return source

    async def kv_scales(self) -> dict[str, dict[str, float]]:
        """layer -> scales of q, k, v that the live engine uses, on the device and on the host."""
        refuse_shut_down(self.state)
        found: dict[str, dict[str, float]] = (await self._drive(rpc("fp8plan_kv_scales")))[0]
        return found

    async def sleep(self, level: int = 1) -> None:
        """AsyncLLM's sleep. Level 2 drops the weights: a sync must follow the wake-up."""
        with alone(self.state, self._busy()), falling_asleep(self.state, level) as needed:
            if needed:
                await self._whole(self._alive(lambda: self.llm.sleep(level)))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """AsyncLLM's wake_up, which sets KV scales to 1.0; they are put back, and the KV cache is zeroed."""
        with alone(self.state, self._busy()):
            if sleeping := asleep_of(self.state, tags):
                await self._whole(self._alive(lambda: self.llm.wake_up(sleeping)))
            await self._drive(self._woken(sleeping))

    def shutdown(self) -> None:
        """Stop the engine's process, for good: every later call raises LostEngineError."""
        self.state.shut_down = True
        self._stop()

    async def _start(self) -> None:
        self.launch.prepare()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self.launch.kwargs)
        self.llm = started_apart(lambda: AsyncLLM.from_engine_args(arguments))
        freeze_garbage()

    def _stop(self) -> None:
        if self.llm is not None:
            try:
                self.llm.shutdown()
            except BaseException:
                self._give_up()  # vLLM shuts processes down only once: a second try would leave them
                raise
            self.llm = None

    def _model_config(self) -> Any:
        return self.llm.model_config

    def _busy(self) -> int:
        """Unfinished requests. Raises LostEngineError after shutdown."""
        refuse_shut_down(self.state)
        return 0 if self.state.dead else self.llm.output_processor.get_num_unfinished_requests()

    async def _drive(self, procedure: Generator[Call, Any, Answer]) -> Answer:
        """Run a procedure to its end, answering its calls."""
        try:
            call = next(procedure)
            while True:
                try:
                    answer = await self._whole(self._answer(call))
                except BaseException as error:
                    call = procedure.throw(error)
                else:
                    call = procedure.send(answer)
        except StopIteration as end:
            return cast("Answer", end.value)

    async def _answer(self, call: Call) -> Any:
        if call.what == "restart":
            self._stop()
            return await self._start()
        if call.what == "reset":
            return await self._reset_prefix_cache()
        if call.what == "generate":
            from vllm import SamplingParams

            prompts, settings = call.arguments
            params = SamplingParams(**{"detokenize": False} | settings)
            tasks = [asyncio.ensure_future(self._one(tokens, params)) for tokens in prompts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one that failed must not leave the others running
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        method, arguments = call.arguments
        try:
            return await self._alive(lambda: self.llm.collective_rpc(method, args=arguments))
        except Exception as error:
            raise self.lost(error) from error

    async def _one(self, tokens: Sequence[int], params: Any) -> Any:
        found = None
        async with aclosing(self._request({"prompt_token_ids": [index(token) for token in tokens]}, params)) as outputs:
            async for output in outputs:
                found = output
        return found

    async def _request(self, prompt: Any, params: Any, request_id: str | None = None) -> AsyncGenerator[Any]:
        """Outputs of one request, which is gone afterwards: vLLM forgets it if it is cancelled while it is sent."""
        from vllm.v1.engine.exceptions import EngineDeadError

        name = request_id or uuid4().hex
        try:
            async with aclosing(self.llm.generate(prompt, params, name)) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError as error:
            raise self._died() from error
        except BaseException:
            if self.llm is not None and not self.state.dead:
                await self._whole(self.llm.abort(name))
            raise

    async def _whole(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What `work` gives. A task that is cancelled meanwhile ends when that has ended: what comes next must not meet
        it. One that is cancelled again, or waits too long, ends at once, and the engine is given up."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            try:
                done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
            except asyncio.CancelledError:
                done = set()
            if not done:
                self._give_up()
                await asyncio.wait({task}, timeout=LAST_WORDS_S)
            raise

    def _give_up(self) -> None:
        """End an engine that somebody has lost patience with; the next sync starts another."""
        self.state.dead = True
        if self.llm is not None:
            for process in self.llm.engine_core.resources.engine_manager.processes:
                process.kill()

    def _died(self) -> NotServingError:
        self.state.dead = True
        return NotServingError("the engine has died; the next sync_weights starts it again")

    async def _reset_prefix_cache(self) -> None:
        if self.llm.model_config.is_multimodal_model:
            await self._alive(self.llm.reset_encoder_cache)
        for _ in range(RESET_TRIES):
            if await self._alive(lambda: self.llm.reset_prefix_cache(reset_connector=True)):
                return
            await asyncio.sleep(RESET_WAIT_S)
        raise SyncError(f"vLLM did not empty its prefix cache within {RESET_TRIES * RESET_WAIT_S:.0f} s")

    async def _alive(self, act: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `act` gives; if the engine dies of it, that is remembered."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm is None:
            raise NotServingError("the engine could not be started; call sync_weights, which tries again")
        try:
            return await act()
        except EngineDeadError as error:
            raise self._died() from error
