"""The verdicts of news.md, gates.md and mix.md: laws against constants, by a rule from before their runs.

python -m benchmarks.learning.evidence.news [NEWS.jsonl]      tables and verdicts; default: the committed runs
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple

from benchmarks.learning.arms import BANDS, JUDGED, MASKED
from benchmarks.learning.evidence.corrections import whole_runs
from benchmarks.learning.evidence.kept import Run, kept_runs
from benchmarks.learning.evidence.places import NEWS
from benchmarks.learning.evidence.seeds import mean
from benchmarks.learning.predicted import UNSEEN
from benchmarks.learning.trainer import GradientError
from benchmarks.tables.markdown import table

SEEDS: Final = 6
MISMATCHES: Final = (*JUDGED, "benign")
NEW: Final = ("growing", "spiking", "staler", "broken")  # where the law has to be ahead of C = 2
USUAL: Final = "tis"
CONSTANTS: Final = (USUAL, "tis-1.4")
BEST: Final = "the better constant"
NAMES: Final = {USUAL: "C = 2", "tis-1.4": "C = 1.4"}
TRIES: Final = {
    "news.md": ("news", "news-free", "least-error"),
    "gates.md": ("ess", "mass"),
    "mix.md": ("mix",),
}  # plan -> its laws
LAWS: Final = tuple(law for tries in TRIES.values() for law in tries)
OTHERS: Final = ("none", *CONSTANTS, "adaptive")
MASKS: Final = tuple(arm for mask in BANDS for arm in (mask, f"{mask}-news"))  # no rule judges them
# No rule was written for these before the runs.
EXPLORED: Final = (("tis-1.4", USUAL), ("adaptive", USUAL), ("adaptive", BEST))
TRIMMED: Final = 0.05  # share of an arm's steps whose exact gradients are the largest: a few would decide the sums

Rewards = Mapping[str, Mapping[Hashable, float]]


class Margin(NamedTuple):
    """A mean difference of rewards over seeds, and its standard error."""

    difference: float
    error: float

    @property
    def cell(self) -> str:
        return f"{self.difference:+.3f} ± {self.error:.3f}"


def margin(mine: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> Margin | None:
    """The margin of an arm over another; None unless both have SEEDS seeds in common."""
    differences = [mine[seed] - other[seed] for seed in mine if seed in other]
    if len(differences) < SEEDS:
        return None
    return Margin(fmean(differences), stdev(differences) / len(differences) ** 0.5)


def pooled(rewards: Rewards, law: str, other: str, mismatches: Sequence[str] = JUDGED) -> Margin | None:
    """The margin of each seed's mean over mismatches. A seed draws the same problems under all of them."""

    def means(name: str) -> dict[Hashable, float]:
        of = [_of(rewards, mismatch, name) for mismatch in mismatches]
        return {seed: fmean(each[seed] for each in of) for seed in of[0] if all(seed in each for each in of)}

    return margin(means(law), means(other))


def _of(rewards: Rewards, mismatch: str, name: str) -> Mapping[Hashable, float]:
    """An arm's rewards by seed. name: of the arm without its mismatch, or BEST"""
    return rewards.get(f"{mismatch}-{best_constant(rewards, mismatch) if name == BEST else name}", {})


def _name(arm: str) -> str:
    return NAMES.get(arm, arm)


def best_constant(rewards: Rewards, mismatch: str) -> str:
    """The constant with the higher mean reward."""
    means = {name: list(rewards.get(f"{mismatch}-{name}", {}).values()) for name in CONSTANTS}
    return max(CONSTANTS, key=lambda name: fmean(means[name]) if means[name] else float("-inf"))


def missing(rewards: Rewards, law: str) -> Iterator[str]:
    """The mismatches under which the law or a constant has not all seeds, as sentences."""
    for mismatch in MISMATCHES:
        seeds = min(len(_of(rewards, mismatch, name)) for name in (law, *CONSTANTS))
        if seeds < SEEDS:
            yield f"{mismatch} has {seeds} of {SEEDS} seeds"


