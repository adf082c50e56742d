"""fp8plan's part of a server's front end: who may generate when, KV scales, and the status.

All requests pass through one object, the AsyncLLM, and so do the calls that concern weights. Front stands before these,
on that one object:

- while weights are updated nothing generates: requests wait in a pause, and are refused else;
- what fails after the first write makes the server refuse to generate, until an update is complete;
- what would end the engine, or leave a request that nobody reads, is refused or taken back before it counts;
- what would run a half-written model, or take its memory away, is refused: to resume, to sleep and to wake up;
- after an update the KV scales are measured, by the last sequences that were generated, and the prefix cache is
  emptied. Requests that a pause keeps would read their KV cache with scales that it was not written with: while there
  are any, the scales stay what they are.

By which calls an update comes, a kind of Front knows: vLLM's own (runtime.server.lifecycle), or a trainer's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, aclosing, suppress
from typing import Any, ClassVar, Final, Self

from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.engine.access import until_reset
from fp8plan.runtime.engine.async_engine import driven, forgetting_unsent, named
from fp8plan.runtime.engine.base import has_nan, requests
from fp8plan.runtime.engine.launch import refuse_fixed_scales
from fp8plan.runtime.engine.options import refuse_prompts
from fp8plan.runtime.mismatch.sampling import RAW, Sampling
from fp8plan.runtime.plugin import PROBE
from fp8plan.runtime.server.rollout import finished
from fp8plan.runtime.server.status import status_of
from fp8plan.runtime.weight_sync.kv_calibration import (
    CALIBRATION_SEQUENCES,
    CALIBRATION_TOKENS,
    RANDOM,
    kv_scales,
    random_prompts,
)
from fp8plan.runtime.weight_sync.kv_scales import PARTS
from fp8plan.runtime.weight_sync.procedure import clean
from fp8plan.runtime.weight_sync.state import Call, Procedure, SyncSettings, SyncState, rpc

LAST_SEQUENCES: Final = "the last sequences that were generated"
# Hundredths of a second in which a request that vLLM does not count becomes tokens, or, if it was aborted, ends.
SETTLES: Final = 100


class UpdateError(SyncError, ValueError):
    """An update that failed, or a request that would meet such weights.

    A ValueError, so that vLLM answers with status 400 and this text: TRL's client tries again after a 500, and loses
    what was said.
    """


class Front:
    """The front end of one server; `opened` makes it.

    engine: vLLM's AsyncLLM
    state:  of the weights, as a RolloutEngine keeps it
    facts:  what runs (runtime.worker.facts)

    wrapped: names of the AsyncLLM's methods that its own stand before
    """

    wrapped: ClassVar[tuple[str, ...]] = ("generate", "resume_generation", "sleep", "wake_up")
    asks_facts: ClassVar[str] = "fp8plan_facts"  # the workers' method

    def __init__(self, engine: Any) -> None:
        config = engine.vllm_config
        self.engine = engine
        self.state = SyncState(SyncSettings(), None, str(config.cache_config.cache_dtype).startswith("fp8"))
        self.state.longest_prompt = config.model_config.max_model_len - 1
        self.state.vocabulary = config.model_config.get_vocab_size()
        # Beside images the ids of placeholders may lie beyond the vocabulary.
        self._prompt_ids = None if config.model_config.is_multimodal_model else self.state.vocabulary
        self.facts: dict[str, Any] = {}
        self.failure: str | None = None  # of the last update that was not complete
        self.kv_source: str | None = None
        self.sampling: Sampling | None = None  # of the requests to the weights that serve
        self.serve_s = 0.0  # that KV scales and the prefix cache have taken, the last time
        self._own: dict[str, Callable[..., Any]] = {name: getattr(engine, name) for name in self.wrapped}
        self._updating = False
        self._changed = asyncio.Condition()  # of who may generate
        self._measuring = False
        self._entering = 0  # requests that may generate, of which vLLM has not shown an output yet
        self._under_way: list[str] = []  # calls that keep the workers, which answer nothing else meanwhile
        self._kept = asyncio.Event()  # there are such calls
        self._answered: dict[str, Any] = {}  # the last that they have answered
        self._sequences: deque[list[int]] = deque(maxlen=CALIBRATION_SEQUENCES)

    @classmethod
    async def opened(cls, engine: Any) -> Self:
        """Stand before an AsyncLLM that has just started. Raises ConfigError for one whose KV scales are fixed."""
        front = cls(engine)
        front.facts = (await front._drive(rpc(cls.asks_facts)))[0]
        if front.state.fp8_kv:
            refuse_fixed_scales(front.facts)
            answers = await front._drive(rpc("fp8plan_kv_scales"))
            front.state.kv_scales = {layer: [parts[p] for p in PARTS] for layer, parts in answers[0].items()}
        await front._serve()
        await front.status()
        forgetting_unsent(engine)
        for name in cls.wrapped:
            setattr(engine, name, getattr(front, name))
        return front

    async def status(self) -> dict[str, Any]:
        """Return what runs and what its weights are (runtime.server.status). While the workers are kept by a call, such
        as one that waits for a trainer, it is what they have answered before."""
        if not self._under_way:
            asking, kept = asyncio.create_task(self._ask()), asyncio.create_task(self._kept.wait())
            try:
                await asyncio.wait({asking, kept}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    self._answered = asking.result()
            finally:
                asking.cancel()
                kept.cancel()
        cache = self.engine.vllm_config.cache_config
        return status_of(
            self.state,
            self.facts,
            **self._answered,
            model=self.engine.vllm_config.model_config.model,
            kv_cache_tokens=(cache.num_gpu_blocks or 0) * cache.block_size or None,
            kv_source=self.kv_source,
            serve_s=self.serve_s,
            failure=self.failure,
            sampling=self.sampling,
            under_way=tuple(self._under_way),
        )

    # ------------------------------------------------------------------------------------ before vLLM's own calls

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Generate one request, once the weights may be used. Raises UpdateError if they must not be, and ConfigError
        for token ids that would end the engine and numbers that cannot be sent to it."""
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

    async def resume_generation(self) -> None:
        """Resume after a pause. Raises UpdateError while an update is open, and while requests that a pause keeps would
        go on with weights that must not be used."""
        self._refuse_open("resume")
        if self.state.refusal is not None and self._unfinished():
            raise UpdateError(
                f"{self.state.refusal}; {self._unfinished()} requests that were kept would go on with such weights: "
                "make a complete update before, or abort them (POST /abort_requests)"
            )
        await self._own["resume_generation"]()

    async def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> None:
        """Sleep; at level 2 the weights are dropped, and an update must follow the wake-up. Raises UpdateError while an
        update is open."""
        self._refuse_open("sleep")
        if level > 1:
            self.state.refusal = "the engine slept at level 2, which drops its weights"
        await self._own["sleep"](level, *args, **kwargs)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up, and mend what that leaves: a KV cache of whatever lay in that memory, and KV scales of 1.0. Raises
        UpdateError while an update is open: vLLM goes on with requests then."""
        self._refuse_open("wake up")
        await self._own["wake_up"](tags)
        if tags is None or "kv_cache" in tags:
            self.state.soiled = True
            await self._drive(clean(self.state))
        if self.state.kv_scales is not None:
            await self._drive(rpc("fp8plan_set_kv_scales", self.state.kv_scales))

    # ------------------------------------------------------------------------------------ how

    async def _ask(self) -> dict[str, Any]:
        """Return what the workers say of their weights, and the client's name of these."""
        name_of = getattr(self.engine, "get_weight_version", None)
        worker = (await self._drive(rpc("fp8plan_status")))[0]
        return {"worker": worker, "named": await name_of() if name_of else None}

    def _outputs(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Return the outputs of a request that may generate."""
        outputs: AsyncGenerator[Any] = self._own["generate"](*args, **kwargs)
        return outputs

    def _count(self, sampling_params: Any = None, **_: Any) -> None:
        """Count a request's sampling in; none where the engine gives logits in the place of log-probs."""
        with suppress(ConfigError):
            found = Sampling.of(sampling_params, self.facts.get("logprobs_mode", RAW))
            self.sampling = found if self.sampling is None else Sampling.mixed((self.sampling, found))

    def _entered(self) -> None:
        self._entering -= 1

    async def _admitted(self) -> None:
        """Wait while scales are measured, and while an update runs in a pause, as vLLM itself would."""
        async with self._changed:
            while self._measuring or (self._updating and await self.engine.is_paused()):
                await self._changed.wait()
        if self._updating:
            raise UpdateError("an update of the weights is under way; pause generation before it, or wait")
        if self.state.refusal is not None:
            raise UpdateError(f"{self.state.refusal}; the server generates again after a complete update")

    async def _refuse_running(self, how: str) -> None:
        """Raise UpdateError while requests run, unless generation is paused.

        Requests that vLLM does not count get a second to show whether they run. how: what to do about those that do
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

    def _refuse_open(self, what: str) -> None:
        if self._updating:
            raise UpdateError(
                "an update of the weights is open, and the model may be half written; allowed: POST "
                f"/finish_weight_update before you {what}"
            )

    async def _let(self, **flags: bool) -> None:
        """Set flags of who may generate, and tell those that wait."""
        async with self._changed:
            for name, value in flags.items():
                setattr(self, f"_{name}", value)
            self._changed.notify_all()

    def _unfinished(self) -> int:
        return max(self._entering, self._counted())

    def _counted(self) -> int:
        """The requests that vLLM counts: not those whose text it still turns into tokens."""
        found: int = self.engine.output_processor.get_num_unfinished_requests()
        return found

    async def _serve(self) -> None:
        """Make the weights that the workers hold serve: measure KV scales, empty the prefix cache. While a pause keeps
        requests, neither is done: their keys and values are there, or may come at any moment.
        """
        self.serve_s = 0.0
        if self._unfinished():
            self.kv_source = f"{(self.kv_source or '1.0').partition(', kept')[0]}, kept while requests wait"
            self.state.refusal = None
            return
        paused, begun = await self.engine.is_paused(), time.perf_counter()
        await self._let(measuring=True)
        try:
            if paused:
                await self._own["resume_generation"]()
            await self._drive(self._measured())
        finally:
            if paused:
                await self.engine.pause_generation(mode="keep")
            await self._let(measuring=False)
            self.serve_s = time.perf_counter() - begun

    def _measured(self) -> Procedure:
        state = self.state
        yield from clean(state)
        state.soiled = True  # until the new weights have shown that they are sound
        prompts, source = list(self._sequences), LAST_SEQUENCES
        if not prompts:
            prompts, source = random_prompts(state.vocabulary, state.longest_prompt or 1), RANDOM
        try:
            self.kv_source = yield from kv_scales(state, None, prompts, source)
        except Exception as error:
            state.refusal = f"the KV scales could not be measured: {error}"
            raise
        yield Call("reset")
        state.soiled, state.refusal, self.sampling = False, None, None

    async def _failed(self, error: Exception) -> UpdateError:
        """Note an update that failed; return the error to raise, which says what serves."""
        text = str(error)
        with suppress(Exception):
            for answer in await self._drive(rpc("fp8plan_status")):
                self.state.refusal = self.state.refusal or answer["refusal"]
        serves = "the old weights serve" if self.state.refusal is None else "the server refuses to generate"
        self.failure = text
        await self._let(updating=False)
        return error if isinstance(error, UpdateError) else UpdateError(f"{text}; {serves} until a complete update")

    async def _drive(self, procedure: Generator[Call, Any, Any]) -> Any:
        return await driven(procedure, self._answer)

    async def _answer(self, call: Call) -> Any:
        if call.what == "reset":
            if self.engine.model_config.is_multimodal_model:
                await self.engine.reset_encoder_cache()
            for pause_s in until_reset():
                if await self.engine.reset_prefix_cache():
                    return None
                await asyncio.sleep(pause_s)
        if call.what == "generate":
            prompts, params = requests(call)
            return await asyncio.gather(*[finished(self._own["generate"], prompt, params) for prompt in prompts])
        method, arguments = call.arguments
        return await self.engine.collective_rpc(method, args=arguments)
