"""Predict what routing by expected lengths gains over the static split, with the cost model alone.

    python -m benchmarks.fleet_routing

Qwen3-8B with FP8 weights and KV cache on H200s, 16 samples of each prompt; lognormal response lengths (sigma 0.9) as in
the rollout of DAPO (arXiv 2503.14476). "alone": lengths are independent; "by prompt": 70% of the variance of the log is
the prompt's. Each figure is the makespan divided by that of the static split, its median over SEEDS batches and the
worst of them, by what is known of the lengths: each itself; each with a noise of sigma 0.3; or the mean of the prompt's
responses in another rollout, which is what a fleet remembers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp8plan.model.limits import EngineLimits
from fp8plan.runtime.fleet.report import makespans
from fp8plan.runtime.fleet.routing import consecutive, routed
from fp8plan.runtime.guard.observation import EngineFacts, Observation

SEEDS, SAMPLES, SIGMA, NOISE, SHARE = 10, 16, 0.9, 0.3, 0.7
MEAN, LONGEST, PROMPT = 6000, 20480, 1024
FACTS = EngineFacts(
    "Qwen/Qwen3-8B",
    "h200_sxm",
    "0.26.0",
    "fp8_block+fp8_kv",
    EngineLimits(max_num_seqs=256, gpu_memory_utilization=0.9),
)
KNOWN = ("each", "with noise", "the prompt's mean")


def lengths(
    prompts: int, share: float, rng: np.random.Generator, mean: float = MEAN, longest: int = LONGEST
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Response lengths of two rollouts of the same prompts. share: of the log's variance that is the prompt's"""
    own = rng.normal(0, SIGMA * share**0.5, prompts).repeat(SAMPLES)
    logs = own + rng.normal(0, SIGMA * (1 - share) ** 0.5, (2, prompts * SAMPLES))
    both = np.clip(np.rint(mean * np.exp(logs - SIGMA**2 / 2)), 1, longest).astype(np.int64)
    return both[0], both[1]


def prompts_means(responses: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean length of each prompt's responses, once for each of them."""
    return responses.reshape(-1, SAMPLES).mean(1).repeat(SAMPLES)


def gains(prompts: int, replicas: int, share: float, seed: int) -> list[float]:
    """Makespans over the static split's, for each of KNOWN."""
    rng = np.random.default_rng(seed)
    now, before = lengths(prompts, share, rng)
    expected = (now, now * rng.lognormal(0, NOISE, len(now)), prompts_means(before))
    splits = [consecutive(len(now), replicas), *(routed(loads.tolist(), replicas) for loads in expected)]
    ids = np.arange(prompts).repeat(SAMPLES).tolist()
    seen = Observation(1.0, [PROMPT] * len(now), now, ids)
    static, *others = makespans(FACTS, seen, [[np.array(part) for part in split] for split in splits])
    return [other / static for other in others]


def main() -> None:
    print("prompts  replicas  lengths    " + "".join(f"{name:>24}" for name in KNOWN))
    for prompts, replicas in ((32, 4), (128, 4), (128, 8)):
        for name, share in (("alone", 0.0), ("by prompt", SHARE)):
            found = np.array([gains(prompts, replicas, share, seed) for seed in range(SEEDS)])
            cells = zip(np.median(found, 0), found.max(0), strict=True)
            row = "".join(f"{middle:>14.2f} (to {worst:.2f})" for middle, worst in cells)
            print(f"{prompts:>7}  {replicas:>8}  {name:<10}{row}")


if __name__ == "__main__":
    main()
