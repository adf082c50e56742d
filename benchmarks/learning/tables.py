"""The tables of docs/evidence that are made of the committed runs.

    python -m benchmarks.learning.tables      prints them; `make tables` writes them into the pages

A run is a line of a table of runs, as benchmarks.learning.keep writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final, NamedTuple

from benchmarks.learning.arms import ARMS, BASELINE, JUDGED, uncorrected
from benchmarks.tables.markdown import table
from fp8plan import jsonl

Run = dict[str, Any]
Key = tuple[Path, int]  # a table of runs, and a seed
Runs = dict[Key, Run]
Rewards = Mapping[str, Mapping[Hashable, float]]  # arm -> seed -> reward after the run

_CPU, _GPUS = (Path(__file__).parent / place for place in ("cpu/tiny-qk-norm", "gpus"))
RULED: Final = _CPU / "news.jsonl"  # the tiny policy's runs for the rule
H200, H100 = (_GPUS / f"{name}.jsonl" for name in ("h200", "h100"))  # runs that shared a GPU
ALONE: Final = _GPUS / "h200_alone.jsonl.gz"  # runs that had the GPU for themselves, with the seconds of each step

UNSEEN: Final = "-"
SEEDS: Final = 6  # of an arm that is compared by the rule
USUAL: Final = "tis"  # the correction that others are held against: token TIS at C = 2
NAMES: Final = {
    USUAL: "C = 2",
    "tis-1.4": "C = 1.4",
    "adaptive": "`LevelThresholds(tis=2, narrowest=0.4)`",
    "level-2-1.4": "`LevelThresholds(narrowest=0.485)`, C from 2 to 1.4",
    "level-4-2": "`LevelThresholds(tis=4, narrowest=0.5)`, C from 4 to 2",
}
LAWS: Final = ("news", "news-free", "least-error", "ess", "mass", "mix", "adaptive")  # all but the last are deleted
MASKS: Final = ("mis", "icepop", "geometric")  # each also with the thresholds of a deleted law, "-news"
MASKED: Final = ("lasting", "growing", "staler", "broken")  # mismatches under which masks ran


def kept_runs(*tables: Path, policy: str | None = None, unfinished: bool = False) -> dict[str, Runs]:
    """Arm -> its runs in the tables, in the order of the table of arms; arms that it has no more come last.

    policy:     whose runs; None: of all
    unfinished: with the runs that were broken off
    """
    runs = defaultdict[str, Runs](dict)
    for path in tables:
        for row in jsonl.rows(path):
            if policy in (None, row["policy"]) and (unfinished or row["reward_after"] is not None):
                runs[row["arm"]][path, row["seed"]] = row
    return {arm: runs[arm] for arm in dict.fromkeys([*ARMS, *runs]) if arm in runs}


def figure(runs: Runs, name: str) -> dict[Key, float]:
    """One figure of each run."""
    return {key: row[name] for key, row in runs.items()}


def rewards_of(arms: Mapping[str, Runs], name: str = "reward_after") -> dict[str, dict[Hashable, float]]:
    return {arm: dict(figure(runs, name)) for arm, runs in arms.items()}


# ------------------------------------------------------------------------------------------------------ cells of seeds


def mean(values: Sequence[float], sign: str = "") -> str:
    """A mean, and its standard error if there is more than one value."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{error}" if values else UNSEEN


def apart(mine: Mapping[Hashable, float], beside: Mapping[Hashable, float]) -> str:
    """The mean difference of an arm to another over the seeds that both have, with its standard error.

    Runs of the same seed begin with the same weights and draw the same problems. An arm beside itself is UNSEEN.
    """
    return UNSEEN if mine is beside else mean([mine[seed] - beside[seed] for seed in mine if seed in beside], "+")


