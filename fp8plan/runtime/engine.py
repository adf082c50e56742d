"""RolloutEngine: a Plan applied to the real vLLM, and new policy weights every RL step.

    engine = RolloutEngine.from_plan(plan, "Qwen/Qwen3-8B")
    for step in range(steps):
        engine.sync_weights(trainer.named_bf16_tensors())
        outputs = engine.generate(prompts, sampling_params)

`engine.llm` is vLLM's own LLM. Generate through the engine: only it knows when the weights must not be used.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fp8plan.errors import ConfigError, NotServingError, SyncError
from fp8plan.runtime.launch import Launch, launch
from fp8plan.runtime.weight_sync import Call, Procedure, SyncReport, SyncSettings, SyncState, kv_scales, rpc, sync

if TYPE_CHECKING:
    from fp8plan.model.plan import Plan

MODES = ("inprocess", "multiprocess")

# Sequences of the last rollout that KV scales are calibrated on, and tokens of each.
CALIBRATION_SEQUENCES, CALIBRATION_TOKENS = 16, 1024


class EngineBase:
    """What the engines of this process and of asyncio share: how they were started, and their SyncState."""

    def __init__(self, launched: Launch, settings: SyncSettings, staged_on: str | None) -> None:
        self.launched = launched
        self.state = SyncState(settings, staged_on, launched.fp8_kv, expected=launched.checkpoint)
        self.facts: dict[str, Any] = {}
        self._rollout: list[list[int]] = []

    @property
    def serving(self) -> bool:
        return self.state.refusal is None and not self.state.dead

    def _refuse_unless_serving(self) -> None:
        if self.state.dead:
            raise NotServingError("the engine has died; call sync_weights with all weights, which starts it again")
        if self.state.refusal is not None:
            raise NotServingError(f"{self.state.refusal}; call sync_weights with all weights")

    def _opening(self) -> Generator[Call, Any, None]:
        """What every start ends with: read what runs, and refuse what the plan did not ask for."""
        answers = yield from rpc("fp8plan_facts")
        self.facts = answers[0]
        self.launched.refuse_other(self.facts)

    def _sync(
        self, source: Any, manifest: Any, kv_amax: Any, kv_prompts: Sequence[Sequence[int]] | None, busy: int
    ) -> Generator[Call, Any, SyncReport]:
        state = self.state
        if state.running:
            raise SyncError("another sync is running; wait for it. The weights that it leaves will serve")
        if busy:
            raise SyncError(
                f"{busy} requests are running; finish or abort them before a sync. Nothing was sent; the old weights serve"
            )
        state.running = True
        try:
            if state.dead:
                yield Call("restart")
                state.prepared.clear()
                state.dead, state.kv_scales = False, None
                state.refusal = "the engine was started again with the weights of its checkpoint"
                yield from self._opening()
            if state.settings.weights_in == "fp8_block" and not state.quantised and state.expected is not None:
                yield from self._learn_quantised()
            prompts, where = self._calibration(kv_prompts)
            return (yield from sync(state, source, manifest, kv_amax, prompts, where))
        finally:
            state.running = False

    def _learn_quantised(self) -> Generator[Call, Any, None]:
        """Which of the checkpoint's tensors the engine holds in FP8."""
        plain = [[name, dtype, list(shape)] for name, dtype, shape in self.state.expected or ()]
        answers = yield from rpc("fp8plan_prepare", plain, self.state.settings.in_place)
        self.state.quantised = tuple(answers[0]["quantised"])

    def _calibration(self, given: Sequence[Sequence[int]] | None) -> tuple[Sequence[Sequence[int]], str]:
        """Token ids to calibrate KV scales on: those given, the last rollout's, or random ones."""
        if given is not None:
            return given, "calibration prompts"
        if self._rollout:
            return self._rollout, "sequences of the last rollout"
        import numpy as np

        chance, length = np.random.default_rng(0), min(256, self.launched.max_model_len - 1)
        tokens = chance.integers(0, self.launched.vocabulary, (CALIBRATION_SEQUENCES, length))
        return tokens.tolist(), "random tokens, as no rollout has run yet"

    def _remember(self, outputs: Sequence[Any]) -> None:
        if self.state.fp8_kv:
            most = min(CALIBRATION_TOKENS, self.launched.max_model_len - 1)
            chosen = outputs[:: max(1, len(outputs) // CALIBRATION_SEQUENCES)][:CALIBRATION_SEQUENCES]
            self._rollout = [
                [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids][:most] for output in chosen
            ]

    def _rescale(self) -> Procedure:
        """Put the KV scales back, after what sets them to 1.0."""
        if self.state.kv_scales is not None:
            yield from rpc("fp8plan_set_kv_scales", self.state.kv_scales)

    def _recalibrate(self, kv_amax: Any, kv_prompts: Any) -> Procedure:
        prompts, where = self._calibration(kv_prompts)
        used = yield from kv_scales(self.state, kv_amax, prompts, where)
        yield Call("reset")
        return used


class RolloutEngine(EngineBase):
    """A vllm.LLM with a plan's precision. Make one with `from_plan`."""

    def __init__(self, launched: Launch, settings: SyncSettings, mode: Literal["inprocess", "multiprocess"]) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; allowed: {', '.join(MODES)}, or AsyncRolloutEngine for AsyncLLM")
        super().__init__(launched, settings, launched.device if mode == "multiprocess" else None)
        self.mode = mode
        self.llm: Any = None
        self._start()
        self._drive(self._opening())

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        model_path: str | None = None,
        *,
        choice: int | None = None,
        mode: Literal["inprocess", "multiprocess"] = "inprocess",
        sync: SyncSettings | None = None,
        keep_bf16: tuple[int, int] = (0, 0),
        **vllm_kwargs: Any,
    ) -> RolloutEngine:
        """Start vLLM as the plan says.

        model_path:  folder or Hugging Face id of the BF16 checkpoint; the plan's model unless given
        choice:      index into plan.choices; the chosen one unless given
        mode:        the engine in this process, or in one of its own
        sync:        how weights are synced
        keep_bf16:   first and last layers of the model whose linears stay BF16
        vllm_kwargs: further arguments of vllm.LLM, which win over the plan's limits, but not over its precision

        Raises ConfigError if vLLM's version is not supported, or for a plan, model or argument that cannot be applied.
        """
        return cls(launch(plan, model_path, choice, keep_bf16, vllm_kwargs), sync or SyncSettings(), mode)

    def sync_weights(
        self,
        tensors: Any,
        *,
        manifest: Any = None,
        kv_amax: Mapping[str, Sequence[float]] | None = None,
        kv_prompts: Sequence[Sequence[int]] | None = None,
    ) -> SyncReport:
        """Make new weights serve: complete, checked, KV scales recalibrated, prefix cache emptied.

        tensors:    {name: tensor}, a list of pairs, an iterator of pairs, or a vLLM WeightSource; Hugging Face names,
                    full tensors in BF16 on any device (or FP8 and scales, by SyncSettings.weights_in)
        manifest:   (name, dtype, shape) of each, for an iterator. Without it, the checkpoint's tensors are expected
        kv_amax:    largest |q|, |k|, |v| of each attention layer, from the trainer; else they are measured here, on
        kv_prompts: token ids; unless given, sequences of the last rollout

        Raises SyncError; its message says which weights serve now.
        """
        return self._drive(self._sync(tensors, manifest, kv_amax, kv_prompts, self._busy()))

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """vLLM's generate. Raises NotServingError while the weights are not to be used."""
        self._refuse_unless_serving()
        outputs = self._alive(lambda: self.llm.generate(prompts, sampling_params, **{"use_tqdm": False} | kwargs))
        self._remember(outputs)
        return outputs

    def recalibrate_kv(self, *, kv_amax: Any = None, kv_prompts: Any = None) -> str | None:
        """Measure or set the KV scales anew, without new weights; where they come from."""
        return self._drive(self._recalibrate(kv_amax, kv_prompts))

    def kv_scales(self) -> dict[str, dict[str, float]]:
        """layer -> scales of q, k, v that the live engine uses, on the device and on the host."""
        return self._drive(rpc("fp8plan_kv_scales"))[0]

    def sleep(self, level: int = 1) -> None:
        self._alive(lambda: self.llm.sleep(level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's wake_up, which sets KV scales to 1.0; they are put back."""
        self._alive(lambda: self.llm.wake_up(tags))
        self._drive(self._rescale())

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        if self.llm is not None:
            core = self.llm.llm_engine.engine_core
            self.llm = None
            core.shutdown()
        gc.unfreeze()
        gc.collect()

    def _start(self) -> None:
        os.environ.update(self.launched.env)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.mode == "multiprocess" else "0"
        from vllm import LLM

        self.llm = LLM(**self.launched.kwargs)
        # vLLM freezes what stays in its own processes; in the one that holds an LLM, each full collection stops it.
        gc.collect()
        gc.freeze()

    def _busy(self) -> int:
        return 0 if self.state.dead else self.llm.llm_engine.get_num_unfinished_requests()

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
            return self._alive(self.llm.reset_prefix_cache)
        if call.what == "generate":
            from vllm import SamplingParams

            prompts, settings = call.arguments
            inputs = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
            return self._alive(lambda: self.llm.generate(inputs, SamplingParams(**settings), use_tqdm=False))
        method, arguments = call.arguments
        return self._alive(lambda: self.llm.collective_rpc(method, args=arguments))

    def _alive(self, act: Any) -> Any:
        """What `act` gives; if the engine dies of it, that is remembered."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return act()
        except EngineDeadError as error:
            self.state.dead = True
            raise NotServingError("the engine has died; the next sync_weights starts it again") from error
