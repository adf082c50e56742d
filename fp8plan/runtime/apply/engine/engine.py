"""RolloutEngine: a Plan or an EngineSetup applied to the real vLLM, and new policy weights every RL step.

    engine = RolloutEngine.from_plan(plan, "Qwen/Qwen3-8B")
    for step in range(steps):
        with engine.rollout():                                # may be left out if each step has one call
            outputs = engine.generate(prompts, sampling_params)
        ...                                                   # train on them
        engine.apply(engine.verdict)                          # after a step down, a sync must follow
        engine.sync_weights(trainer.named_bf16_tensors())

`engine.llm` is vLLM's own LLM. Generate through the engine: only it knows when the weights must not be used.
"""

# `drive` returns what a procedure returns, or a coroutine of it.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import gc
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.apply.engine.base import (
    Done,
    EngineBase,
    LiveScales,
    Made,
    Report,
    Source,
    driven,
    requests,
    until_reset,
)
from fp8plan.runtime.apply.engine.judge import Judge, Judging
from fp8plan.runtime.apply.engine.launch import Launch, launch
from fp8plan.runtime.apply.engine.options import arguments_of
from fp8plan.runtime.apply.engine.returned_experts import refuse_request
from fp8plan.runtime.apply.engine.warm_up import freeze_garbage
from fp8plan.runtime.apply.interrupts import Held, let_in, released
from fp8plan.runtime.apply.threads import started_apart, watched
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate, Procedure, Reset, Restart, Rpc, Sleep, WakeUp
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.sleeping import asleep_of, falling_asleep, woken
from fp8plan.runtime.apply.weight_sync.state import DIED, Event, State, generating, refuse_shut_down
from fp8plan.runtime.tokens import refuse_prompts
from fp8plan.runtime.watch.guard.fallback import GuardSettings

if TYPE_CHECKING:
    from fp8plan.model.architecture.kept import Kept
    from fp8plan.model.setup import EngineSetup

Answer = TypeVar("Answer")
MODES = ("inprocess", "multiprocess")


class VllmEngine(Judging, EngineBase[Made, Report, Source, LiveScales, Done]):
    """One vLLM, in this process or in one of its own.

    mode: "inprocess" or "multiprocess": where vLLM's engine runs
    """

    mode: Literal["inprocess", "multiprocess"] = "multiprocess"

    def sleep(self, level: int = 1) -> Done:
        """Call vLLM's sleep (enable_sleep_mode=True). Level 1 keeps the weights on the host.

        Level 2 drops them: a sync must follow the wake-up. Raises SyncError while requests run, ConfigError for other
        levels.
        """
        return self.drive(self._sleep(level))

    def wake_up(self, tags: list[str] | None = None) -> Done:
        """Call vLLM's wake_up. vLLM sets the KV scales to 1.0; they are put back, and the KV cache is zeroed.

        tags: "weights", "kv_cache"; None: all that sleeps. Raises ConfigError for others.
        """
        return self.drive(self._wake_up(tags))

    def _sleep(self, level: int) -> Procedure:
        with self._alone(), falling_asleep(self.state, level) as needed:
            if needed:
                yield Sleep(level)

    def _wake_up(self, tags: Sequence[str] | None) -> Procedure:
        state = self.state
        with self._alone():
            if sleeping := asleep_of(state, tags):
                yield WakeUp(sleeping)
            yield from woken(state, sleeping)

    def sizes(self) -> tuple[int, int]:
        running = self._front.model_config
        return running.max_model_len, running.get_vocab_size()

    def _busy(self) -> int:
        if self.llm is None or self.state.weights.state is State.DEAD:
            return 0
        return self._front.output_processor.get_num_unfinished_requests()

    def lost(self, error: Exception) -> Exception:
        """Return the error to raise in place of one from an rpc.

        Workers return their own errors as data, so an exception from another process means that it has ended.
        """
        return error if self.state.staged_on is None or isinstance(error, NotServingError) else self._died()

    def _died(self) -> NotServingError:
        self.state.note(Event.DIE)
        return NotServingError(DIED)

    @contextmanager
    def _noticing_death(self) -> Iterator[None]:
        """Note if the engine dies in this `with`. Raises NotServingError then, and if there is no engine.

        vLLM closes its sockets once the engine's process has ended. A call that is under way raises ZMQError then.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm is None:
            raise NotServingError("the engine could not be started; call sync_weights, which tries again")
        try:
            yield
        except Exception as error:
            if isinstance(error, EngineDeadError) or self._process_ended():
                raise self._died() from error
            raise

    def _process_ended(self) -> bool:
        return self.llm is not None and self.mode == "multiprocess" and self._front.engine_core.resources.engine_dead

    @property
    def _front(self) -> Any:
        """vLLM's front end: the LLMEngine of an LLM, or the AsyncLLM itself."""
        return getattr(self.llm, "llm_engine", self.llm)

    def _give_up(self) -> None:
        """Kill the engine, because it takes too long; the next sync starts another."""
        self.state.note(Event.DIE)
        if self.mode == "multiprocess" and self.llm is not None:
            for process in self._front.engine_core.resources.engine_manager.processes:
                process.kill()

    def _stop(self) -> None:
        """Shut vLLM down, and let Python collect what it leaves."""
        if self.llm is not None:
            try:
                self._shut_down()
            except BaseException:
                self._give_up()  # vLLM shuts processes down only once: a second attempt would leave them
                raise
            self.llm = None
        gc.unfreeze()
        gc.collect()

    @abstractmethod
    def _shut_down(self) -> None:
        """Shut vLLM down."""


