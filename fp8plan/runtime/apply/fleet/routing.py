"""The routing of a rollout's requests to replicas: to the one that holds a prefix, or else to the least loaded.

The planner and trainers split a batch into consecutive parts (`Batch.split`). Then all wait for the replica with most
long responses. Routing by expected lengths avoids that. If it would not help, the consecutive parts are used. Turns of
a trajectory go to the replica that served it, as runtime.apply.fleet.served knows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError

Split = list[list[int]]  # numbers of each replica's requests, in the order in which it gets them

MOST_PROMPTS: Final = 1 << 20  # number of prompts whose lengths are remembered
# A replica's load in multiples of the mean, and its number of requests, above which a trajectory does not return to it.
# The first is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018). The second
# is for the tail of a rollout: a step of few requests takes as long as a step of one.
BOUND: Final = 1.25
FEW: Final = 16


def consecutive(requests: int, replicas: int) -> Split:
    """Split as the planner and trainers do: consecutive parts, nearly equal in number."""
    bounds = np.linspace(0, requests, replicas + 1).astype(int).tolist()
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def returned(loads: Sequence[float], replicas: int, homes: Sequence[int | None]) -> Split:
    """Split by prefix: a returning trajectory goes to the replica that served it, unless this one is full.

    homes: the replica that served a request's trajectory; None: it is new

    A replica is full if with this request it has more than FEW requests and more than BOUND times the mean load. Then
    the request goes to the replica with the least load so far, and so do new ones. Returning requests come before new
    ones, which would take the blocks of their prefixes; of each kind the longest comes first.

    If all are new, the largest load is at most 4/3 - 1/(3 replicas) times the smallest that any split has (LPT;
    Graham, SIAM J. Appl. Math. 17, 1969).
    """
    most = BOUND * sum(loads) / replicas
    split: Split = [[] for _ in range(replicas)]
    totals = [0.0] * replicas
    for request in sorted(range(len(loads)), key=lambda request: (homes[request] is None, -loads[request])):
        replica = homes[request]
        if replica is None or (len(split[replica]) >= FEW and totals[replica] + loads[request] > most):
            replica = min(range(replicas), key=totals.__getitem__)
        split[replica].append(request)
        totals[replica] += loads[request]
    return split


def routed(loads: Sequence[float], replicas: int, homes: Sequence[int | None] = ()) -> Split:
    """Return the split by prefix if a trajectory returns, or else the better of both others.

    On a tie it is the consecutive one, in which copies of a prompt share a cache.
    """
    if any(home is not None for home in homes):
        return returned(loads, replicas, homes)
    static, greedy = consecutive(len(loads), replicas), returned(loads, replicas, [None] * len(loads))
    return greedy if largest(greedy, loads) < largest(static, loads) else static


def largest(split: Split, loads: Sequence[float]) -> float:
    """Return the load of the busiest replica."""
    return max((sum(loads[request] for request in part) for part in split), default=0)


class SeenLengths:
    """The response lengths that prompts had when they were last sampled, to expect them again.

    otherwise: tokens to expect of a prompt that was never seen
    """

    def __init__(self, otherwise: float) -> None:
        self._otherwise = otherwise
        self._seen: dict[int, float] = {}

    def expected(self, prompts: Iterable[Hashable]) -> list[float]:
        """Return the tokens to expect of one response to each prompt."""
        return [self._seen.get(hash(prompt), self._otherwise) for prompt in prompts]

    def learn(self, prompts: Sequence[Hashable], responses: Sequence[float]) -> None:
        """Note the mean response length of each prompt, over its copies in this rollout."""
        lengths: dict[int, list[float]] = {}
        for prompt, tokens in zip(prompts, responses, strict=True):
            lengths.setdefault(hash(prompt), []).append(tokens)
        for key, copies in lengths.items():
            self._seen.pop(key, None)  # the order is that of the last sight of each
            self._seen[key] = sum(copies) / len(copies)
        for key in list(self._seen)[: max(0, len(self._seen) - MOST_PROMPTS)]:
            del self._seen[key]


def given_lengths(lengths: Sequence[float], requests: int) -> list[float]:
    """Check a caller's expected lengths. Raises ConfigError for anything but a number of tokens for each prompt."""
    tokens = list(lengths)
    if len(tokens) != requests or not all(is_number(number) and number >= 0 for number in tokens):
        raise ConfigError(
            f"expected_lengths has {len(tokens)} entries for {requests} prompts; allowed: for each prompt the tokens "
            "expected of one response, numbers of at least 0"
        )
    return tokens


def given_names(names: Sequence[Hashable], requests: int) -> list[Hashable]:
    """Check a caller's names of trajectories. Raises ConfigError for anything but a text or number for each prompt."""
    listed = list(names)
    if len(listed) != requests or not all(isinstance(name, (str, int)) for name in listed):
        raise ConfigError(
            f"trajectory_ids has {len(listed)} entries for {requests} prompts; allowed: for each prompt the name of "
            "its trajectory, a text or a whole number"
        )
    return listed


def mean_response(workload: Mapping[str, Any]) -> float:
    """Return the mean tokens of an answer in a plan's workload; for a trace, whose plan has no mean, the longest."""
    if of_turn := workload.get("mean_turn_tokens"):
        return float(of_turn)
    lengths = workload.get("response_lengths") or {}
    return float(lengths.get("mean") or lengths.get("tokens") or workload.get("max_response_tokens") or 1)
