"""The tables of docs/evidence/learning.md: what the committed runs have learnt, by arm.

python -m benchmarks.learning.evidence      prints them; `make tables` writes them into the page
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import NamedTemporaryFile
from typing import Any, Final, NamedTuple

from benchmarks.learning import engine_modes
from benchmarks.learning.arms import ARMS, CONTROL, CORRECTIONS, baseline
from benchmarks.learning.predicted import UNSEEN, last_tenth, observed, read_json, reward_after, speedups
from benchmarks.learning.run import found_runs
from benchmarks.learning.state import DRILL, RunFolder
from fp8plan import jsonl, schemas
from fp8plan.errors import ConfigError
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate
from fp8plan.runtime.controller.laws import ConstantThresholds

CPU: Final = Path(__file__).parent / "cpu" / "tiny-qk-norm"
H200: Final = Path(__file__).parent / "h200"
SHARED, ALONE = H200 / "shared", H200 / "alone"  # runs that shared a GPU, and runs that had it for themselves
OF_SPEED: Final = ("qk-norm", "wide")  # the policies that ran alone
DOUBT: Final = "rollout_corr/rollout_log_ppl"  # -log p of sampled tokens, mean over sequences, in nats


def by_arm(folder: Path) -> dict[str, dict[int, RunFolder]]:
    """Arm -> seed -> its run, of those that came to their end, in the order of the table of arms."""
    found = defaultdict[str, dict[int, RunFolder]](dict)
    for (arm, seed), run in found_runs(folder).items():
        if run.done:
            found[arm][seed] = run
    return dict(found)


def learnt(policy: str) -> str:
    """A line for each arm of a policy, in Markdown: means over seeds, and the lowest and highest.

    KL, ESS and clipped tokens of a run are medians over its steps but the first. The difference to BF16 is over the
    seeds that both have, with its standard error.
    """
    lines = [
        "| arm | seeds | reward before | after | less BF16's | KL k3 | raw ESS | clipped | least C |",
        "|" + "---|" * 9,
    ]
    found = by_arm(SHARED / policy)
    rewards = {arm: {seed: reward_after(run) for seed, run in runs.items()} for arm, runs in found.items()}
    for arm, runs in found.items():
        seen = [observed(run) for run in runs.values()]
        before = [read_json(run / "predicted.json")["pilot_reward"] for run in runs.values()]
        after, beside = rewards[arm], rewards.get(baseline(arm), {})
        apart = [reward - beside[seed] for seed, reward in after.items() if seed in beside]
        figures = [[one[name] for one in seen] for name in ("kl_k3", "ess_raw", "clip_fraction")]
        bounds = [one["lowest_c"] for one in seen if one["lowest_c"] and ARMS[arm].correction != "none"]
        least = f"{min(bounds):.2f}" if bounds else UNSEEN
        cells = [arm, str(len(runs)), _spread(before, ".2f"), _spread(list(after.values()), ".2f")]
        cells += [UNSEEN if arm == baseline(arm) else _mean(apart, "+")]
        cells += [_spread(each, kind) for each, kind in zip(figures, (".1e", ".3f", ".2g"), strict=True)]
        lines.append(f"| {' | '.join([*cells, least])} |")
    return "\n".join(lines)


class Alone(NamedTuple):
    """A run that had the GPU for itself.

    disturbed: steps in which another run was on the GPU after all, as machine.json says
    """

    policy: str
    arm: str
    seed: int
    run: RunFolder
    disturbed: set[int]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a log that count: not the first step's, nor those of disturbed ones."""
        return [row for row in self.run.rows(name)[1:] if row["step"] not in self.disturbed]


def alone(policies: Sequence[str]) -> list[Alone]:
    """The runs of these policies that had the GPU for themselves, in the order of the table of arms."""
    disturbed = read_json(H200 / "machine.json").get("disturbed_steps", {})
    return [
        Alone(policy, arm, seed, run, set(disturbed.get(f"{policy}/{arm}/{seed}", ())))
        for policy in policies
        for (arm, seed), run in found_runs(ALONE / policy).items()
    ]


