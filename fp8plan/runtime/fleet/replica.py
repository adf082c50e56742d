"""One replica of a fleet: a RolloutEngine in the process of a Ray actor. The fleet's calls are its methods."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from fp8plan.runtime.engine.engine import RolloutEngine
from fp8plan.runtime.engine.launch import Launch
from fp8plan.runtime.engine.rollout_timer import Judged
from fp8plan.runtime.fleet.sync import Packed, unpacked
from fp8plan.runtime.guard.fallback import Action, GuardSettings, GuardState
from fp8plan.runtime.weight_sync.shared_memory import Channel
from fp8plan.runtime.weight_sync.state import Call, SyncSettings


class Replica:
    """The engine of one replica. The fleet has the state of its weights; the engine's own never changes.

    Made in two steps, as what is raised in an actor's __init__ reaches nobody with its type.
    """

    def __init__(self, launched: Launch, settings: SyncSettings) -> None:
        self._launch, self._settings = launched, settings
        self._channel: Channel | None = None

    def start(self, mode: Literal["inprocess", "multiprocess"], guard: GuardSettings | None) -> tuple[int, int]:
        """Start vLLM. Returns the longest request and the vocabulary, in tokens. Raises as RolloutEngine does."""
        self._engine = RolloutEngine(self._launch, self._settings, mode, guard)
        return self._engine.sizes()

    def answer(self, call: Call) -> Any:
        """Do what a Call asks for."""
        self._close()
        found = self._engine.answer(call)
        if call == COMMIT:  # a sync ends what a broken-off generate has left
            self._engine.state.refusal = None
        return found

    def load(self, method: str, numbers: Sequence[int], parts: Sequence[Packed]) -> Any:
        """Hand a chunk of tensors to a worker's method."""
        if self._channel is None:
            self._channel = Channel(self._engine.state.staged_on, self._settings.chunk_bytes)
        found = self._engine.answer(Call("rpc", self._channel.message(method, numbers, unpacked(parts))))
        self._channel.close()  # all workers have it open
        return found

    def generate(self, prompts: Any, sampling_params: Any, more: dict[str, Any]) -> tuple[list[Any], float]:
        """Return the RequestOutputs, and the seconds that they took."""
        begun = time.perf_counter()
        outputs = self._engine.generate(prompts, sampling_params, **more)
        return outputs, time.perf_counter() - begun

    def judgement(self) -> Judged:
        """Wait for the guard's verdict on the last rollout."""
        return Judged(self._engine.observation, self._engine.verdict, self._engine.guard_off)

    def report_kl(self, kl_k3: float) -> None:
        """Tell the guard the KL of the last rollout."""
        self._engine.report_kl(kl_k3)

    def remember(self, rung: Action) -> None:
        """Tell the guard the deepest rung that the fleet has taken."""
        guard = self._engine.guard
        if guard is not None and guard.state.rung != rung:
            guard.state = GuardState(rung=rung)

    def stop(self) -> None:
        """Shut vLLM down: its own processes would outlive this one's."""
        self._close()
        self._engine.shutdown()

    def _close(self) -> None:
        """Let go of the memory that the chunks of a sync went through."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


COMMIT = Call("rpc", ("fp8plan_commit", ()))
