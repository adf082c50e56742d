"""Tables of learning: rewards, KL and thresholds of arms, what a correction is worth, and the fault drill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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

CPU: Final = Path(__file__).parents[1] / "cpu" / "tiny-qk-norm"
SHARED: Final = Path(__file__).parents[1] / "h200" / "shared"  # runs that shared a GPU
BROKEN_OFF: Final = SHARED.with_name("broken_off")  # likewise, but the lease ended before they did
LATE: Final = slice(-10, None)  # steps
PARTS: Final = {"steps 1-5": slice(0, 5), "21-30": slice(20, 30), "last ten": LATE}
DOUBT: Final = "rollout_corr/rollout_log_ppl"  # -log p of sampled tokens, mean over sequences, in nats


def by_arm(folder: Path, unfinished: bool = False) -> dict[str, dict[int, RunFolder]]:
    """Arm -> seed -> its run, in the order of the table of arms. unfinished: those too that did not end"""
    found = defaultdict[str, dict[int, RunFolder]](dict)
    for (arm, seed), run in found_runs(folder).items():
        if run.done or unfinished:
            found[arm][seed] = run
    return dict(found)


def learnt(policy: str) -> str:
    """A line for each arm of a policy, in Markdown: means over seeds, and the lowest and highest.

    KL, ESS and clipped tokens of a run are medians over its steps but the first. The difference to BF16 is over the
    seeds that both have, with its standard error.
    """
    heads = ("arm", "seeds", "reward before", "after", "less BF16's", "KL k3", "raw ESS", "clipped", "least C")
    return table(heads, _learnt(by_arm(SHARED / policy)))


def _learnt(found: Mapping[str, Mapping[int, RunFolder]]) -> Iterator[list[str]]:
    rewards = {arm: {seed: reward_after(run) for seed, run in runs.items()} for arm, runs in found.items()}
    for arm, runs in found.items():
        seen = [observed(run) for run in runs.values()]
        before = [read_json(run / "predicted.json")["pilot_reward"] for run in runs.values()]
        after, beside = rewards[arm], rewards.get(baseline(arm), {})
        apart = [reward - beside[seed] for seed, reward in after.items() if seed in beside]
        cells = [arm, str(len(runs)), spread(before, ".2f"), spread(list(after.values()), ".2f")]
        cells += [UNSEEN if arm == baseline(arm) else mean(apart, "+")]
        for name, kind in (("kl_k3", ".1e"), ("ess_raw", ".3f"), ("clip_fraction", ".2g")):
            cells.append(spread([one[name] for one in seen], kind))
        bounds = [one["lowest_c"] for one in seen if one["lowest_c"] and ARMS[arm].correction != "none"]
        yield [*cells, f"{min(bounds):.2f}" if bounds else UNSEEN]


def in_training(policy: str) -> str:
    """A line for each arm of the runs that a lease's end broke off, in Markdown: rewards of what the engine sampled.

    Means over steps and over seeds, with the lowest and highest seed. KL and C are of the last ten steps. Steps are
    those of the shortest run.
    """
    first, *rest = PARTS
    heads = ("arm", "seeds", "steps", f"reward, {first}", *rest, "KL k3, last ten", "C, last ten")
    arms = by_arm(BROKEN_OFF / policy, unfinished=True)
    return table(heads, ([arm, *_in_training(arm, list(runs.values()))] for arm, runs in arms.items()))


def _in_training(arm: str, runs: Sequence[RunFolder]) -> Iterator[str]:
    rewards = [[row["reward"] for row in run.rows("steps.jsonl")] for run in runs]
    metrics = [[row["metrics"] for row in run.rows("run.jsonl")][LATE] for run in runs]
    yield from (str(len(runs)), str(min(map(len, rewards))))
    for part in PARTS.values():
        yield spread([fmean(of_run[part]) if of_run[part] else None for of_run in rewards], ".2f")
    yield spread([fmean(m[schemas.K3] for m in late) for late in metrics], ".1e")
    uncorrected = ARMS[arm].correction == "none"
    yield UNSEEN if uncorrected else spread([fmean(m[schemas.TIS] for m in late) for late in metrics], ".2f")


def corrected(path: Path = CPU / "control.jsonl") -> str:
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


def drill(policy: str) -> str:
    """A line for each fault of the drill, in Markdown: how the reward on held-out prompts changed over it."""
    found = read_json(SHARED / policy / DRILL / "drill.json")
    return table(
        ("fault", "after step", "change of the reward three steps later", "its standard error"),
        ((x["fault"], str(x["step"]), f"{x['change']:+.3f}", f"{x['error']:.3f}") for x in found["scars"]),
    )


def doubt(policy: str, steps: int = 10) -> str:
    """A line for each arm without added mismatch, in Markdown: k3 beside the policy's own doubt, -log p of its tokens.

    Means over seeds and over the first and the last steps.
    """
    heads = ("arm", "-log p, first steps", "last", "k3, first", "last", "k3 / -log p, first", "last")
    benign = {arm: runs for arm, runs in by_arm(SHARED / policy).items() if ARMS[arm].mismatch == "benign"}
    return table(heads, ([arm, *_doubts(runs, steps)] for arm, runs in benign.items()))


def _doubts(runs: Mapping[int, RunFolder], steps: int) -> list[str]:
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
