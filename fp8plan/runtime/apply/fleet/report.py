"""The report of a fleet's rollout: the replica of each request, compared with the planner's static split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.errors import Fp8PlanError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.anchor import Anchor, corrected
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import rollout, schedules
from fp8plan.runtime.apply.fleet.routing import Split, consecutive, largest
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation, joined, with_pool
from fp8plan.runtime.watch.mismatch.sampling import Sampling

if TYPE_CHECKING:
    from fp8plan.runtime.watch.guard.guard import Judged


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of one rollout, beside the static split (consecutive parts, as the planner assumes).

    replicas:        number of the replica that answered each request
    expected:        tokens that were expected of each request, over its samples
    tokens:          tokens generated, over its samples
    seconds:         wall time of the whole call
    replica_seconds: replica -> wall time of its part, with that of a part that it took over
    routed_tokens, static_tokens: tokens of the replica with most, as routed and in the static split
    predicted_routed_s, predicted_static_s: predicted makespans of the lengths that came; None if the cost model cannot
                     predict them (`off` says why). Their ratio is the gain of routing; only the first was really run
    rerouted:        requests whose replica died, which others then answered
    """

    replicas: Sequence[int]
    expected: Sequence[float]
    tokens: Sequence[int]
    seconds: float
    replica_seconds: Mapping[int, float]
    routed_tokens: int
    static_tokens: int
    predicted_routed_s: float | None
    predicted_static_s: float | None
    rerouted: int
    off: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a record."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line for a log."""
        text = f"{len(self.tokens)} requests in {self.seconds:.3f} s; most tokens of a replica: {self.routed_tokens:,}"
        text += f" routed, {self.static_tokens:,} split statically"
        if self.predicted_routed_s is not None and self.predicted_static_s is not None:
            text += f"; predicted {self.predicted_routed_s:.3f} s and {self.predicted_static_s:.3f} s"
        return text + (f"; {self.rerouted} requests routed again" if self.rerouted else "")


@dataclass(frozen=True, slots=True)
class Finished:
    """The raw figures of a rollout. A Routing is made of them on request.

    observation: of all replicas together
    parts:       replica -> the requests that it answered, in the order in which it got them
    samples:     responses of each request that have tokens
    expected, replica_seconds, rerouted: as in Routing
    judgements:  those of the replicas' guards on their parts; empty until they are asked
    """

    observation: Observation
    parts: Mapping[int, Sequence[int]]
    samples: Sequence[int]
    expected: Sequence[float]
    replica_seconds: Mapping[int, float]
    rerouted: int
    judgements: Mapping[int, Judged] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Finished]) -> Finished:
        """One rollout of several calls, one after the other; not judged so far."""
        by_replica: dict[int, list[int]] = {}
        seconds: dict[int, float] = {}
        before = 0
        for part in parts:
            for number, requests in part.parts.items():
                by_replica.setdefault(number, []).extend(before + request for request in requests)
            for number, took_s in part.replica_seconds.items():
                seconds[number] = seconds.get(number, 0.0) + took_s
            before += len(part.samples)
        return cls(
            observation=parts[0].observation if len(parts) == 1 else joined([part.observation for part in parts]),
            parts=by_replica,
            samples=[count for part in parts for count in part.samples],
            expected=[tokens for part in parts for tokens in part.expected],
            replica_seconds=seconds,
            rerouted=sum(part.rerouted for part in parts),
        )

    def judged(self, judgements: Mapping[int, Judged]) -> Finished:
        """Return the same with the guards' judgements, and their counts and sampling in the observation."""
        ours = {number: judged for number, judged in judgements.items() if number in self.parts}
        seen = [judged.observation for judged in ours.values() if judged.observation is not None]
        whole = replace(
            self.observation,
            preemptions=sum(part.preemptions for part in seen),
            kv_cache_tokens=seen[0].kv_cache_tokens if seen else None,
            compiled_files=sum(part.compiled_files or 0 for part in seen) if seen else None,
            sampling=Sampling.mixed(part.sampling for part in seen),
        )
        return replace(self, observation=whole, judgements=ours)

    def routing(self, facts: EngineFacts, count: int, anchor: Anchor | None = None) -> Routing:
        """Compare both splits. facts: of one replica; count: of replicas; anchor: as for `makespans`"""
        rows = np.split(np.arange(sum(self.samples)), np.cumsum(self.samples)[:-1])
        lengths = self.observation.response_lengths
        tokens = [sum(lengths[row] for row in some) for some in rows]
        splits: list[Split] = [[list(part) for part in self.parts.values()], consecutive(len(tokens), count)]
        owner = {request: replica for replica, part in self.parts.items() for request in part}
        predicted: list[float | None] = [None, None]
        off = None
        try:
            by_row = [[np.concatenate([rows[n] for n in part]) for part in split if part] for split in splits]
            predicted = [*makespans(facts, self.observation, by_row, anchor)]
        except Fp8PlanError as error:
            off = str(error)
        return Routing(
            replicas=[owner[request] for request in range(len(tokens))],
            expected=self.expected,
            tokens=tokens,
            seconds=self.observation.seconds,
            replica_seconds=self.replica_seconds,
            routed_tokens=int(largest(splits[0], tokens)),
            static_tokens=int(largest(splits[1], tokens)),
            predicted_routed_s=predicted[0],
            predicted_static_s=predicted[1],
            rerouted=self.rerouted,
            off=off,
        )


def makespans(
    facts: EngineFacts, seen: Observation, splits: Sequence[Sequence[Any]], anchor: Anchor | None = None
) -> list[float]:
    """Predict the makespan of each split of the responses that came, in seconds: of its slowest replica.

    facts:  of one replica
    splits: for each the rows of every replica
    anchor: corrects the profile; None: the profile stands alone

    Raises ProfileError, ConfigError or CapacityError if the cost model cannot predict this engine.
    """
    batch = seen.batch
    setup = with_pool(facts.setup.holding(batch.longest), seen.kv_cache_tokens)
    profile, _ = load_profile(find_gpu(facts.gpu), facts.engine_version)
    profile = corrected(profile, anchor, facts.host_loop_s)
    memory, model = setup.memory(batch.longest), setup.step_model(profile)
    parts = ([batch.take(rows) for rows in split] for split in splits)
    return [rollout(schedules(part, memory.kv, setup.limits), model).makespan_s for part in parts]
