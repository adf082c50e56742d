"""The way of a procedure's Calls to replicas, and of their answers back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fp8plan.errors import NotServingError
from fp8plan.runtime.fleet.members import Members
from fp8plan.runtime.fleet.sync import STREAMED, addressed, merged, packed
from fp8plan.runtime.weight_sync.state import Call

Answers = list[dict[str, Any]]


class Calls:
    """The answerer of one procedure's Calls.

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
        if method == "fp8plan_abort":
            with suppress(Exception):  # whatever became of the chunk, who lives must close its sync
                self._landed()
        else:
            late = self._landed()
            if any("error" in answer for answer in late):
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