def timed(*policies: str) -> str:
    """A line for each run that had the GPU for itself, in Markdown: seconds predicted, and medians of those seen.

    Of seconds per token of a rollout, the lowest and highest, too.
    """
    lines = [
        "| policy | arm | steps | rollout, predicted (90%) | observed | per token | training | sync | whole step |",
        "|" + "---|" * 9,
    ]
    for one in alone(policies):
        said, steps = read_json(one.run / "predicted.json"), one.rows("steps.jsonl")
        rollout, *others = (
            f"{median(row[f'{part}_s'] for row in steps):.2f} s" for part in ("rollout", "train", "sync", "step")
        )
        each = _spread([1e6 * row["rollout_s"] / row["response_tokens"] for row in steps], ".0f", median, " µs")
        low, high = said["makespan_low_s"], said["makespan_high_s"]
        cells = [one.policy, one.arm, str(len(steps)), f"{said['makespan_s']:.2f} s ({low:.2f}-{high:.2f})"]
        lines.append(f"| {' | '.join([*cells, rollout, each, *others])} |")
    return "\n".join(lines)


def gained(*policies: str) -> str:
    """A line for each FP8 run that had the GPU for itself, in Markdown: speed-ups and KL of its plan, and those seen.

    Observed: seconds per token of BF16's step over those of the same step of the run, whose problems are the same; the
    median over steps, and the lowest and highest. KL: k3 of the plan, and the median seen, of all steps but the first.
    A star: the plan went beyond what its profile had measured.
    """
    lines = [
        "| policy | arm | steps | rollout, predicted | seen | step, predicted | seen | k3, predicted | seen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    runs = {(one.policy, one.arm, one.seed): one for one in alone(policies)}
    for (policy, arm, seed), one in runs.items():
        base = runs.get((policy, baseline(arm), seed))
        if base is None or base is one:
            continue
        said, kl = read_json(one.run / "predicted.json"), observed(one.run)["kl_k3"]
        but = base.disturbed | one.disturbed
        rollout, step = (speedups(base.run, one.run, part, but) for part in ("rollout", "step"))
        band = f"{said['speedup']:.2f} ({said['speedup_low']:.2f}-{said['speedup_high']:.2f})"
        k3 = f"{said['kl_k3']:.1e} ({said['kl_k3_low']:.1e}-{said['kl_k3_high']:.1e})"
        name = f"{policy} *" if said["extrapolated"] else policy
        cells = [name, arm, str(len(rollout)), band, _spread(rollout, ".2f", median), f"{said['step_speedup']:.2f}"]
        cells += [_spread(step, ".2f", median), k3, UNSEEN if kl is None else f"{kl:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def again(*policies: str) -> str:
    """A line for each run that had the GPU for itself, in Markdown: its rollouts as predicted from their own lengths.

    Errors of the seconds of `generate`, (predicted - measured) / measured. The profile is today's, the plan's may have
    been another.
    """
    lines = ["| policy | arm | steps | median error | lowest | highest |", "|---|---|---|---|---|---|"]
    for one in alone(policies):
        rows = [row | {"model": str(ALONE / one.policy)} for row in one.rows("run.jsonl")]
        with NamedTemporaryFile(suffix=".jsonl") as file:
            Path(file.name).write_bytes(b"".join(map(jsonl.line, rows)))
            errors = [row["error"] for row in validate(read_records(file.name)).records]
        cells = [f"{x:+.1%}" for x in (median(errors), min(errors), max(errors))]
        lines.append(f"| {' | '.join([one.policy, one.arm, str(len(rows)), *cells])} |")
    return "\n".join(lines)


def corrected(path: Path = CPU / "control.jsonl") -> str:
    """A line for each correction under each mismatch, in Markdown: rewards after the run, and beside C = 2.

    Means over seeds with their standard errors. The difference is over the seeds that both have, which begin with the
    same weights and draw the same problems. KL and C are of the last tenth of the steps.

    Raises ConfigError if there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; type: python -m benchmarks.learning.keep FOLDER/POLICY {path}")
    lines = [
        "| mismatch | correction | seeds | reward before | after | less that of C = 2 | KL k3, at last | C, at last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    runs = {(row["arm"], row["seed"]): row for row in jsonl.rows(path)}
    arms = {arm for arm, _ in runs}
    for arm in (name for name in CONTROL if name in arms):
        mine = {seed: row for (name, seed), row in runs.items() if name == arm}
        usual = f"{ARMS[arm].mismatch}-tis"
        apart = [
            row["reward_after"] - runs[usual, seed]["reward_after"]
            for seed, row in mine.items()
            if (usual, seed) in runs
        ]
        kls, bounds = ([x for row in mine.values() for x in last_tenth(row[name])] for name in ("kl_k3", "tis"))
        c = UNSEEN if ARMS[arm].correction == "none" else f"{fmean(bounds):.2f}"
        cells = [ARMS[arm].mismatch, _name(ARMS[arm].correction), str(len(mine))]
        cells += [_mean([row[f"reward_{when}"] for row in mine.values()]) for when in ("before", "after")]
        cells += [UNSEEN if arm == usual else _mean(apart, "+"), f"{fmean(kls):.2g}", c]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def drill(policy: str) -> str:
    """A line for each fault of the drill, in Markdown: how the reward on held-out prompts changed over it."""
    found = read_json(SHARED / policy / DRILL / "drill.json")
    lines = [
        "| fault | after step | change of the reward three steps later | its standard error |",
        "|---|---|---|---|",
    ]
    lines += [f"| {x['fault']} | {x['step']} | {x['change']:+.3f} | {x['error']:.3f} |" for x in found["scars"]]
    return "\n".join(lines)


def doubt(policy: str, steps: int = 10) -> str:
    """A line for each arm without added mismatch, in Markdown: k3 beside the policy's own doubt, -log p of its tokens.

    Means over seeds and over the first and the last steps.
    """
    lines = ["| arm | -log p, first steps | last | k3, first | last | k3 / -log p, first | last |", "|" + "---|" * 7]
    for arm, runs in by_arm(SHARED / policy).items():
        if ARMS[arm].mismatch != "benign":
            continue
        rows = [[row["metrics"] for row in run.rows("run.jsonl")] for run in runs.values()]
        parts = [[m for of_run in rows for m in of_run[part]] for part in (slice(steps), slice(-steps, None))]
        doubts = [fmean(m[DOUBT] for m in part) for part in parts]
        kls = [fmean(m[schemas.K3] for m in part) for part in parts]
        cells = [f"{x:.1e}" for x in (*doubts, *kls, *(kl / x for kl, x in zip(kls, doubts, strict=True)))]
        lines.append(f"| {' | '.join([arm, *cells])} |")
    return "\n".join(lines)


def _name(correction: str) -> str:
    """A correction as the page calls it."""
    law = CORRECTIONS[correction]
    if isinstance(law.controller, ConstantThresholds):
        return "none" if law.settings.level is None else f"token TIS, C = {law.controller.tis:g}"
    return f"`{type(law.controller).__name__}`"


def _mean(values: Sequence[float], sign: str = "") -> str:
    """A mean, and its standard error if there is more than one value."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{error}" if values else UNSEEN


def _spread(
    values: Sequence[float | None], kind: str, middle: Callable[[list[float]], float] = fmean, unit: str = ""
) -> str:
    """The mean, or another middle, with the lowest and highest if there is more than one value."""
    known = [x for x in values if x is not None]
    if not known:
        return UNSEEN
    ends = f" ({min(known):{kind}}-{max(known):{kind}})" if len(known) > 1 else ""
    return f"{middle(known):{kind}}{unit}{ends}"


if __name__ == "__main__":
    print(
        learnt("qk-norm"),
        timed(*OF_SPEED),
        gained(*OF_SPEED),
        again(*OF_SPEED),
        engine_modes.table(),
        doubt("qk-norm"),
        drill("qk-norm"),
        corrected(),
        sep="\n\n",
    )