def failures(rewards: Rewards, law: str) -> Iterator[str]:
    """The conditions that a law does not keep, as sentences. Mismatches with too few seeds are left out."""
    for mismatch in MISMATCHES:
        mine, usual = (_of(rewards, mismatch, name) for name in (law, USUAL))
        if any(len(_of(rewards, mismatch, name)) < SEEDS for name in (law, *CONSTANTS)):
            continue
        beside, ahead = margin(mine, _of(rewards, mismatch, BEST)), margin(mine, usual)
        if beside is not None and beside.difference < -beside.error:
            best = NAMES[best_constant(rewards, mismatch)]
            yield f"{mismatch}: below {best} by {-beside.difference:.3f} ± {beside.error:.3f}"
        if mismatch in NEW and ahead is not None and ahead.difference <= ahead.error:
            yield f"{mismatch}: not ahead of C = 2: {ahead.cell}"


def verdict(rewards: Rewards, tries: Sequence[str]) -> str:
    """The rule's verdict on laws, in Markdown. Missing runs cannot mend a condition that is broken."""
    lines = []
    for law in tries:
        failed, lacking = (list(said(rewards, law)) for said in (failures, missing))
        said = "does not hold: " if failed else "is not judged: " if lacking else "holds"
        more = f" Missing: {'; '.join(lacking)}." if failed and lacking else ""
        lines.append(f"- `{law}` {said}{'; '.join(failed or lacking)}.{more}")
    return "\n".join(lines)


def rewarded(rewards: Rewards, arms: Sequence[str], mismatches: Sequence[str]) -> str:
    """The mean reward of each arm under each mismatch, in Markdown: (n) if it has n seeds and not SEEDS."""
    rows = ((_name(arm), *(_mean(_of(rewards, mismatch, arm)) for mismatch in mismatches)) for arm in arms)
    return table(("reward after", *mismatches), rows)


def _mean(values: Mapping[Hashable, float]) -> str:
    return mean(list(values.values())) + (f" ({len(values)})" if 0 < len(values) < SEEDS else "")


def margins(rewards: Rewards, pairs: Iterable[tuple[str, str]], mismatches: Sequence[str] = JUDGED) -> str:
    """The margins of arms over others, under each mismatch with all seeds and pooled, in Markdown."""
    rows = []
    for law, other in pairs:
        cells = [margin(_of(rewards, mismatch, law), _of(rewards, mismatch, other)) for mismatch in mismatches]
        cells.append(pooled(rewards, law, other, mismatches))
        rows.append((f"{_name(law)} less {_name(other)}", *(UNSEEN if x is None else x.cell for x in cells)))
    return table(("difference", *mismatches, "all of them"), rows)


def without_mismatch(rewards: Rewards, pairs: Iterable[tuple[str, str]]) -> str:
    """The margins of arms over others under `benign`, as a sentence."""
    cells = []
    for law, other in pairs:
        apart = margin(_of(rewards, "benign", law), _of(rewards, "benign", other))
        cells.append(f"{_name(law)} less {_name(other)} {UNSEEN if apart is None else apart.cell}")
    return f"Under `benign`: {'; '.join(cells)}."


def judged(rewards: Rewards) -> str:
    """The margins that the rule asks for, in Markdown."""
    return margins(rewards, [(law, other) for law in LAWS for other in (USUAL, BEST)])


def masked(rewards: Rewards) -> str:
    """The margins of masks over token TIS, and of laws over a mask's constant band, in Markdown."""
    pairs = [(mask, USUAL) for mask in BANDS] + [(f"{mask}-news", mask) for mask in BANDS]
    return margins(rewards, pairs, MASKED)


def costs(path: Path, arms: Sequence[str] = (), mismatches: Sequence[str] = JUDGED) -> str:
    """Return what corrections cost and save, in Markdown: means over all steps and seeds of an arm.

    arms: a row for each that has all seeds under all mismatches. Empty: a row for each run arm and mismatch

    Errors are those of the gradient in squares, relative to the exact one (trainer.GradientError): ratios of sums
    without the steps of TRIMMED, and the jackknife's standard error over seeds. Without bias they may be negative.
    """
    runs = kept_runs(path)
    heads = ("arm", "runs", "clipped mass", "tokens left out", "ESS", "squared error", "of it bias", "steps in BF16")
    rows = {name: list(of.values()) for name, of in runs.items()}
    if arms:
        rows = {arm: [row for m in mismatches for row in rows.get(f"{m}-{arm}", ())] for arm in arms}
        rows = {arm: of for arm, of in rows.items() if len(of) == SEEDS * len(mismatches)}
    return table(heads, ((_name(arm), *_costs(of)) for arm, of in rows.items()))


