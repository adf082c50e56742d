"""Tables of learning: rewards, KL and thresholds of arms, what a correction is worth, and the fault drill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.learning.arms import ARMS, CONTROL, CORRECTIONS, baseline
from benchmarks.learning.evidence.cells import mean, spread
from benchmarks.learning.predicted import UNSEEN, last_tenth, observed, read_json, reward_after
from benchmarks.learning.run import found_runs
from benchmarks.learning.state import DRILL, RunFolder
from benchmarks.tables.markdown import table
from fp8plan import jsonl, schemas
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.laws import ConstantThresholds

# Figures of the tiny policy's runs, of 512 sequences a step and of 32.
LARGE_BATCHES, SMALL_BATCHES = (
    Path(__file__).parents[1] / "cpu" / "tiny-qk-norm" / name for name in ("control.jsonl", "small_batches.jsonl")
)
# Folders of policies. Of runs that shared a GPU, whole; and of those that the end of a lease broke off.
H200, H100 = ((Path(__file__).parents[1] / gpu / "shared") for gpu in ("h200", "h100"))
H200_BROKEN_OFF, H100_BROKEN_OFF = (shared.with_name("broken_off") for shared in (H200, H100))
DOUBTED: Final = (H200 / "qk-norm", H100 / "moe", H100_BROKEN_OFF / "plain", H100 / "smollm2")
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
    return {arm: found[arm] for arm in ARMS if arm in found}


def learnt(*policies: Path) -> str:
    """A line for each arm in the folders of policies, in Markdown: means over seeds, and the lowest and highest.

    KL, ESS and clipped tokens of a run are medians over its steps but the first. The difference to BF16 is over the
    seeds that both have, with its standard error.
    """
    heads = (
        "arm",
        "seeds",
        "reward before",
        "after",
        "gained",
        "less BF16's",
        "KL k3",
        "raw ESS",
        "clipped",
        "least C",
    )
    return table(heads, _learnt(by_arm(*policies)))


def _learnt(found: Mapping[str, Runs]) -> Iterator[list[str]]:
    rewards = {arm: {seed: reward_after(run) for seed, run in runs.items()} for arm, runs in found.items()}
    for arm, runs in found.items():
        seen = [observed(run) for run in runs.values()]
        before = [read_json(run / "predicted.json")["pilot_reward"] for run in runs.values()]
        after, beside = rewards[arm], rewards.get(baseline(arm), {})
        apart = [reward - beside[seed] for seed, reward in after.items() if seed in beside]
        gained = [end - start for start, end in zip(before, after.values(), strict=True)]
        cells = [arm, str(len(runs)), *(spread(x, ".2f") for x in (before, list(after.values()), gained))]
        cells += [UNSEEN if arm == baseline(arm) else mean(apart, "+")]
        for name, kind in (("kl_k3", ".1e"), ("ess_raw", ".3f"), ("clip_fraction", ".2g")):
            cells.append(spread([one[name] for one in seen], kind))
        bounds = [one["lowest_c"] for one in seen if one["lowest_c"] and ARMS[arm].correction != "none"]
        yield [*cells, f"{min(bounds):.2f}" if bounds else UNSEEN]


def in_training(*policies: Path, against: str) -> str:
    """A line for each arm of runs of which some were broken off, in Markdown: rewards of what the engine sampled.

    Means over steps and over seeds, with the lowest and highest seed. KL, C and the difference to the arm `against`,
    with its standard error, are of the last ten steps; steps are those of the shortest run.
    """
    first, *rest = PARTS
    heads = ("arm", "seeds", "steps", f"reward, {first}", *rest, f"less `{against}`", "KL k3, last ten", "C, last ten")
    arms = by_arm(*policies, unfinished=True)
    of_mismatch = {arm: runs for arm, runs in arms.items() if ARMS[arm].mismatch == ARMS[against].mismatch}
    return table(heads, ([arm, *_in_training(arm, runs, arms[against])] for arm, runs in of_mismatch.items()))


def _in_training(arm: str, runs: Runs, beside: Runs) -> Iterator[str]:
    rewards = {key: [row["reward"] for row in run.rows("steps.jsonl")] for key, run in runs.items()}
    metrics = [[row["metrics"] for row in run.rows("run.jsonl")][LATE] for run in runs.values()]
    yield from (str(len(runs)), str(min(map(len, rewards.values()))))
    for part in PARTS.values():
        yield spread([fmean(of_run[part]) for of_run in rewards.values()], ".2f")
    others = {key: [row["reward"] for row in run.rows("steps.jsonl")] for key, run in beside.items()}
    apart = [fmean(rewards[key][LATE]) - fmean(others[key][LATE]) for key in rewards if key in others]
    yield UNSEEN if runs == beside else mean(apart, "+")
    yield spread([fmean(m[schemas.K3] for m in late) for late in metrics], ".1e")
    uncorrected = ARMS[arm].correction == "none"
    yield UNSEEN if uncorrected else spread([fmean(m[schemas.TIS] for m in late) for late in metrics], ".2f")


def corrected(path: Path) -> str:
    """A line for each correction under each mismatch, in Markdown: rewards after the run, and beside C = 2.

    Means over seeds with their standard errors. The difference is over the seeds that both have, which begin with the
    same weights and draw the same problems. KL and C are of the last tenth of the steps.

    Raises ConfigError if there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; type: python -m benchmarks.learning.keep FOLDER/POLICY {path}")
    runs = defaultdict[str, dict[int, dict[str, Any]]](dict)
    for row in jsonl.rows(path):
        runs[row["arm"]][row["seed"]] = row
    heads = ("mismatch", "correction", "seeds", "reward before", "after", "less that of C = 2")
    return table((*heads, "KL k3, at last", "C, at last"), _corrected(runs))


