"""The replicas of a fleet. Replica is an engine in a Ray actor, Members are all actors, Calls passes Calls to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from textwrap import shorten
from typing import Any, Literal, NamedTuple

from fp8plan.errors import LostEngineError, NotServingError, warn
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.judge import How
from fp8plan.runtime.apply.engine.launch import Launch
from fp8plan.runtime.apply.fleet.placement import await_places, place, placed, ray
from fp8plan.runtime.apply.fleet.sync import Packed, addressed, merged, packed, unpacked
from fp8plan.runtime.apply.weight_sync.calls import TAKE_TENSORS, Call, Method, Rpc
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import Event, refuse_dead
from fp8plan.runtime.apply.weight_sync.stream import Channel
from fp8plan.runtime.watch.guard.fallback import DEPTH, Action, GuardSettings, GuardState
from fp8plan.runtime.watch.guard.guard import Judged, in_effect


class _Broken(Exception):
    """The end of a fleet's rollout that is not judged."""


class Replica:
    """A RolloutEngine in the process of a Ray actor. The fleet keeps the state of its weights.

    It is made and then started, because an error in an actor's __init__ would lose its type.
    """

    def __init__(self, launched: Launch, settings: SyncSettings) -> None:
        self._launch, self._settings = launched, settings
        self._channel: Channel | None = None
        self._rollout, self._open = ExitStack(), False  # the fleet's, while it is open

    def start(self, mode: Literal["inprocess", "multiprocess"], guard: GuardSettings | None) -> tuple[int, int]:
        """Start vLLM. Returns the longest request and the vocabulary, in tokens. Raises as RolloutEngine does."""
        self._engine = RolloutEngine(self._launch, self._settings, mode, guard)
        return self._engine.sizes()

    def answer(self, call: Call) -> Any:
        """Do a Call. Raises NotServingError if the engine has died."""
        self._close()
        state = self._engine.state
        refuse_dead(state)
        reply = self._engine.answer(call)
        if isinstance(call, Rpc) and call.method == "fp8plan_commit":
            for event in (Event.BEGIN, Event.CHECK, Event.SERVE):  # also after a generate that was broken off
                state.note(event)
            state.version += 1  # the next rollout is the first on new weights
        return reply

    def load(self, method: Method, numbers: Sequence[int], parts: Sequence[Packed]) -> Any:
        """Hand a chunk of tensors to a worker's method."""
        state = self._engine.state
        if self._channel is None:
            self._channel = Channel(state.staged_on, self._settings.chunk_bytes, state.workers)
        reply = self._engine.answer(self._channel.message(method, numbers, unpacked(parts)))
        self._channel.close()  # all workers have it open
        return reply

    def generate(self, prompts: Any, sampling_params: Any, more: dict[str, Any], how: How) -> tuple[list[Any], float]:
        """Return the RequestOutputs, and the seconds that they took. how: what the call is to the fleet's rollouts"""
        if how == "open" and not self._open:
            self._rollout.enter_context(self._engine.rollout())
            self._open = True
        elif how == "beside":  # to a replica that has replaced another, too
            with self._engine.rollout():
                pass
        begun = time.perf_counter()
        outputs = self._engine.generate(prompts, sampling_params, **more)
        return outputs, time.perf_counter() - begun

    def close_rollout(self, broken: bool) -> None:
        """End the fleet's rollout. broken: it ended by an exception, and is not judged"""
        self._open = False
        with suppress(_Broken), self._rollout:
            if broken:
                raise _Broken

    def judgement(self) -> Judged:
        """Wait for the guard's verdict on the last rollout."""
        return Judged(self._engine.observation, self._engine.verdict, self._engine.guard_off)

    def report_kl(self, kl_k3: float) -> None:
        """Tell the guard the KL of the last rollout."""
        self._engine.report_kl(kl_k3)

    def remember(self, rung: Action) -> None:
        """Tell the guard the deepest rung that the fleet has taken. Advice that is not done stands."""
        guard = self._engine.guard
        if guard is not None:
            if DEPTH[rung] < DEPTH[guard.state.taken]:  # from a checkpoint
                guard.state = GuardState()
            guard.took(rung)
            guard.state = in_effect(guard.state, guard.facts.precision)

    def stop(self) -> None:
        """Shut vLLM down: its own processes would outlive this one's."""
        self._close()
        self._engine.shutdown()

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


