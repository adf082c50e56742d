"""The way of a procedure's Calls to replicas, and of a rollout's requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fp8plan.errors import NotServingError
from fp8plan.runtime.fleet.members import Members
from fp8plan.runtime.fleet.requests import Requests
from fp8plan.runtime.fleet.routing import routed
from fp8plan.runtime.fleet.sync import STREAMED, addressed, merged, packed
from fp8plan.runtime.weight_sync.state import Call

Answers = list[dict[str, Any]]


class Calls:
    """What answers the Calls of one procedure.

    numbers: replicas that are asked; None: all that live
    keep:    keep the chunks of tensors that pass in the object store

    While replicas load a chunk of tensors, the next is being packed: a chunk's answers are those of the one before.
    """

    def __init__(self, members: Members, numbers: Sequence[int] | None = None, keep: bool = False) -> None:
        self._members, self._numbers, self._keep = members, numbers, keep
        self._under_way: tuple[Call, dict[int, Any]] | None = None
        self.chunks: list[tuple[Sequence[int], Any]] = []
        self.number = -1  # of the manifest of the sync that has begun

    def answer(self, call: Call) -> Any:
        """Ask the replicas, and return their answer as one. Raises NotServingError if none is left."""
        method = call.arguments[0] if call.what == "rpc" else None
        if method in STREAMED:
            return self._streamed(*call.arguments)
        late = self._landed()
        if method != "fp8plan_abort" and any("error" in answer for answer in late):
            return late
        if method == "fp8plan_begin":
            self.number, self.chunks = call.arguments[1][0], []
        asked = self._asked()
        workers = self._members.terms.workers
        parts = {number: (addressed(call, at, len(asked), workers),) for at, number in enumerate(asked)}
        return self._collected(call, self._members.submit("answer", parts))

    def _streamed(self, method: str, arguments: tuple[Sequence[int], Sequence[Any]]) -> Answers:
        """Send a chunk, and return the answers to the one before."""
        numbers, tensors = arguments
        reference = self._members.put(packed(tensors))
        if self._keep:
            self.chunks.append((numbers, reference))
        late = self._landed()
        sent = self._members.submit("load", dict.fromkeys(self._asked(), (method, numbers, reference)))
        self._under_way = Call("rpc", (method, ())), sent
        return late

    def _landed(self) -> Answers:
        """Return the answers to the chunk that is under way."""
        if self._under_way is None:
            return []
        call, references = self._under_way
        self._under_way = None
        found: Answers = self._collected(call, references)
        return found

    def _asked(self) -> list[int]:
        return sorted(self._members.living if self._numbers is None else self._numbers)

    def _collected(self, call: Call, references: Mapping[int, Any]) -> Any:
        answers = {}
        for number, answer in self._members.collect(references).items():
            if call.what == "rpc" and (lost := [text["error"] for text in answer if text.get("lost")]):
                self._members.lose(number, lost[0])
            else:
                answers[number] = answer
        if not answers:
            raise NotServingError(f"no replica is left ({self._members.obituary()}); the next sync_weights starts all")
        return merged(call, answers)


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


def dispatched(members: Members, serving: Sequence[int], requests: Requests, expected: Sequence[float]) -> Dispatched:
    """Have requests answered by these replicas. What a replica had when it died is asked of the others, from the start.

    Raises NotServingError once none is left, and what vLLM raises for a request.
    """
    loads = requests.loads(expected)
    outputs: list[Any] = [None] * len(loads)
    parts: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    rerouted, left = 0, list(range(len(loads)))
    while left:
        alive = [number for number in serving if number in members.living]
        if not alive:
            raise NotServingError(
                f"{len(left)} of {len(loads)} requests are unanswered, and no replica that has the weights is left "
                f"({members.obituary()}); the outputs of the others are lost, too. Type: fleet.sync_weights(...)"
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
        left = [request for number in asked.keys() - answers.keys() for request in asked[number]]
        rerouted += len(left)
    return Dispatched(outputs, parts, seconds, rerouted)