class RolloutEngine(VllmEngine["RolloutEngine", SyncReport, str | None, dict[str, dict[str, float]], None]):
    """A vllm.LLM in one of fp8plan's precisions; `from_plan` or `from_setup` makes one.

    Calls after `shutdown` raise LostEngineError. Ctrl-C during a call is held back until it does no harm.
    """

    def __init__(
        self,
        launched: Launch,
        settings: SyncSettings,
        mode: Literal["inprocess", "multiprocess"],
        guard: GuardSettings | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; allowed: {', '.join(MODES)}, or AsyncRolloutEngine for AsyncLLM")
        apart = mode == "multiprocess" or launched.workers > 1  # then workers are processes, too
        staged_on = launched.device if apart else None
        super().__init__(launched, settings, staged_on, guard or GuardSettings())
        self.mode = mode
        self._judge = Judge(self, self.state)
        self._half_done = False  # a step or a request was broken off
        with Held(self._give_up):
            try:
                self._start()
                driven(self._opening(), self.answer)
            except BaseException:
                self._stop()
                raise

    @classmethod
    def from_setup(
        cls,
        setup: EngineSetup,
        model_path: str | None = None,
        *,
        mode: Literal["inprocess", "multiprocess"] = "inprocess",
        sync: SyncSettings | None = None,
        remote: bool = False,
        guard: GuardSettings | None = None,
        keep_bf16: Kept | None = None,
        precisions: Sequence[str] | None = None,
        **vllm_kwargs: Any,
    ) -> RolloutEngine:
        """Start one replica of vLLM with any model that it runs.

        model_path:  folder or Hugging Face id of the BF16 checkpoint; the setup's model unless given
        mode:        "inprocess": vLLM's engine runs in this process; "multiprocess": in one of its own
        sync:        how weights are synced; None: as the precision asks for (SyncSettings.planned)
        remote:      whether the trainer's tensors come over a link (fp8plan.runtime.apply.weight_sync.nccl)
        guard:       when the guard advises to step down; None: the defaults
        keep_bf16:   linears that stay in BF16, as in Remedies; None: as in the setup
        precisions:  presets that the engine may step down to; None: any
        vllm_kwargs: further arguments of vllm.LLM, which win over the setup's limits, but not over its precision

        Until the first sync the checkpoint's weights serve. An FP8 KV cache then has vLLM's scales of 1.0;
        `recalibrate_kv` measures better ones. Where fp8plan cannot predict the engine's speed, `guard_off` says why,
        and all the rest works.

        Raises ConfigError if vLLM's version is not supported, or for a model or argument that cannot be applied.
        """
        launched = launch(setup, model_path, keep_bf16, vllm_kwargs, precisions, arguments_of(cls))
        return cls(launched, sync or SyncSettings.planned(launched.precision, remote), mode, guard)

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, routed_experts: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Generate as vllm.LLM.generate does, and return its RequestOutputs, in the order of the prompts.

        With `routed_experts` each response has the experts of its tokens (apply.engine.returned_experts). Without
        `rollout` the call is a rollout of its own, and `verdict` the guard's on it. Raises NotServingError while
        another generate runs or the weights must not be used, and ConfigError for a token id that the model does not
        have, or if the engine returns no experts.
        """
        refuse_shut_down(self.state)
        refuse_request(routed_experts, self.facts)
        with Held(self._give_up):
            refuse_prompts(prompts, self.state.vocabulary)
            if self.state.generating or (not self.state.running and self._busy()):
                raise NotServingError(
                    "another generate is running, and vllm.LLM would mix up their outputs; wait for it"
                )
            with generating(self.state):
                how, ended = self._judge.how, self._judge.begin(self.llm, sampling_params)
                more = {"use_tqdm": False} | kwargs
                outputs: list[Any] = self._finished(lambda: self.llm.generate(prompts, sampling_params, **more))
                ended(outputs)
                self._remember(outputs, how)
                return outputs

    def shutdown(self) -> None:
        """Stop the engine and free its memory, for good: every later call raises LostEngineError."""
        with Held(self._give_up):
            self.state.note(Event.CLOSE)
            self._judge.close()
            self._stop()

    def _start(self) -> None:
        self._judge.wait()  # the engine must not change while the guard judges
        self._half_done = False  # it belonged to the engine before this one
        self.launch.prepare()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.mode == "multiprocess" else "0"
        from vllm import LLM

        if self.mode == "multiprocess":
            self.llm = started_apart(lambda: LLM(**self.launch.kwargs))
        else:
            with released():
                self.llm = LLM(**self.launch.kwargs)
        core = self.llm.llm_engine
        core.add_request, core.step = self._whole(core.add_request), self._whole(core.step)
        freeze_garbage()

    def _shut_down(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _whole(self, act: Callable[..., Answer]) -> Callable[..., Answer]:
        """Let Ctrl-C in only between two calls of `act`, and note a call that is broken off nevertheless."""

        def whole(*args: Any, **kwargs: Any) -> Answer:
            let_in()
            self._half_done = True
            try:
                answer = act(*args, **kwargs)
            except Exception:
                self._half_done = False
                raise
            self._half_done = False
            return answer

        return whole

    def drive(self, procedure: Generator[Call, Any, Answer]) -> Answer:
        with Held(self._give_up):
            return driven(procedure, self.answer)

    def answer(self, call: Call) -> Any:
        """Do a Call, and return its answer. Not for users: nothing is checked."""
        match call:
            case Rpc(method, arguments):
                try:
                    return self._alive(lambda: self.llm.collective_rpc(method, args=arguments))
                except Exception as error:
                    raise self.lost(error) from error
            case Generate():
                prompts, params = requests(call)
                outputs = self._finished(lambda: self.llm.generate(prompts, params, use_tqdm=False))
                return [outputs] if call.everywhere else outputs
            case Reset():
                return self._reset_prefix_cache()
            case Sleep(level):
                return self._alive(lambda: self.llm.sleep(level))
            case WakeUp(tags):
                return self._alive(lambda: self.llm.wake_up(tags))
            case Restart():
                self._stop()
                return self._start()

    def _reset_prefix_cache(self) -> None:
        if self.llm.llm_engine.model_config.is_multimodal_model:
            self._alive(self.llm.llm_engine.reset_encoder_cache)
        for pause_s in until_reset():
            if self._alive(lambda: self.llm.reset_prefix_cache(reset_connector=True)):
                return
            if self.mode == "inprocess":
                self._alive(self.llm.llm_engine.step)
            time.sleep(pause_s)

    def _finished(self, generate: Callable[[], Answer]) -> Answer:
        """Return the result of `generate`. If it is broken off, its requests are aborted."""
        try:
            return self._alive(generate)
        except BaseException as error:
            self._clear(error)
            raise

    def _clear(self, error: BaseException) -> None:
        """Abort the requests of a generate that was broken off, and empty the prefix cache.

        The next generate's bits would depend on that cache. If this fails, the engine refuses to generate.
        """
        if self.llm is None or self.state.dead:
            return
        core = self.llm.llm_engine
        if self._half_done and self.mode == "inprocess":
            self._half_done = False
            self.state.note(Event.DIE)
            return
        request_ids = [*core.output_processor.parent_requests, *core.output_processor.request_states]
        try:
            self._alive(lambda: core.abort_request(request_ids, internal=True))
            self._reset_prefix_cache()
        except Exception as second:
            why = f"a generate was broken off ({str(error) or type(error).__name__}), and is not over: {second}"
            self.state.note(Event.REFUSE, why)

    def _alive(self, act: Callable[[], Answer]) -> Answer:
        """Return what `act` returns. Raises NotServingError if the engine dies of it, or if there is none."""
        with self._noticing_death():
            if self.mode == "inprocess":
                return act()
            return watched(act, self._process_ended, self._give_up)
