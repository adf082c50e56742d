"""The sampler of benchmarks.gpu.verl_grpo, in the form that verl loads from a file."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Impatient(ReplayBuffer):
    """verl's own sampler, which looks for finished rollouts every 0.1 s. By default it looks every 2 s (verl 0.9.1)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.1)
