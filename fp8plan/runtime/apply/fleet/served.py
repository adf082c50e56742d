"""The sequences that replicas have served, so that a trajectory's next turn finds the replica that holds its prefix.

verl's load balancer calls this a sticky session, and routers of vLLM and SGLang session or prefix affinity. A caller
names trajectories, or their tokens tell: with token-in, token-out a turn's prompt begins with the last one's prompt and
answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from fp8plan.runtime.apply.engine.prefixes import Hashed, Prefixes

MOST: Final = 1 << 20  # trajectories that are remembered by name, and sequences that are remembered by their tokens


class Served:
    """The replicas that served trajectories, by the callers' names and by tokens; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._by_name: dict[Hashable, int] = {}
        self._by_tokens = Prefixes[int]()

    def named(self, names: Sequence[Hashable]) -> list[int | None]:
        """Return the replica that served each trajectory last; None for a new one."""
        return [self._by_name.get(name) for name in names]

    def continued(self, prompts: Sequence[Hashable]) -> list[int | None]:
        """Return the replica that served the longest sequence with which a prompt begins; None without one.

        prompts: token ids, as tuples; a text continues nothing
        """
        begun = (self._by_tokens.beginning(Hashed(each)) if isinstance(each, tuple) else [] for each in prompts)
        return [replicas[-1] if replicas else None for replicas in begun]

    def learn(self, name: Hashable | None, sequences: Sequence[Sequence[int]], replica: int) -> None:
        """Note a request's replica. name: of its trajectory, or None; sequences: its prompt with each answer"""
        if name is not None:
            self._by_name.pop(name, None)
            self._by_name[name] = replica
            if len(self._by_name) > MOST:
                del self._by_name[next(iter(self._by_name))]
            return
        for tokens in sequences:
            self._by_tokens.at(Hashed(tokens))[:] = [replica]
        while len(self._by_tokens) > MOST:
            self._by_tokens.forget_oldest()

    def forget(self, replica: int | None = None) -> None:
        """Forget what a replica has served, whose prefix cache is lost; None: what all have."""
        self._by_name = {name: owner for name, owner in self._by_name.items() if replica not in (None, owner)}
        self._by_tokens.keep(lambda owner: replica not in (None, owner))
