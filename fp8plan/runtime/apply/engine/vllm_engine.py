"""The base of the engines that hold one vLLM: its sleep, its death and its shutdown."""

# `drive` returns what a procedure returns, or a coroutine of it.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from fp8plan.errors import NotServingError
from fp8plan.runtime.apply.engine.base import Done, EngineBase, LiveScales, Made, Reply, Report, Source
from fp8plan.runtime.apply.engine.judge import Judge
from fp8plan.runtime.apply.weight_sync.calls import (
    Call,
    Files,
    Generate,
    Procedure,
    Reset,
    Restart,
    Rpc,
    Sleep,
    WakeUp,
)
from fp8plan.runtime.apply.weight_sync.kv_calibration import woken
from fp8plan.runtime.apply.weight_sync.state import DIED, Event, asleep_of, falling_asleep

if TYPE_CHECKING:
    from fp8plan.runtime.watch.guard.guard import Verdict
    from fp8plan.runtime.watch.guard.observation import Observation


class VllmEngine(EngineBase[Made, Report, Source, LiveScales, Reply, Done]):
    """One vLLM, in this process or in one of its own.

    mode: "inprocess" or "multiprocess": where vLLM's engine runs
    """

    mode: Literal["inprocess", "multiprocess"] = "multiprocess"
    _judge: Judge

    def rollout(self) -> AbstractContextManager[None]:
        """Open a rollout: all calls of `generate` in this `with` belong to one batch, and are judged once.

        Until the first `with engine.rollout():` every `generate` of a RolloutEngine is a rollout of its own. From then
        on a call outside is not judged, recorded or calibrated on. A rollout inside another is part of it; one that
        ends by an exception is not judged.
        """
        return self._judge.rollout()

    @property
    def verdict(self) -> Verdict | None:
        """The guard's verdict on the last rollout. None before the first, and without a guard (`guard_off` says why).

        Its action is the advice that stands: that of this rollout or of an earlier one, until `apply` has done it. A
        thread works the verdict out while the trainer goes on. Reading it waits for that thread.
        """
        return self._judge.verdict

    @property
    def observation(self) -> Observation | None:
        """The lengths, seconds, preemptions and sampling of the last rollout; None before the first.

        Several rollouts that were opened since the last sync, or since a Monitor's last step, are one observation.
        """
        return self._judge.last.observation

    def report_kl(self, kl_k3: float) -> None:
        """Report the trainer's mean k3 between its policy and the last rollout's, in nats per token.

        The verdict on the next rollout takes it into account. Raises ConfigError if it is not finite.
        """
        self._judge.report_kl(kl_k3)

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
        return 0 if self.state.dead else self._front.output_processor.get_num_unfinished_requests()

    def answer(self, call: Call) -> Any:
        """Do a Call, and return its answer; under asyncio, a coroutine that does. Not for users: nothing is checked."""
        engine: Any = self  # each kind talks to vLLM in its own way
        match call:
            case Rpc(method, arguments):
                return engine._rpc(method, arguments)
            case Generate():
                return engine._outputs(call)
            case Reset():
                return engine._reset_prefix_cache()
            case Sleep(level):
                return engine._alive(lambda: self.llm.sleep(level))
            case WakeUp(tags):
                return engine._alive(lambda: self.llm.wake_up(tags))
            case Restart():
                self._stop()
                return engine._start()
            case Files():
                raise TypeError("work on files is done by whoever drives the procedure")

    def lost(self, error: Exception) -> Exception:
        """Return the error to raise in place of one from an rpc.

        Workers return their own errors as data, so an exception from another process means that it has ended.
        """
        return error if self.state.staged_on is None or isinstance(error, NotServingError) else self._died()

    def _died(self) -> NotServingError:
        """Note that the engine is dead, and return the error that says so."""
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
        """True once vLLM has noticed that the engine's process is gone."""
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

    def _shut_down(self) -> None:
        """Call vLLM's own shutdown."""
        raise NotImplementedError
