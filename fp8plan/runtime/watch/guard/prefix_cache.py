"""Prompt tokens that a prefix cache has lost: their share, the likely cause and the remedy, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from fp8plan.model.rollout import Simulated
from fp8plan.runtime.watch.guard.observation import Observation

LOST: Final = 0.05  # share of the prompt tokens, more than expected, from which on a lost prefix is named
MANY_QUERIES: Final = 100_000  # tokens that were looked up, from which on few hits are named
FEW_HITS: Final = 0.01  # share of these tokens; turns, or samples of one prompt, give far more


class Lost(NamedTuple):
    """Lost prefixes in words: the share and its cause, and the remedy."""

    says: str
    todo: str

    @property
    def sentence(self) -> str:
        return f"{self.says}: {self.todo}"

    @classmethod
    def of(cls, sentence: str) -> Lost:
        """Read a sentence."""
        says, _, todo = sentence.partition(": ")
        return cls(says, todo)


OFF: Final = Lost(
    "prefix caching is off, so that turns of a trajectory and samples of a prompt compute the same tokens again",
    "enable_prefix_caching=True; vllm serve: --enable-prefix-caching",
)
SAME_TOKENS: Final = "let each turn's prompt begin with the tokens of the turns before"
SAME_REPLICA: Final = "route each trajectory to the same replica"
MORE_ROOM: Final = "run fewer trajectories at once, or give the KV cache more room"


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """The use of a prefix cache by the requests of a rollout, beside its prediction.

    queries, hits: as Observation.prefix_cache_queries and prefix_cache_hits
    repeated:      tokens of the prompts that earlier prompts and turns have computed
    rewritten:     as Observation.rewritten_tokens
    expected:      share of the prompt tokens that the prediction computes again
    at_most:       the same with half of the cache; None: not predicted
    replicas:      number of engines that share the requests
    """

    queries: int
    hits: int
    repeated: int
    rewritten: int = 0
    expected: float = 0.0
    at_most: float | None = None
    replicas: int = 1

    @classmethod
    def of(cls, seen: Observation, ran: Simulated) -> PrefixUse | None:
        """The use of the cache by turns. ran: the prediction for what ran

        None without turns, counts or a cache, and if the engine looked up other requests, too.
        """
        queries, hits, rewritten = seen.prefix_cache_queries, seen.prefix_cache_hits, seen.rewritten_tokens or 0
        if not queries or hits is None or not ran.model.limits.enable_prefix_caching:
            return None
        queried, kept, lost = (_total(ran, name) for name in ("queried_tokens", "hit_tokens", "again_tokens"))
        if (seen.turns is None and not rewritten) or abs(queries - queried) > LOST * queried:
            return None
        return cls(queries, hits, kept + lost, rewritten, lost / queried, replicas=len(ran.schedules))

    def beside(self, smaller: Simulated) -> PrefixUse:
        """The same with `at_most`. smaller: the prediction with half of the cache"""
        return replace(self, at_most=_total(smaller, "again_tokens") / _total(smaller, "queried_tokens"))

    @property
    def again(self) -> float:
        """The share of the prompt tokens that were computed again."""
        return max(0, self.repeated - self.hits) / self.queries

    @property
    def more_than_expected(self) -> bool:
        """True if clearly more tokens were computed again than predicted."""
        return self.again >= self.expected + LOST

    @property
    def is_rewritten(self) -> bool:
        """True if many prompts have other tokens in the place of an answer, which no cache has."""
        share = self.rewritten / self.queries
        return share >= LOST and share >= self.again / 2

    @property
    def holds(self) -> float:
        """The share of the repeated tokens that the cache still has, as predicted."""
        return 1 - self.expected * self.queries / max(1, self.repeated)


def _total(ran: Simulated, column: str) -> int:
    """The sum of a column over the schedules of all replicas."""
    return sum(plan.total(getattr(plan, column)) for plan in ran.schedules)


def lost_prefixes(use: PrefixUse) -> Lost | None:
    """The lost prefixes in words; None if there are few."""
    if use.again < LOST and not use.is_rewritten:
        return None
    says = f"{use.again:.0%} of the prompt tokens were computed again"
    if use.more_than_expected:
        says += f", {use.expected:.0%} predicted"
    if use.is_rewritten:
        where = f"{use.rewritten / use.queries:.0%} stand in the place of an answer, and are other tokens than it"
        return Lost(f"{says}; {where}", f"{SAME_TOKENS}, without a template that drops or writes them anew")
    if use.expected >= LOST and use.again < max(use.at_most or 0.0, use.expected) + LOST:
        return Lost(f"{says}; the cache holds {use.holds:.0%} of what waits", MORE_ROOM)
    if use.replicas > 1:
        elsewhere = f"a turn that comes to another of {use.replicas} replicas finds nothing there"
        return Lost(f"{says}; {elsewhere}", SAME_REPLICA)
    alone = "no cache of this size loses so many, so prompts have other tokens, or something empties it"
    return Lost(f"{says}; {alone}", f"{SAME_TOKENS}, and let nothing reset the cache between them")


def few_hits(queries: int, hits: int) -> Lost | None:
    """Few hits in words, where nothing is predicted; None if they are enough, or if few tokens were looked up."""
    if queries < MANY_QUERIES or hits >= FEW_HITS * queries:
        return None
    return Lost("turns and samples of one prompt would hit", f"{SAME_TOKENS}; {SAME_REPLICA}; or {MORE_ROOM}")
