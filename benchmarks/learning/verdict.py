"""The rule by which a law of thresholds becomes the default: it is not worse than C = 2.

    python -m benchmarks.learning.verdict     prints the table and the verdict

Runs of one seed begin with the same weights and draw the same problems. A difference is the reward after a run less
that of C = 2 with the same seed. Its lower end is that of a one-sided 90% interval over seeds (Student's t).
A candidate holds if every lower end is above its bound:

- the tiny policy on a CPU: WORSE_IN_ONE under each of six mismatches, and WORSE_OVER_ALL for each seed's mean over them
- the policy of 25M parameters on a GPU: WORSE_IN_ONE under lasting noise and broken syncs

Candidates are judged in order, and the first that holds is the default. Each has seeds that no other run has seen.
Their number was fixed before the runs. A clause that fails with all its seeds rejects a candidate, whatever else is
missing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from scipy.stats import t

from benchmarks.learning.arms import EVERY
from benchmarks.learning.tables import NAMES, UNSEEN, USUAL, Margin, kept_runs
from benchmarks.tables.markdown import table

WORSE_IN_ONE: Final = -0.05
WORSE_OVER_ALL: Final = -0.02
CONFIDENCE: Final = 0.9
LARGE: Final = ("lasting", "broken")  # of the policy of 25M parameters
FOLDER: Final = Path(__file__).parent
CPU, GPU = FOLDER / "cpu/tiny-qk-norm/default.jsonl", FOLDER / "gpus/default.jsonl"
OVER_ALL: Final = "all of them"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A law that may become the default.

    arm:       the end of its arms' names
    cpu, gpu:  seeds of the tiny policy, and of that of 25M parameters
    """

    arm: str
    cpu: range
    gpu: range


# The second starts looser than C = 2 and tightens to it. A difference has a standard deviation of about 0.09, so that a
# law that is level with C = 2 needs some 30 seeds to show it.
CANDIDATES: Final = (
    Candidate("level-2-1.4", cpu=range(10, 18), gpu=range(10, 14)),
    Candidate("level-4-2", cpu=range(20, 52), gpu=range(20, 28)),
)


@dataclass(frozen=True, slots=True)
class Clause:
    """One condition of the rule.

    differences: of the seeds that both arms have
    bound:       the lower end must be above it
    seeds:       the number that was fixed
    """

    policy: str
    mismatch: str
    differences: tuple[float, ...]
    bound: float
    seeds: int

    @property
    def complete(self) -> bool:
        return len(self.differences) == self.seeds

    @property
    def lower_end(self) -> float:
        margin = Margin.of(self.differences)
        return margin.difference - float(t.ppf(CONFIDENCE, len(self.differences) - 1)) * margin.error

    @property
    def holds(self) -> bool | None:
        """None while seeds are missing."""
        return self.lower_end > self.bound if self.complete else None

    @property
    def cells(self) -> tuple[str, ...]:
        seeds = len(self.differences)
        verdicts = {True: "holds", False: "fails", None: f"{self.seeds - seeds} seeds are missing"}
        figures = [UNSEEN, UNSEEN]
        if seeds > 1:
            figures = [f"{fmean(self.differences):+.3f}", f"{self.lower_end:+.3f}"]
        return self.policy, self.mismatch, str(seeds), *figures, f"{self.bound:g}", verdicts[self.holds]


Rewards = Mapping[str, Mapping[int, float]]  # arm -> seed -> reward after the run


def rewards_in(path: Path) -> dict[str, dict[int, float]]:
    """The rewards of a table of runs; {} if there is none."""
    if not path.is_file():
        return {}
    arms = kept_runs(path)
    return {arm: {seed: row["reward_after"] for (_, seed), row in runs.items()} for arm, runs in arms.items()}


def clauses(candidate: Candidate, cpu: Rewards, gpu: Rewards) -> list[Clause]:
    """The conditions on a candidate, with the differences that are there."""
    made = []
    for policy, rewards, seeds, mismatches in (
        ("tiny", cpu, candidate.cpu, EVERY),
        ("25M", gpu, candidate.gpu, LARGE),
    ):
        apart = {mismatch: _differences(rewards, mismatch, candidate.arm, seeds) for mismatch in mismatches}
        for mismatch in mismatches:
            made.append(Clause(policy, mismatch, tuple(apart[mismatch].values()), WORSE_IN_ONE, len(seeds)))
        if policy == "tiny":
            means = tuple(_means(apart, seeds))
            made.append(Clause(policy, OVER_ALL, means, WORSE_OVER_ALL, len(seeds)))
    return made


def _differences(rewards: Rewards, mismatch: str, arm: str, seeds: range) -> dict[int, float]:
    """Seed -> the reward less that of C = 2, for seeds that both arms have."""
    mine, usual = rewards.get(f"{mismatch}-{arm}", {}), rewards.get(f"{mismatch}-{USUAL}", {})
    return {seed: mine[seed] - usual[seed] for seed in seeds if seed in mine and seed in usual}


def _means(apart: Mapping[Hashable, Mapping[int, float]], seeds: range) -> Iterator[float]:
    """Each seed's mean over all mismatches, where it has all."""
    for seed in seeds:
        if all(seed in differences for differences in apart.values()):
            yield fmean(differences[seed] for differences in apart.values())


def verdict(all_clauses: Sequence[Clause]) -> bool | None:
    """True if a candidate holds, False if a clause fails, None while that is open."""
    held = [clause.holds for clause in all_clauses]
    if False in held:
        return False
    return None if None in held else True


def report(cpu: Rewards, gpu: Rewards) -> str:
    """The table of each candidate and its verdict, in Markdown."""
    words = {True: "It holds.", False: "It fails.", None: "It is open."}
    blocks = []
    for candidate in CANDIDATES:
        judged = clauses(candidate, cpu, gpu)
        rows = (clause.cells for clause in judged)
        heads = ("policy", "mismatch", "seeds", "mean difference", "lower end", "bound", "verdict")
        blocks.append(f"{NAMES[candidate.arm]}. {words[verdict(judged)]}\n\n{table(heads, rows)}")
    return "\n\n".join(blocks)


def tables() -> dict[str, str]:
    """The block of a page that the report fills -> the report."""
    return {"default by a rule": report(rewards_in(CPU), rewards_in(GPU))}


if __name__ == "__main__":
    print(report(rewards_in(CPU), rewards_in(GPU)))
