"""The base of both engines: their state, and the procedures that act on them.

A procedure is a generator that yields Calls (runtime.weight_sync.state). RolloutEngine answers them in place,
AsyncRolloutEngine under asyncio, so everything but the talking to vLLM is written once.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import isnan
from operator import index
from typing import Any, Literal

from fp8plan.errors import ConfigError, Fp8PlanError, NotServingError
from fp8plan.runtime.controller.state import Escalation
from fp8plan.runtime.engine.access import (
    alone,
    asleep_of,
    falling_asleep,
    refuse_asleep,
    refuse_dead,
    refuse_shut_down,
    warm_up_batches,
)
from fp8plan.runtime.engine.launch import Launch
from fp8plan.runtime.engine.options import is_text
from fp8plan.runtime.guard.fallback import Action, GuardSettings, stepped_down
from fp8plan.runtime.guard.guard import Guard, Verdict, answer
from fp8plan.runtime.guard.observation import EngineFacts, facts_of
from fp8plan.runtime.weight_sync.kv_calibration import (
    CALIBRATION_SEQUENCES,
    CALIBRATION_TOKENS,
    RANDOM,
    kv_scales,
    random_prompts,
    refuse_calibration,
)
from fp8plan.runtime.weight_sync.kv_scales import PARTS, Scales
from fp8plan.runtime.weight_sync.manifest import stored_wide
from fp8plan.runtime.weight_sync.nccl import Rendezvous
from fp8plan.runtime.weight_sync.procedure import clean, plain, replace_weights
from fp8plan.runtime.weight_sync.state import Call, Procedure, Scored, SyncReport, SyncSettings, SyncState, rpc


class EngineBase:
    """An engine, and all that fp8plan knows of it.

    mode:   "inprocess" or "multiprocess": where vLLM's engine runs
    llm:    vLLM's own LLM or AsyncLLM; None while there is none
    launch: how it was started
    state:  the state of its weights
    facts:  what really runs (runtime.worker.facts)
    guard:  compares rollouts with what the best profile predicts; None if nothing can (`guard_off` says why)
    """

    mode: Literal["inprocess", "multiprocess"] = "multiprocess"

    def __init__(self, launched: Launch, settings: SyncSettings, staged_on: str | None, guard: GuardSettings) -> None:
        self.llm: Any = None
        self.launch = launched
        self.state = SyncState(settings, staged_on, launched.fp8_kv)
        self.facts: dict[str, Any] = {}
        self.guard: Guard | None = None
        self.guard_off: str | None = None
        self._guard_settings = guard
        self._rollout: list[list[int]] = []

    @property
    def serving(self) -> bool:
        """Return whether rollouts may use the weights now."""
        return self.state.refusal is None and not self.state.dead and not self.state.shut_down

    def lost(self, error: Exception) -> Exception:
        """Return the error to raise for one that an rpc raised.

        Workers answer their own errors as data. So an exception from another process means that it has ended.
        """
        return error if self.state.staged_on is None or isinstance(error, NotServingError) else self._died()

    def _died(self) -> NotServingError:
        """Note that the engine is dead, and return the error that says so."""
        self.state.dead = True
        return NotServingError("the engine has died; the next sync_weights starts it again")

    @contextmanager
    def _noticing_death(self) -> Iterator[None]:
        """Note it if the engine dies of what is done inside. Raises NotServingError then, and if there is no engine."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm is None:
            raise NotServingError("the engine could not be started; call sync_weights, which tries again")
        try:
            yield
        except EngineDeadError as error:
            raise self._died() from error

    @property
    def _front(self) -> Any:
        """vLLM's front end: the LLMEngine of an LLM, or the AsyncLLM itself."""
        return getattr(self.llm, "llm_engine", self.llm)

    def _busy(self) -> int:
        """Return the number of unfinished requests. Raises LostEngineError after shutdown."""
        refuse_shut_down(self.state)
        return 0 if self.state.dead else self._front.output_processor.get_num_unfinished_requests()

    def _give_up(self) -> None:
        """Kill an engine that somebody has lost patience with; the next sync starts another."""
        self.state.dead = True
        if self.mode == "multiprocess" and self.llm is not None:
            for process in self._front.engine_core.resources.engine_manager.processes:
                process.kill()

    def _stop(self) -> None:
        """Shut vLLM down, and let Python collect what it leaves."""
        if self.llm is not None:
            try:
                self._shut_down()
            except BaseException:
                self._give_up()  # vLLM shuts processes down only once: a second try would leave them
                raise
            self.llm = None
        gc.unfreeze()
        gc.collect()

    def _shut_down(self) -> None:
        """Call vLLM's own shutdown: each kind of engine has another."""
        raise NotImplementedError

    def _opening(self) -> Procedure:
        """Take over an engine that has started: read what runs, refuse what was not planned, compile kernels."""
        yield from self._read()
        if not self.launch.setup.gpu.is_cpu:
            for prompts in warm_up_batches(self.launch.setup, self._longest):
                yield Call("generate", (prompts, {"max_tokens": 1, "ignore_eos": True}))
            yield Call("reset")
        self._watch()

    def _read(self) -> Procedure:
        """Read what runs. Raises ConfigError for what was not planned."""
        answers = yield from rpc("fp8plan_facts")
        self.facts = answers[0]
        self.launch.refuse_other(self.facts)
        self.state.expected = self.launch.checkpoint()
        longest, self.state.vocabulary = self.sizes()
        self.state.longest_prompt = longest - 1
        self.launch = self.launch.holding(longest)
        self.state.kv_scales = (yield from self._live_scales()) if self.state.fp8_kv else None

    def sizes(self) -> tuple[int, int]:
        """Return the longest request and the model's vocabulary, in tokens."""
        running = self._front.model_config
        return running.max_model_len, running.get_vocab_size()

    @property
    def _longest(self) -> int:
        """The longest request, in tokens."""
        return self.launch.limits.max_model_len or 2

    def _live_scales(self) -> Generator[Call, Any, Scales]:
        """Read the KV scales of a started engine: 1.0, or those of its checkpoint."""
        answers = yield from rpc("fp8plan_kv_scales")
        return {layer: [parts[part] for part in PARTS] for layer, parts in answers[0].items()}

    def _watch(self) -> None:
        """Let the guard look at the engine that runs now, if it can be predicted."""
        self.guard_off = None
        try:
            if self.guard is None:
                self.guard = self._guarding()
            else:
                self.guard.engine_changed(self._guarded_facts())
        except Fp8PlanError as error:  # a GPU without a profile: everything works but this comparison
            self.guard, self.guard_off = None, str(error)

    def _guarded_facts(self) -> EngineFacts:
        """Return the facts of what the guard looks at."""
        return self.engine_facts()

    def _guarding(self) -> Guard:
        """Return a guard of the engine that runs. Raises as Guard does."""
        return Guard(self._guarded_facts(), self._guard_settings)

    def engine_facts(self) -> EngineFacts:
        """Return the facts that the guard needs about the running engine."""
        return facts_of(self.launch.setup, self.facts, self.launch.not_predicted)

    def _revive_and_sync(
        self,
        busy: int,
        source: Any,
        manifest: Any,
        kv_amax: Mapping[str, Sequence[float]] | None,
        kv_prompts: Sequence[Sequence[int]] | None,
        scored: Scored | None,
    ) -> Generator[Call, Any, SyncReport]:
        """Replace the weights; a dead engine is started again first. busy: unfinished requests."""
        state = self.state
        with alone(self.state, busy):
            refuse_asleep(self.state, kv_amax, scored)
            if not state.dead and state.staged_on is not None:
                with suppress(NotServingError):
                    yield from rpc("fp8plan_attention_layers")  # a process that died while idle is noticed here
            if state.dead:
                yield from self._restart()
            if state.settings.weights_in == "fp8_block" and not state.quantised and state.expected is not None:
                yield from self._learn_quantised()
            prompts, where = self._calibration(kv_amax, kv_prompts)
            return (yield from replace_weights(state, source, manifest, kv_amax, prompts, where, scored))

    def _join(self, busy: int, where: Rendezvous) -> Procedure:
        """Meet a trainer; a dead engine is started again first."""
        with alone(self.state, busy):
            if self.state.dead:
                yield from self._restart()
            yield from rpc("fp8plan_join", asdict(where))

    def _restart(self) -> Procedure:
        """Start the engine anew, as `launch` says now. The engine counts as dead until all of it has gone well."""
        state = self.state
        state.dead = True
        state.refusal = "the engine was started again, with the weights of its checkpoint"
        state.prepared.clear()
        state.quantised, state.fp8_kv = (), self.launch.fp8_kv
        state.asleep, state.soiled = frozenset(), False
        yield Call("restart")
        yield from self._opening()
        state.dead = False

    def _learn_quantised(self) -> Procedure:
        """Ask the workers which of the checkpoint's tensors the engine holds in FP8."""
        expected = self.state.expected or ()
        answers = yield from rpc(
            "fp8plan_prepare", plain(expected), self.state.settings.in_place, None, stored_wide(expected)
        )
        self.state.quantised = tuple(answers[0]["quantised"])
        return self.state.quantised

    def _calibration(self, amax: Any, given: Sequence[Sequence[int]] | None) -> tuple[Any, str]:
        """Return token ids to calibrate KV scales on, and where they come from.

        They are the given ones; None with an amax or without an FP8 KV cache; else sequences of the last rollout, or
        random tokens before the first.
        """
        if given is not None or amax is not None or not self.state.fp8_kv:
            return _as_lists(given), "calibration prompts"
        if self._rollout:
            return self._rollout, "sequences of the last rollout"
        return random_prompts(self.state.vocabulary, self._longest - 1), RANDOM

    @property
    def last_sequences(self) -> list[list[int]]:
        """Some sequences of the last rollout, prompt and response as token ids; none before the first."""
        return self._rollout

    def _asked(self, busy: int, procedure: Procedure) -> Procedure:
        """Run a procedure that changes neither weights nor scales."""
        with alone(self.state, busy):
            refuse_dead(self.state)
            refuse_asleep(self.state, None, None)
            return (yield from procedure)

    def _remember(self, outputs: Sequence[Any], more: bool = False) -> None:
        """Keep some sequences of a rollout, to calibrate and to examine the engine with, and note log-probs that are
        NaN. more: beside those of outputs before
        """
        most = min(CALIBRATION_TOKENS, self._longest - 1)
        chosen = outputs[:: max(1, len(outputs) // CALIBRATION_SEQUENCES)][:CALIBRATION_SEQUENCES]
        both = [[*(output.prompt_token_ids or ()), *output.outputs[0].token_ids][:most] for output in chosen]
        if both:
            self._rollout = [*(self._rollout if more else ()), *both][-CALIBRATION_SEQUENCES:]
        if any(has_nan(response) for output in outputs for response in output.outputs):
            self.state.soiled = True

    def _rescale(self) -> Procedure:
        """Put the KV scales back after vLLM has set them to 1.0."""
        if self.state.kv_scales is not None:
            yield from rpc("fp8plan_set_kv_scales", self.state.kv_scales)

    def _recalibrate(
        self, busy: int, kv_amax: Mapping[str, Sequence[float]] | None, kv_prompts: Any
    ) -> Generator[Call, Any, str | None]:
        """Measure or set the KV scales without a sync, and return where they come from. After a failure the old ones
        are back."""
        state = self.state
        with alone(self.state, busy):
            refuse_dead(self.state)
            refuse_asleep(self.state, kv_amax, None)
            prompts, where = self._calibration(kv_amax, kv_prompts)
            refuse_calibration(state, kv_amax, prompts)
            before, state.refusal = state.refusal, "the KV scales were being changed, and that has not ended"
            try:
                used = yield from kv_scales(state, kv_amax, prompts, where)
                yield Call("reset")  # what is cached was written with other scales
            except BaseException:
                yield from self._rescale()
                yield Call("reset")
                state.refusal = before
                raise
            state.refusal = before
        return used

    def _sleep(self, busy: int, level: int) -> Procedure:
        """Put vLLM to sleep, unless it sleeps already."""
        with alone(self.state, busy), falling_asleep(self.state, level) as needed:
            if needed:
                yield Call("sleep", (level,))

    def _wake_up(self, busy: int, tags: Sequence[str] | None) -> Procedure:
        """Wake vLLM up, and mend what that leaves: a KV cache of whatever lay in that memory, KV scales of 1.0."""
        state = self.state
        with alone(state, busy):
            if sleeping := asleep_of(state, tags):
                yield Call("wake_up", (sleeping,))
            if "kv_cache" in sleeping:
                state.soiled = True
                yield from clean(state)
            yield from self._rescale()
            state.asleep -= frozenset(sleeping)

    def _advised(self, verdict: Verdict | Action | None, escalate: Escalation | None) -> Action:
        """Return what the guard advises; if that is nothing, its answer to the controller's escalation."""
        action = verdict.action if isinstance(verdict, Verdict) else verdict or Action.NONE
        if action != Action.NONE or escalate is None:
            return action
        return answer(self.guard, self.launch.precision, escalate)

    def _apply(self, busy: int, action: Action) -> Procedure:
        """Do what the guard advises, and tell the guard."""
        if action == Action.RECALIBRATE_KV:
            yield from self._recalibrate(busy, None, None)
            self._took(action)
        elif action != Action.NONE:
            wanted = stepped_down(self.launch.precision, action)
            if wanted == self.launch.precision:
                raise ConfigError(f"{action.value} changes nothing in {wanted}; allowed: an action of the guard's")
            with alone(self.state, busy):
                self.launch = self.launch.with_precision(wanted)
                self._took(action)  # should it not start, the next sync starts it in that precision
                yield from self._restart()

    def _took(self, action: Action) -> None:
        if self.guard is not None:
            self.guard.took(action)


def requests(call: Call) -> tuple[list[dict[str, list[int]]], Any]:
    """Return the prompts of a "generate" or "score" Call as vLLM takes them, and their SamplingParams."""
    from vllm import SamplingParams

    prompts, settings = call.arguments
    inputs = [{"prompt_token_ids": [index(token) for token in tokens]} for tokens in prompts]
    return inputs, SamplingParams(**{"detokenize": False} | settings)


def has_nan(response: Any) -> bool:
    """Return whether a log-prob is NaN in a response, a vLLM CompletionOutput."""
    total = response.cumulative_logprob
    return total is not None and isnan(total)


def _as_lists(prompts: Any) -> Any:
    """Return prompts that can be read more than once: to be checked, and in each pass of a calibration.

    What is no list of lists stays what it is, and is refused later.
    """
    if not isinstance(prompts, Iterable) or is_text(prompts):
        return prompts
    return [list(tokens) if isinstance(tokens, Iterable) and not is_text(tokens) else tokens for tokens in prompts]