def spread(values: Sequence[float | None], kind: str, middle: Callable[[list[float]], float] = fmean) -> str:
    """The mean, or another middle, with the lowest and highest if there is more than one value."""
    known = [x for x in values if x is not None]
    if not known:
        return UNSEEN
    ends = f" ({min(known):{kind}} to {max(known):{kind}})" if len(known) > 1 else ""
    return f"{middle(known):{kind}}{ends}"


# ------------------------------------------------------------------------------------------------------------ learning


def learnt(policy: str, *tables: Path) -> str:
    """A line for each arm of a policy, in Markdown: means over seeds, and the lowest and highest.

    KL, ESS and clipped tokens of a run are medians over its steps but the first. The reward is set beside that of BF16,
    and beside that of the arm which differs in having no correction.
    """
    heads = ("arm", "seeds", "reward before", "after", "gained", "less BF16's", "less uncorrected")
    return table((*heads, "KL k3", "raw ESS", "clipped", "least C"), _learnt(kept_runs(*tables, policy=policy)))


def _learnt(arms: Mapping[str, Runs]) -> Iterator[list[str]]:
    rewards = rewards_of(arms)
    for arm, runs in arms.items():
        before, after = list(figure(runs, "reward_before").values()), rewards[arm]
        gains = [end - start for start, end in zip(before, after.values(), strict=True)]
        cells = [arm, str(len(runs)), *(spread(x, ".2f") for x in (before, list(after.values()), gains))]
        cells += [apart(after, rewards.get(other or "", {})) for other in (BASELINE, uncorrected(arm))]
        for name, kind in (("kl_k3", ".1e"), ("ess_raw", ".3f"), ("clip_fraction", ".2g")):
            cells.append(spread(list(figure(runs, name).values()), kind))
        bounds = [x for x in figure(runs, "tis_least").values() if x and ARMS[arm].correction != "none"]
        yield [*cells, f"{min(bounds):.2f}" if bounds else UNSEEN]


# ---------------------------------------------------------------------------------------------------------- thresholds


class Margin(NamedTuple):
    """A mean difference of rewards over seeds, and its standard error."""

    difference: float
    error: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Margin:
        """The margin of differences, one for each seed; two at least."""
        return cls(fmean(differences), stdev(differences) / len(differences) ** 0.5)

    @property
    def cell(self) -> str:
        return f"{self.difference:+.3f} ± {self.error:.3f}"


