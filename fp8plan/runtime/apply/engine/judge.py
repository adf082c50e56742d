"""The rollouts of an engine: which calls belong to one, how long it took, and the guard's verdict on it.

A rollout is opened and closed by whoever knows which calls make a batch (`with engine.rollout():`). It is judged once,
as one observation, while the trainer goes on. Until the first one is opened every call is a rollout of its own; from
then on a call outside is of no rollout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.engine.rollout_log import RolloutLog, responses_of
from fp8plan.runtime.watch.guard.guard import Judged, judged
from fp8plan.runtime.watch.guard.observation import Observation, joined

if TYPE_CHECKING:
    from fp8plan.runtime.apply.weight_sync.state import SyncState
    from fp8plan.runtime.watch.guard.guard import Verdict

MOST: Final = 64  # rollouts that are kept for a step that does not come
How = Literal["open", "beside", "alone"]  # a call beside the rollouts of its engine, as Judge.how says


class Judge:
    """The rollouts of an engine, and the guard's verdicts on them. Reading one waits for the guard.

    engine: has `guard` and `guard_off`
    state:  of the engine's weights; None: not known
    calls:  until a rollout is opened, each call is a rollout of its own; False: a call is one request of many

    opened: a rollout was opened; calls outside are not judged from then on
    """

    def __init__(self, engine: Any, state: SyncState | None = None, calls: bool = True) -> None:
        self._engine, self._state, self._calls = engine, state, calls
        self.opened = False
        self._open: RolloutLog | None = None
        self._thread = ThreadPoolExecutor(1, "fp8plan-guard")  # one thread keeps the order
        self._judging: Future[Judged] | None = None  # the last one
        self._since: deque[Future[Judged]] = deque(maxlen=MOST)  # rollouts that no step and no sync has followed
        self._followed: object = None  # the weights of these rollouts; None: a step has followed
        self._joined: tuple[list[Observation], Observation] | None = None
        self._kl_k3: float | None = None
        self._ended: float | None = None  # the last rollout, by time.perf_counter
        self._beside_s = 0.0  # seconds of the calls since then that were of no rollout

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Open a rollout: all calls in this `with` are one. Inside an open one they are the outer one's.

        If the `with` ends by an exception, or no call had tokens, nothing is judged and nothing is used up.
        """
        if self._open is not None:
            yield
            return
        if not self.opened:
            self.opened = True
            self._since.clear()
        log = self._open = RolloutLog()
        try:
            yield
        finally:
            self._open = None
        self._close(log)

    @property
    def how(self) -> How:
        """The kind of a call that begins now: in the open rollout, beside all, or alone, before any was opened."""
        if self._open is not None:
            return "open"
        return "beside" if self.opened else "alone"

    def begin(self, llm: Any, sampling_params: Any) -> Callable[[Sequence[Any]], None]:
        """Start the clock of a call. Return the function to call with its outputs once they are there.

        sampling_params: as vllm.LLM.generate takes them; None: those of the model's generation config
        """
        alone = self.how == "alone" and self._calls
        log = RolloutLog() if alone else self._open
        if log is not None:
            log.begin()
        begun = time.perf_counter()

        def ended(outputs: Sequence[Any]) -> None:
            now = time.perf_counter()
            if log is None:
                self._beside_s += now - begun
                return
            front = getattr(llm, "llm_engine", llm)  # an LLM's, or an AsyncLLM
            config = front.vllm_config
            params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
            log.kv_cache_tokens = (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size or None
            log.add(begun, now, responses_of(outputs), params, config.model_config.logprobs_mode)
            if alone:
                self._close(log)

        return ended

    def count(self, add: Callable[[RolloutLog], None], seconds: float) -> None:
        """Count a call that has ended, made by somebody else. add: adds it to a log"""
        if self.how == "beside":
            self._beside_s += seconds
            return
        log = self._open or RolloutLog()
        add(log)
        if self._open is None:
            self._close(log)

    @property
    def last(self) -> Judged:
        """The rollouts since the last step or sync as one observation, with the verdict on the last of them.

        A step says that it has followed by `report_kl`. Without an open rollout, the last call alone.
        """
        done = [future.result() for future in self._since if not future.cancelled()]
        if not done:
            return Judged()
        seen = [each.observation for each in done if each.observation is not None]
        if len(seen) < 2:
            return done[-1]
        if self._joined is None or self._joined[0] != seen:
            self._joined = seen, joined(seen)
        return done[-1]._replace(observation=self._joined[1])

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the last rollout, with the guard's advice that still stands."""
        verdict, guard = self.last.verdict, self._engine.guard
        return verdict if verdict is None or guard is None else guard.standing(verdict)

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
        self._kl_k3, self._followed = kl_k3, None

    def synced(self) -> None:
        """Note new weights of an engine without a state: the next rollout is no part of the last observation."""
        self._followed = None

    def _close(self, log: RolloutLog) -> None:
        """Let the guard judge a rollout that has ended, while the caller goes on."""
        if not log.trajectories:
            return
        log.end()
        kl_k3, self._kl_k3 = self._kl_k3, None
        idle_s = None if self._ended is None else max(0.0, log.begun - self._ended - self._beside_s)
        self._ended, self._beside_s = log.ended, 0.0
        clipped = () if self._state is None else tuple(self._state.kv_clipped)

        def observe() -> Observation | None:
            seen = log.observed()
            if seen is None:
                return None
            return Observation(**seen, kl_k3=kl_k3, kv_clipped=clipped, idle_s=idle_s)

        weights = ("weights", None if self._state is None else self._state.version)
        if weights != self._followed or not self.opened:
            self._since.clear()
        self._followed, self._joined = weights, None
        self._judging = self._thread.submit(self._judged, observe)
        self._since.append(self._judging)

    def _judged(self, observe: Callable[[], Observation | None]) -> Judged:
        result = judged(self._engine.guard, observe)
        if self._engine.guard is not None:
            self._engine.guard_off = result.off
        return result


class Judging:
    """An engine whose rollouts a Judge puts together."""

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
