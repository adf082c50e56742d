"""fp8plan's part of a server's front end: permission to generate, KV scales, and the status.

All requests and all calls about weights pass through one object, the AsyncLLM. Front wraps its methods:

- During an update nothing generates: requests wait if generation is paused, and are refused otherwise.
- After a failed write the server refuses to generate until an update is complete.
- Input that would end the engine is refused.
- Calls to resume, sleep or wake up are refused while the model may be half written.
- After an update the KV scales are measured on the last generated sequences, and the prefix cache is emptied. While a
  pause keeps requests, the scales stay: their KV cache was written with these.

Subclasses know the calls of an update: vLLM's own (runtime.apply.server.lifecycle), or a trainer's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from typing import Any, ClassVar, Final, Self

from fp8plan.errors import ConfigError, SyncError, text_of
from fp8plan.runtime.apply.engine.async_engine import (
    answered_or_dead,
    driven,
    emptied,
    finished,
    forgetting_unsent,
    named,
    while_alive,
)
from fp8plan.runtime.apply.engine.base import has_nan, requests
from fp8plan.runtime.apply.plugin import PROBE
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate, Method, Procedure, Reset, Rpc, rpc
from fp8plan.runtime.apply.weight_sync.fixed_scales import learn_scales
from fp8plan.runtime.apply.weight_sync.kv_calibration import (
    CALIBRATION_SEQUENCES,
    CALIBRATION_TOKENS,
    RANDOM,
    random_prompts,
)
from fp8plan.runtime.apply.weight_sync.procedure import ended, readied
from fp8plan.runtime.apply.weight_sync.sleeping import TAGS, woken
from fp8plan.runtime.apply.weight_sync.state import UNDER_WAY, Event, State, SyncState
from fp8plan.runtime.apply.worker.facts import preset_of
from fp8plan.runtime.tokens import refuse_prompts
from fp8plan.runtime.watch.mismatch.sampling import RAW, Sampling
from fp8plan.version import __version__

LAST_SEQUENCES: Final = "the last sequences that were generated"
# Hundredths of a second that a request which vLLM does not count yet has to show tokens or to end.
SETTLES: Final = 100
LOOK_S: Final = 0.1  # seconds between two looks at whether a call blocks the workers
DEAD: Final = "the engine's process has ended; start the server again"


class UpdateError(SyncError, ValueError):
    """An update that failed, or a request that would meet the weights of one.

    A ValueError, so that vLLM answers with status 400 and this text: TRL's client retries after a 500 and loses it.
    """


class Front:
    """The front end of one server; `opened` makes it.

    engine: vLLM's AsyncLLM
    state:  state of the weights, as in a RolloutEngine
    facts:  facts of the running engine (runtime.apply.worker.facts)

    wrapped: names of the AsyncLLM's methods that Front replaces by its own
    """

    wrapped: ClassVar[tuple[str, ...]] = ("generate", "pause_generation", "resume_generation", "sleep", "wake_up")
    wrapped_if_there: ClassVar = ("release_kv_cache_memory",)  # 0.32 has it
    asks_facts: ClassVar[Method] = "fp8plan_facts"  # name of the workers' method

    def __init__(self, engine: Any) -> None:
        config = engine.vllm_config
        self.engine = engine
        self.state = SyncState.of(config)
        # Ids of placeholders for images may lie beyond the vocabulary.
        self._prompt_ids = None if config.model_config.is_multimodal_model else self.state.vocabulary
        self.facts: dict[str, Any] = {}
        self.failure: str | None = None  # why the last update failed
        self.pulled: dict[str, Any] | None = None  # the last update, if it was pulled from a store
        self.kv_source: str | None = None
        self.sampling: Sampling | None = None  # sampling of the requests since the weights serve
        self.serve_s = 0.0  # seconds of the last measurement of KV scales, with the reset of the prefix cache
        newer = [name for name in self.wrapped_if_there if hasattr(engine, name)]
        self._own: dict[str, Callable[..., Any]] = {name: getattr(engine, name) for name in (*self.wrapped, *newer)}
        self._changed = asyncio.Condition()  # notified when the permission to generate changes
        self._measuring = False
        self._entering = 0  # number of requests that may generate and have no output so far
        self._under_way: list[str] = []  # calls that block the workers
        self._answered: dict[str, Any] = {}  # the workers' last answer
        self._sequences: deque[list[int]] = deque(maxlen=CALIBRATION_SEQUENCES)

    @classmethod
    async def opened(cls, engine: Any) -> Self:
        """Wrap an AsyncLLM that has just started. Raises as `learn_scales` does."""
        answered_or_dead(engine)
        front = cls(engine)
        front.facts = (await front.drive(rpc(cls.asks_facts)))[0]
        await front.drive(learn_scales(front.state, front.facts))
        front._note(Event.BEGIN)  # the checkpoint's weights have come already
        front._note(Event.CHECK)
        await front._serve()
        await front.status()
        forgetting_unsent(engine)
        for name in front._own:
            setattr(engine, name, getattr(front, name))
        return front

    async def status(self) -> dict[str, Any]:
        """Return the server's status as JSON holds it, as GET /fp8plan/status answers it.

        backend, fp8plan_version, model
        precision:   running preset of fp8plan; None for another quantisation
        facts:       as runtime.apply.worker.facts reads them
        kv_cache_tokens: size of the pool; None: not known
        serving, refusal: whether the weights may be used now, and why not
        paused, asleep: whether generation is paused; the parts that sleep
        open_update: an update that has begun and not ended: "age_s", "silent_s" since its last call, and "limit_s", the
                     silence after which it is ended; None without one
        weights:     "version": number of the serving update (0: the checkpoint); "name": the client's name of it
        kv_scales:   "source", and "scales": layer -> {"q", "k", "v", on the host "q_host"}; None with a BF16 KV cache
        last_update: the last complete update (runtime.apply.worker.updates), with the seconds of each phase
        last_failure: error of an update since then; None without one
        sampling:    fp8plan.Sampling of the requests since the weights serve, field by field; None without any
        under_way:   calls that block the workers, such as "update_weights"; the workers' last answer counts meanwhile
        """
        if not self._under_way and not self.engine.errored:
            asking = asyncio.create_task(self._ask())
            try:
                while not asking.done() and not self._under_way:
                    await asyncio.wait({asking}, timeout=LOOK_S)
                if asking.done():
                    self._answered = asking.result()
            finally:
                asking.cancel()
        config, worker, paused = self.engine.vllm_config, self._answered["worker"], self._answered["paused"]
        cache, update = config.cache_config, worker["last_update"]
        refusal = self.refusal or worker["refusal"]
        if self.pulled is not None:
            update = self.pulled
        elif update is not None:
            update = update | {"seconds": update["seconds"] | {"kv_scales": self.serve_s}}
        scales = {"source": self.kv_source, "scales": worker["kv_scales"]} if self.state.fp8_kv else None
        return {
            "backend": "fp8plan",
            "fp8plan_version": __version__,
            "model": config.model_config.model,
            "precision": preset_of(self.facts),
            "facts": dict(self.facts),
            "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size or None,
            "serving": refusal is None,
            "refusal": refusal,
            "paused": paused,
            "asleep": sorted(self.state.asleep),
            "open_update": self.open_update(),
            "weights": {"version": worker["version"], "name": self._answered["named"]},
            "kv_scales": scales,
            "last_update": update,
            "last_failure": self.failure,
            "sampling": None if self.sampling is None else asdict(self.sampling),
            "under_way": list(self._under_way),
        }

    @property
    def refusal(self) -> str | None:
        """The reason why the weights must not be used now, as far as this process knows; None if they may."""
        return DEAD if self.engine.errored or self.state.dead else self.state.refusal

    @property
    def _updating(self) -> bool:
        """True while an update is open, unless it only waits for parts that sleep: that one forbids requests alone."""
        weights = self.state.weights
        return weights.is_open and not (weights.state is State.CHECKED and self.state.asleep)

    def open_update(self) -> dict[str, float] | None:
        """Return the status's `open_update`."""
        return None

    # ------------------------------------------------------------------------------------ in place of vLLM's calls

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Generate one request, once the weights may be used. Raises UpdateError if they must not be used, and
        ConfigError for token ids and numbers that the engine cannot take."""
        refuse_prompts([prompt], self._prompt_ids)
        await self._admitted()
        last = None
        with ExitStack() as entering, named():
            self._entering += 1
            entering.callback(self._entered)
            async with aclosing(self._outputs(prompt, *args, **kwargs)) as outputs:
                async for last in outputs:
                    entering.close()
                    if any(map(has_nan, last.outputs)):
                        self.state.soiled = True
                    yield last
        if last is None or PROBE in last.request_id:
            return
        self._count(*args[:1], **kwargs)
        if last.prompt_token_ids and self.state.fp8_kv:
            tokens = [*last.prompt_token_ids, *last.outputs[0].token_ids]
            self._sequences.append(tokens[: min(CALIBRATION_TOKENS, self.state.longest_prompt or 1)])

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        """Pause, as vLLM does."""
        with self._switch("pause"):
            await self._own["pause_generation"](*args, **kwargs)

    async def resume_generation(self) -> None:
        """Resume after a pause. Raises UpdateError while an update is open, and if kept requests would go on with
        weights that must not be used."""
        with self._switch("resume"):
            self._refuse_open("resume")
            if self.refusal is not None and self._unfinished():
                raise UpdateError(
                    f"{self.refusal}; {self._unfinished()} requests that were kept would go on with such weights: "
                    "make a complete update before, or abort them (POST /abort_requests)"
                )
            await self._own["resume_generation"]()

    async def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> None:
        """Sleep. Level 2 drops the weights, so an update must follow the wake-up. Raises UpdateError while an update is
        open."""
        with self._switch("sleep"):
            self._refuse_open("sleep")
            if level > 1:
                self.state.note(Event.REFUSE, "the engine slept at level 2, which drops its weights")
            if level > 0:  # level 0 only pauses
                self.state.asleep = frozenset(TAGS)
            await self._own["sleep"](level, *args, **kwargs)

    async def release_kv_cache_memory(self) -> None:
        """Let the KV cache sleep alone. Raises UpdateError while an update is open."""
        with self._switch("release the KV cache"):
            self._refuse_open("release the KV cache")
            self.state.asleep |= {"kv_cache"}
            await self._own["release_kv_cache_memory"]()

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        """Wake up, clean the KV cache and set the KV scales again; return vLLM's answer. Raises UpdateError while an
        update is open, as vLLM would go on with requests."""
        with self._switch("wake up"):
            self._refuse_open("wake up")
            answer = await self._own["wake_up"](tags)
            await self.drive(woken(self.state, TAGS if tags is None else tags))
            return answer

    # ------------------------------------------------------------------------------------ helpers

    async def _ask(self) -> dict[str, Any]:
        """Return the workers' status of their weights, the client's name of these, and whether a pause holds."""
        worker = (await self.drive(rpc("fp8plan_status")))[0]
        named = await self.engine.get_weight_version()
        return {"worker": worker, "named": named, "paused": await self.engine.is_paused()}

    def _outputs(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        outputs: AsyncGenerator[Any] = self._own["generate"](*args, **kwargs)
        return outputs

    def _count(self, sampling_params: Any = None, **_: Any) -> None:
        """Add a request's sampling, unless the engine gives logits in the place of log-probs."""
        with suppress(ConfigError):
            sampling = Sampling.of(sampling_params, self.facts.get("logprobs_mode", RAW))
            self.sampling = sampling if self.sampling is None else Sampling.mixed((self.sampling, sampling))

    def _entered(self) -> None:
        self._entering -= 1

    async def _admitted(self) -> None:
        """Wait while scales are measured, and during an update in a pause, as vLLM itself would."""
        async with self._changed:
            while self._measuring or (self._updating and await self.engine.is_paused()):
                await while_alive(self.engine, self._changed.wait())
        if self._updating:
            raise UpdateError(f"{UNDER_WAY}; pause generation before it, or wait")
        if self.refusal is not None:
            raise UpdateError(f"{self.refusal}; the server generates again after a complete update")

    async def _refuse_running(self, how: str) -> None:
        """Raise UpdateError while requests run, unless generation is paused. how: advice for the error

        Requests that vLLM does not count yet get a second to show tokens or end.
        """
        if self._unfinished() and await self.engine.is_paused():
            return
        for _ in range(SETTLES):
            if self._entering <= self._counted():
                break
            await asyncio.sleep(0.01)
        if self._unfinished() and not await self.engine.is_paused():
            raise UpdateError(
                f"{self._unfinished()} requests are running, which would meet a mixture of weights; wait for them, or "
                f"{how}"
            )

    @contextmanager
    def _switch(self, what: str) -> Iterator[None]:
        """Hold a call that switches generation on or off. Subclasses refuse it beside others."""
        yield

    def _refuse_open(self, what: str) -> None:
        if self._updating:
            raise UpdateError(
                "an update of the weights is open, and the model may be half written; allowed: POST "
                f"/finish_weight_update before you {what}"
            )

    def _note(self, event: Event, why: str | None = None) -> None:
        try:
            self.state.note(event, why)
        except SyncError as error:
            raise UpdateError(str(error)) from error

    async def _changes(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _unfinished(self) -> int:
        return max(self._entering, self._counted())

    def _counted(self) -> int:
        """The requests that vLLM counts: all but those that are still being tokenised."""
        return int(self.engine.output_processor.get_num_unfinished_requests())

    async def _serve(self) -> None:
        """Let checked weights serve: measure KV scales, empty the prefix cache. While a pause keeps requests,
        it does neither, as their keys and values are or will be in the cache.
        """
        self.serve_s, begun = 0.0, time.perf_counter()
        if self._unfinished():
            self.kv_source = self._kept_scales()
            self._note(Event.SERVE)
            return
        try:
            async with self._holding(), self._pause_lifted():
                await self.drive(self._measured())
        finally:
            self.serve_s = time.perf_counter() - begun

    @asynccontextmanager
    async def _holding(self) -> AsyncGenerator[None]:
        """Let new requests wait."""
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False
            await self._changes()

    @asynccontextmanager
    async def _pause_lifted(self) -> AsyncGenerator[None]:
        """Lift a pause, so that fp8plan's own prompts run."""
        paused = await self.engine.is_paused()
        if paused:
            await self._own["resume_generation"]()
        try:
            yield
        finally:
            if paused:
                await self._own["pause_generation"](mode="keep")

    def _kept_scales(self) -> str:
        """Return the name of the KV scales' source while they stay as they are."""
        return f"{(self.kv_source or '1.0').partition(', kept')[0]}, kept while requests wait"

    def _prompts(self) -> tuple[list[list[int]], str]:
        """Return token ids to measure KV scales on, and where they come from."""
        if self._sequences:
            return list(self._sequences), LAST_SEQUENCES
        return random_prompts(self.state.vocabulary, self.state.longest_prompt or 1), RANDOM

    def _measured(self) -> Procedure:
        state = self.state
        try:
            self.kv_source = yield from readied(state, None, *self._prompts(), None, {})
        except Exception as error:
            raise ConfigError(f"the KV scales could not be measured: {error}") from error
        state.note(Event.SERVE)
        state.soiled, self.sampling = False, None

    async def _failed(self, error: Exception) -> UpdateError:
        """End the open update, and let requests look again. Return the error to raise."""
        await self._end(_said(error))
        await self._changes()
        return self._failing(error)

    async def _end(self, why: str) -> None:
        """End the open update in all workers. Those that have written nothing have the old weights."""
        why = f"the update of the weights failed: {why}"
        with suppress(Exception):
            await self.drive(ended(self.state, why))
        self._note(Event.END, why)  # where the workers did not answer

    def _failing(self, error: Exception) -> UpdateError:
        text = _said(error)
        if self.engine.errored:
            self.failure = f"{text}; {DEAD}"
            return UpdateError(self.failure)
        serves = "the old weights serve" if self.refusal is None else "the server refuses to generate"
        self.failure = text
        return error if isinstance(error, UpdateError) else UpdateError(f"{text}; {serves} until a complete update")

    async def drive(self, procedure: Generator[Call, Any, Any]) -> Any:
        return await driven(procedure, self._answer)

    async def _answer(self, call: Call) -> Any:
        if isinstance(call, Reset):
            return await emptied(self.engine)
        if isinstance(call, Generate):
            prompts, params = requests(call)
            return await asyncio.gather(*[finished(self._own["generate"], prompt, params) for prompt in prompts])
        assert isinstance(call, Rpc), call
        return await self.engine.collective_rpc(call.method, args=call.arguments)


def _said(error: Exception) -> str:
    """Return an error's text, with its kind where the text alone says little."""
    return text_of(error) if isinstance(error, (LookupError, TypeError, AttributeError)) else str(error)