def _corrected(runs: Mapping[str, Mapping[int, dict[str, Any]]]) -> Iterator[list[str]]:
    for arm in (name for name in CONTROL if name in runs):
        mine, usual = runs[arm], f"{ARMS[arm].mismatch}-tis"
        beside = runs.get(usual, {})
        apart = [row["reward_after"] - beside[seed]["reward_after"] for seed, row in mine.items() if seed in beside]
        kls, bounds = ([x for row in mine.values() for x in last_tenth(row[name])] for name in ("kl_k3", "tis"))
        c = UNSEEN if ARMS[arm].correction == "none" else f"{fmean(bounds):.2f}"
        cells = [ARMS[arm].mismatch, _name(ARMS[arm].correction), str(len(mine))]
        cells += [mean([row[f"reward_{when}"] for row in mine.values()]) for when in ("before", "after")]
        yield [*cells, UNSEEN if arm == usual else mean(apart, "+"), f"{fmean(kls):.2g}", c]


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
    benign = (one for one in found if ARMS[one[1]].mismatch == "benign")
    return table(heads, ([policy, arm, *_doubts(runs, steps)] for policy, arm, runs in benign))


def _doubts(runs: Runs, steps: int) -> list[str]:
    rows = [[row["metrics"] for row in run.rows("run.jsonl")] for run in runs.values()]
    parts = [[m for of_run in rows for m in of_run[part]] for part in (slice(steps), slice(-steps, None))]
    doubts, kls = ([fmean(m[name] for m in part) for part in parts] for name in (DOUBT, schemas.K3))
    return [f"{x:.1e}" for x in (*doubts, *kls, *(kl / x for kl, x in zip(kls, doubts, strict=True)))]


def _name(correction: str) -> str:
    """A correction as the page calls it."""
    law = CORRECTIONS[correction]
    if isinstance(law.controller, ConstantThresholds):
        return "none" if law.settings.level is None else f"token TIS, C = {law.controller.tis:g}"
    return f"`{type(law.controller).__name__}`"
