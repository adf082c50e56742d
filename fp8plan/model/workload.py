"""The workload of a rollout: the numbers of prompts and samples, and their lengths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.checks import whole
from fp8plan.errors import ConfigError
from fp8plan.model.distributions import DEFAULT_PROMPTS, LENGTHS, Distribution, Trace, distribution_of
from fp8plan.model.turn_table import TurnTable
from fp8plan.model.workload_turns import LoggedTurns, Turns
from fp8plan.options import WORKLOAD, Option, group_of

# The rollout of DAPO (arXiv 2503.14476) on one GPU, for a command that is told nothing else.
PROMPTS, SAMPLES, SEED = 32, 16, 0
RESPONSES = "lognormal:mean=6000,sigma=0.9,max=20480"
MOST_REQUESTS = 10**7  # far above any rollout


class Batch(NamedTuple):
    """Requests in order of arrival, or trajectories of several turns: int64 arrays of shape (requests,)."""

    prompts: NDArray[np.int64]  # prompt tokens, at least 1
    responses: NDArray[np.int64]  # response tokens, at least 1; of all turns
    prompt_ids: NDArray[np.int64]  # the number of the request's prompt, 0 .. prompts-1
    turns: TurnTable | None = None  # None: one turn each

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Prompt + response tokens of each request, with what tools add."""
        return self.prompts + (self.responses if self.turns is None else self.turns.added)

    @property
    def at_once(self) -> int:
        """The most requests that may run or wait at the same time."""
        if self.turns is None or self.turns.concurrent is None:
            return len(self.prompts)
        return min(self.turns.concurrent, len(self.prompts))

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def split(self, replicas: int) -> list[Batch]:
        """Consecutive, nearly equal parts, as RL trainers split a batch between data-parallel replicas.

        Replicas without a request are left out. If `replicas` does not divide the batch, samples of one prompt may be
        parted. The trajectories that may run at once are split like them; no replica has less than one.
        """
        if replicas == 1:
            return [self]
        bounds = np.linspace(0, len(self.prompts), min(replicas, len(self.prompts)) + 1).astype(int)
        parts = [self.take(slice(a, b)) for a, b in itertools.pairwise(bounds)]
        if self.turns is None or self.turns.concurrent is None:
            return parts
        each, more = divmod(self.turns.concurrent, len(parts))
        limited = []
        for replica, part in enumerate(parts):
            assert part.turns is not None
            at_once = max(1, each + (1 if replica < more else 0))
            limited.append(part._replace(turns=part.turns._replace(concurrent=at_once)))
        return limited

    def at_most(self, concurrent: int | None) -> Batch:
        """The trajectories of turns with so many at once; None: all."""
        assert self.turns is not None
        return self._replace(turns=self.turns._replace(concurrent=concurrent))

    def stopped_at(self, tokens: int) -> Batch:
        """The requests whose responses, or turns with what tools add, stop at so many tokens."""
        if self.turns is None:
            return self._replace(responses=np.minimum(self.responses, tokens))
        turns = self.turns.stopped_at(tokens)
        return self._replace(turns=turns, responses=turns.responses)

    def take(self, rows: Any) -> Batch:
        """Some of the requests with their prompts renumbered. rows: an index of numpy's"""
        prompt_ids = np.unique(self.prompt_ids[rows], return_inverse=True)[1].astype(np.int64)
        turns = None if self.turns is None else self.turns.take(rows)
        return Batch(self.prompts[rows], self.responses[rows], prompt_ids, turns)


