"""AsyncRolloutEngine: the same setup and procedures with vLLM's AsyncLLM, for trainers with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import uuid4

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.engine.base import requests, until_reset
from fp8plan.runtime.apply.engine.engine import VllmEngine
from fp8plan.runtime.apply.engine.judge import Judge
from fp8plan.runtime.apply.engine.launch import Launch, launch
from fp8plan.runtime.apply.engine.options import arguments_of
from fp8plan.runtime.apply.engine.returned_experts import refuse_request
from fp8plan.runtime.apply.engine.warm_up import freeze_garbage
from fp8plan.runtime.apply.threads import LAST_WORDS_S, PATIENCE_S, WATCH_S, in_thread, started_apart
from fp8plan.runtime.apply.weight_sync.calls import Call, Files, Generate, Reset, Restart, Rpc, Sleep, WakeUp
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import Event, generating, refuse_shut_down
from fp8plan.runtime.tokens import refuse_prompts
from fp8plan.runtime.watch.guard.fallback import GuardSettings

if TYPE_CHECKING:
    from fp8plan.model.architecture.kept import Kept
    from fp8plan.model.setup import EngineSetup

Answer = TypeVar("Answer")
Later = Coroutine[Any, Any, Answer]


class AsyncRolloutEngine(
    VllmEngine[
        Later["AsyncRolloutEngine"],
        Later[SyncReport],
        Later[str | None],
        Later[dict[str, dict[str, float]]],
        Later[None],
    ]
):
    """A vllm AsyncLLM in one of fp8plan's precisions, in a process of its own; `from_plan` or `from_setup` makes one.

    `engine.llm` is vLLM's AsyncLLM. Generate through the engine: only it knows when the weights must not be used. The
    requests that begin and end in a `with engine.rollout():` are judged together; others are not judged, nor are those
    whose outputs are deltas, which no longer have all tokens.

    Calls after `shutdown` raise LostEngineError.
    """

    def __init__(self, launched: Launch, settings: SyncSettings, guard: GuardSettings | None = None) -> None:
        super().__init__(launched, settings, launched.device, guard or GuardSettings())
        self._judge = Judge(self, self.state, calls=False)

    @classmethod
    async def from_setup(
        cls,
        setup: EngineSetup,
        model_path: str | None = None,
        *,
        sync: SyncSettings | None = None,
        remote: bool = False,
        guard: GuardSettings | None = None,
        keep_bf16: Kept | None = None,
        precisions: Sequence[str] | None = None,
        **vllm_kwargs: Any,
    ) -> AsyncRolloutEngine:
        """Start vLLM as RolloutEngine.from_setup does; vllm_kwargs: further arguments of vLLM's AsyncEngineArgs."""
        launched = launch(setup, model_path, keep_bf16, vllm_kwargs, precisions, arguments_of(cls))
        engine = cls(launched, sync or SyncSettings.planned(launched.precision, remote), guard)
        try:
            await engine._start()
            await engine.drive(engine._opening())
        except BaseException:
            engine.shutdown()
            raise
        return engine

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str | None = None, *, routed_experts: bool = False
    ) -> AsyncGenerator[Any]:
        """Generate one request as AsyncLLM.generate does, and yield its RequestOutputs.

        routed_experts: as in RolloutEngine.generate; the last output has them

        A generate that is cancelled, or left before its end, leaves no request behind. Raises NotServingError while the
        weights must not be used, and ConfigError as RolloutEngine.generate does.
        """
        from vllm.sampling_params import RequestOutputKind

        refuse_shut_down(self.state)
        refuse_request(routed_experts, self.facts)
        refuse_prompts([prompt], self.state.vocabulary)
        with generating(self.state), named():
            output, how, ended = None, self._judge.how, self._judge.begin(self.llm, sampling_params)
            async with aclosing(self._request(prompt, sampling_params, request_id or uuid4().hex)) as outputs:
                async for output in outputs:
                    yield output
            if output is not None:
                if getattr(sampling_params, "output_kind", None) != RequestOutputKind.DELTA:
                    ended([output])
                self._remember([output], how, more=True)

    def shutdown(self) -> None:
        """Stop the engine's process, for good: every later call raises LostEngineError."""
        self.state.note(Event.CLOSE)
        self._judge.close()
        self._stop()

    async def _start(self) -> None:
        await asyncio.to_thread(self._judge.wait)  # the engine must not change while the guard judges
        self.launch.prepare()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self.launch.kwargs)
        self.llm = started_apart(lambda: AsyncLLM.from_engine_args(arguments))
        forgetting_unsent(self.llm)
        answered_or_dead(self.llm)
        freeze_garbage()

    def _shut_down(self) -> None:
        self.llm.shutdown()

    async def drive(self, procedure: Generator[Call, Any, Answer]) -> Answer:
        return await driven(procedure, lambda call: self._whole(self.answer(call)))

    async def answer(self, call: Call) -> Any:
        """Do a Call, and return its answer. Not for users: nothing is checked."""
        match call:
            case Rpc(method, arguments):
                try:
                    return await self._alive(lambda: self.llm.collective_rpc(method, args=arguments))
                except Exception as error:
                    raise self.lost(error) from error
            case Generate():
                return await self._outputs(call)
            case Reset():
                return await self._alive(lambda: emptied(self.llm))
            case Sleep(level):
                return await self._alive(lambda: self.llm.sleep(level))
            case WakeUp(tags):
                return await self._alive(lambda: self.llm.wake_up(tags))
            case Restart():
                self._stop()
                return await self._start()

    async def _outputs(self, call: Generate) -> Any:
        prompts, params = requests(call)
        tasks = [asyncio.ensure_future(finished(self._request, prompt, params)) for prompt in prompts]
        try:
            outputs = await asyncio.gather(*tasks)
            return [outputs] if call.everywhere else outputs
        finally:
            for task in tasks:  # if one has failed, the others must not run on
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(self, prompt: Any, params: Any, name: str) -> AsyncGenerator[Any]:
        """Yield the outputs of one request, and abort it at a failure.

        vLLM itself would not abort a request that is cancelled while it is sent.
        """
        try:
            with self._noticing_death():
                async with aclosing(self.llm.generate(prompt, params, name)) as outputs:
                    async for output in outputs:
                        yield output
        except BaseException:
            if self.llm is not None and not self.state.dead:
                await self._whole(self.llm.abort(name))
            raise

    async def _whole(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the result of `work`. A task that is cancelled meanwhile first waits for `work` to end.

        So the next call does not run beside `work`. A second cancellation, or PATIENCE_S, ends the wait. The engine is
        given up then.
        """
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

    async def _alive(self, act: Callable[[], Awaitable[Answer]]) -> Answer:
        with self._noticing_death():
            return await act()


Generates = Callable[[Any, Any, str], AsyncGenerator[Any]]  # `generate` of an AsyncLLM, or one like it


async def finished(generate: Generates, prompt: Any, params: Any) -> Any:
    """Return the last output of one request."""
    output = None
    async with aclosing(generate(prompt, params, f"fp8plan-{uuid4().hex}")) as outputs:
        async for output in outputs:  # noqa: B007 -- the last one is wanted
            pass
    return output


async def emptied(llm: Any) -> None:
    """Empty the prefix cache of an AsyncLLM, and that of its encoders. Raises SyncError if vLLM does not."""
    if llm.model_config.is_multimodal_model:
        await llm.reset_encoder_cache()
    for pause_s in until_reset():
        if await llm.reset_prefix_cache(reset_connector=True):
            return
        await asyncio.sleep(pause_s)


async def driven(
    procedure: Generator[Call, Any, Answer], answer: Callable[[Call], Awaitable[Any]], threads: bool = False
) -> Answer:
    """Run a procedure to its end under asyncio.

    answer:  does a Call to the engine
    threads: run the procedure itself in threads, so that the event loop goes on while it reads files. Do not cancel
             its task then
    """
    resume = partial(next, procedure)
    while True:
        ended, value = await asyncio.to_thread(_resumed, resume) if threads else _resumed(resume)
        if ended:
            return cast("Answer", value)
        try:
            reply = await (in_thread(value.act, *value.arguments) if isinstance(value, Files) else answer(value))
        except BaseException as error:
            resume = partial(procedure.throw, error)
        else:
            resume = partial(procedure.send, reply)


def _resumed(resume: Callable[[], Any]) -> tuple[bool, Any]:
    """Return True and a procedure's result if it ends, else False and its next Call."""
    try:
        return False, resume()
    except StopIteration as end:
        return True, end.value


def forgetting_unsent(llm: Any) -> None:
    """Make an AsyncLLM forget a request that it cannot send to its engine's process, e.g. with a seed of 70 bits.

    vLLM would count that request for ever, and no later sync could begin. The request raises ConfigError.
    """
    send = llm.engine_core.add_request_async

    async def send_or_forget(request: Any) -> None:
        try:
            await send(request)
        except Exception as error:
            # With n responses vLLM sends n requests, and the first ones may have arrived.
            state = llm.output_processor.request_states.get(request.request_id)
            parent = getattr(state, "parent_req", None) or request
            with suppress(Exception):  # an engine that has died counts nothing any more
                await llm.abort(parent.request_id, internal=True)
            if isinstance(error, OverflowError):
                raise ConfigError(
                    f"the request cannot be sent to the engine: {error}; allowed: whole numbers of 64 bits (seed, also "
                    "of each of n responses: seed + n - 1)"
                ) from error
            raise

    llm.engine_core.add_request_async = send_or_forget


def answered_or_dead(llm: Any) -> None:
    """Make an AsyncLLM's calls to its engine's process raise EngineDeadError once that process has ended.

    vLLM would wait for their answers for ever, and a server that has such a request never ends.
    """
    send = llm.engine_core._call_utility_async

    async def send_and_watch(*arguments: Any, **more: Any) -> Any:
        return await while_alive(llm, send(*arguments, **more))

    llm.engine_core._call_utility_async = send_and_watch


async def while_alive(llm: Any, work: Awaitable[Answer]) -> Answer:
    """Return the result of `work`. Raises vLLM's EngineDeadError if the engine's process ends before."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=WATCH_S))[0]:
            if llm.errored:
                raise llm.dead_error
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # a Condition takes its lock again


@contextmanager
def named() -> Iterator[None]:
    """Raise the ConfigError of a request that could not be sent, instead of vLLM's EngineGenerateError."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise
