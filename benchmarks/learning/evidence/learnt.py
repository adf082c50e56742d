"""Tables of learning: rewards, KL and thresholds of arms, a policy's doubt, and the fault drill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.learning.arms import LOGGED, baseline, uncorrected
from benchmarks.learning.evidence.seeds import apart, spread
from benchmarks.learning.predicted import UNSEEN, observed, read_json, reward_after
from benchmarks.learning.run import found_runs
from benchmarks.learning.state import DRILL, RunFolder
from benchmarks.tables.markdown import table
from fp8plan import schemas

LATE: Final = slice(-10, None)  # steps
PARTS: Final = {"steps 1-5": slice(0, 5), "21-30": slice(20, 30), "last ten": LATE}
DOUBT: Final = "rollout_corr/rollout_log_ppl"  # -log p of sampled tokens, mean over sequences, in nats

Runs = dict[tuple[Path, int], RunFolder]  # by the folder of the policy, and the seed


def by_arm(*policies: Path, unfinished: bool = False) -> dict[str, Runs]:
    """Arm -> its runs in the folders of policies, in the order of the table of arms.

    unfinished: those too that did not end
    """
    found = defaultdict[str, Runs](dict)
    for policy in policies:
        for (arm, seed), run in found_runs(policy).items():
            if run.done or unfinished:
                found[arm][policy, seed] = run
    return {arm: found[arm] for arm in LOGGED if arm in found}


def learnt(*policies: Path) -> str:
    """A line for each arm in the folders of policies, in Markdown: means over seeds, and the lowest and highest.

    KL, ESS and clipped tokens of a run are medians over its steps but the first. The reward is set beside that of BF16,
    and beside that of the arm which differs in having no correction: over the seeds that both have, with the standard
    error of the difference.
    """
    heads = ("arm", "seeds", "reward before", "after", "gained", "less BF16's", "less uncorrected")
    return table((*heads, "KL k3", "raw ESS", "clipped", "least C"), _learnt(by_arm(*policies)))


def _learnt(found: Mapping[str, Runs]) -> Iterator[list[str]]:
    rewards = {arm: rewards_after(runs) for arm, runs in found.items()}
    for arm, runs in found.items():
        seen = [observed(run) for run in runs.values()]
        before = [read_json(run / "predicted.json")["pilot_reward"] for run in runs.values()]
        after = rewards[arm]
        gained = [end - start for start, end in zip(before, after.values(), strict=True)]
        cells = [arm, str(len(runs)), *(spread(x, ".2f") for x in (before, list(after.values()), gained))]
        cells += [apart(after, rewards.get(other, {})) for other in (baseline(arm), uncorrected(arm))]
        for name, kind in (("kl_k3", ".1e"), ("ess_raw", ".3f"), ("clip_fraction", ".2g")):
            cells.append(spread([one[name] for one in seen], kind))
        bounds = [one["lowest_c"] for one in seen if one["lowest_c"] and LOGGED[arm].correction != "none"]
        yield [*cells, f"{min(bounds):.2f}" if bounds else UNSEEN]


def rewards_after(runs: Runs) -> dict[Hashable, float]:
    """The rewards after runs that are over, by policy's folder and seed."""
    return {key: reward_after(run) for key, run in runs.items()}


def rewards_late(runs: Runs) -> dict[Hashable, float]:
    """The mean rewards of the last ten steps, of what the engine sampled, by policy's folder and seed."""
    return {key: fmean(row["reward"] for row in run.rows("steps.jsonl")[LATE]) for key, run in runs.items()}


def in_training(*policies: Path, against: str) -> str:
    """A line for each arm of runs of which some were broken off, in Markdown: rewards of what the engine sampled.

    Means over steps and over seeds, with the lowest and highest seed. KL, C and the difference to the arm `against`,
    with its standard error, are of the last ten steps; steps are those of the shortest run.
    """
    first, *rest = PARTS
    heads = ("arm", "seeds", "steps", f"reward, {first}", *rest, f"less `{against}`", "KL k3, last ten", "C, last ten")
    arms = by_arm(*policies, unfinished=True)
    of_mismatch = {arm: runs for arm, runs in arms.items() if LOGGED[arm].mismatch == LOGGED[against].mismatch}
    late = {arm: rewards_late(runs) for arm, runs in of_mismatch.items()}
    return table(
        heads, ([arm, *_in_training(arm, runs, apart(late[arm], late[against]))] for arm, runs in of_mismatch.items())
    )


def _in_training(arm: str, runs: Runs, less: str) -> Iterator[str]:
    rewards = {key: [row["reward"] for row in run.rows("steps.jsonl")] for key, run in runs.items()}
    metrics = [[row["metrics"] for row in run.rows("run.jsonl")][LATE] for run in runs.values()]
    yield from (str(len(runs)), str(min(map(len, rewards.values()))))
    for part in PARTS.values():
        yield spread([fmean(of_run[part]) for of_run in rewards.values()], ".2f")
    yield less
    yield spread([fmean(m[schemas.K3] for m in late) for late in metrics], ".1e")
    bounds = [] if LOGGED[arm].correction == "none" else [fmean(m[schemas.TIS] for m in late) for late in metrics]
    yield spread(bounds, ".2f")  # UNSEEN where there are none


def drill(policy: Path) -> str:
    """A line for each fault of the drill, in Markdown: how the reward on held-out prompts changed over it."""
    found = read_json(policy / DRILL / "drill.json")
    return table(
        ("fault", "after step", "change of the reward three steps later", "its standard error"),
        ((x["fault"], str(x["step"]), f"{x['change']:+.3f}", f"{x['error']:.3f}") for x in found["scars"]),
    )


def doubt(*policies: Path, steps: int = 10) -> str:
    """A line for each arm without added mismatch, in Markdown: k3 beside the policy's own doubt, -log p of its tokens.

    Means over seeds and over the first and the last steps, also of runs that did not end.
    """
    heads = ("policy", "arm", "-log p, first steps", "last", "k3, first", "last", "k3 / -log p, first", "last")
    found = [(policy.name, arm, runs) for policy in policies for arm, runs in by_arm(policy, unfinished=True).items()]
    benign = (one for one in found if LOGGED[one[1]].mismatch == "benign")
    return table(heads, ([policy, arm, *_doubts(runs, steps)] for policy, arm, runs in benign))


def _doubts(runs: Runs, steps: int) -> list[str]:
    rows = [[row["metrics"] for row in run.rows("run.jsonl")] for run in runs.values()]
    parts = [[m for of_run in rows for m in of_run[part]] for part in (slice(steps), slice(-steps, None))]
    doubts, kls = ([fmean(m[name] for m in part) for part in parts] for name in (DOUBT, schemas.K3))
    return [f"{x:.1e}" for x in (*doubts, *kls, *(kl / x for kl, x in zip(kls, doubts, strict=True)))]
