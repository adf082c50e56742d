"""RolloutEngine: a Plan or an EngineSetup applied to the real vLLM, and new policy weights every RL step.

    engine = RolloutEngine.from_plan(plan, "Qwen/Qwen3-8B")
    for step in range(steps):
        outputs = engine.generate(prompts, sampling_params)
        ...                                                   # train on them
        engine.apply(engine.verdict)                          # after a step down it wants a sync
        engine.sync_weights(trainer.named_bf16_tensors())

`engine.llm` is vLLM's own LLM. Generate through the engine: only it knows when the weights must not be used.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import active_children
from multiprocessing.resource_tracker import ensure_running
from operator import index
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from fp8plan.errors import ConfigError, NotServingError, SyncError
from fp8plan.runtime.engine.access import alone, asleep_of, falling_asleep, generating, refuse_shut_down
from fp8plan.runtime.engine.base import EngineBase
from fp8plan.runtime.engine.interrupts import Held, let_in, released
from fp8plan.runtime.engine.launch import Launch, launch
from fp8plan.runtime.engine.rollout_timer import Judge
from fp8plan.runtime.engine.warm_up import freeze_garbage
from fp8plan.runtime.engine.watched import watched
from fp8plan.runtime.guard.fallback import Action, GuardSettings
from fp8plan.runtime.weight_sync.state import Call, Scored, SyncReport, SyncSettings, rpc

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.setup import EngineSetup
    from fp8plan.runtime.controller.state import Escalation
    from fp8plan.runtime.guard.guard import Verdict
    from fp8plan.runtime.guard.observation import Observation
    from fp8plan.runtime.weight_sync.nccl import Rendezvous

Answer = TypeVar("Answer")
MODES = ("inprocess", "multiprocess")

# With async scheduling vLLM frees the last blocks a moment after the last token is out.
RESET_TRIES, RESET_WAIT_S = 50, 0.1


class RolloutEngine(EngineBase):
    """A vllm.LLM in one of fp8plan's precisions; `from_plan` or `from_setup` makes one.

    `verdict` is what the guard says of the last `generate`; it is worked out while the trainer goes on.
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
        apart = mode == "multiprocess" or launched.limits.tensor_parallel_size > 1  # then workers are processes, too
        staged_on = launched.device if apart else None
        super().__init__(launched, settings, staged_on, guard or GuardSettings())
        self.mode = mode
        self._judge = Judge(self)
        self.llm: Any = None
        self._half_done = False  # a step or a request, when something other than an Exception came out of it
        with Held(self._give_up):
            try:
                self._start()
                self._drive(self._opening())
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
        """Start vLLM, one replica, with any model that it runs: where fp8plan cannot predict its speed, `guard_off`
        says so, and all the rest works.

        model_path:  folder or Hugging Face id of the BF16 checkpoint; the setup's model unless given
        mode:        the engine in this process, or in one of its own
        sync, guard: how weights are synced, and when the guard advises to step down; None: as planned
        remote:      whether the trainer's tensors come over a link (fp8plan.runtime.weight_sync.nccl)
        keep_bf16:   first and last layers of the model whose linears stay BF16
        precisions:  that the engine may step down to; None: any
        vllm_kwargs: further arguments of vllm.LLM, which win over the setup's limits, but not over its precision

        Until the first sync the checkpoint's weights serve, an FP8 KV cache with vLLM's scales of 1.0; `recalibrate_kv`
        measures better ones.

        Raises ConfigError if vLLM's version is not supported, or for a model or argument that cannot be applied.
        """
        launched = launch(setup, model_path, keep_bf16, vllm_kwargs, precisions)
        return cls(launched, sync or SyncSettings.planned(launched.precision, remote), mode, guard)

    @classmethod
    def from_plan(
        cls, plan: Plan, model_path: str | None = None, *, choice: int | str | None = None, **settings: Any
    ) -> RolloutEngine:
        """Start vLLM as the plan says. The engine may step down to the plan's precisions on the same layout.

        choice:   index into plan.choices, or a precision of the plan; the chosen one unless given
        settings: as `from_setup` takes them

        Raises ConfigError for a choice that the plan has not, and as `from_setup` does.
        """
        precisions = plan.precisions_beside(choice)
        return cls.from_setup(plan.setup(choice), model_path, precisions=precisions, **settings)

    def sync_weights(
        self,
        tensors: Any,
        *,
        manifest: Any = None,
        kv_amax: Mapping[str, Sequence[float]] | None = None,
        kv_prompts: Sequence[Sequence[int]] | None = None,
        scored: Scored | None = None,
    ) -> SyncReport:
        """Make new weights serve: complete, checked, KV scales recalibrated, prefix cache emptied.

        tensors:    {name: tensor}, a list of pairs, an iterator of pairs, or a vLLM WeightSource; Hugging Face names,
                    full tensors in BF16 on any device (or FP8 and scales, by SyncSettings.weights_in). An iterator must
                    not write again to what it gave
        manifest:   (name, dtype, shape) of each, for an iterator. Without it, the checkpoint's tensors are expected
        kv_amax:    largest |q|, |k|, |v| of each attention layer, from the trainer; else they are measured here, on
        kv_prompts: token ids; unless given, sequences of the last rollout
        scored:     a sequence with the trainer's log-probs, which the new weights must agree with

        Raises SyncError; its message says which weights serve now.
        """
        with self._calling():
            report: SyncReport = self._drive(self._sync(self._busy(), tensors, manifest, kv_amax, kv_prompts, scored))
            return report

    def join_transfer(self, where: Rendezvous) -> None:
        """Meet a trainer that sends over NCCL; returns once it has come (fp8plan.runtime.weight_sync.nccl)."""
        with self._calling():
            self._drive(self._join(self._busy(), where))

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """vLLM's generate; `verdict` is the guard's on it. Raises NotServingError while weights must not be used."""
        with self._calling():
            if self.state.generating or (not self.state.running and self._busy()):
                raise NotServingError(
                    "another generate is running, and vllm.LLM would mix up their outputs; wait for it"
                )
            with generating(self.state):
                return self._rollout_of(prompts, sampling_params, kwargs)

    @property
    def verdict(self) -> Verdict | None:
        """Of the last rollout; None before the first, and where none can be given (`guard_off` says why)."""
        return self._judge.last.verdict

    @property
    def observation(self) -> Observation | None:
        """What the last rollout showed: its lengths, seconds, preemptions; None before the first."""
        return self._judge.last.observation

    def report_kl(self, kl_k3: float) -> None:
        """The trainer's mean k3 (nats per token) between its policy and the last rollout's; the verdict on the next
        rollout counts it. Raises ConfigError if it is not finite."""
        self._judge.report_kl(kl_k3)

    def apply(self, verdict: Verdict | None, escalate: Escalation | None = None) -> None:
        """Do what a verdict advises: nothing, recalibrate the KV cache, or restart in a safer precision, after which
        the engine refuses to generate until a sync. Where it advises nothing, do what `escalate` asks for, that of a
        Monitor's decision."""
        if (action := self._advised(verdict, escalate)) != Action.NONE:
            with self._calling():
                self._drive(self._apply(self._busy(), action))

    follow = apply  # its name until 0.1

    def recalibrate_kv(self, *, kv_amax: Any = None, kv_prompts: Any = None) -> str | None:
        """Measure or set the KV scales anew, without new weights; where they come from."""
        with self._calling():
            source: str | None = self._drive(self._recalibrate(self._busy(), kv_amax, kv_prompts))
            return source

    def kv_scales(self) -> dict[str, dict[str, float]]:
        """layer -> scales of q, k, v that the live engine uses, on the device and on the host."""
        with self._calling():
            found: dict[str, dict[str, float]] = self._drive(rpc("fp8plan_kv_scales"))[0]
        return found

    def sleep(self, level: int = 1) -> None:
        """vLLM's sleep (enable_sleep_mode=True). Level 2 drops the weights: a sync must follow the wake-up."""
        with self._calling(), alone(self.state, self._busy()), falling_asleep(self.state, level) as needed:
            if needed:
                self._alive(lambda: self.llm.sleep(level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's wake_up, which sets KV scales to 1.0; they are put back, and the KV cache is zeroed."""
        with self._calling(), alone(self.state, self._busy()):
            if sleeping := asleep_of(self.state, tags):
                self._alive(lambda: self.llm.wake_up(sleeping))
            self._drive(self._woken(sleeping))

    def shutdown(self) -> None:
        """Stop the engine and free its memory, for good: every later call raises LostEngineError."""
        with Held(self._give_up):
            self.state.shut_down = True
            self._judge.close()
            self._stop()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call of the caller's: Ctrl-C waits for places where it does no harm. Raises LostEngineError after
        shutdown."""
        refuse_shut_down(self.state)
        with Held(self._give_up):
            yield

    def _rollout_of(self, prompts: Any, sampling_params: Any, more: dict[str, Any]) -> list[Any]:
        judge = self._judge.begin(self.llm)
        outputs: list[Any] = self._finished(
            lambda: self.llm.generate(prompts, sampling_params, **{"use_tqdm": False} | more)
        )
        judge(outputs)
        self._remember(outputs)
        return outputs

    def _start(self) -> None:
        self._judge.wait()  # the guard must not learn of another engine meanwhile
        self._half_done = False  # of the engine before it
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

    def _stop(self) -> None:
        if self.llm is not None:
            try:
                self.llm.llm_engine.engine_core.shutdown()
            except BaseException:
                self._give_up()  # vLLM shuts processes down only once: a second try would leave them
                raise
            self.llm = None
        gc.unfreeze()
        gc.collect()

    def _whole(self, act: Callable[..., Answer]) -> Callable[..., Answer]:
        """`act`, which nothing interrupts but between two of its calls; what does all the same is remembered."""

        def whole(*args: Any, **kwargs: Any) -> Answer:
            let_in()
            self._half_done = True
            try:
                found = act(*args, **kwargs)
            except Exception:
                self._half_done = False
                raise
            self._half_done = False
            return found

        return whole

    def _give_up(self) -> None:
        """End an engine that somebody has lost patience with; the next sync starts another."""
        self.state.dead = True
        if self.mode == "multiprocess" and self.llm is not None:
            for process in self.llm.llm_engine.engine_core.resources.engine_manager.processes:
                process.kill()

    def _model_config(self) -> Any:
        return self.llm.llm_engine.model_config

    def _busy(self) -> int:
        return 0 if self.state.dead else self.llm.llm_engine.get_num_unfinished_requests()

    def _drive(self, procedure: Generator[Call, Any, Answer]) -> Answer:
        """Run a procedure to its end, answering its calls."""
        try:
            call = next(procedure)
            while True:
                try:
                    let_in()
                    answer = self._answer(call)
                except BaseException as error:
                    call = procedure.throw(error)
                else:
                    call = procedure.send(answer)
        except StopIteration as end:
            return cast("Answer", end.value)

    def _answer(self, call: Call) -> Any:
        if call.what == "restart":
            self._stop()
            return self._start()
        if call.what == "reset":
            return self._reset_prefix_cache()
        if call.what == "generate":
            from vllm import SamplingParams

            prompts, settings = call.arguments
            inputs = [{"prompt_token_ids": [index(token) for token in tokens]} for tokens in prompts]
            params = SamplingParams(**{"detokenize": False} | settings)
            return self._finished(lambda: self.llm.generate(inputs, params, use_tqdm=False))
        method, arguments = call.arguments
        try:
            return self._alive(lambda: self.llm.collective_rpc(method, args=arguments))
        except Exception as error:
            raise self.lost(error) from error

    def _reset_prefix_cache(self) -> None:
        if self.llm.llm_engine.model_config.is_multimodal_model:
            self._alive(self.llm.llm_engine.reset_encoder_cache)
        for _ in range(RESET_TRIES):
            if self._alive(lambda: self.llm.reset_prefix_cache(reset_connector=True)):
                return
            if self.mode == "inprocess":
                self._alive(self.llm.llm_engine.step)
            time.sleep(RESET_WAIT_S)
        raise SyncError(f"vLLM did not empty its prefix cache within {RESET_TRIES * RESET_WAIT_S:.0f} s")

    def _finished(self, generate: Callable[[], Answer]) -> Answer:
        """What `generate` gives; if it does not end by itself, nothing of it is left: the next one would get it."""
        try:
            return self._alive(generate)
        except BaseException as error:
            self._clear(error)
            raise

    def _clear(self, error: BaseException) -> None:
        """Abort what a generate has left; the prefix cache holds what it got to, on which the next one's bits would
        depend. Where that fails the engine refuses."""
        if self.llm is None or self.state.dead:
            return
        core = self.llm.llm_engine
        if self._half_done and self.mode == "inprocess":
            self._half_done, self.state.dead = False, True
            return
        left = [*core.output_processor.parent_requests, *core.output_processor.request_states]
        try:
            self._alive(lambda: core.abort_request(left, internal=True))
            self._reset_prefix_cache()
        except Exception as second:
            self.state.refusal = (
                f"a generate was broken off ({str(error) or type(error).__name__}), and is not over: {second}"
            )

    def _alive(self, act: Callable[[], Answer]) -> Answer:
        """What `act` gives; if the engine dies of it, that is remembered."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm is None:
            raise NotServingError("the engine could not be started; call sync_weights, which tries again")
        try:
            if self.mode == "inprocess":
                return act()
            resources = self.llm.llm_engine.engine_core.resources
            return watched(act, lambda: resources.engine_dead, self._give_up)
        except EngineDeadError as error:
            self.state.dead = True
            raise NotServingError("the engine has died; the next sync_weights starts it again") from error


def started_apart(start: Callable[[], Answer]) -> Answer:
    """What `start` gives, a vLLM, which starts processes. Ctrl-C in a terminal does not reach them; it ends a start at
    once. Under asyncio.run only the second does: the first cancels the task, which comes when the start has ended."""
    before, over = set(active_children()), Event()

    def begun() -> Answer:
        found = start()
        if over.is_set():  # nobody waits for it any more, and its processes came too late to be killed
            vllm: Any = found
            getattr(vllm, "llm_engine", vllm).engine_core.shutdown()
        return found

    def give_up() -> None:
        over.set()
        for process in set(active_children()) - before:
            process.kill()

    ensure_running()  # or Python starts it now, and lets SIGINT through again
    return watched(begun, lambda: False, give_up, patience_s=0.0)
