"""Remedies: settings that lower the mismatch between the rollout policy and the trainer's.

A correction weighs the mismatch that is left (fp8plan.runtime.watch.correction).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fp8plan.errors import ConfigError

# How a trainer computes its linears. BLOCK has 128x128 weights and 1x128 activations, as FP8_BLOCK of the rollout;
# POW2 rounds their scales to powers of two (E8M0); TENSOR has one scale for each matrix.
BF16, BLOCK, POW2, TENSOR = "bf16", "fp8_block", "fp8_block_pow2", "fp8_tensor"
TRAINER_PRECISIONS: Final = (BF16, BLOCK, POW2, TENSOR)


@dataclass(frozen=True, slots=True)
class Remedies:
    """The remedies of a run.

    router_replay:     the trainer uses the experts that the engine picked for each token (R3, arXiv 2510.11370)
    trainer_precision: one of TRAINER_PRECISIONS: how the trainer rounds weights and activations
    keep_bf16:         how many first and last layers of the rollout keep their linears in BF16

    Raises ConfigError for an unknown precision, and for counts below 0.
    """

    router_replay: bool = False
    trainer_precision: str = BF16
    keep_bf16: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.trainer_precision not in TRAINER_PRECISIONS:
            allowed = ", ".join(TRAINER_PRECISIONS)
            raise ConfigError(f"trainer_precision is {self.trainer_precision!r}; allowed: {allowed}")
        ends = self.keep_bf16
        counts = isinstance(ends, tuple | list) and len(ends) == 2 and all(type(n) is int and n >= 0 for n in ends)
        if not counts:
            raise ConfigError(f"keep_bf16 is {ends!r}; allowed: two counts of layers, first and last, e.g. (1, 1)")
        object.__setattr__(self, "keep_bf16", tuple(ends))
