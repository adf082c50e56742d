"""RolloutEngine: a Plan applied to the real vLLM, and new policy weights every RL step.

    engine = RolloutEngine.from_plan(plan, "Qwen/Qwen3-8B")
    for step in range(steps):
        engine.sync_weights(trainer.named_bf16_tensors())
        outputs = engine.generate(prompts, sampling_params)
        engine.follow(engine.verdict)

`engine.llm` is vLLM's own LLM. Generate through the engine: only it knows when the weights must not be used.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fp8plan.errors import ConfigError, NotServingError, SyncError
from fp8plan.runtime.cpu_kernels import register
from fp8plan.runtime.engine_base import EngineBase
from fp8plan.runtime.guarding.facts import Observation, observation_of
from fp8plan.runtime.guarding.ladder import GuardSettings
from fp8plan.runtime.launch import Launch, launch
from fp8plan.runtime.sync_state import Call, Procedure, Scored, SyncReport, SyncSettings, rpc
from fp8plan.runtime.warm_up import compiled_files, freeze_garbage

if TYPE_CHECKING:
    from fp8plan.model.plan import Plan
    from fp8plan.runtime.guard import Verdict
    from fp8plan.runtime.transfer import Rendezvous

Answer = TypeVar("Answer")
MODES = ("inprocess", "multiprocess")

# With async scheduling vLLM frees the last blocks a moment after the last token is out.
RESET_TRIES, RESET_WAIT_S = 50, 0.1

# How often it is asked whether the engine's process lives, and how long a dead one's last answers may take.
WATCH_S, LAST_WORDS_S = 1.0, 5.0


class RolloutEngine(EngineBase):
    """A vllm.LLM with a plan's precision; `from_plan` makes one.

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
        staged_on = launched.device if mode == "multiprocess" else None
        super().__init__(launched, settings, staged_on, guard or GuardSettings())
        self.mode = mode
        self._judge = ThreadPoolExecutor(1, "fp8plan-guard")  # while the trainer works; one thread keeps the order
        self._judging: Future[Verdict] | None = None
        self.llm: Any = None
        self._start()
        try:
            self._drive(self._opening())
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        model_path: str | None = None,
        *,
        choice: int | None = None,
        mode: Literal["inprocess", "multiprocess"] = "inprocess",
        sync: SyncSettings | None = None,
        remote: bool = False,
        guard: GuardSettings | None = None,
        keep_bf16: tuple[int, int] = (0, 0),
        **vllm_kwargs: Any,
    ) -> RolloutEngine:
        """Start vLLM as the plan says.

        model_path:  folder or Hugging Face id of the BF16 checkpoint; the plan's model unless given
        choice:      index into plan.choices; the chosen one unless given
        mode:        the engine in this process, or in one of its own
        sync, guard: how weights are synced, and when the guard advises to step down; None: as planned
        remote:      whether the trainer's tensors come over a link (fp8plan.runtime.transfer)
        keep_bf16:   first and last layers of the model whose linears stay BF16
        vllm_kwargs: further arguments of vllm.LLM, which win over the plan's limits, but not over its precision

        Raises ConfigError if vLLM's version is not supported, or for a plan, model or argument that cannot be applied.
        """
        launched = launch(plan, model_path, choice, keep_bf16, vllm_kwargs)
        return cls(launched, sync or SyncSettings.planned(launched.precision, remote), mode, guard)

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
                    full tensors in BF16 on any device (or FP8 and scales, by SyncSettings.weights_in)
        manifest:   (name, dtype, shape) of each, for an iterator. Without it, the checkpoint's tensors are expected
        kv_amax:    largest |q|, |k|, |v| of each attention layer, from the trainer; else they are measured here, on
        kv_prompts: token ids; unless given, sequences of the last rollout
        scored:     a sequence with the trainer's log-probs, which the new weights must agree with

        Raises SyncError; its message says which weights serve now.
        """
        return self._drive(self._sync(self._busy(), tensors, manifest, kv_amax, kv_prompts, scored))

    def join_transfer(self, where: Rendezvous) -> None:
        """Meet a trainer that sends over NCCL; returns once it has come (fp8plan.runtime.transfer)."""
        self._drive(self._join(where))

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """vLLM's generate; `verdict` is the guard's on it. Raises NotServingError while weights must not be used."""
        self._refuse_unless_serving()
        before = self._counts()
        begun = time.perf_counter()
        outputs = self._alive(lambda: self.llm.generate(prompts, sampling_params, **{"use_tqdm": False} | kwargs))
        seconds = time.perf_counter() - begun
        self._remember(outputs)
        observed = self._observation(outputs, seconds, before)
        if self.guard is not None and observed is not None:
            self._judging = self._judge.submit(self.guard.after_rollout, observed)
        return outputs

    @property
    def verdict(self) -> Verdict | None:
        """Of the last rollout; None before the first, and without a guard (`guard_off` says why)."""
        return None if self._judging is None else self._judging.result()

    def follow(self, verdict: Verdict | None) -> None:
        """Do what a verdict advises: nothing, recalibrate the KV cache, or restart in a safer precision, after which
        the engine refuses to generate until a sync."""
        if verdict is not None:
            self._drive(self._follow(self._busy(), verdict.action))

    def recalibrate_kv(self, *, kv_amax: Any = None, kv_prompts: Any = None) -> str | None:
        """Measure or set the KV scales anew, without new weights; where they come from."""
        return self._drive(self._recalibrate(self._busy(), kv_amax, kv_prompts))

    def kv_scales(self) -> dict[str, dict[str, float]]:
        """layer -> scales of q, k, v that the live engine uses, on the device and on the host."""
        return self._drive(rpc("fp8plan_kv_scales"))[0]

    def sleep(self, level: int = 1) -> None:
        """vLLM's sleep (enable_sleep_mode=True). Level 2 drops the weights: a sync must follow the wake-up."""
        self._alive(lambda: self.llm.sleep(level))
        if level >= 2:
            self.state.refusal = "the engine slept at level 2, which drops its weights"

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's wake_up, which may set KV scales to 1.0; they are put back."""
        self._alive(lambda: self.llm.wake_up(tags))
        self._drive(self._rescale())

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        if self.llm is not None:
            core, self.llm = self.llm.llm_engine.engine_core, None
            core.shutdown()
        gc.unfreeze()
        gc.collect()

    def _start(self) -> None:
        if self._judging is not None:
            wait([self._judging])  # the guard must not learn of another engine meanwhile
        os.environ.update(self.launch.env)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.mode == "multiprocess" else "0"
        register()  # vLLM loads plugins once: an engine before this one may have needed none
        from vllm import LLM

        self.llm = LLM(**self.launch.kwargs)
        freeze_garbage()

    def _busy(self) -> int:
        return 0 if self.state.dead else self.llm.llm_engine.get_num_unfinished_requests()

    def _counts(self) -> tuple[int, int]:
        """Preemptions so far and compiled kernels there are; for the guard."""
        if self.guard is None:
            return 0, 0
        found = [metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions"]
        return int(sum(found)), compiled_files()

    def _observation(self, outputs: Sequence[Any], seconds: float, before: tuple[int, int]) -> Observation | None:
        if self.guard is None or not any(len(one.token_ids) for output in outputs for one in output.outputs):
            return None
        preemptions, compiled = (now - then for now, then in zip(self._counts(), before, strict=True))
        cache = self.llm.llm_engine.vllm_config.cache_config
        pool = cache.num_gpu_blocks * cache.block_size
        return observation_of(outputs, seconds, preemptions=preemptions, kv_cache_tokens=pool, compiled_files=compiled)

    def _drive(self, procedure: Procedure) -> Any:
        """Run a procedure to its end, answering its calls."""
        try:
            call = next(procedure)
            while True:
                try:
                    answer = self._answer(call)
                except BaseException as error:
                    call = procedure.throw(error)
                else:
                    call = procedure.send(answer)
        except StopIteration as end:
            return end.value

    def _answer(self, call: Call) -> Any:
        if call.what == "restart":
            self.shutdown()
            return self._start()
        if call.what == "reset":
            return self._reset_prefix_cache()
        if call.what == "generate":
            from vllm import SamplingParams

            prompts, settings = call.arguments
            inputs = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
            params = SamplingParams(**{"detokenize": False} | settings)
            return self._alive(lambda: self.llm.generate(inputs, params, use_tqdm=False))
        method, arguments = call.arguments
        try:
            return self._alive(lambda: self.llm.collective_rpc(method, args=arguments))
        except Exception as error:
            raise self.lost(error) from error

    def _reset_prefix_cache(self) -> None:
        for _ in range(RESET_TRIES):
            if self._alive(self.llm.reset_prefix_cache):
                return
            time.sleep(RESET_WAIT_S)
        raise SyncError(f"vLLM did not empty its prefix cache within {RESET_TRIES * RESET_WAIT_S:.0f} s")

    def _alive(self, act: Callable[[], Answer]) -> Answer:
        """What `act` gives; if the engine dies of it, that is remembered."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return act() if self.mode == "inprocess" else self._watched(act)
        except EngineDeadError as error:
            self.state.dead = True
            raise NotServingError("the engine has died; the next sync_weights starts it again") from error

    def _watched(self, act: Callable[[], Answer]) -> Answer:
        """What `act` gives, or EngineDeadError: an LLM waits for ever for the outputs of a process that was killed."""
        from vllm.v1.engine.exceptions import EngineDeadError

        found: Future[Answer] = Future()

        def run() -> None:
            try:
                found.set_result(act())
            except BaseException as error:
                found.set_exception(error)

        resources = self.llm.llm_engine.engine_core.resources
        Thread(target=run, daemon=True, name="fp8plan-engine").start()
        while not wait([found], WATCH_S).done:
            if resources.engine_dead and not wait([found], LAST_WORDS_S).done:
                raise EngineDeadError
        return found.result()
