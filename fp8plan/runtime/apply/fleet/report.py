"""The report of a fleet's rollout: its requests by replica, beside the planner's static split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fp8plan.runtime.apply.fleet.routing import consecutive, largest
from fp8plan.runtime.watch.guard.observation import Observation, totals
from fp8plan.runtime.watch.mismatch.sampling import Sampling

if TYPE_CHECKING:
    from fp8plan.runtime.watch.guard.guard import Judged


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of one rollout.

    count:           number of replicas
    observation:     of all replicas together
    parts:           replica -> the requests that it answered, in the order in which it got them
    tokens:          tokens generated for each request, over its samples
    expected:        tokens that were expected of each request, over its samples
    replica_seconds: replica -> wall time of its part, with that of a part that it took over
    rerouted:        requests whose replica died, which others then answered
    returning:       requests that continue a trajectory which a replica had served with these weights
    kept:            those of them that came to this replica
    judgements:      those of the replicas' guards on their parts; empty until they are asked
    """

    count: int
    observation: Observation
    parts: Mapping[int, Sequence[int]]
    tokens: Sequence[int]
    expected: Sequence[float]
    replica_seconds: Mapping[int, float]
    rerouted: int
    returning: int = 0
    kept: int = 0
    judgements: Mapping[int, Judged] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Routing], observation: Observation) -> Routing:
        """Calls one after the other as one rollout, which is not judged so far. observation: of all of them"""
        by_replica: dict[int, list[int]] = {}
        seconds: dict[int, float] = {}
        before = 0
        for part in parts:
            for number, requests in part.parts.items():
                by_replica.setdefault(number, []).extend(before + request for request in requests)
            for number, took_s in part.replica_seconds.items():
                seconds[number] = seconds.get(number, 0.0) + took_s
            before += len(part.tokens)
        return cls(
            count=parts[0].count,
            observation=observation,
            parts=by_replica,
            tokens=[tokens for part in parts for tokens in part.tokens],
            expected=[tokens for part in parts for tokens in part.expected],
            replica_seconds=seconds,
            rerouted=sum(part.rerouted for part in parts),
            returning=sum(part.returning for part in parts),
            kept=sum(part.kept for part in parts),
        )

    def judged(self, judgements: Mapping[int, Judged]) -> Routing:
        """Return the same with the guards' judgements, and their counts and sampling in the observation."""
        ours = {number: judged for number, judged in judgements.items() if number in self.parts}
        seen = [judged.observation for judged in ours.values() if judged.observation is not None]
        if not seen:
            return replace(self, judgements=ours)
        whole = replace(
            self.observation,
            **totals(seen),
            kv_cache_tokens=seen[0].kv_cache_tokens,
            sampling=Sampling.mixed(part.sampling for part in seen),
        )
        return replace(self, observation=whole, judgements=ours)

    @property
    def replicas(self) -> list[int]:
        """The replica that answered each request."""
        owner = {request: replica for replica, part in self.parts.items() for request in part}
        return [owner[request] for request in range(len(self.tokens))]

    @property
    def routed_tokens(self) -> int:
        """The tokens of the replica with most."""
        return int(largest([list(part) for part in self.parts.values()], self.tokens))

    @property
    def static_tokens(self) -> int:
        """The tokens of the replica with most, had the batch been split into consecutive parts."""
        return int(largest(consecutive(len(self.tokens), self.count), self.tokens))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a record."""
        return {
            "replicas": self.replicas,
            "expected": list(self.expected),
            "tokens": list(self.tokens),
            "seconds": self.observation.seconds,
            "replica_seconds": dict(self.replica_seconds),
            "routed_tokens": self.routed_tokens,
            "static_tokens": self.static_tokens,
            "rerouted": self.rerouted,
            "returning": self.returning,
            "kept": self.kept,
        }

    def __str__(self) -> str:
        """Return one line for a log."""
        text = f"{len(self.tokens)} requests in {self.observation.seconds:.3f} s; most tokens of a replica: "
        text += f"{self.routed_tokens:,} routed, {self.static_tokens:,} split statically"
        if self.returning:
            text += f"; {self.kept:,} of {self.returning:,} returning trajectories came to their replica"
        if self.observation.cached_share is not None:
            text += f"; {self.observation.cached_share:.0%} of the prompts' tokens were cached"
        return text + (f"; {self.rerouted} requests routed again" if self.rerouted else "")
