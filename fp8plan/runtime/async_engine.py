"""AsyncRolloutEngine: the same plan and procedures with vLLM's AsyncLLM, for trainers with an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from fp8plan.errors import NotServingError, SyncError
from fp8plan.runtime.engine import RESET_TRIES, RESET_WAIT_S
from fp8plan.runtime.engine_base import EngineBase
from fp8plan.runtime.gate import alone, falling_asleep, generating
from fp8plan.runtime.guarding.ladder import Action, GuardSettings
from fp8plan.runtime.launch import Launch, launch
from fp8plan.runtime.sync_state import Call, Procedure, Scored, SyncReport, SyncSettings, rpc
from fp8plan.runtime.warm_up import freeze_garbage

if TYPE_CHECKING:
    from fp8plan.model.plan import Plan
    from fp8plan.runtime.controlling.state import Escalation
    from fp8plan.runtime.guard import Verdict
    from fp8plan.runtime.transfer import Rendezvous

Answer = TypeVar("Answer")


class AsyncRolloutEngine(EngineBase):
    """A vllm AsyncLLM with a plan's precision; `from_plan` makes one. Its engine runs in a process of its own.

    `engine.llm` is vLLM's AsyncLLM. Generate through the engine: only it knows when the weights must not be used. The
    guard is fed by the caller, who knows which requests make a rollout: guard.after_rollout(observation_of(...)).
    """

    def __init__(self, launched: Launch, settings: SyncSettings, guard: GuardSettings | None = None) -> None:
        super().__init__(launched, settings, launched.device, guard or GuardSettings())
        self.llm: Any = None

    @classmethod
    async def from_plan(
        cls,
        plan: Plan,
        model_path: str | None = None,
        *,
        choice: int | str | None = None,
        sync: SyncSettings | None = None,
        remote: bool = False,
        guard: GuardSettings | None = None,
        keep_bf16: tuple[int, int] = (0, 0),
        **vllm_kwargs: Any,
    ) -> AsyncRolloutEngine:
        """As RolloutEngine.from_plan, with arguments of vLLM's AsyncEngineArgs."""
        launched = launch(plan, model_path, choice, keep_bf16, vllm_kwargs)
        engine = cls(launched, sync or SyncSettings.planned(launched.precision, remote), guard)
        engine._start()
        try:
            await engine._drive(engine._opening())
        except BaseException:
            engine.shutdown()
            raise
        return engine

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
        return await self._drive(self._sync(self._busy(), tensors, manifest, kv_amax, kv_prompts, scored))

    async def join_transfer(self, where: Rendezvous) -> None:
        """As RolloutEngine.join_transfer."""
        await self._drive(self._join(self._busy(), where))

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str | None = None) -> AsyncGenerator[Any]:
        """AsyncLLM's generate, one request. Raises NotServingError while the weights are not to be used."""
        with generating(self.state):
            output = None
            async for output in self.llm.generate(prompt, sampling_params, request_id or uuid4().hex):
                yield output
            if output is not None:
                self._remember([output])

    async def follow(self, verdict: Verdict | None, escalate: Escalation | None = None) -> None:
        """As RolloutEngine.follow."""
        if (action := self._advised(verdict, escalate)) != Action.NONE:
            await self._drive(self._follow(self._busy(), action))

    async def recalibrate_kv(self, *, kv_amax: Any = None, kv_prompts: Any = None) -> str | None:
        """Measure or set the KV scales anew, without new weights; where they come from."""
        return await self._drive(self._recalibrate(self._busy(), kv_amax, kv_prompts))

    async def kv_scales(self) -> dict[str, dict[str, float]]:
        """layer -> scales of q, k, v that the live engine uses, on the device and on the host."""
        return (await self._drive(rpc("fp8plan_kv_scales")))[0]

    async def sleep(self, level: int = 1) -> None:
        """AsyncLLM's sleep. Level 2 drops the weights: a sync must follow the wake-up."""
        with alone(self.state, self._busy()), falling_asleep(self.state, level):
            await self._alive(lambda: self.llm.sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """AsyncLLM's wake_up, which sets KV scales to 1.0; they are put back, and the KV cache is zeroed."""
        with alone(self.state, self._busy()):
            await self._alive(lambda: self.llm.wake_up(tags))
            await self._drive(self._woken(tags))

    def shutdown(self) -> None:
        """Stop the engine's process."""
        if self.llm is not None:
            stopping, self.llm = self.llm, None
            stopping.shutdown()

    def _start(self) -> None:
        os.environ.update(self.launch.env)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.launch.kwargs))
        freeze_garbage()

    def _busy(self) -> int:
        return 0 if self.state.dead else self.llm.output_processor.get_num_unfinished_requests()

    async def _drive(self, procedure: Procedure) -> Any:
        """Run a procedure to its end, answering its calls."""
        try:
            call = next(procedure)
            while True:
                try:
                    answer = await self._answer(call)
                except BaseException as error:
                    call = procedure.throw(error)
                else:
                    call = procedure.send(answer)
        except StopIteration as end:
            return end.value

    async def _answer(self, call: Call) -> Any:
        if call.what == "restart":
            self.shutdown()
            return self._start()
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
        method, arguments = call.arguments
        try:
            return await self._alive(lambda: self.llm.collective_rpc(method, args=arguments))
        except Exception as error:
            raise self.lost(error) from error

    async def _one(self, tokens: Sequence[int], params: Any) -> Any:
        async def last() -> Any:
            found = None
            async for output in self.llm.generate({"prompt_token_ids": list(tokens)}, params, uuid4().hex):
                found = output
            return found

        return await self._alive(last)

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

        try:
            return await act()
        except EngineDeadError as error:
            self.state.dead = True
            raise NotServingError("the engine has died; the next sync_weights starts it again") from error
