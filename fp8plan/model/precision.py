"""Rollout precisions: the formats of weights and KV cache, and how many bytes they take with their scales."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, Literal, TypeAlias

from fp8plan.errors import ConfigError

BF16_BYTES = 2
FP8_BYTES = 1
FP32_BYTES = 4

# E4M3 "fn": 4 exponent bits, 3 mantissa bits, no infinities (OCP OFP8 specification, table 1).
E4M3_MAX = 448.0
E4M3_MANTISSA_BITS = 3

Weights: TypeAlias = Literal["bf16", "fp8_block", "fp8_tensor", "fp8_channel"]


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats in which a rollout engine stores weights and KV cache.

    name:    preset name, as the command line spells it
    weights: "bf16", or "fp8_block": E4M3 weights with one FP32 scale per `weight_block`, activations
             quantised per 1 x weight_block[1] group by the engine. Of checkpoints alone: "fp8_tensor", one scale for a
             matrix, and "fp8_channel", one for each of its rows; activations have one for a token or for all
    kv:      "bf16" or "fp8" (E4M3, one scale per layer and K/V)
    """

    name: str
    weights: Weights
    kv: Literal["bf16", "fp8"]
    weight_block: tuple[int, int] = (128, 128)

    @property
    def uses_fp8(self) -> bool:
        return self.weights != "bf16" or self.kv != "bf16"

    @property
    def gemm_dtype(self) -> str:
        """The key of the quantised linears' GEMM tables in a profile."""
        return "fp8" if self.weights in ("fp8_tensor", "fp8_channel") else self.weights

    @property
    def in_blocks(self) -> bool:
        """Tell whether weights have a scale for each block of them."""
        return self.weights == "fp8_block"

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one K or V element (the per-layer scales are a few bytes in all)."""
        return FP8_BYTES if self.kv == "fp8" else BF16_BYTES

    def linear_bytes(self, n: int, k: int, quantised: bool) -> int:
        """Bytes of one (n, k) weight matrix; `quantised` says whether this layer is one the engine quantises."""
        if self.weights == "bf16" or not quantised:
            return n * k * BF16_BYTES
        rows, columns = self.weight_block
        blocks = ceil(n / rows) * ceil(k / columns)
        scales = blocks if self.in_blocks else n if self.weights == "fp8_channel" else 1
        return n * k * FP8_BYTES + scales * FP32_BYTES


BF16 = Precision("bf16", "bf16", "bf16")
FP8_BLOCK = Precision("fp8_block", "fp8_block", "bf16")
FP8_KV = Precision("fp8_kv", "bf16", "fp8")
FP8_BLOCK_KV = Precision("fp8_block+fp8_kv", "fp8_block", "fp8")

PRESETS: dict[str, Precision] = {p.name: p for p in (BF16, FP8_BLOCK, FP8_KV, FP8_BLOCK_KV)}

# Formats that vLLM does not make of BF16 weights here: those of checkpoints that hold them.
_SCALES: Final[tuple[Weights, ...]] = ("fp8_tensor", "fp8_channel")
STORED_PRESETS: dict[str, Precision] = {
    p.name: p
    for weights in _SCALES
    for p in (Precision(weights, weights, "bf16"), Precision(f"{weights}+fp8_kv", weights, "fp8"))
}


def precision(name: str) -> Precision:
    """The preset called `name`. Raises ConfigError for another name."""
    try:
        return (PRESETS | STORED_PRESETS)[name]
    except KeyError:
        stored = f"of a checkpoint that holds such weights {', '.join(STORED_PRESETS)}"
        raise ConfigError(f"unknown precision {name!r}; allowed: {', '.join(PRESETS)}; {stored}") from None


def presets_of(weights: Weights) -> tuple[Precision, Precision]:
    """The presets with these weights: with a KV cache in BF16, and in FP8."""
    bf16, fp8 = (p for p in (PRESETS | STORED_PRESETS).values() if p.weights == weights)
    return bf16, fp8
