"""Targets: the programs that settings are written for, and how each of them starts and bounds its engines."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from types import MappingProxyType
from typing import Final, NamedTuple


class Starts(NamedTuple):
    """The way in which a program starts engines.

    whole_blocks: it loads FP8 weights as a checkpoint in whole blocks
    sender:       the trainer that sends new weights, all in BF16; None: fp8plan does, or nobody
    measures:     measurer of the scales of an FP8 cache after each sync: "fp8plan" or the "trainer"; "": nobody
    lacks:        precision that it cannot have -> the reason
    engine:       its engine
    at_once:      its settings for the trajectories at once -> their unit, as in `settings_at_once`
    whole_groups: it runs all samples of a prompt at once
    starts_all:   note, if it starts all trajectories of a batch; "": its settings or its caller bound them
    over_http:    its requests reach vLLM's own server over HTTP
    """

    whole_blocks: bool = False
    sender: str | None = None
    measures: str = ""
    lacks: Mapping[str, str] = MappingProxyType({})
    engine: str = "vLLM"
    at_once: Mapping[str, str] = MappingProxyType({})
    whole_groups: bool = False
    starts_all: str = ""
    over_http: bool = False

    def least_at_once(self, samples: int) -> int:
        """The fewest trajectories at once that its settings allow. samples: of each prompt"""
        return samples if self.whole_groups else 1

    def settings_at_once(self, number: int, replicas: int) -> dict[str, int]:
        """Its settings for a number of trajectories at once, on all replicas; {} if it has none."""
        counts = {"trajectories": number, "trajectories of a replica": ceil(number / replicas)}
        return {setting: counts[unit] for setting, unit in self.at_once.items()}


_NO_FP8: Final = "OpenRLHF hands vLLM no quantisation and no dtype of the cache; allowed: bf16"
_BF16_ALONE: Final = dict.fromkeys(("fp8_block", "fp8_kv", "fp8_block+fp8_kv"), _NO_FP8)
_FP8_CACHE: Final = "NeMo RL has an FP8 cache beside FP8 weights alone; allowed: bf16, fp8_block, fp8_block+fp8_kv"

# Sources of the settings for trajectories at once, or of their absence:
# verl 0.9.1: AgentLoopConfig of workers/config/rollout.py has none.
# TRL 1.16: the tool loop of trl/trainer/grpo_trainer.py has none; experimental/async_grpo/async_grpo_config.py has one.
# NeMo RL: nemo_rl/experience/rollouts.py has none.
# SkyRL 0.3.0: FullyAsyncRayPPOTrainer of skyrl/train/fully_async_trainer.py asserts mini-batch <= workers, in prompts,
# and that a mini-batch is the batch.
# prime-rl: ConcurrencyConfig and resolve_batching of prime_rl/configs/orchestrator.py.
# slime: a semaphore of slime/rollout/sglang_rollout.py holds as many whole trajectories as this, times its engines.
# OpenRLHF 0.11.2: openrlhf/trainer/ppo_utils/samples_generator.py hands all prompts of a batch to its engines.
_WHOLE_BATCH: Final = "it has no setting for it, and starts the whole batch"
_TRL: Final = "GRPOTrainer has no setting for it. It starts all, and takes them through each turn together"
_ASYNC_TRL: Final = {"experimental.async_grpo: max_inflight_tasks": "trajectories"}
_SKYRL: Final = (
    "main_base starts the whole batch. The fully asynchronous trainer starts at least as much: it requires "
    "trainer.policy_mini_batch_size, which is its batch, <= trainer.fully_async.num_parallel_generation_workers <= "
    "trainer.policy_mini_batch_size * (trainer.fully_async.max_staleness_steps + 1)"
)
_PRIME_RL: Final = {f"orchestrator.concurrency.{end}_inflight": "trajectories" for end in ("max", "min")}
_SLIME: Final = {"--sglang-server-concurrency": "trajectories of a replica"}

# The first three run with fp8plan, the others without it.
TARGETS: Final = {
    "vllm": Starts(),
    "verl": Starts(whole_blocks=True, sender="verl", measures="fp8plan", starts_all=_WHOLE_BATCH),
    "trl": Starts(sender="TRL", measures="fp8plan", at_once=_ASYNC_TRL, starts_all=_TRL),
    "vllm-serve": Starts(over_http=True),
    "verl-stock": Starts(whole_blocks=True, sender="verl", starts_all=_WHOLE_BATCH),
    "nemo-rl": Starts(
        whole_blocks=True, sender="NeMo RL", measures="trainer", lacks={"fp8_kv": _FP8_CACHE}, starts_all=_WHOLE_BATCH
    ),
    "skyrl": Starts(sender="SkyRL", starts_all=_SKYRL),
    "prime-rl": Starts(sender="prime-rl", at_once=_PRIME_RL, whole_groups=True, over_http=True),
    "slime": Starts(whole_blocks=True, sender="slime", engine="SGLang", at_once=_SLIME),
    "openrlhf": Starts(sender="OpenRLHF", lacks=_BF16_ALONE, starts_all=_WHOLE_BATCH),
}


def words_at_once(number: int, samples: int, replicas: int) -> dict[str, str]:
    """Target -> its words for a number of trajectories at once; a target without any is left out.

    number, replicas: as in `settings_at_once`
    samples:          of each prompt
    """
    words = {}
    for target, starts in TARGETS.items():
        settings = starts.settings_at_once(number, replicas)
        if settings and number >= starts.least_at_once(samples):
            words[target] = " and ".join(f"{setting}={value}" for setting, value in settings.items())
    return words
