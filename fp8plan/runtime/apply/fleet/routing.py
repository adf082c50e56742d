"""The routing of a rollout's requests to replicas: the longest expected first, each to the least loaded.

The planner and trainers split a batch into consecutive parts (`Batch.split`). Then all wait for the replica with most
long responses. Routing by expected lengths avoids that. If it would not help, the consecutive parts are used.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError

Split = list[list[int]]  # numbers of each replica's requests, in the order in which it gets them

MOST_PROMPTS: Final = 1 << 20  # number of prompts whose lengths are remembered


def consecutive(requests: int, replicas: int) -> Split:
    """Split as the planner and trainers do: consecutive parts, nearly equal in number."""
    bounds = np.linspace(0, requests, replicas + 1).astype(int).tolist()
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def longest_first(loads: Sequence[float], replicas: int) -> Split:
    """Split by load: each request, the longest first, goes to the replica with the least load so far.

    The largest load is at most 4/3 - 1/(3 replicas) times the smallest that any split has (LPT; Graham, SIAM J. Appl.
    Math. 17, 1969).
    """
    least = [(0.0, replica) for replica in range(replicas)]
    split: Split = [[] for _ in range(replicas)]
    for request in sorted(range(len(loads)), key=lambda request: -loads[request]):
        load, replica = heapq.heappop(least)
        split[replica].append(request)
        heapq.heappush(least, (load + loads[request], replica))
    return split


def routed(loads: Sequence[float], replicas: int) -> Split:
    """Return the better of both splits; on a tie the consecutive one, in which copies of a prompt share a cache."""
    static, greedy = consecutive(len(loads), replicas), longest_first(loads, replicas)
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


def mean_response(workload: Mapping[str, Any]) -> float:
    """Return the mean response of a plan's workload, in tokens; for a trace, whose plan has no mean, the longest."""
    lengths = workload.get("response_lengths") or {}
    return float(lengths.get("mean") or lengths.get("tokens") or workload.get("max_response_tokens") or 1)
