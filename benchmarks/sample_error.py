"""Makespans from a sample of a batch against those from all of its requests.

`python -m benchmarks.sample_error` prints a line for each batch: 24,000 responses on an H200 with 128 slots, of which
4,000 are simulated, in a pool that holds all requests and in one that does not, with lengths of several seeds.
"""

from __future__ import annotations

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import rollout
from fp8plan.model.schedule.sample import schedules_of
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.workload import Batch, Fixed, LogNormal, Workload

LIMITS = EngineLimits(max_num_seqs=128)
POOLS = {"ample": 10**8, "starved": 5_000}  # blocks
SEEDS, SAMPLE = range(6), 4_000


def main() -> None:
    card = find_gpu("h200")
    model = StepModel(ModelShape.from_hf("Qwen/Qwen3-8B"), card, find_precision("bf16"), LIMITS, load_profile(card)[0])
    for name, blocks in POOLS.items():

        def simulate(batch: Batch, blocks: int = blocks) -> Schedule:
            return schedule(*batch, blocks, LIMITS)

        for seed in SEEDS:
            batch = Workload(1500, 16, Fixed(300), LogNormal(1500, 0.9, 5000), seed).batch()
            estimate = rollout(schedules_of([batch], simulate, SAMPLE), model)
            exact = rollout([simulate(batch)], model)
            error = estimate.makespan_s / exact.makespan_s - 1
            lost = f"{estimate.preemptions:,} preemptions of {exact.preemptions:,}"
            print(f"{name}, seed {seed}: {error:+.2%}, told {estimate.sampling_sd:.2%}; {lost}", flush=True)


if __name__ == "__main__":
    main()
