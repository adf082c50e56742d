"""The prefix cache of vLLM 0.32: a kept state makes other requests wait while a request that holds it is served.

A state that a step computes can be read only from the next step on, so a request that hits it waits. 0.32 counts the
state at the end of a prompt as computed in every step that serves a request which holds it, also if it was computed
before (`MambaManager._cache_partial_tail_block` in vllm/v1/core/single_type_kv_cache_manager.py). So the requests of
one prompt are admitted one after another. 0.31 does not, and 0.33 does not any more.
"""

from __future__ import annotations

from typing import Any

from fp8plan.model.schedule.pool import Block, Pool


class HoldersWaitPool(Pool):
    """A pool with the prefix cache of vLLM 0.32."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._again: dict[int, list[list[Block]]] = {}  # request -> its states that count as computed in `_again_at`
        self._again_at = -1

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if step == self._again_at:
            for held in self._again.values():
                self._new_states += held

    def cache(self, request: int, tokens: int) -> None:
        super().cache(request, tokens)
        if tokens // self._size == self._end(request):
            self._new_states += self._held(request)

    def start(self, request: int, step: int, computed: int, in_flight: int) -> None:
        end = self._end(request)
        # In its first step of decoding it still holds the state that the chunk in flight reads, or keeps inside.
        if in_flight and computed // self._size == end and computed - in_flight <= end * self._size:
            if step != self._again_at:
                self._again_at = step
                self._again.clear()
            self._again[request] = self._held(request)
        super().start(request, step, computed, in_flight)

    def stop(self, request: int) -> None:
        self._again.pop(request, None)  # a request of one token is not served again
        super().stop(request)

    def _end(self, request: int) -> int:
        """The number of whole blocks before the last token of a prompt."""
        return (self._prompts[request] - 1) // self._size

    def _held(self, request: int) -> list[list[Block]]:
        """The copies of the state of the last such block, in each group in which the request holds it."""
        number = self._end(request) - 1
        return [
            self._same(at, request, number)
            for at in self._states
            if 0 <= number < len(self._tables[at][request].blocks)
            and self._tables[at][request].blocks[number] is not None
        ]
