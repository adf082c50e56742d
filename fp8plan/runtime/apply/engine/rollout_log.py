"""The requests of a rollout, put together to trajectories of turns, with the seconds in which they ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from fp8plan.model.turn_table import Turn
from fp8plan.runtime.apply.engine.counters import counts, gains
from fp8plan.runtime.apply.engine.prefixes import Hashed, Key, Prefixes
from fp8plan.runtime.apply.engine.warm_up import compiled_files
from fp8plan.runtime.watch.mismatch.sampling import PROCESSED, Sampling


class Response(NamedTuple):
    """One response to a request.

    prompt, answer: token ids
    ended_s:        its end, on the clock of its call; None: not known
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    ended_s: float | None = None


class Request(NamedTuple):
    """One request of a trajectory.

    prompt_tokens, generated: tokens of its prompt, and of its response
    begun, ended:             of its call
    answered:                 end of its response, after which a tool works
    """

    prompt_tokens: int
    generated: int
    begun: float
    ended: float
    answered: float

    @property
    def tokens(self) -> int:
        """Tokens of its prompt and response."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True, eq=False)
class Trajectory:
    """A request, and those whose prompts go on from it.

    name:  the identity of its first prompt
    taken: a prompt of the call that is being added goes on from its last response
    """

    name: Key
    requests: list[Request] = field(default_factory=list)
    taken: bool = False

    @property
    def last(self) -> Request:
        return self.requests[-1]

    @property
    def begun(self) -> float:
        return self.requests[0].begun

    def waits(self, begun: float) -> bool:
        """True if a call that begins then may go on from its last response."""
        return not self.taken and self.last.ended <= begun

    @property
    def turns(self) -> list[Turn]:
        """Its turns. No tool follows the last one."""
        between = [
            Turn(before.generated, after.prompt_tokens - before.tokens, after.begun - before.answered)
            for before, after in pairwise(self.requests)
        ]
        return [*between, Turn(self.last.generated, 0, 0.0)]


@dataclass(slots=True)
class RolloutLog:
    """The calls of a rollout. A call is one `generate`, or one request of a server.

    trajectories:    in order of the ends of their first calls
    samplings:       sampling parameters of each call, with the engine's logprobs_mode
    counted:         vLLM's counts and the compiled kernels during the rollout, by field of an Observation
    kv_cache_tokens: as in Observation
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    samplings: list[tuple[Any, str]] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    kv_cache_tokens: int | None = None
    # Trajectories under their prompts with the answers, and under the prompts alone. Beside each stands the number of
    # tokens that it is under, because it stays there when it goes on.
    _sequences: Prefixes[tuple[int, Trajectory]] = field(default_factory=Prefixes)
    _prompts: Prefixes[tuple[int, Trajectory]] = field(default_factory=Prefixes)
    _rewritten_tokens: int = 0  # as in Observation
    _before: dict[str, int] | None = None

    def begin(self) -> None:
        """Count vLLM's counts and the compiled kernels from now on, unless it has begun already."""
        if self._before is None:
            self._before = _counts()

    def end(self) -> None:
        """Count up to now, if `begin` was called."""
        if self._before is not None:
            self.counted = gains(self._before, _counts())

    def add(
        self, begun: float, ended: float, responses: Iterable[Response], sampling: Any, mode: str = PROCESSED
    ) -> None:
        """Add a call, unless none of its responses has tokens.

        begun, ended:   of the call, in seconds
        sampling, mode: as Sampling.of takes them
        """
        known = [response for response in responses if len(response.answer)]
        if not known:
            return
        self.samplings.append((sampling, mode))
        # All are looked up before any is noted: responses of one call do not continue each other.
        prompts = [Hashed(response.prompt) for response in known]
        before = [self._taken(prompt, begun) for prompt in prompts]
        for prompt, (_, answer, answered), trajectory in zip(prompts, known, before, strict=True):
            if answered is None or not begun <= answered <= ended:  # another machine's clock
                answered = ended
            if trajectory is None:
                trajectory = Trajectory(prompt.key)
                self.trajectories.append(trajectory)
            request = Request(len(prompt), len(answer), begun, ended, answered)
            trajectory.requests.append(request)
            trajectory.taken = False
            self._sequences.at(prompt.followed_by(answer)).append((request.tokens, trajectory))
            self._prompts.at(prompt).append((request.prompt_tokens, trajectory))

    def _taken(self, prompt: Hashed, begun: float) -> Trajectory | None:
        """Take the trajectory that a prompt continues, so that no other does; None if the prompt begins another.

        A prompt with other tokens in the place of the answer continues, too. If it is shorter than prompt and answer
        were, it has dropped some of the answer: then it is not known what a tool has added, and another begins.
        """
        known = self._sequences.beginning(prompt)
        kept = next((each for tokens, each in known if each.waits(begun) and each.last.tokens == tokens), None)
        if kept is not None:
            kept.taken = True
            return kept
        same = self._prompts.beginning(prompt)
        standing = [each for size, each in same if each.waits(begun) and each.last.prompt_tokens == size < len(prompt)]
        if not standing:
            return None
        whole = [each for each in standing if each.last.tokens <= len(prompt)]
        rewritten = (whole or standing)[0]
        rewritten.taken = True
        self._rewritten_tokens += min(rewritten.last.generated, len(prompt) - rewritten.last.prompt_tokens)
        return rewritten if whole else None

    @property
    def begun(self) -> float:
        """The begin of the first call."""
        return min(each.begun for each in self.trajectories)

    @property
    def ended(self) -> float:
        """The end of the last call."""
        return max(each.last.ended for each in self.trajectories)

    def observed(self) -> dict[str, Any] | None:
        """The fields of an Observation, as plain data but for the Sampling; None without calls."""
        if not self.trajectories:
            return None
        every = sorted(self.trajectories, key=lambda trajectory: trajectory.begun)
        numbers: dict[Key, int] = {}
        spans = [(each.begun, each.last.ended) for each in every]
        seconds, arrival_s = busy(spans)
        fields: dict[str, Any] = {
            "seconds": seconds,
            "arrival_s": arrival_s if len({each.begun for each in every}) > 1 else None,
            "prompt_lengths": [each.requests[0].prompt_tokens for each in every],
            "response_lengths": [sum(request.generated for request in each.requests) for each in every],
            "prompt_ids": [numbers.setdefault(each.name, len(numbers)) for each in every],
            "rewritten_tokens": self._rewritten_tokens,
            **self.counted,
            "kv_cache_tokens": self.kv_cache_tokens,
            "sampling": Sampling.mixed(Sampling.of(params, mode) for params, mode in self.samplings),
        }
        if any(len(each.requests) > 1 for each in every):
            fields["turns"] = [each.turns for each in every]
            at_once = most_at_once(spans)
            if at_once < len(every):  # each of the others begins when one ends, as the prediction has it
                fields |= {"concurrent": at_once, "arrival_s": None}
        return fields


def busy(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The seconds in which at least one span ran, and those of them before the last one began.

    spans: begin and end of each
    """
    total, arrival, reached = 0.0, 0.0, -inf
    for begun, ended in sorted(spans):
        arrival = total - max(0.0, reached - begun)
        total += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return total, arrival


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans that ran at the same time. One that begins when another ends is not beside it."""
    changes = sorted(change for begun, ended in spans for change in ((begun, 1), (ended, -1)))
    return max(accumulate(change for _, change in changes))


def responses_of(outputs: Iterable[Any]) -> list[Response]:
    """The responses of vLLM's RequestOutputs. vLLM says when they ended, if it keeps statistics."""
    return [
        Response(output.prompt_token_ids or (), each.token_ids, _ended_s(output))
        for output in outputs
        for each in output.outputs
    ]


def _ended_s(output: Any) -> float | None:
    """The last token's time on the clock of the engine's machine, which is time.perf_counter's on Linux."""
    ended_s: float | None = getattr(getattr(output, "metrics", None), "last_token_ts", None)
    return ended_s


def _counts() -> dict[str, int]:
    return {"compiled_files": compiled_files(), **counts()}
