"""The trajectories at once of a plan of turns, in the words of each trainer.

prime-rl of 21 August 2026: ConcurrencyConfig of prime_rl/configs/orchestrator.py. SkyRL 0.3.0: FullyAsyncConfig in
skyrl/train/config/config.py; a worker holds the samples of one prompt. TRL 1.16: experimental/async_grpo's
async_grpo_config.py; the tool loop of trl/trainer's grpo_trainer.py takes all trajectories through each turn together.
verl 0.9.1: AgentLoopConfig of workers/config/rollout.py has no such setting, and its agent loops start a whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_CALLER: Final = "the caller of the engine bounds them"
_VERL: Final = "verl has no setting for it. Its agent loops start the whole batch"
UNBOUNDED: Final = {  # target without a setting -> what happens there
    "verl": _VERL,
    "verl-stock": _VERL,
    "trl": "GRPOTrainer has no setting for it. It starts all, and takes them through each turn together",
}


def concurrent_words(number: int, samples: int) -> dict[str, str]:
    """Trainer -> its words for so many trajectories at once. samples: of each prompt"""
    groups = max(1, number // samples)
    return {
        "prime-rl": f"orchestrator.concurrency.max_inflight={number} and min_inflight={number}",
        "SkyRL": f"trainer.fully_async.num_parallel_generation_workers={groups}",
        "trl": f"experimental.async_grpo: max_inflight_tasks={number}",
    }


def concurrent_notes(workload: Mapping[str, Any], target: str) -> list[str]:
    """Notes on the trajectories at once, for `target`; [] for a workload without turns. workload: as in Plan"""
    turns, samples = workload.get("turns"), workload["samples"]
    if turns is None:
        return []
    number = turns.get("concurrent")
    every = workload["prompts"] * samples
    notes = [f"planned for {number or every} trajectories at once, of {every}: {UNBOUNDED.get(target, _CALLER)}"]
    if number is not None:
        words = concurrent_words(number, samples).items()
        notes.append("elsewhere they are " + ", ".join(f"{trainer}'s {word}" for trainer, word in words))
    return notes
