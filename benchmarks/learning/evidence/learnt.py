"""Tables of learning: rewards, KL and thresholds of arms, a policy's doubt, and the fault drill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.learning.arms import BASELINE, LOGGED, uncorrected
from benchmarks.learning.evidence.kept import Runs, figure, kept_runs
from benchmarks.learning.evidence.seeds import apart, spread
from benchmarks.learning.predicted import UNSEEN, read_json
from benchmarks.tables.markdown import table


def learnt(policy: str, *tables: Path) -> str:
    """A line for each arm of a policy, in Markdown: means over seeds, and the lowest and highest.

    KL, ESS and clipped tokens of a run are medians over its steps but the first. The reward is set beside that of BF16,
    and beside that of the arm which differs in having no correction: over the seeds that both have, with the standard
    error of the difference.
    """
    heads = ("arm", "seeds", "reward before", "after", "gained", "less BF16's", "less uncorrected")
    return table((*heads, "KL k3", "raw ESS", "clipped", "least C"), _learnt(kept_runs(*tables, policy=policy)))


def _learnt(arms: Mapping[str, Runs]) -> Iterator[list[str]]:
    rewards = {arm: figure(runs, "reward_after") for arm, runs in arms.items()}
    for arm, runs in arms.items():
        before, after = list(figure(runs, "reward_before").values()), rewards[arm]
        gained = [end - start for start, end in zip(before, after.values(), strict=True)]
        cells = [arm, str(len(runs)), *(spread(x, ".2f") for x in (before, list(after.values()), gained))]
        cells += [apart(after, rewards.get(other, {})) for other in (BASELINE, uncorrected(arm))]
        for name, kind in (("kl_k3", ".1e"), ("ess_raw", ".3f"), ("clip_fraction", ".2g")):
            cells.append(spread(list(figure(runs, name).values()), kind))
        bounds = [x for x in figure(runs, "tis_least").values() if x and LOGGED[arm].correction != "none"]
        yield [*cells, f"{min(bounds):.2f}" if bounds else UNSEEN]


def in_training(policy: str, *tables: Path, against: str) -> str:
    """A line for each arm of runs of which some were broken off, in Markdown: rewards of what the engine sampled.

    Means over steps and over seeds, with the lowest and highest seed. KL, C and the difference to the arm `against`,
    with its standard error, are of the last ten steps; steps are those of the shortest run.
    """
    heads = ("arm", "seeds", "steps", "reward, steps 1-5", "21-30", "last ten", f"less `{against}`")
    arms = kept_runs(*tables, policy=policy, unfinished=True)
    of_mismatch = {arm: runs for arm, runs in arms.items() if LOGGED[arm].mismatch == LOGGED[against].mismatch}
    late = {arm: figure(runs, "reward_late") for arm, runs in of_mismatch.items()}
    lines = ([arm, *_in_training(arm, runs, apart(late[arm], late[against]))] for arm, runs in of_mismatch.items())
    return table((*heads, "KL k3, last ten", "C, last ten"), lines)


def _in_training(arm: str, runs: Runs, less: str) -> Iterator[str]:
    yield from (str(len(runs)), str(min(figure(runs, "steps").values())))
    for part in ("first", "middle", "late"):
        yield spread(list(figure(runs, f"reward_{part}").values()), ".2f")
    yield less
    yield spread(list(figure(runs, "kl_late").values()), ".1e")
    bounds = [] if LOGGED[arm].correction == "none" else list(figure(runs, "tis_late").values())
    yield spread(bounds, ".2f")  # UNSEEN where there are none


def drill(report: Path) -> str:
    """A line for each fault of the drill, in Markdown: how the reward on held-out prompts changed over it."""
    return table(
        ("fault", "after step", "change of the reward three steps later", "its standard error"),
        ((x["fault"], str(x["step"]), f"{x['change']:+.3f}", f"{x['error']:.3f}") for x in read_json(report)["scars"]),
    )


def doubt(places: Iterable[tuple[str, Path]]) -> str:
    """A line for each arm without added mismatch, in Markdown: k3 beside the policy's own doubt, -log p of its tokens.

    Means over seeds and over the first and the last ten steps, also of runs that did not end.

    places: policies, each with its table
    """
    heads = ("policy", "arm", "-log p, first steps", "last", "k3, first", "last", "k3 / -log p, first", "last")
    lines = [
        [policy, arm, *_doubts(runs)]
        for policy, path in places
        for arm, runs in kept_runs(path, policy=policy, unfinished=True).items()
        if LOGGED[arm].mismatch == "benign"
    ]
    return table(heads, lines)


def _doubts(runs: Runs) -> list[str]:
    doubts, kls = (
        [fmean(figure(runs, f"{name}_{at}").values()) for at in ("begin", "late")] for name in ("doubt", "kl")
    )
    return [f"{x:.1e}" for x in (*doubts, *kls, *(kl / x for kl, x in zip(kls, doubts, strict=True)))]