def margin(mine: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> Margin | None:
    """The margin of an arm over another; None unless both have SEEDS seeds in common."""
    differences = [mine[seed] - other[seed] for seed in mine if seed in other]
    if len(differences) < SEEDS:
        return None
    return Margin.of(differences)


def pooled(rewards: Rewards, law: str, other: str, mismatches: Sequence[str] = JUDGED) -> Margin | None:
    """The margin of each seed's mean over mismatches. A seed draws the same problems under all of them."""

    def means(name: str) -> dict[Hashable, float]:
        of = [rewards.get(f"{mismatch}-{name}", {}) for mismatch in mismatches]
        return {seed: fmean(each[seed] for each in of) for seed in of[0] if all(seed in each for each in of)}

    return margin(means(law), means(other))


def margins(rewards: Rewards, pairs: Iterable[tuple[str, str]], mismatches: Sequence[str] = JUDGED) -> str:
    """The margins of arms over others, under each mismatch and pooled, in Markdown."""
    rows = []
    for law, other in pairs:
        each = [[rewards.get(f"{mismatch}-{name}", {}) for name in (law, other)] for mismatch in mismatches]
        cells = [*(margin(*both) for both in each), pooled(rewards, law, other, mismatches)]
        names = " less ".join(NAMES.get(name, name) for name in (law, other))
        rows.append((names, *(UNSEEN if x is None else x.cell for x in cells)))
    return table(("difference", *mismatches, "all of them"), rows)


def rewarded(rewards: Rewards, arms: Sequence[str], mismatches: Sequence[str]) -> str:
    """The mean reward of each arm under each mismatch, in Markdown."""
    rows = (
        (NAMES.get(arm, arm), *(mean(list(rewards[f"{mismatch}-{arm}"].values())) for mismatch in mismatches))
        for arm in arms
    )
    return table(("reward after", *mismatches), rows)


def ruled() -> str:
    """The margins of all laws over C = 2, in Markdown."""
    return margins(rewards_of(kept_runs(RULED)), [(law, USUAL) for law in LAWS])


def masks() -> str:
    """The rewards of masks, their margins over token TIS, and those of a law over a mask's constant band."""
    rewards = rewards_of(kept_runs(RULED))
    arms = [arm for mask in MASKS for arm in (mask, f"{mask}-news")]
    pairs = [(mask, USUAL) for mask in MASKS] + [(f"{mask}-news", mask) for mask in MASKS]
    return f"{rewarded(rewards, (USUAL, *arms), MASKED)}\n\n{margins(rewards, pairs, MASKED)}"


# --------------------------------------------------------------------------------------------------------------- speed


def speedups(base: Run, run: Run, part: str) -> list[float]:
    """The observed speed-ups of a run over the BF16 run of the same seed, one for each step that is in both.

    part: "rollout" or "step". The first step and those in which another run was on the GPU do not count.
    """
    left_out = {*base.get("disturbed", ()), *run.get("disturbed", ())}
    seconds = [
        {row["step"]: row[f"{part}_s"] / row["response_tokens"] for row in each["seconds"][1:]} for each in (base, run)
    ]
    steps = sorted(seconds[0].keys() & seconds[1].keys() - left_out)
    return [seconds[0][step] / seconds[1][step] for step in steps]


def gained(*policies: str) -> str:
    """A line for each FP8 run that had the GPU for itself, in Markdown: speed-ups and KL of its plan, and those seen.

    Observed: seconds per token of BF16's step over those of the same step of the run, whose problems are the same; the
    median over steps, and the lowest and highest. KL: k3 of the plan, and the median seen, of all steps but the first.
    A star: the plan went beyond what its profile had measured.
    """
    heads = ("policy", "arm", "steps", "rollout, predicted", "seen", "step, predicted", "seen", "k3, predicted", "seen")
    return table(heads, (line for policy in policies for line in _gained(policy)))


def _gained(policy: str) -> Iterator[list[str]]:
    arms = kept_runs(ALONE, policy=policy, unfinished=True)
    for arm, runs in arms.items():
        if arm == BASELINE:
            continue
        for key, run in runs.items():
            said, kl = run["predicted"], run["kl_k3"]
            rollout, step = (speedups(arms[BASELINE][key], run, part) for part in ("rollout", "step"))
            band = f"{said['speedup']:.2f} ({said['speedup_low']:.2f} to {said['speedup_high']:.2f})"
            k3 = f"{said['kl_k3']:.1e} ({said['kl_k3_low']:.1e} to {said['kl_k3_high']:.1e})"
            name = f"{policy} *" if said["extrapolated"] else policy
            seen = (spread(rollout, ".2f", median), spread(step, ".2f", median), UNSEEN if kl is None else f"{kl:.1e}")
            yield [name, arm, str(len(rollout)), band, seen[0], f"{said['step_speedup']:.2f}", seen[1], k3, seen[2]]


def tables() -> dict[str, str]:
    """The block of a page that a table fills -> the table, in Markdown."""
    return {
        "laws by a rule": ruled(),
        "rewards of masks": masks(),
        "gained": gained("qk-norm", "wide"),
        "learnt": learnt("qk-norm", H200),
        "learnt qk-norm on H100s": learnt("qk-norm", H100),
        "learnt smollm2": learnt("smollm2", H200, H100),
        "learnt gemma": learnt("gemma", H200),
        "learnt moe": learnt("moe", H200),
        "learnt moe on H100s": learnt("moe", H100),
    }


if __name__ == "__main__":
    print("\n\n".join(tables().values()))