LOOK_S = 10.0  # between two checks that starting replicas have places
STOP_S = 30.0  # a replica's time to shut vLLM down
MOST_WORDS = 400  # characters of a death's cause


class Terms(NamedTuple):
    """The terms on which every actor of a fleet is started.

    workers: number of vLLM's workers in each replica, on a GPU each where device is "cuda"
    cpus:    CPUs that Ray reserves for a replica
    env:     further environment variables
    wait_s:  seconds to wait for free places
    """

    settings: SyncSettings
    mode: Literal["inprocess", "multiprocess"]
    guard: GuardSettings | None
    workers: int
    device: str
    cpus: float
    env: dict[str, str]
    wait_s: float

    @property
    def gpus(self) -> int:
        return self.workers if self.device == "cuda" else 0


class Members:
    """The actors, by number. Places are reserved when this is made; `start` fills them.

    living: number -> actor
    lost:   number -> cause of death, until another takes its place
    terms:  terms of every start
    sizes:  the longest request and the vocabulary of each engine, in tokens
    born:   number of actors that were started so far
    """

    def __init__(self, replicas: int, terms: Terms) -> None:
        self._ray = ray()
        self.terms = terms
        self._group = placed(replicas, terms.gpus, terms.cpus, terms.wait_s)
        self.born = 0
        self.count = replicas
        self.living: dict[int, Any] = {}
        self.lost: dict[int, str] = {}
        self.sizes = (0, 0)

    def start(self, numbers: Iterable[int], launched: Launch) -> None:
        """Start engines in these places, at once. Raises the first error of an engine that does not start.

        Raises ConfigError if a place was lost with its host, and Ray finds no other.
        """
        terms, actors = self.terms, {}
        for number in numbers:
            options = place(self._group, number, terms.gpus, terms.cpus, terms.env)
            actor = self._ray.remote(Replica).options(**options)
            actors[number] = actor.remote(self._seeded(launched), terms.settings)
            self.living[number] = actors[number]
            self.lost.pop(number, None)
        try:
            starting = self.submit("start", dict.fromkeys(actors, (terms.mode, terms.guard)))
            while self._ray.wait([*starting.values()], num_returns=len(starting), timeout=LOOK_S)[1]:
                await_places(self._group, actors, terms.wait_s)
            sizes = self.collect(starting)
        except BaseException as error:
            self.stop(actors)  # some have started
            self.lost = dict.fromkeys(actors, f"it did not start: {error}") | self.lost
            raise
        if dead := actors.keys() - sizes.keys():
            raise LostEngineError(f"the engine died while it started: {self.obituary(dead)}")
        self.sizes = next(iter(sizes.values()))

    @property
    def lineup(self) -> tuple[list[int], int]:
        """A value that changes whenever an actor comes or goes."""
        return sorted(self.living), self.born

    def submit(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of the living among these actors, without waiting. Each does its calls in order."""
        living = {number: self.living[number] for number in arguments if number in self.living}
        return {number: getattr(actor, method).remote(*arguments[number]) for number, actor in living.items()}

    def collect(self, references: Mapping[int, Any]) -> dict[int, Any]:
        """Wait for answers. A replica that dies is lost, and leaves none. Other errors are raised once all are in."""
        from ray.exceptions import RayError, RayTaskError

        answers, errors = {}, []
        for number, reference in references.items():
            try:
                answers[number] = self._ray.get(reference)
            except RayTaskError as error:  # it lives, and has raised an error
                if isinstance(error.cause, (NotServingError, LostEngineError)):
                    self.lose(number, str(error.cause))
                else:
                    errors.append(error.cause)
            except _deaths() as error:
                self.lose(number, _short(error))
            except RayError as error:  # e.g. the object store is full: it lives
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def lose(self, number: int, why: str) -> None:
        """Count a replica as lost, end its actor, and warn."""
        actor = self.living.pop(number, None)
        if actor is not None:
            self.lost[number] = why
            with suppress(Exception):
                self._ray.kill(actor)
            warn(f"replica {number} of the fleet is lost: {why}; type: fleet.replace({number})")

    def obituary(self, numbers: Iterable[int] | None = None) -> str:
        """Return the replicas' causes of death, in one line."""
        chosen = sorted(self.lost if numbers is None else numbers)
        return "; ".join(f"replica {number}: {self.lost[number]}" for number in chosen)

    def stop(self, numbers: Iterable[int] | None = None) -> None:
        """Shut engines down, and end their actors."""
        chosen = [number for number in (self.living if numbers is None else numbers) if number in self.living]
        with suppress(Exception):
            stopping = list(self.submit("stop", dict.fromkeys(chosen, ())).values())
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
        for number in chosen:
            with suppress(Exception):
                self._ray.kill(self.living.pop(number))

    def close(self) -> None:
        """Stop all, and give their places back."""
        from ray.util.placement_group import remove_placement_group

        self.stop()
        with suppress(Exception):
            remove_placement_group(self._group)

    def put(self, value: Any) -> Any:
        """Put a value into Ray's object store, once for all who read it."""
        return self._ray.put(value)

    def _seeded(self, launched: Launch) -> Launch:
        """Give an engine a seed that no other had.

        With vLLM's default, copies of a prompt in two replicas would get the same response.
        """
        seed = int(launched.kwargs.get("seed") or 0) + self.born
        self.born += 1
        return replace(launched, kwargs={**launched.kwargs, "seed": seed})


def _deaths() -> tuple[type[Exception], ...]:
    """Return the errors that Ray raises for a call to an actor that has died, or whose host has."""
    from ray import exceptions

    return (
        exceptions.RayActorError,  # ActorDiedError and ActorUnavailableError
        exceptions.OutOfMemoryError,  # Ray's memory monitor has killed it
        exceptions.ObjectReconstructionFailedError,  # its answer was lost with its host (seen with Ray 2.60)
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.RuntimeEnvSetupError,  # the actor never came to life
        exceptions.ActorUnschedulableError,
        exceptions.ActorPlacementGroupRemoved,
    )


def _short(error: Exception) -> str:
    """Return the first and the last line of Ray's page about a death."""
    lines = [line.strip(" .:") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return shorten(". ".join(dict.fromkeys((lines[0], lines[-1]))), MOST_WORDS)


Answers = list[dict[str, Any]]


class Calls:
    """The way of one procedure's Calls to replicas, and of their answers back.

    numbers: replicas that are asked; None: all that live
    synced:  a sync has begun

    While replicas load a chunk of tensors, the next one is packed. So sending a chunk returns the answers to the
    one before.
    """

    def __init__(self, members: Members, numbers: Sequence[int] | None = None) -> None:
        self._members, self._numbers = members, numbers
        self._under_way: tuple[Call, dict[int, Any]] | None = None
        self.synced = False

    def answer(self, call: Call) -> Any:
        """Ask the replicas, and return their answer as one. Raises NotServingError if none is left."""
        method = call.method if isinstance(call, Rpc) else None
        if isinstance(call, Rpc) and method in TAKE_TENSORS:
            return self._streamed(call)
        if method == "fp8plan_abort":
            with suppress(Exception):  # even if the chunk failed, living replicas must close their sync
                self._landed()
        else:
            late = self._landed()
            if any("error" in answer for answer in late):
                return late
        self.synced |= method == "fp8plan_begin"
        numbers, workers = self._asked(), self._members.terms.workers
        parts = {number: (addressed(call, at, len(numbers), workers),) for at, number in enumerate(numbers)}
        return self._collected(call, self._members.submit("answer", parts))

    def _streamed(self, call: Rpc) -> Answers:
        """Send a chunk, and return the answers to the one before."""
        numbers, tensors = call.arguments
        reference = self._members.put(packed(tensors))
        late = self._landed()
        sent = self._members.submit("load", dict.fromkeys(self._asked(), (call.method, numbers, reference)))
        self._under_way = Rpc(call.method), sent
        return late

    def _landed(self) -> Answers:
        if self._under_way is None:
            return []
        (call, references), self._under_way = self._under_way, None
        answers: Answers = self._collected(call, references)
        return answers

    def _asked(self) -> list[int]:
        return sorted(self._members.living if self._numbers is None else self._numbers)

    def _collected(self, call: Call, references: Mapping[int, Any]) -> Any:
        answers = {}
        for number, answer in self._members.collect(references).items():
            if isinstance(call, Rpc) and (lost := [text["error"] for text in answer if text.get("lost")]):
                self._members.lose(number, lost[0])
            else:
                answers[number] = answer
        if not answers:
            raise NotServingError(f"no replica is left ({self._members.obituary()}); the next sync_weights starts all")
        return merged(call, answers)
