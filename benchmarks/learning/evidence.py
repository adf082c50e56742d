"""The tables of docs/evidence/learning.md: what the committed runs on an H200 have learnt, by arm.

python -m benchmarks.learning.evidence      prints them; `make tables` writes them into the page
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

from benchmarks.learning.arms import ARMS
from benchmarks.learning.predicted import UNSEEN, observed, read_json
from benchmarks.learning.run import found_runs
from benchmarks.learning.state import RunFolder
from fp8plan import schemas

H200: Final = Path(__file__).parent / "h200"
SHARED, ALONE = H200 / "shared", H200 / "alone"  # runs that shared a GPU, and runs that had it for themselves
DOUBT: Final = "rollout_corr/rollout_log_ppl"  # -log p of sampled tokens, mean over sequences, in nats


def by_arm(folder: Path) -> dict[str, list[RunFolder]]:
    """Arm -> its runs that came to their end, by seed, in the order of the table of arms."""
    found = defaultdict[str, list[RunFolder]](list)
    for (arm, _), run in found_runs(folder).items():
        if run.done:
            found[arm].append(run)
    return dict(found)


def learnt(policy: str) -> str:
    """A line for each arm of a policy, in Markdown: means over seeds, and the lowest and highest.

    KL, ESS and clipped tokens of a run are medians over its steps but the first.
    """
    lines = [
        "| arm | seeds | reward before | after | KL k3 | raw ESS | clipped | least C |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in by_arm(SHARED / policy).items():
        seen = [observed(run) for run in runs]
        before = [read_json(run / "predicted.json")["pilot_reward"] for run in runs]
        after = [read_json(run / "done.json")["reward_after"] for run in runs]
        figures = [[one[name] for one in seen] for name in ("kl_k3", "ess_raw", "clip_fraction")]
        bounds = [one["lowest_c"] for one in seen if one["lowest_c"] and ARMS[arm].correction != "none"]
        least = f"{min(bounds):.2f}" if bounds else UNSEEN
        cells = [arm, str(len(runs)), _spread(before, ".2f"), _spread(after, ".2f")]
        cells += [_spread(each, kind) for each, kind in zip(figures, (".1e", ".3f", ".2g"), strict=True)]
        lines.append(f"| {' | '.join([*cells, least])} |")
    return "\n".join(lines)


def timed(policy: str) -> str:
    """A line for each run that had the GPU for itself, in Markdown: seconds predicted, and medians of those observed.

    The first step is left out.
    """
    lines = [
        "| arm | seed | steps | rollout, predicted (90%) | observed | training | sync | whole step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (arm, seed), run in found_runs(ALONE / policy).items():
        said, steps = read_json(run / "predicted.json"), run.rows("steps.jsonl")
        seconds = [median(row[f"{part}_s"] for row in steps[1:]) for part in ("rollout", "train", "sync", "step")]
        low, high = said["makespan_low_s"], said["makespan_high_s"]
        cells = [arm, str(seed), str(len(steps)), f"{said['makespan_s']:.2f} s ({low:.2f}-{high:.2f})"]
        cells += [f"{x:.2f} s" for x in seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def doubt(policy: str, steps: int = 10) -> str:
    """A line for each arm without added mismatch, in Markdown: k3 beside the policy's own doubt, -log p of its tokens.

    Means over seeds and over the first and the last steps.
    """
    lines = ["| arm | -log p, first steps | last | k3, first | last | k3 / -log p, first | last |", "|" + "---|" * 7]
    for arm, runs in by_arm(SHARED / policy).items():
        if ARMS[arm].mismatch != "benign":
            continue
        rows = [[row["metrics"] for row in run.rows("run.jsonl")] for run in runs]
        parts = [[m for of_run in rows for m in of_run[part]] for part in (slice(steps), slice(-steps, None))]
        doubts = [fmean(m[DOUBT] for m in part) for part in parts]
        kls = [fmean(m[schemas.K3] for m in part) for part in parts]
        cells = [f"{x:.1e}" for x in (*doubts, *kls, *(kl / x for kl, x in zip(kls, doubts, strict=True)))]
        lines.append(f"| {' | '.join([arm, *cells])} |")
    return "\n".join(lines)


def _spread(values: Sequence[float | None], kind: str) -> str:
    known = [x for x in values if x is not None]
    if not known:
        return UNSEEN
    ends = f" ({min(known):{kind}}-{max(known):{kind}})" if len(known) > 1 else ""
    return f"{fmean(known):{kind}}{ends}"


if __name__ == "__main__":
    print(learnt("qk-norm"), timed("qk-norm"), doubt("qk-norm"), sep="\n\n")
