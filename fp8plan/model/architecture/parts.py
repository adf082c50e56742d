"""The parts that a decoder layer is made of: a mixer, which tokens meet in, and an MLP.

Each part knows its own weight matrices, as vLLM fuses and cuts them over tensor-parallel ranks, and what else it holds;
a mixer also knows what it keeps of each token or request. A model is a list of layers, each a mixer and an MLP, so a
new family is a new way to read these from a config (`families`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fp8plan.model.architecture.attention import Attention, Indexer, LatentAttention, QkNorm
from fp8plan.model.architecture.linear import Cache, CacheKind, Linear, Part, Size
from fp8plan.model.architecture.mlp import Experts, LayerInput, Mlp
from fp8plan.model.architecture.recurrent import DeltaNet, KimiDelta, Mamba2, ShortConv

__all__ = [
    "Attention",
    "Cache",
    "CacheKind",
    "DeltaNet",
    "Experts",
    "Indexer",
    "KimiDelta",
    "LatentAttention",
    "Layer",
    "LayerInput",
    "Linear",
    "Mamba2",
    "Mixer",
    "Mlp",
    "Part",
    "QkNorm",
    "ShortConv",
    "Size",
    "TokenPart",
    "mixers",
    "parts",
]

Mixer: TypeAlias = Attention | LatentAttention | DeltaNet | KimiDelta | Mamba2 | ShortConv
TokenPart: TypeAlias = Mlp | Experts | LayerInput  # what works on each token alone


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; None where a family has layers of one part only. Hashable, so equal layers can be counted.

    parallel:     further parts, beside the first ones (Falcon-H1's Mamba; the dense MLP beside Gemma 4's experts;
                  LongCat's second attention and MLP)
    norms:        norms over the hidden size
    norm_vectors: learned vectors of each of these: 1 for an RMSNorm, 2 for a LayerNorm with bias, 0 for OLMo's
    scalars:      further learned numbers
    """

    mixer: Mixer | None
    mlp: Mlp | Experts | None
    parallel: tuple[Mixer | TokenPart, ...] = ()
    norms: int = 2
    norm_vectors: int = 1
    scalars: int = 0

    def vectors(self, hidden: int) -> int:
        """Elements beside the parts': those of the norms."""
        return self.norms * self.norm_vectors * hidden + self.scalars


def parts(layer: Layer) -> Iterator[Mixer | TokenPart]:
    """All parts of a layer."""
    yield from mixers(layer)
    if layer.mlp is not None:
        yield layer.mlp
    yield from (part for part in layer.parallel if isinstance(part, TokenPart))


def mixers(layer: Layer) -> Iterator[Mixer]:
    """All mixers of a layer."""
    if layer.mixer is not None:
        yield layer.mixer
    yield from (part for part in layer.parallel if not isinstance(part, TokenPart))
