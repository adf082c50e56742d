"""The Front of verl's server: two outputs for each request, and the moment when new weights serve.

verl asks an AsyncLLM for cumulative outputs, one for each token, and needs two of them. The first tells it that the
engine has the request: a pause waits for that, and then aborts the request. The last is the answer. The others (text,
an object, a wake-up of a task) cost the server's one Python thread more than all else for a token:
docs/evidence/speed.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, Self

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.server.front import LAST_SEQUENCES, Front, UpdateError
from fp8plan.runtime.apply.server.rollout import enough
from fp8plan.runtime.apply.weight_sync.state import Event, State


async def two_outputs(
    engine: Any, prompt: Any, sampling_params: Any, request_id: str, **more: Any
) -> AsyncGenerator[Any]:
    """Generate one request as an AsyncLLM's `generate` does. Yield an output without tokens once the engine has the
    request, and then the finished output. After an abort that has the tokens so far.

    more: other arguments of the AsyncLLM's add_request
    """
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.exceptions import EngineDeadError

    answer = await engine.add_request(request_id, prompt, enough(sampling_params), **more)
    try:
        yield RequestOutput(request_id, None, None, None, [], finished=False)
        finished = await answer.get()
    except EngineDeadError:
        raise
    except BaseException:  # a cancellation: nobody waits for the request any more
        await engine.abort(answer.request_id, internal=True)
        raise
    yield finished


UNMEASURED: Final = "new weights have arrived, but the KV cache is still asleep, so its scales cannot be measured yet"


class VerlFront(Front):
    """A Front before an AsyncLLM that verl puts to sleep, gives weights, and wakes up part by part.

    verl sends weights while the KV cache is asleep. They serve once nothing sleeps, because running prompts measure the
    scales of an FP8 cache.

    seen: the status when weights last began to serve; a sleeping worker cannot answer
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.seen: dict[str, Any] = {}
        self._before: list[list[int]] = []  # sequences from before the rollout began
        self._update: asyncio.Task[None] | None = None  # the last update

    @classmethod
    async def opened(cls, engine: Any) -> Self:
        front = await super().opened(engine)
        front.seen = await front.status()
        return front

    async def update(self, call: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
        """Update the weights. call: sends an update to the workers, and returns their answers

        Raises UpdateError beside another update, and if a worker refuses it; then it names the weights that serve. If
        this is cancelled, the update goes on to its end.
        """
        await self._refuse_running("abort them before (verl: abort_all_requests)")
        if self._update is not None and not self._update.done():
            raise UpdateError("an update of the weights is under way; wait for it before you begin another")
        self._update = asyncio.create_task(self._updated(call))
        await asyncio.shield(self._update)

    async def _updated(self, call: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
        self._note(Event.BEGIN)
        self._note(Event.WRITE)
        try:
            for answer in await call():
                if "error" in answer:
                    raise ConfigError(answer["error"])
        except Exception as error:
            raise await self._failed(error) from error
        self._note(Event.CHECK, UNMEASURED)
        self.failure = None
        await self._serve_new()

    def begin_rollout(self) -> None:
        """Measure KV scales on the sequences that come from now on, and on earlier ones (a validation's) until then."""
        if self._sequences:
            self._before = list(self._sequences)
            self._sequences.clear()

    async def pause_generation(self, *, wait_for_inflight_requests: bool | None = None, **more: Any) -> None:
        """Pause as verl 0.9.1 asks. vLLM 0.32 has dropped the argument, which `mode` had replaced."""
        if wait_for_inflight_requests:
            more.setdefault("mode", "wait")
        await self._own["pause_generation"](**more)

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        """Wake up the parts that the tags name. Once all are awake, new weights serve."""
        answer = await super().wake_up(tags)
        await self._serve_new()
        return answer

    def _outputs(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncGenerator[Any]:
        """Return the outputs of a request: two for verl's own, vLLM's for one over HTTP.

        verl leaves the kind of outputs at vLLM's default, cumulative; requests over HTTP name another.
        """
        from vllm.sampling_params import RequestOutputKind

        if sampling_params.output_kind is RequestOutputKind.CUMULATIVE:
            return two_outputs(self.engine, prompt, sampling_params, request_id, **more)
        return super()._outputs(prompt, sampling_params, request_id, **more)

    def _prompts(self) -> tuple[list[list[int]], str]:
        if self._before and not self._sequences:
            return self._before, LAST_SEQUENCES
        return super()._prompts()

    async def _serve_new(self) -> None:
        """Let checked weights serve, unless something sleeps."""
        if self.state.weights.state is State.CHECKED and not self.state.asleep:
            try:
                await self._serve()
            except Exception as error:
                raise await self._failed(error) from error
            await self._changes()
            self.seen = await self.status()
