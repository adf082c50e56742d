"""The verdicts of news.md and gates.md beside this file: laws against constants, by a rule from before their runs.

python -m benchmarks.learning.evidence.news [NEWS.jsonl]      tables and verdicts; default: the committed runs
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from benchmarks.learning.arms import ARMS, GATES, JUDGED, NEWS_MASKS, NEWS_MORE
from benchmarks.learning.arms import NEWS as NEWS_FIRST
from benchmarks.learning.evidence.corrections import kept_runs, of_lines
from benchmarks.learning.evidence.places import NEWS
from benchmarks.learning.evidence.seeds import apart, mean
from benchmarks.learning.predicted import UNSEEN
from benchmarks.learning.trainer import GradientError
from benchmarks.tables.markdown import table

SEEDS: Final = 6
MISSING: Final = f"not all {SEEDS} seeds are there"
MISMATCHES: Final = ("benign", *JUDGED)
NEW: Final = ("growing", "spiking", "staler", "broken")  # where the law has to be ahead of C = 2
USUAL: Final = "tis"
CONSTANTS: Final = (USUAL, "tis-1.4")
TRIES: Final = {"news.md": ("news", "news-free"), "gates.md": ("ess", "mass")}  # plan -> its laws

Rewards = Mapping[str, Mapping[Hashable, float]]


class Margin(NamedTuple):
    """A mean difference of rewards over seeds, and its standard error."""

    difference: float
    error: float


def margin(mine: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> Margin | None:
    """The margin of an arm over another; None unless both have SEEDS seeds in common."""
    differences = [mine[seed] - other[seed] for seed in mine if seed in other]
    if len(differences) < SEEDS:
        return None
    return Margin(fmean(differences), stdev(differences) / len(differences) ** 0.5)


def best_constant(rewards: Rewards, mismatch: str) -> str:
    """The constant with the higher mean reward."""
    means = {name: list(rewards.get(f"{mismatch}-{name}", {}).values()) for name in CONSTANTS}
    return max(CONSTANTS, key=lambda name: fmean(means[name]) if means[name] else float("-inf"))


def failures(rewards: Rewards, law: str) -> Iterator[str]:
    """The conditions of the rule that a law does not keep, as sentences."""
    for mismatch in MISMATCHES:
        mine, best = rewards.get(f"{mismatch}-{law}", {}), best_constant(rewards, mismatch)
        beside = margin(mine, rewards.get(f"{mismatch}-{best}", {}))
        if beside is None:
            yield f"{mismatch}: {MISSING}"
            continue
        if beside.difference < -beside.error:
            yield f"{mismatch}: below {best} by {-beside.difference:.3f} ± {beside.error:.3f}"
        ahead = margin(mine, rewards.get(f"{mismatch}-{USUAL}", {}))
        if mismatch in NEW and (ahead is None or ahead.difference <= ahead.error):
            yield f"{mismatch}: not ahead of C = 2" + (
                f": {ahead.difference:+.3f} ± {ahead.error:.3f}" if ahead else ""
            )


def verdict(rewards: Rewards, tries: Sequence[str]) -> str:
    """The rule's verdict on laws, in Markdown."""
    lines = []
    for law in tries:
        failed = list(failures(rewards, law))
        missing = [sentence for sentence in failed if sentence.endswith(MISSING)]
        said = "is not judged: " if missing else "does not hold: " if failed else "holds"
        lines.append(f"- `{law}` {said}{'; '.join(missing or failed)}.")
    return "\n".join(lines)


def shown(rewards: Rewards, tries: Sequence[str]) -> str:
    """The rewards of each arm under each mismatch, and the two margins of each law of a plan, in Markdown."""
    arms = ("none", *CONSTANTS, "adaptive", "least-error", *tries)
    heads = (
        "mismatch",
        "seeds",
        *arms,
        *(f"{law} less {other}" for law in tries for other in ("C = 2", "best constant")),
    )
    return table(heads, (_row(rewards, mismatch, arms, tries) for mismatch in MISMATCHES))


def _row(rewards: Rewards, mismatch: str, arms: Sequence[str], tries: Sequence[str]) -> list[str]:
    of = {name: rewards.get(f"{mismatch}-{name}", {}) for name in arms}
    beside = [apart(of[law], of[name]) for law in tries for name in (USUAL, best_constant(rewards, mismatch))]
    return [mismatch, str(len(of[tries[0]])), *(mean(list(of[name].values())) for name in arms), *beside]


def costs(path: Path) -> str:
    """What corrections cost and save, in Markdown: means over all steps and seeds of an arm.

    Errors are those of the gradient relative to the exact one (trainer.GradientError): square roots of ratios of sums.
    """
    heads = ("mismatch", "arm", "seeds", "clipped mass", "tokens left out", "ESS", "error", "of it bias")
    return table(heads, _costs(kept_runs(path)))


def _costs(runs: Mapping[str, Mapping[Hashable, dict[str, Any]]]) -> Iterator[list[str]]:
    for arm in (name for name in (*NEWS_MORE, *NEWS_FIRST, *GATES, *NEWS_MASKS) if name in runs):
        rows = list(runs[arm].values())
        cells = [ARMS[arm].mismatch, arm.removeprefix(f"{ARMS[arm].mismatch}-"), str(len(rows))]
        for column in ("clipped_mass", "lost_tokens", "ess"):
            values = [x for row in rows for x in row[column] if x is not None]
            cells.append(f"{fmean(values):.1%}" if values else UNSEEN)
        errors = [each for row in rows for each in row.get("gradient_error", ())]
        bias2, variance, norm2 = (sum(each[part] for each in errors) for part in GradientError._fields)
        parts = (bias2 + variance, bias2) if norm2 > 0 else ()
        yield cells + [f"{(max(part, 0) / norm2) ** 0.5:.2f}" for part in parts] + [UNSEEN] * (2 - len(parts))


def main(words: Sequence[str] | None = None) -> None:
    paths = list(sys.argv[1:] if words is None else words)
    path = Path(paths[0]) if paths else NEWS
    rewards = of_lines(path).rewards
    for plan, tries in TRIES.items():
        print(f"{plan}\n\n{shown(rewards, tries)}\n\n{verdict(rewards, tries)}\n")
    print(costs(path))


if __name__ == "__main__":
    main()
