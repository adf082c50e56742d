"""The rollouts of a fleet: requests dealt out to replicas, their outputs, and the guards' verdicts on them."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.apply.engine.judge import How
from fp8plan.runtime.apply.engine.rollout_log import RolloutLog, responses_of
from fp8plan.runtime.apply.fleet.members import Members
from fp8plan.runtime.apply.fleet.report import Routing
from fp8plan.runtime.apply.fleet.routing import SeenLengths, given_lengths, given_names, routed
from fp8plan.runtime.apply.fleet.served import Served
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.runtime.watch.guard.observation import Observation, joined, observation_of


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a rollout.

    params: vLLM's SamplingParams: one for all, one for each, or None for the model's own
    more:   further arguments of generate, the same for all
    """

    prompts: Sequence[Any]
    params: Any
    more: Mapping[str, Any]

    @classmethod
    def of(cls, prompts: Any, params: Any, more: Mapping[str, Any]) -> Requests:
        """Read the arguments of generate. Raises ConfigError for arguments that cannot be dealt out."""
        is_tokens = isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
        every = [prompts] if is_tokens or isinstance(prompts, (str, Mapping)) else list(prompts)
        if isinstance(params, Sequence) and len(params) != len(every):
            raise ConfigError(f"{len(params)} sampling_params for {len(every)} prompts; allowed: one, or one for each")
        if listed := [name for name, value in more.items() if isinstance(value, (list, tuple))]:
            raise ConfigError(f"{', '.join(listed)}: a list, which is not dealt out to replicas; allowed: one for all")
        return cls(every, params, more)

    def take(self, chosen: Sequence[int]) -> tuple[list[Any], Any, dict[str, Any]]:
        """Return the arguments of a replica's generate for these requests."""
        params = [self.params[at] for at in chosen] if isinstance(self.params, Sequence) else self.params
        return [self.prompts[at] for at in chosen], params, dict(self.more)

    def loads(self, expected: Sequence[float]) -> list[float]:
        """Return the response tokens to expect of each request, over its samples. expected: of one response each"""
        each = self.params if isinstance(self.params, Sequence) else [self.params] * len(self.prompts)
        loads = []
        for tokens, params in zip(expected, each, strict=True):
            most = getattr(params, "max_tokens", None)
            loads.append((tokens if most is None else min(tokens, most)) * (getattr(params, "n", None) or 1))
        return loads

    @property
    def names(self) -> list[Hashable]:
        """The identity of each prompt."""
        return [name_of(prompt) for prompt in self.prompts]


