"""The timing of an engine's rollouts and the guard's verdicts on them, worked out while the trainer goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.runtime.engine.access import compiled_files
from fp8plan.runtime.guard.observation import Observation, observation_of
from fp8plan.runtime.mismatch.sampling import Sampling

if TYPE_CHECKING:
    from fp8plan.runtime.guard.guard import Guard, Verdict

PREEMPTIONS: Final = "vllm:num_preemptions_total"  # vLLM's counter, in Prometheus's default registry


class Judged(NamedTuple):
    """A rollout's observation, and the verdict on it. off: why one of the two is missing."""

    observation: Observation | None = None
    verdict: Verdict | None = None
    off: str | None = None


def judged(guard: Guard | None, observe: Callable[[], Observation | None]) -> Judged:
    """Let the guard judge an observation. An error goes into `off`, as it must not cost the rollout."""
    observation = None
    try:
        observation = observe()
        return Judged(observation, None if guard is None or observation is None else guard.after_rollout(observation))
    except Exception as error:
        return Judged(observation, None, f"the last rollout cannot be compared: {error}")


class Judge:
    """The timer of an engine's rollouts. `last` is the Judged of the last one; reading it waits for the guard.

    engine: has `guard` and `guard_off`
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "fp8plan-guard")  # one thread keeps the order
        self._judging: Future[Judged] | None = None
        self._kl_k3: float | None = None
        self._ended: float | None = None  # the last rollout, by time.perf_counter

    @property
    def last(self) -> Judged:
        return Judged() if self._judging is None or self._judging.cancelled() else self._judging.result()

    def wait(self) -> None:
        """Wait until no rollout is being judged."""
        if self._judging is not None:
            wait([self._judging])

    def close(self) -> None:
        """Judge no more rollouts after the one in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def report_kl(self, kl_k3: float) -> None:
        """Take the mean k3 of the last rollout, for the next verdict. Raises ConfigError if it is not finite."""
        if not isfinite(kl_k3):
            raise ConfigError(f"kl_k3 is {kl_k3!r}; allowed: a finite number (nan comes from log-probs that hold it)")
        self._kl_k3 = kl_k3

    def begin(self, llm: Any, sampling_params: Any) -> Callable[[Sequence[Any]], None]:
        """Start the clock of a rollout. Return the function to call with its outputs once they are there.

        sampling_params: as vllm.LLM.generate takes them; None: those of the model's generation config
        """
        before, begun = counts(), time.perf_counter()

        def ended(outputs: Sequence[Any]) -> None:
            seconds = time.perf_counter() - begun
            preemptions, compiled = (max(0, now - then) for now, then in zip(counts(), before, strict=True))
            config = llm.llm_engine.vllm_config
            cache = config.cache_config
            kl_k3, kv_clipped = self.heard(), tuple(self._engine.state.kv_clipped)

            def observe() -> Observation | None:
                if not any(len(response.token_ids) for output in outputs for response in output.outputs):
                    return None
                params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
                return observation_of(
                    outputs,
                    seconds,
                    sampling=Sampling.of(params, config.model_config.logprobs_mode),
                    preemptions=preemptions,
                    compiled_files=compiled,
                    kv_cache_tokens=cache.num_gpu_blocks * cache.block_size,
                    kl_k3=kl_k3,
                    kv_clipped=kv_clipped,
                )

            self.judge(observe)

        return ended

    def heard(self) -> float | None:
        """Return the KL that was reported, once."""
        kl_k3, self._kl_k3 = self._kl_k3, None
        return kl_k3

    def judge(self, observe: Callable[[], Observation | None]) -> None:
        """Let the guard judge the observation of a rollout that has ended, while the caller goes on."""
        before, self._ended = self._ended, time.perf_counter()
        self._judging = self._thread.submit(self._judged, observe, None if before is None else self._ended - before)

    def _judged(self, observe: Callable[[], Observation | None], since_s: float | None) -> Judged:
        def timed() -> Observation | None:
            seen = observe()
            return None if seen is None else seen.after(since_s)

        result = judged(self._engine.guard, timed)
        if self._engine.guard is not None and result != Judged():
            self._engine.guard_off = result.off
        return result


def counts() -> tuple[int, int]:
    """Count the preemptions so far, and the compiled kernels on disk."""
    from prometheus_client import REGISTRY

    # Only this metric: LLM.get_metrics collects all hundred of vLLM's, which takes milliseconds.
    samples = [sample for metric in REGISTRY.restricted_registry([PREEMPTIONS]).collect() for sample in metric.samples]
    return int(sum(sample.value for sample in samples if sample.name == PREEMPTIONS)), compiled_files()
