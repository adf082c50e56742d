"""The base of RolloutEngine, AsyncRolloutEngine and RolloutFleet: their state, and the calls that change an engine.

Each public call is a procedure: a generator that yields Calls (apply.weight_sync.calls) and does no input or output.
`drive` runs it. A RolloutEngine and a RolloutFleet answer its Calls at once, an AsyncRolloutEngine under asyncio.
"""

# `drive` returns what a procedure returns, or a coroutine of it.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from math import isnan
from operator import index
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from fp8plan.errors import ConfigError, Fp8PlanError, NotServingError, SyncError
from fp8plan.runtime.apply.engine.judge import How
from fp8plan.runtime.apply.engine.launch import Launch, facts_of
from fp8plan.runtime.apply.engine.remembered import Remembered
from fp8plan.runtime.apply.engine.warm_up import warm_up_batches
from fp8plan.runtime.apply.interrupts import let_in, released
from fp8plan.runtime.apply.weight_sync.calls import Call, Files, Generate, Procedure, Reset, Restart, rpc
from fp8plan.runtime.apply.weight_sync.delta.base import Chain
from fp8plan.runtime.apply.weight_sync.fixed_scales import learn_scales
from fp8plan.runtime.apply.weight_sync.kv_calibration import (
    RANDOM,
    kv_scales,
    random_prompts,
    refuse_calibration,
    rescaled,
)
from fp8plan.runtime.apply.weight_sync.nccl import Rendezvous
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised, replace_weights
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import (
    Event,
    SyncState,
    alone,
    refuse_asleep,
    refuse_dead,
    refuse_shut_down,
)
from fp8plan.runtime.tokens import is_text
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings, answered, stepped_down
from fp8plan.runtime.watch.guard.guard import Guard, Verdict
from fp8plan.runtime.watch.guard.observation import EngineFacts

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan

# Return types of the calls. An engine under asyncio has coroutines in their place.
Made = TypeVar("Made")  # from_plan: the engine
Report = TypeVar("Report")  # sync_weights: a SyncReport
Source = TypeVar("Source")  # recalibrate_kv: where the KV scales come from
LiveScales = TypeVar("LiveScales")  # kv_scales
Done = TypeVar("Done")  # all others: None
Answer = TypeVar("Answer")

Amaxes = Mapping[str, Sequence[float]]  # layer -> largest |q|, |k|, |v|
Prompts = Sequence[Sequence[int]]  # token ids of each


