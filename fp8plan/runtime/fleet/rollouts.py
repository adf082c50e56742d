"""The rollouts of a fleet: requests dealt out to replicas, their outputs, and what their guards say of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8plan.errors import NotServingError
from fp8plan.runtime.fleet.members import Members
from fp8plan.runtime.fleet.report import Finished
from fp8plan.runtime.fleet.requests import Requests
from fp8plan.runtime.fleet.routing import SeenLengths, given_lengths, routed
from fp8plan.runtime.guard.observation import observation_of


class Rollouts:
    """The last rollout of a fleet, and the lengths that its prompts have had.

    expected_tokens: of a response to a prompt that was never seen
    """

    def __init__(self, members: Members, expected_tokens: float) -> None:
        self._members = members
        self._seen = SeenLengths(expected_tokens)
        self._last: Finished | None = None

    def run(self, serving: Sequence[int], requests: Requests, lengths: Sequence[float] | None) -> list[Any]:
        """Return vLLM's RequestOutputs of one rollout, in the order of the prompts.

        serving: replicas that may be asked
        lengths: tokens to expect of one response to each prompt; None: as they were seen before

        Raises ConfigError for lengths that make no sense, and as `dispatched` does.
        """
        names = requests.names
        expected = self._seen.expected(names) if lengths is None else given_lengths(lengths, len(names))
        loads = requests.loads(expected)
        begun = time.perf_counter()
        done = dispatched(self._members, serving, requests, loads)
        seconds = time.perf_counter() - begun
        samples = [[len(one.token_ids) for one in output.outputs if len(one.token_ids)] for output in done.outputs]
        self._last = None
        if any(samples):
            self._last = Finished(
                observation=observation_of(done.outputs, seconds),
                parts=done.parts,
                samples=[len(some) for some in samples],
                expected=loads,
                replica_seconds=done.seconds,
                rerouted=done.rerouted,
            )
            self._seen.learn(names, [sum(some) / max(1, len(some)) for some in samples])
        return done.outputs

    def judged(self) -> Finished | None:
        """Return the last rollout once the replicas' guards have judged it; None before the first."""
        if self._last is not None and not self._last.judgements:
            asked = self._members.submit("judgement", dict.fromkeys(self._last.parts, ()))
            self._last = self._last.judged(self._members.collect(asked))
        return self._last


class Dispatched(NamedTuple):
    """Requests that have been answered.

    outputs:  RequestOutputs, in the order of the requests
    parts:    replica -> the requests that it answered, in the order in which it got them
    seconds:  replica -> wall time of its parts
    rerouted: requests whose replica died, which others then answered
    """

    outputs: list[Any]
    parts: dict[int, list[int]]
    seconds: dict[int, float]
    rerouted: int


def dispatched(members: Members, serving: Sequence[int], requests: Requests, loads: Sequence[float]) -> Dispatched:
    """Have requests answered by these replicas. What a replica had when it died is asked of the others, from the start.

    Raises NotServingError once none is left, and what vLLM raises for a request.
    """
    outputs: list[Any] = [None] * len(loads)
    parts: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    rerouted, left = 0, list(range(len(loads)))
    while left:
        alive = [number for number in serving if number in members.living]
        if not alive:
            raise NotServingError(
                f"{len(left)} of {len(loads)} requests are unanswered, and no replica that has the weights is left; "
                f"what was answered is lost, too. Dead: {members.obituary() or 'none'}. Call sync_weights"
            )
        split = routed([loads[request] for request in left], len(alive))
        asked = {number: [left[at] for at in part] for number, part in zip(alive, split, strict=True) if part}
        answers = members.collect(
            members.submit("generate", {number: requests.take(part) for number, part in asked.items()})
        )
        for number, (found, took) in answers.items():
            for request, output in zip(asked[number], found, strict=True):
                outputs[request] = output
            parts.setdefault(number, []).extend(asked[number])
            seconds[number] = seconds.get(number, 0.0) + took
        left = sorted(request for number in asked.keys() - answers.keys() for request in asked[number])
        rerouted += len(left)
    return Dispatched(outputs, parts, seconds, rerouted)