def _costs(rows: Sequence[Run]) -> Iterator[str]:
    yield str(len(rows))
    for column in ("clipped_mass", "lost_tokens", "ess"):
        values = [row[column] for row in rows if row[column] is not None]
        yield f"{fmean(values):.1%}" if values else UNSEEN
    yield from _errors(rows)
    yield f"{_in_bf16(rows):.0%}"


def _in_bf16(rows: Iterable[Run]) -> float:
    """The share of the steps of runs that ran in BF16."""
    steps = [(row["bf16_steps"], row["steps"]) for row in rows]
    return sum(bf16 for bf16, _ in steps) / sum(every for _, every in steps)


def _errors(rows: Sequence[Run]) -> tuple[str, str]:
    """The squared error of the gradient and its bias, relative to the exact gradient, as cells."""
    steps = sorted(
        ((GradientError(*step), row["seed"]) for row in rows for step in row["gradient_error"]),
        key=lambda step: abs(step[0].norm2),
    )
    sums = defaultdict[Hashable, list[GradientError]](list)
    for step, seed in steps[: len(steps) - int(TRIMMED * len(steps))]:
        sums[seed].append(step)
    every = {seed: tuple(map(sum, zip(*of, strict=True))) for seed, of in sums.items()}

    def ratios(parts: Iterable[tuple[float, ...]]) -> tuple[float, float]:
        bias2, variance, norm2 = map(sum, zip(*parts, strict=True))
        return (bias2 + variance) / norm2, bias2 / norm2

    if len(every) < 2 or sum(of[2] for of in every.values()) <= 0:
        return UNSEEN, UNSEEN
    without = [ratios(of for other, of in every.items() if other != seed) for seed in every]
    errors = [stdev(of) * (len(of) - 1) / len(of) ** 0.5 for of in zip(*without, strict=True)]
    squared, bias = (f"{x:.2f} ± {error:.2f}" for x, error in zip(ratios(every.values()), errors, strict=True))
    return squared, bias


def stepped_down(path: Path, law: str) -> str:
    """The share of a law's steps that ran in BF16 under each mismatch, as a sentence. Constants never step down."""
    runs = kept_runs(path)
    shares = []
    for mismatch in JUDGED:
        shares.append(f"{_in_bf16(runs[f'{mismatch}-{law}'].values()):.0%} under `{mismatch}`")
    return f"Steps of `{law}` in BF16: {', '.join(shares)}."


def tables() -> dict[str, str]:
    """The blocks of docs/evidence/thresholds.md."""
    rewards = whole_runs(NEWS).rewards
    return {
        "rewards of laws": rewarded(rewards, (*OTHERS, *LAWS), MISMATCHES),
        "verdict of laws": f"{judged(rewards)}\n\n{verdict(rewards, LAWS)}",
        "costs of laws": costs(NEWS, (*OTHERS, *LAWS)),
        "rewards of masks": f"{rewarded(rewards, (USUAL, *MASKS), MASKED)}\n\n{masked(rewards)}",
        "costs of masks": costs(NEWS, ("none", USUAL, *MASKS), MASKED),
        "explored laws": "\n\n".join(
            (margins(rewards, EXPLORED), without_mismatch(rewards, EXPLORED), stepped_down(NEWS, "adaptive"))
        ),
    }


def main(words: Sequence[str] | None = None) -> None:
    paths = list(sys.argv[1:] if words is None else words)
    path = Path(paths[0]) if paths else NEWS
    rewards = whole_runs(path).rewards
    print(f"{rewarded(rewards, (*OTHERS, *LAWS), MISMATCHES)}\n\n{judged(rewards)}\n")
    for plan, tries in TRIES.items():
        print(f"{plan}\n\n{verdict(rewards, tries)}\n")
    print(f"explored, without a rule\n\n{margins(rewards, EXPLORED)}\n\n{without_mismatch(rewards, EXPLORED)}\n")
    print(f"masks\n\n{rewarded(rewards, (USUAL, *MASKS), MASKED)}\n\n{masked(rewards)}\n")
    print(f"{costs(path)}\n\n{costs(path, (*OTHERS, *LAWS))}\n\n{costs(path, ('none', USUAL, *MASKS), MASKED)}")


if __name__ == "__main__":
    main()
