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

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.engine.access import freeze_garbage, generating, refuse_shut_down, until_reset
from fp8plan.runtime.engine.base import EngineBase, requests
from fp8plan.runtime.engine.judge import Judge
from fp8plan.runtime.engine.launch import Launch, launch
from fp8plan.runtime.engine.options import arguments_of, refuse_prompts
from fp8plan.runtime.guard.fallback import Action, GuardSettings
from fp8plan.runtime.interrupts import Held, let_in, released, started_apart, watched
from fp8plan.runtime.weight_sync.state import Call, Procedure, Scored, SyncReport, SyncSettings, driven, rpc

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.setup import EngineSetup
    from fp8plan.runtime.controller.state import Escalation
    from fp8plan.runtime.guard.guard import Verdict
    from fp8plan.runtime.guard.observation import Observation
    from fp8plan.runtime.weight_sync.nccl import Rendezvous

Answer = TypeVar("Answer")
MODES = ("inprocess", "multiprocess")


class RolloutEngine(EngineBase):
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
        apart = mode == "multiprocess" or launched.limits.tensor_parallel_size > 1  # then workers are processes, too
        staged_on = launched.device if apart else None
        super().__init__(launched, settings, staged_on, guard or GuardSettings())
        self.mode = mode
        self._judge = Judge(self)
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
        """Start one replica of vLLM with any model that it runs.

        model_path:  folder or Hugging Face id of the BF16 checkpoint; the setup's model unless given
        mode:        "inprocess": vLLM's engine runs in this process; "multiprocess": in one of its own
        sync:        how weights are synced; None: as the precision asks for (SyncSettings.planned)
        remote:      whether the trainer's tensors come over a link (fp8plan.runtime.weight_sync.nccl)
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

    @classmethod
    def from_plan(
        cls, plan: Plan, model_path: str | None = None, *, choice: int | str | None = None, **settings: Any
    ) -> RolloutEngine:
        """Start vLLM as the plan says. The engine may step down to the plan's precisions on the same layout.

        choice:   index into plan.choices, or a precision of the plan; the chosen one unless given
        settings: as `from_setup` takes them

        Raises ConfigError for a choice that the plan does not have, and as `from_setup` does.
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
        """Make new weights serve: all of them, checked, with new KV scales and an empty prefix cache.

        tensors:    {name: tensor}, a list or an iterator of (name, tensor) pairs, or a vLLM WeightSource. Hugging Face
                    names; full tensors of the checkpoint's shapes, in BF16, on any device (or E4M3 with FP32 scales,
                    see SyncSettings.weights_in). An iterator must not write again to a tensor that it gave
        manifest:   (name, dtype, shape) of each tensor of an iterator; None: the checkpoint's tensors are expected
        kv_amax:    {layer: largest |q|, |k|, |v|} from the trainer, for every attention layer by vLLM's name; None:
                    measured here, on kv_prompts
        kv_prompts: token ids of each prompt; None: sequences of the last rollout
        scored:     a sequence with the trainer's log-probs, which the new weights must reproduce

        Starts the engine again if it has died. Raises SyncError, whose message says which weights serve now.
        """
        with self._calling():
            return self._drive(self._revive_and_sync(self._busy(), tensors, manifest, kv_amax, kv_prompts, scored))

    def join_transfer(self, where: Rendezvous) -> None:
        """Meet a trainer that sends over NCCL (fp8plan.runtime.weight_sync.nccl). Returns once it has come."""
        with self._calling():
            self._drive(self._join(self._busy(), where))

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """Generate as vllm.LLM.generate does, and return its RequestOutputs, in the order of the prompts.

        `verdict` then is the guard's on this rollout. Raises NotServingError while another generate runs, or while the
        weights must not be used, and ConfigError for a token id that the model has not.
        """
        with self._calling():
            refuse_prompts(prompts, self.state.vocabulary)
            if self.state.generating or (not self.state.running and self._busy()):
                raise NotServingError(
                    "another generate is running, and vllm.LLM would mix up their outputs; wait for it"
                )
            with generating(self.state):
                return self._rollout_of(prompts, sampling_params, kwargs)

    @property
    def verdict(self) -> Verdict | None:
        """The guard's verdict on the last rollout. None before the first, and if there is none (`guard_off` says why).

        It is worked out while the trainer goes on; to read it waits for that.
        """
        return self._judge.last.verdict

    @property
    def observation(self) -> Observation | None:
        """The lengths, seconds, preemptions and sampling of the last rollout; None before the first."""
        return self._judge.last.observation

    def report_kl(self, kl_k3: float) -> None:
        """Report the trainer's mean k3 between its policy and the last rollout's, in nats per token.

        The verdict on the next rollout counts it. Raises ConfigError if it is not finite.
        """
        self._judge.report_kl(kl_k3)

    def apply(self, verdict: Verdict | Action | None, escalate: Escalation | None = None) -> None:
        """Do what a verdict advises: nothing, recalibrate the KV cache, or restart in a safer precision.

        verdict:  of the guard, or its action alone
        escalate: of a Monitor's decision; it is followed where the verdict advises nothing

        After a restart the engine refuses to generate until a sync. Raises SyncError while requests run, ConfigError
        if the plan does not have that precision.
        """
        if (action := self._advised(verdict, escalate)) != Action.NONE:
            with self._calling():
                self._drive(self._apply(self._busy(), action))

    def recalibrate_kv(self, *, kv_amax: Any = None, kv_prompts: Any = None) -> str | None:
        """Measure or set the KV scales without new weights, and return where they come from.

        kv_amax, kv_prompts: as for `sync_weights`. Raises ConfigError for ones that scales cannot be made of,
        SyncError while requests run. None is returned without an FP8 KV cache.
        """
        with self._calling():
            return self._drive(self._recalibrate(self._busy(), kv_amax, kv_prompts))

    def ask(self, procedure: Procedure) -> Any:
        """Run a procedure that changes neither weights nor scales, while no request runs (fp8plan.runtime.doctor).

        Raises SyncError while requests run, NotServingError if the engine has died.
        """
        with self._calling():
            return self._drive(self._asked(self._busy(), procedure))

    def kv_scales(self) -> dict[str, dict[str, float]]:
        """Return layer -> KV scales in use: "q", "k", "v" on the device, and "q_host", ... on the host."""
        with self._calling():
            found: dict[str, dict[str, float]] = self._drive(rpc("fp8plan_kv_scales"))[0]
        return found

    def sleep(self, level: int = 1) -> None:
        """Call vLLM's sleep (enable_sleep_mode=True). Level 1 keeps the weights on the host.

        Level 2 drops them: a sync must follow the wake-up. Raises SyncError while requests run, ConfigError for other
        levels.
        """
        with self._calling():
            self._drive(self._sleep(self._busy(), level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Call vLLM's wake_up. vLLM sets the KV scales to 1.0; they are put back, and the KV cache is zeroed.

        tags: "weights", "kv_cache"; None: all that sleeps. Raises ConfigError for others.
        """
        with self._calling():
            self._drive(self._wake_up(self._busy(), tags))

    def shutdown(self) -> None:
        """Stop the engine and free its memory, for good: every later call raises LostEngineError."""
        with Held(self._give_up):
            self.state.shut_down = True
            self._judge.close()
            self._stop()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Hold Ctrl-C back, during a call, until it does no harm. Raises LostEngineError after shutdown."""
        refuse_shut_down(self.state)
        with Held(self._give_up):
            yield

    def _rollout_of(self, prompts: Any, sampling_params: Any, more: dict[str, Any]) -> list[Any]:
        judge = self._judge.begin(self.llm, sampling_params)
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

    def _shut_down(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _whole(self, act: Callable[..., Answer]) -> Callable[..., Answer]:
        """Return `act` such that Ctrl-C comes in between two of its calls only. What breaks one off is remembered."""

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

    def _drive(self, procedure: Generator[Call, Any, Answer]) -> Answer:
        return driven(procedure, self.answer)

    def answer(self, call: Call) -> Any:
        """Do what a Call asks for, and return its answer. This is no call for users: it asks nobody whether it may."""
        if call.what == "restart":
            self._stop()
            return self._start()
        if call.what == "reset":
            return self._reset_prefix_cache()
        if call.what in ("generate", "score"):
            prompts, params = requests(call)
            found = self._finished(lambda: self.llm.generate(prompts, params, use_tqdm=False))
            return [found] if call.what == "score" else found
        if call.what in ("sleep", "wake_up"):
            return self._alive(lambda: getattr(self.llm, call.what)(*call.arguments))
        method, arguments = call.arguments
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
        """Return what `generate` gives. If it is broken off, nothing of it is left: the next one would get that."""
        try:
            return self._alive(generate)
        except BaseException as error:
            self._clear(error)
            raise

    def _clear(self, error: BaseException) -> None:
        """Abort the requests that a broken-off generate has left, and empty the prefix cache.

        That cache holds what the generate got to, and the next one's bits would depend on it. If this fails, the
        engine refuses to generate.
        """
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
        """Return what `act` gives. Raises NotServingError if the engine dies of it, or if there is none."""
        with self._noticing_death():
            if self.mode == "inprocess":
                return act()
            resources = self.llm.llm_engine.engine_core.resources
            return watched(act, lambda: resources.engine_dead, self._give_up)
