"""The end of `make demo`: what its run has shown, beside what was planned.

python -m benchmarks.learning.seen FOLDER    of one run
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from benchmarks.learning.state import RunFolder, read_json


def lines(folder: RunFolder) -> list[str]:
    """Return the lines of a run that is over. Raises OSError for one that is not."""
    planned, done = read_json(folder / "predicted.json"), read_json(folder / "done.json")
    steps, records = folder.rows("steps.jsonl"), folder.rows("run.jsonl")
    before, after = planned["pilot_reward"], done["reward_after"]
    tokens = sum(step["response_tokens"] for step in steps)
    kl = median(record["metrics"]["rollout_corr/k3_kl"] for record in records)
    clipped = median(record["metrics"]["fp8plan/clip_fraction"] for record in records)
    seconds = median(step["rollout_s"] for step in steps)
    learned = f"mean reward {before:.2f} before and {after:.2f} after {done['steps']} steps"
    gain = f"{planned['speedup']:.2f}x as fast as BF16"
    kl_band = f"{planned['kl_k3_low']:.1e} to {planned['kl_k3_high']:.1e}"
    s_band = f"{planned['makespan_low_s']:.2f} to {planned['makespan_high_s']:.2f}"
    return [
        f"learning: {learned}, on problems that it was not trained on",
        f"engine:   vLLM sampled {tokens:,} tokens in {planned['precision']}, and took new weights {len(steps)} times",
        f"mismatch: KL k3 {kl:.1e} per token in the median, planned {kl_band}; TIS clipped {clipped:.2%}",
        f"speed:    {seconds:.2f} s for the median rollout, planned {s_band} s, {gain}",
    ]


def main() -> None:
    (folder,) = sys.argv[1:]
    print("\nSeen in this run:", *lines(RunFolder(Path(folder))), sep="\n")


if __name__ == "__main__":
    main()