def name_of(prompt: Any) -> Hashable:
    """Return the identity of a prompt: its text or its token ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return prompt if isinstance(prompt, str) else tuple(prompt or ())


class Opened(NamedTuple):
    """An open rollout.

    calls: its calls so far; log: their requests
    """

    calls: list[Routing]
    log: RolloutLog


class Rollouts:
    """The last rollouts of a fleet, as apply.engine.judge has those of an engine, and what is known of their prompts.

    expected_tokens: tokens to expect of a response to a new prompt

    opened: a rollout was opened
    served: the trajectories that the replicas have served with their weights
    """

    def __init__(self, members: Members, expected_tokens: float) -> None:
        self._members = members
        self._seen = SeenLengths(expected_tokens)
        self.served = Served()
        self._version = 0  # of the weights that served them
        self._last: Routing | None = None
        self.opened = False
        self._open: Opened | None = None
        self._followed: object = None  # the weights of the last rollout; None: a step has followed

    @contextmanager
    def rollout(self, state: SyncState) -> Iterator[None]:
        """Open a rollout in all replicas. state: of the fleet's weights"""
        if self._open is not None:
            yield
            return
        calls, log = opened = Opened([], RolloutLog())
        self._last = self._last if self.opened else None
        self.opened, self._open, broken = True, opened, True
        try:
            yield
            broken = False
        finally:
            self._open = None
            self._members.collect(self._members.submit("close_rollout", dict.fromkeys(self._members.living, (broken,))))
        if calls:
            weights = ("weights", state.version)
            observation = Observation(**(log.observed() or {}))
            if self._last is not None and self._followed == weights:
                calls.insert(0, self._last)
                observation = joined([self._last.observation, observation])
            self._last, self._followed = Routing.joined(calls, observation), weights

    @property
    def how(self) -> How:
        """The kind of a call that begins now, as Judge.how."""
        if self._open is not None:
            return "open"
        return "beside" if self.opened else "alone"

    def followed(self) -> None:
        """Note that a step has followed the rollouts so far."""
        self._followed = None

    def run(
        self,
        serving: Sequence[int],
        requests: Requests,
        lengths: Sequence[float] | None,
        trajectories: Sequence[Hashable] | None,
        version: int,
    ) -> list[Any]:
        """Return vLLM's RequestOutputs of one rollout, in the order of the prompts.

        serving:      replicas that may be asked
        lengths:      tokens to expect of one response to each prompt; None: the lengths seen before
        trajectories: the name of each prompt's trajectory; None: the prompts' tokens tell
        version:      of the weights that serve

        Raises ConfigError for impossible lengths and names, and as `dispatched` does.
        """
        names = requests.names
        if version != self._version:  # a sync has emptied the prefix caches
            self.served.forget()
            self._version = version
        if trajectories is None:
            homes = self.served.continued(names)
        else:
            trajectories = given_names(trajectories, len(names))
            homes = self.served.named(trajectories)
        expected = self._seen.expected(names) if lengths is None else given_lengths(lengths, len(names))
        loads = requests.loads(expected)
        begun, how = time.perf_counter(), self.how
        done = dispatched(self._members, serving, requests, loads, homes, how)
        ended = time.perf_counter()
        owners = {request: replica for replica, part in done.parts.items() for request in part}
        for request, output in enumerate(done.outputs):
            name = None if trajectories is None else trajectories[request]
            prompt = output.prompt_token_ids or ()  # none for embeddings, which no later prompt begins with
            sequences = [[*prompt, *each.token_ids] for each in output.outputs if prompt]
            self.served.learn(name, sequences, owners[request])
        samples = [[len(each.token_ids) for each in output.outputs if len(each.token_ids)] for output in done.outputs]
        if how == "alone":
            self._last = None
        if any(samples) and how != "beside":
            finished = Routing(
                count=self._members.count,
                observation=observation_of(done.outputs, ended - begun),
                parts=done.parts,
                tokens=[sum(some) for some in samples],
                expected=loads,
                replica_seconds=done.seconds,
                rerouted=done.rerouted,
                returning=sum(home is not None for home in homes),
                kept=sum(home == owners[request] for request, home in enumerate(homes)),
            )
            if self._open is None:
                self._last = finished
            else:
                self._open.calls.append(finished)
                self._open.log.add(begun, ended, responses_of(done.outputs), None)
            self._seen.learn(names, [sum(some) / max(1, len(some)) for some in samples])
        return done.outputs

    def judged(self) -> Routing | None:
        """Return the last rollout once the replicas' guards have judged it; None before the first."""
        if self._last is not None and not self._last.judgements:
            judging = self._members.submit("judgement", dict.fromkeys(self._last.parts, ()))
            self._last = self._last.judged(self._members.collect(judging))
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


def dispatched(
    members: Members,
    serving: Sequence[int],
    requests: Requests,
    loads: Sequence[float],
    homes: Sequence[int | None],
    how: How = "alone",
) -> Dispatched:
    """Let these replicas answer requests. If one dies, the others answer its requests from the start.

    homes: the replica that served a request's trajectory; None: it is new
    how:   what the call is to the fleet's rollouts

    Raises NotServingError once no replica is left, and vLLM's errors.
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
                f"the answers so far are lost, too. Dead: {members.obituary() or 'none'}. Call sync_weights"
            )
        places: dict[int | None, int] = {number: place for place, number in enumerate(alive)}
        split = routed([loads[at] for at in left], len(alive), [places.get(homes[at]) for at in left])
        dealt = {number: [left[at] for at in part] for number, part in zip(alive, split, strict=True) if part}
        running = members.submit("generate", {number: (*requests.take(part), how) for number, part in dealt.items()})
        answers = members.collect(running)
        for number, (answered, took_s) in answers.items():
            for request, output in zip(dealt[number], answered, strict=True):
                outputs[request] = output
            parts.setdefault(number, []).extend(dealt[number])
            seconds[number] = seconds.get(number, 0.0) + took_s
        left = sorted(request for number in dealt.keys() - answers.keys() for request in dealt[number])
        rerouted += len(left)
    return Dispatched(outputs, parts, seconds, rerouted)
