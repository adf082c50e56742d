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

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.apply.engine.base import requests
from fp8plan.runtime.apply.engine.judge import Judge
from fp8plan.runtime.apply.engine.launch import Launch, launch
from fp8plan.runtime.apply.engine.options import arguments_of
from fp8plan.runtime.apply.engine.vllm_engine import VllmEngine
from fp8plan.runtime.apply.engine.warm_up import freeze_garbage
from fp8plan.runtime.apply.interrupts import Held, let_in, released, started_apart, watched
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate, driven, until_reset
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import Event, generating, refuse_shut_down
from fp8plan.runtime.tokens import refuse_prompts
from fp8plan.runtime.watch.guard.fallback import GuardSettings

if TYPE_CHECKING:
    from fp8plan.model.setup import EngineSetup

Answer = TypeVar("Answer")
MODES = ("inprocess", "multiprocess")


class RolloutEngine(VllmEngine["RolloutEngine", SyncReport, str | None, dict[str, dict[str, float]], Any, None]):
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
        keep_bf16: tuple[int, int] = (0, 0),
        precisions: Sequence[str] | None = None,
        **vllm_kwargs: Any,
    ) -> RolloutEngine:
        """Start one replica of vLLM with any model that it runs.

        model_path:  folder or Hugging Face id of the BF16 checkpoint; the setup's model unless given
        mode:        "inprocess": vLLM's engine runs in this process; "multiprocess": in one of its own
        sync:        how weights are synced; None: as the precision asks for (SyncSettings.planned)
        remote:      whether the trainer's tensors come over a link (fp8plan.runtime.apply.weight_sync.nccl)
        guard:       when the guard advises to step down; None: the defaults
        keep_bf16:   how many first and last layers of the model keep their linears in BF16
        precisions:  presets that the engine may step down to; None: any
        vllm_kwargs: further arguments of vllm.LLM, which win over the setup's limits, but not over its precision

        Until the first sync the checkpoint's weights serve. An FP8 KV cache then has vLLM's scales of 1.0;
        `recalibrate_kv` measures better ones. Where fp8plan cannot predict the engine's speed, `guard_off` says why,
        and all the rest works.

        Raises ConfigError if vLLM's version is not supported, or for a model or argument that cannot be applied.
        """
        launched = launch(setup, model_path, keep_bf16, vllm_kwargs, precisions, arguments_of(cls))
        return cls(launched, sync or SyncSettings.planned(launched.precision, remote), mode, guard)

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """Generate as vllm.LLM.generate does, and return its RequestOutputs, in the order of the prompts.

        Without `rollout` the call is a rollout of its own, and `verdict` the guard's on it. Raises NotServingError
        while another generate runs or the weights must not be used, and ConfigError for a token id that the model does
        not have.
        """
        refuse_shut_down(self.state)
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

    def _outputs(self, call: Generate) -> Any:
        prompts, params = requests(call)
        outputs = self._finished(lambda: self.llm.generate(prompts, params, use_tqdm=False))
        return [outputs] if call.everywhere else outputs

    def _rpc(self, method: str, arguments: Sequence[Any]) -> Any:
        try:
            return self._alive(lambda: self.llm.collective_rpc(method, args=arguments))
        except Exception as error:
            raise self.lost(error) from error

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
