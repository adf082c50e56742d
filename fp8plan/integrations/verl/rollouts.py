"""The requests of one rollout, as a server has seen them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fp8plan.runtime.engine.rollout_timer import counts
from fp8plan.runtime.mismatch.sampling import Sampling


@dataclass(slots=True)
class RolloutLog:
    """The requests since the last `clear`: rows of (begun, ended) in seconds, tokens of prompt and response, prompt;
    and their samplings.
    """

    rows: list[tuple[float, float, int, int, int]] = field(default_factory=list)
    before: tuple[int, int] = (0, 0)
    samplings: set[Sampling] = field(default_factory=set)

    def clear(self) -> None:
        self.rows, self.before, self.samplings = [], counts(), set()

    def add(self, begun: float, ended: float, prompt: list[int], response: int, sampling: Sampling) -> None:
        """Count a request in. response: tokens"""
        if response:
            self.samplings.add(sampling)
            self.rows.append((begun, ended, len(prompt), response, hash(tuple(prompt))))

    def observed(self) -> dict[str, Any] | None:
        """The fields of an Observation: from the first request's start to the last one's end. None without requests."""
        if not self.rows:
            return None
        begun, ended, prompts, responses, ids = zip(*self.rows, strict=True)
        preemptions, compiled = (max(0, now - then) for now, then in zip(counts(), self.before, strict=True))
        return {
            "seconds": max(ended) - min(begun),
            "arrival_s": max(begun) - min(begun),
            "prompt_lengths": list(prompts),
            "response_lengths": list(responses),
            "prompt_ids": list(ids),
            "preemptions": preemptions,
            "compiled_files": compiled,
            "sampling": Sampling.mixed(self.samplings),
        }