class EngineBase(ABC, Generic[Made, Report, Source, LiveScales, Done]):
    """An engine or a fleet, and all that fp8plan knows of it.

    launch: how it was started
    state:  the state of its weights
    facts:  facts of the engine that runs (runtime.apply.worker.facts)
    guard:  compares rollouts with the best profile's predictions; None if nothing can (`guard_off` says why)
    llm:    vLLM's own LLM or AsyncLLM; None while there is none, and in a fleet
    """

    def __init__(self, launched: Launch, settings: SyncSettings, staged_on: str | None, guard: GuardSettings) -> None:
        self.llm: Any = None
        self.launch = launched
        self.state = SyncState(settings, staged_on, launched.fp8_kv, launched.workers)
        self.facts: dict[str, Any] = {}
        self.guard: Guard | None = None
        self.guard_off: str | None = None
        self._guard_settings = guard
        self._remembered = Remembered()
        self._delta_bytes: int | None = None  # as in EngineFacts

    @classmethod
    def from_plan(
        cls, plan: Plan, model_path: str | None = None, *, choice: int | str | None = None, **settings: Any
    ) -> Made:
        """Start vLLM as the plan says. It may step down to the plan's precisions on the same layout.

        choice:   index into plan.choices, or a precision of the plan; None: the chosen one
        settings: as `from_setup` takes them. The guard's get the plan's anchor

        Raises ConfigError for a choice that the plan does not have, and as `from_setup` does.
        """
        kind: Any = cls  # each class has its own from_setup
        precisions = plan.precisions_beside(choice)
        if plan.anchor is not None:
            settings["guard"] = replace(settings.get("guard") or GuardSettings(), anchor=plan.anchor)
        engine: Made = kind.from_setup(plan.setup(choice), model_path, precisions=precisions, **settings)
        return engine

    def sync_weights(
        self,
        tensors: Any,
        *,
        manifest: Any = None,
        kv_amax: Amaxes | None = None,
        kv_prompts: Prompts | None = None,
        scored: Scored | None = None,
    ) -> Report:
        """Make new weights serve: all of them, checked, with new KV scales and an empty prefix cache.

        tensors:    {name: tensor}, a list or an iterator of (name, tensor) pairs, or a vLLM WeightSource. Hugging Face
                    names; full tensors of the checkpoint's shapes, in BF16, on any device (or E4M3 with FP32 scales,
                    see SyncSettings.weights_in). FP32 is rounded where vLLM keeps BF16. An iterator must not write to a
                    tensor that it has yielded
        manifest:   (name, dtype, shape) of each tensor of an iterator; None: the checkpoint's tensors are expected
        kv_amax:    {layer: largest |q|, |k|, |v|} from the trainer, for every attention layer by vLLM's name; None:
                    measured here, on kv_prompts
        kv_prompts: token ids of each prompt; None: sequences of the last rollout
        scored:     a sequence with the trainer's log-probs, which the new weights must reproduce

        No request may be running. An engine that has died is started again. Raises SyncError, whose message says which
        weights serve now.
        """
        return self.drive(self.syncing(tensors, manifest, kv_amax, kv_prompts, scored))

    def join_transfer(self, where: Rendezvous) -> Done:
        """Meet a trainer that sends over NCCL (fp8plan.runtime.apply.weight_sync.nccl). Returns once it has come."""
        return self.drive(self._join(where))

    def recalibrate_kv(self, *, kv_amax: Any = None, kv_prompts: Any = None) -> Source:
        """Measure or set the KV scales without new weights, and return where they come from.

        kv_amax, kv_prompts: as for `sync_weights`. Raises ConfigError if they give no scales, SyncError
        while requests run. Returns None without an FP8 KV cache.
        """
        return self.drive(self._recalibrate(kv_amax, kv_prompts))

    def apply(self, verdict: Verdict | Action | None, escalate: Escalation | None = None) -> Done:
        """Do what a verdict advises: nothing, recalibrate the KV cache, or restart in a safer precision.

        verdict:  the guard's, or its action alone
        escalate: the escalation that a Monitor decided; followed only if the verdict advises nothing

        After a restart the engine refuses to generate until a sync. Raises SyncError while requests run, ConfigError
        if the plan does not have that precision.
        """
        return self.drive(self._apply(verdict, escalate))

    def ask(self, procedure: Procedure) -> Any:
        """Run a procedure that changes neither weights nor scales, while no request runs (apply.doctor).

        Raises SyncError while requests run, NotServingError if the engine has died.
        """
        return self.drive(self.asking(procedure))

    def kv_scales(self) -> LiveScales:
        """Return layer -> KV scales in use: "q", "k", "v" on the device, and "q_host", ... on the host.

        A fleet returns a list of these: one for each worker, replica by replica.
        """
        return self.drive(self._scales_in_use())

    @abstractmethod
    def drive(self, procedure: Generator[Call, Any, Any]) -> Any:
        """Run a procedure to its end, and return what it returns; under asyncio, a coroutine that does."""

    @property
    def serving(self) -> bool:
        """Return whether rollouts may use the weights now."""
        return self.state.refusal is None

    def _busy(self) -> int:
        return 0

    def _alone(self) -> AbstractContextManager[None]:
        """Keep everybody else away from the engine. Raises SyncError while requests or another procedure run."""
        return alone(self.state, self._busy())

    def _opening(self) -> Procedure:
        """Take over an engine that has started: read its facts, refuse one that was not planned, compile kernels."""
        yield from self._read()
        if not self.launch.setup.gpu.is_cpu:
            for prompts in warm_up_batches(self.launch.setup, self._longest):
                yield Generate(prompts, {"max_tokens": 1, "ignore_eos": True})
            yield Reset()
        self._watch()

    def _read(self) -> Procedure:
        answers = yield from rpc("fp8plan_facts")
        self.facts = answers[0]
        self.launch.refuse_other(self.facts)
        self.state.expected = self.launch.checkpoint()
        longest, self.state.vocabulary = self.sizes()
        self.state.longest_prompt = longest - 1
        self.launch = self.launch.holding(longest)
        yield from learn_scales(self.state, self.facts)

    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Return the longest request and the model's vocabulary, in tokens."""

    @property
    def _longest(self) -> int:
        return self.launch.limits.max_model_len or 2

    def _watch(self) -> None:
        self.guard_off = None
        try:
            if self.guard is None:
                self.guard = self._guarding()
            else:
                self.guard.engine_changed(self._guarded_facts())
        except Fp8PlanError as error:  # e.g. a GPU without a profile: all but this comparison works
            self.guard, self.guard_off = None, str(error)

    def _guarded_facts(self) -> EngineFacts:
        return self.engine_facts()

    def _guarding(self) -> Guard:
        return Guard(self._guarded_facts(), self._guard_settings)

    def engine_facts(self) -> EngineFacts:
        """Return the facts that the guard needs about the running engine."""
        facts = facts_of(self.launch.setup, self.facts, self.launch.not_predicted)
        return replace(facts, delta_bytes=self._delta_bytes)

    def syncing(
        self, source: Any, manifest: Any, kv_amax: Amaxes | None, kv_prompts: Prompts | None, scored: Scored | None
    ) -> Generator[Call, Any, SyncReport]:
        """Replace the weights; a dead engine is started again first."""
        state = self.state
        with self._alone():
            refuse_asleep(state, kv_amax, scored)
            if not state.dead and state.staged_on is not None:
                with suppress(NotServingError):
                    yield from rpc("fp8plan_attention_layers")  # a process that died while idle is noticed here
            if state.dead:
                yield from self._restart()
            if state.settings.weights_in == "fp8_block":
                yield from learn_quantised(state)
            prompts, where = self._calibration(kv_amax, kv_prompts)
            report = yield from replace_weights(state, source, manifest, kv_amax, prompts, where, scored)
            exact = report.patched and state.settings.top_k is None and not isinstance(source, Chain)
            self._delta_bytes = report.bytes if exact else None  # a Chain may lead over several versions
            return report

    def _join(self, where: Rendezvous) -> Procedure:
        """Meet a trainer; a dead engine is started again first."""
        with self._alone():
            if self.state.dead:
                yield from self._restart()
            yield from rpc("fp8plan_join", asdict(where))

    def _restart(self) -> Procedure:
        """Start the engine anew from the present `launch`. It counts as dead until the whole start has succeeded."""
        state = self.state
        state.note(Event.DIE)
        state.prepared.clear()
        state.quantised, state.fp8_kv = None, self.launch.fp8_kv
        state.asleep, state.soiled = frozenset(), False
        yield Restart()
        yield from self._opening()
        state.note(Event.START)

    def _calibration(self, amax: Any, prompts: Prompts | None) -> tuple[Any, str]:
        """Return the prompts to calibrate KV scales on, and where they come from.

        Without prompts they are sequences of the last rollout, or random tokens before the first. With an amax or a
        BF16 KV cache none are needed.
        """
        if prompts is not None or amax is not None or not self.state.fp8_kv:
            return _as_lists(prompts), "calibration prompts"
        if self.last_sequences:
            return self.last_sequences, "sequences of the last rollout"
        return random_prompts(self.state.vocabulary, self._longest - 1), RANDOM

    @property
    def last_sequences(self) -> list[list[int]]:
        """Some sequences of the last rollout, prompt and response as token ids; empty before the first.

        They are spread over all calls of the rollouts that were opened since the last sync.
        """
        return self._remembered.sequences

    def asking(self, procedure: Procedure) -> Procedure:
        with self._alone():
            refuse_dead(self.state)
            refuse_asleep(self.state, None, None)
            return (yield from procedure)

    def _scales_in_use(self) -> Procedure:
        refuse_shut_down(self.state)
        workers = yield from rpc("fp8plan_kv_scales")
        return workers[0]

    def _remember(self, outputs: Sequence[Any], how: How, more: bool = False) -> None:
        """Keep some sequences of a call as Remembered.add does, and note NaN log-probs."""
        if any(has_nan(response) for output in outputs for response in output.outputs):
            self.state.soiled = True
        self._remembered.add(outputs, how, more, self.state.version, self._longest - 1)

    def _recalibrate(self, kv_amax: Amaxes | None, kv_prompts: Any) -> Generator[Call, Any, str | None]:
        """Measure or set the KV scales; after a failure the old ones are back."""
        state = self.state
        with self._alone():
            refuse_dead(state)
            refuse_asleep(state, kv_amax, None)
            prompts, where = self._calibration(kv_amax, kv_prompts)
            refuse_calibration(state, kv_amax, prompts)
            state.note(Event.BEGIN, "the KV scales were being changed, and that has not ended")
            state.note(Event.WRITE)
            try:
                used = yield from kv_scales(state, kv_amax, prompts, where)
                yield Reset()  # the cached blocks were written with other scales
            except BaseException:
                yield from rescaled(state)
                yield Reset()
                state.note(Event.RESTORE)
                raise
            state.note(Event.RESTORE)
        return used

    def _advised(self, verdict: Verdict | Action | None, escalate: Escalation | None) -> Action:
        """Return the action of the verdict, or else the guard's answer to the controller's escalation."""
        action = verdict.action if isinstance(verdict, Verdict) else verdict or Action.NONE
        if action != Action.NONE or escalate is None:
            return action
        state = None if self.guard is None else self.guard.state
        return answered(state, self.launch.precision, escalate, self.state.kv_fixed)

    def _apply(self, verdict: Verdict | Action | None, escalate: Escalation | None) -> Procedure:
        action = self._advised(verdict, escalate)
        if action == Action.RECALIBRATE_KV:
            yield from self._recalibrate(None, None)
            self._took(action)
        elif action != Action.NONE:
            safer = stepped_down(self.launch.precision, action)
            if safer == self.launch.precision:
                raise ConfigError(f"{action.value} changes nothing in {safer}; allowed: an action of the guard's")
            with self._alone():
                self.launch = self.launch.with_precision(safer)
                self._took(action)  # if the start fails, the next sync starts it in that precision
                yield from self._restart()

    def _took(self, action: Action) -> None:
        if self.guard is not None:
            self.guard.took(action)