@dataclass(frozen=True, slots=True, init=False)
class Workload:
    """One rollout of an RL step: `prompts` prompts, `samples_per_prompt` responses to each.

    prompt_lengths, response_lengths: a whole number of tokens for all, or Fixed, LogNormal or Trace
    seed:                             of all that is drawn
    turns:                            trajectories of several turns, whose tokens are the responses: then
                                      response_lengths is None. None: each response has one turn
    """

    prompts: Annotated[int, Option(WORKLOAD, default=f"{PROMPTS}")]
    samples_per_prompt: Annotated[int, Option(WORKLOAD, "responses per prompt", f"{SAMPLES}", "--samples")]
    prompt_lengths: Annotated[
        Distribution,
        Option(
            WORKLOAD,
            "TOKENS, lognormal:mean=TOKENS,sigma=S,max=TOKENS (mean before clipping), or a .jsonl/.parquet trace",
            f"those of the responses' trace, else {DEFAULT_PROMPTS}",
            kind=str,
        ),
    ]
    response_lengths: Annotated[Distribution | None, Option(WORKLOAD, "the same", RESPONSES, kind=str)]
    seed: Annotated[int, Option(WORKLOAD, "of lengths that are drawn", f"{SEED}")]
    turns: Turns | LoggedTurns | None

    def __init__(
        self,
        prompts: int,
        samples_per_prompt: int,
        prompt_lengths: Distribution | int,
        response_lengths: Distribution | int | None = None,
        seed: int = 0,
        turns: Turns | LoggedTurns | None = None,
    ) -> None:
        """Raises ConfigError for values of another kind, both lengths and turns, and more than MOST_REQUESTS turns."""
        if not isinstance(turns, Turns | LoggedTurns | None):
            raise ConfigError(f"turns is {turns!r}; allowed: fp8plan.Turns, or None for one turn in each response")
        if turns is not None and response_lengths is not None:
            raise ConfigError(
                f"response_lengths is {response_lengths!r}, and the turns have lengths of their own; leave one of them "
                "out (--response-lengths, or --turns)"
            )
        fields = {
            "prompts": whole("prompts", prompts),
            "samples_per_prompt": whole("samples_per_prompt", samples_per_prompt),
            "prompt_lengths": distribution_of("prompt_lengths", prompt_lengths, LENGTHS),
            "response_lengths": None,
            "seed": whole("seed", seed, 0),
            "turns": turns,
        }
        if turns is None:
            fields["response_lengths"] = distribution_of("response_lengths", response_lengths, LENGTHS)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        requests = self.prompts * self.samples_per_prompt
        if requests > MOST_REQUESTS:
            raise ConfigError(
                f"prompts x samples_per_prompt is {self.prompts} x {self.samples_per_prompt}; allowed: at most "
                f"{MOST_REQUESTS:,} responses"
            )
        if turns is not None and requests * turns.most_turns > MOST_REQUESTS:
            raise ConfigError(
                f"{requests:,} trajectories have up to {turns.most_turns:,} turns each; allowed: at most "
                f"{MOST_REQUESTS:,} turns in all; lower prompts, samples_per_prompt or the largest number of turns"
            )

    @property
    def longest_prompt(self) -> int:
        return int(self.prompt_lengths.largest)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response, with those of its tools. Turns are drawn for it."""
        if self.response_lengths is not None:
            return int(self.response_lengths.largest)
        turns = self.batch().turns
        assert turns is not None
        return int(turns.added.max())

    @property
    def shorten(self) -> str:
        """Advice for requests that are too long."""
        if self.turns is None:
            return "shorten --prompt-lengths and --response-lengths (in Python the workload's)"
        return self.turns.shorten

    def describe(self) -> dict[str, Any]:
        """The workload as plain data, without its seed."""
        lengths = {"prompt_lengths": self.prompt_lengths.describe()}
        if self.response_lengths is not None:
            lengths["response_lengths"] = self.response_lengths.describe()
        if self.turns is not None:
            lengths["turns"] = self.turns.describe()
        longest = {"max_prompt_tokens": self.longest_prompt, "max_response_tokens": self.longest_response}
        return {"prompts": self.prompts, "samples": self.samples_per_prompt, **lengths, **longest}

    def batch(self) -> Batch:
        """The requests, prompt by prompt, with samples of a prompt next to each other. The seed decides the numbers.

        Prompt and response lengths are independent, except in a trace with one row per response. Its rows are taken in
        order, and the first row of each prompt has the prompt's length. The same holds for turns.
        """
        rng = np.random.default_rng(self.seed)
        prompt_ids = np.repeat(np.arange(self.prompts, dtype=np.int64), self.samples_per_prompt)
        requests = len(prompt_ids)
        if isinstance(self.prompt_lengths, Trace) and len(self.prompt_lengths.values) == requests:
            prompts = self.prompt_lengths.draw(requests, rng)[:: self.samples_per_prompt]
        else:
            prompts = self.prompt_lengths.draw(self.prompts, rng)
        if self.response_lengths is not None:
            return Batch(prompts[prompt_ids], self.response_lengths.draw(requests, rng), prompt_ids)
        assert self.turns is not None
        turns = self.turns.draw(requests, rng)
        return Batch(prompts[prompt_ids], turns.responses, prompt_ids, turns)


WORKLOAD_OPTIONS: Final = group_of(Workload)