AnyEngine = EngineBase[Any, Any, Any, Any, Any]


# With async scheduling vLLM frees the last blocks a moment after the last token is out.
RESET_TRIES, RESET_WAIT_S = 50, 0.1


def until_reset() -> Iterator[float]:
    """Yield seconds to wait before each further try to empty the prefix cache. Raises SyncError after the last."""
    for _ in range(RESET_TRIES):
        yield RESET_WAIT_S
    raise SyncError(f"vLLM did not empty its prefix cache within {RESET_TRIES * RESET_WAIT_S:.0f} s")


def driven(procedure: Generator[Call, Any, Answer], answer: Callable[[Call], Any]) -> Answer:
    """Run a procedure to its end. answer: does a Call to the engine. Work on files is done here"""
    try:
        call = next(procedure)
        while True:
            try:
                let_in()
                if isinstance(call, Files):
                    with released():  # Ctrl-C may break it off anywhere
                        reply = call.act(*call.arguments)
                else:
                    reply = answer(call)
            except BaseException as error:
                call = procedure.throw(error)
            else:
                call = procedure.send(reply)
    except StopIteration as end:
        return cast("Answer", end.value)


def requests(call: Generate) -> tuple[list[dict[str, list[int]]], Any]:
    """Return the prompts of requests as vLLM takes them, and their SamplingParams."""
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": [index(token) for token in tokens]} for tokens in call.prompts]
    return inputs, SamplingParams(**{"detokenize": False, **call.sampling})


def has_nan(response: Any) -> bool:
    """Return whether a response, a vLLM CompletionOutput, has a log-prob that is NaN."""
    total = response.cumulative_logprob
    return total is not None and isnan(total)


def _as_lists(prompts: Any) -> Any:
    """Return prompts that can be read more than once. Anything but a list of lists is returned as it is."""
    if not isinstance(prompts, Iterable) or is_text(prompts):
        return prompts
    return [list(tokens) if isinstance(tokens, Iterable) and not is_text(tokens) else tokens for tokens in prompts]
