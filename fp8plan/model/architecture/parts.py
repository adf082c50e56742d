"""A decoder layer and its parts: a mixer, in which tokens meet, and parts that work on each token alone.

The parts of the second kind are a dense MLP, a mixture of experts, and Gemma 4's inputs of a layer. Each part knows its
weight matrices, as vLLM fuses and cuts them over tensor-parallel ranks, and its other weights. A mixer also knows its
cache. A model is a list of layers, so a new family is a new way to read layers from a config (`families`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from fp8plan.model.architecture.mixers import (
    Attention,
    Cache,
    DeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    Linear,
    Mamba2,
    Part,
    QkNorm,
    ShortConv,
    Size,
    column,
    fused,
    row,
)
from fp8plan.model.precision import BF16, Precision

EXPERT_LINEARS: Final = ("experts_w13", "experts_w2")


@dataclass(frozen=True, slots=True)
class Mlp(Part):
    """A dense MLP of two or three matrices, all of which `fp8_per_block` quantises. gated: vLLM fuses gate and up"""

    inner: int
    gated: bool = True
    bias: bool = False
    activation_elements: int = 0  # parameters of the activation (xIELU: alpha_p, alpha_n, beta and eps)

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        inner = self.inner // tp
        first = fused("gate_up_proj", (inner, inner), hidden) if self.gated else column("up_proj", inner, hidden)
        return self.held(first, row("down_proj", hidden, inner))

    def vectors(self, hidden: int, tp: int = 1) -> int:
        return self.activation_elements + (sum(linear.n for linear in self.linears(hidden, tp)) if self.bias else 0)

    def cuts(self) -> tuple[Size, ...]:
        return (Size("MLP channels", self.inner),)


@dataclass(frozen=True, slots=True)
class Experts(Part):
    """The routed experts of a mixture-of-experts layer. Sizes are per expert, before tensor parallelism.

    `fp8_per_block` quantises routed and shared experts. The router and the gate of shared experts stay BF16. Most
    families build these without the quantisation config. Qwen3-MoE's router has it, so fp8plan excludes it by name.
    GLM-4 MoE and MiniMax-M2 have a float32 router (glm4_moe.py, minimax_m2.py), counted as BF16 here: 1 MB less.
    """

    num_experts: int
    experts_per_token: int  # without those that have no weights
    intermediate_size: int
    shared_intermediate_size: int = 0  # of all shared experts together
    shared_gate: bool = False  # a gate of one output weighs the shared experts (Qwen)
    gated: bool = True
    bias: bool = False  # of the experts' matrices (gpt-oss)
    shared_bias: bool = False
    shared_stream: bool = True  # vLLM can run the shared experts beside the routed ones, on their own stream
    router_bias: bool = False  # a learned bias, or a correction of the scores, for each expert
    router_scales: bool = False  # learned scales of the router's input and of each expert's output (Gemma 4)
    idle_experts: int = 0  # weightless experts that return the token itself (LongCat); the router picks among them

    @property
    def choices_per_token(self) -> int:
        """Experts picked for a token under even routing, including those without weights."""
        return round(self.experts_per_token * (1 + self.idle_experts / self.num_experts))

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        matrices = [column("router", self.num_experts + self.idle_experts, hidden, quantisable=False)]
        if self.shared_intermediate_size:
            inner = self.shared_intermediate_size // tp
            if self.shared_gate:
                matrices.append(column("shared_expert_gate", 1, hidden, quantisable=False))
            matrices.append(
                fused("shared_gate_up_proj", (inner, inner), hidden)
                if self.gated
                else column("shared_up_proj", inner, hidden)
            )
            # Its output is added to the routed experts' before their one all-reduce, so it needs none.
            matrices.append(column("shared_down_proj", hidden, inner))
        return self.held(*matrices)

    def expert_linears(self, hidden: int, slices: int = 1) -> tuple[Linear, Linear]:
        """The w13 and w2 matrices of ONE routed expert on one rank. slices: into which tensor parallelism cuts it"""
        inner = self.intermediate_size // slices
        first, second = EXPERT_LINEARS
        w13, w2 = column(first, (1 + self.gated) * inner, hidden), row(second, hidden, inner)
        w13, w2 = self.held(replace(w13, padded=True), replace(w2, padded=True))
        return w13, w2

    def stored_linears(self, hidden: int, precision: Precision, slices: int = 1) -> tuple[Linear, Linear]:
        """`expert_linears` as a rank stores them: in FP8 vLLM pads the expert's and the model's width to whole blocks.

        The 2,880 of gpt-oss become 2,944 (quantization/online/fp8.py, maybe_roundup_sizes).
        """
        w13, w2 = self.expert_linears(hidden, slices)
        if self.run_in(precision).weights == "bf16":
            return w13, w2
        rows, columns = precision.weight_block
        inner, width = -(-w2.k // rows) * rows, -(-w13.k // columns) * columns
        return replace(w13, n=inner * (w13.n // w2.k), k=width), replace(w2, n=width, k=inner)

    def stored_bytes(self, hidden: int, precision: Precision, slices: int = 1) -> int:
        linears = self.stored_linears(hidden, precision, slices)
        return sum(precision.linear_bytes(w.n, w.k, w.quantised) for w in linears)

    def run_in(self, precision: Precision) -> Precision:
        """The precision of the routed experts in an engine of this precision: BF16 in a layer that is kept so."""
        return BF16 if self.bf16.issuperset(EXPERT_LINEARS) else precision

    def most_on_a_rank(self, ranks: int) -> int:
        """Experts of the fullest rank if `ranks` share whole experts (vLLM's determine_expert_map)."""
        return -(-self.num_experts // ranks)

    def vectors(self, hidden: int, tp: int = 1, ranks: int = 1) -> int:
        """Elements as in Part. ranks: those that share whole experts; 1: each of `tp` ranks has slices of all"""
        inner, shared = self.intermediate_size // (tp // ranks), self.shared_intermediate_size // tp
        routed = self.most_on_a_rank(ranks) * ((1 + self.gated) * inner + hidden) if self.bias else 0
        beside = (1 + self.gated) * shared + hidden if self.shared_bias and shared else 0
        choices = self.num_experts + self.idle_experts
        router = choices * (self.router_bias + self.router_scales) + hidden * self.router_scales
        return routed + beside + router

    def parameters(self, hidden: int) -> int:
        routed = self.num_experts * sum(linear.elements for linear in self.expert_linears(hidden))
        return routed + super(Experts, self).parameters(hidden)

    def cuts(self, expert_parallel: bool = False) -> tuple[Size, ...]:
        """Sizes as in Part. expert_parallel: routed experts stay whole"""
        routed = Size("channels of an expert", 0 if expert_parallel else self.intermediate_size)
        shared = Size("channels of its shared experts", self.shared_intermediate_size)
        return tuple(size for size in (routed, shared) if size.size)


@dataclass(frozen=True, slots=True)
class LayerInput(Part):
    """The input of one layer beside the hidden state: each token's embedding for that layer (Gemma 4 E2B and E4B).

    width:      elements of a token's embedding for one layer
    vocabulary: rows of the table with the embeddings of all layers side by side; its columns are counted here
    all_widths: sum of the widths of all layers, in the first layer, in which vLLM projects to all; else 0

    Source: vllm/model_executor/models/gemma4.py, 0.30. The two matrices of a layer are not cut. The table is cut by
    rows. The projection to all layers is cut by columns, and every rank gathers the parts.
    """

    width: int
    vocabulary: int
    all_widths: int = 0

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        own = column("per_layer_input_gate", self.width, hidden), column("per_layer_projection", hidden, self.width)
        if not self.all_widths:
            return self.held(*own)
        return self.held(column("per_layer_model_projection", self.all_widths // tp, hidden), *own)

    def vectors(self, hidden: int, tp: int = 1) -> int:
        norm = self.width if self.all_widths else 0  # of the projection; each layer counts its own among its norms
        return -(-self.vocabulary // tp) * self.width + norm

    def cuts(self) -> tuple[Size, ...]:
        return (Size("channels of its layers' inputs", self.all_widths),) if self.all_widths else ()


__all__ = [
    "Attention", "Cache", "DeltaNet", "Experts", "Indexer", "KimiDelta", "LatentAttention", "Layer", "LayerInput",
    "Linear", "Mamba2", "Mixer", "Mlp", "Part", "QkNorm", "ShortConv", "Size", "TokenPart", "mixers", "parts",
]  # fmt: skip

Mixer: TypeAlias = Attention | LatentAttention | DeltaNet | KimiDelta | Mamba2 | ShortConv
TokenPart: TypeAlias = Mlp | Experts | LayerInput  # works on each token alone


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Mixer or MLP is None where layers have one part. Hashable: equal layers are counted.

    parallel:     further parts, beside the first ones (Falcon-H1's Mamba; the dense MLP beside Gemma 4's experts;
                  LongCat's second attention and MLP)
    norms:        norms over the hidden size
    norm_vectors: learned vectors of each such norm: 1 for an RMSNorm, 2 for a LayerNorm with bias, 0 for OLMo's
    scalars:      further learned numbers
    """

    mixer: Mixer | None
    mlp: Mlp | Experts | None
    parallel: tuple[Mixer | TokenPart, ...] = ()
    norms: int = 2
    norm_vectors: int = 1
    scalars: int = 0

    def vectors(self, hidden: int) -> int:
        """Elements of the norms and scalars."""
        return self.norms * self.norm_vectors * hidden + self.scalars


def parts(layer: Layer) -> Iterator[Mixer | TokenPart]:
    yield from mixers(layer)
    if layer.mlp is not None:
        yield layer.mlp
    yield from (part for part in layer.parallel if isinstance(part, TokenPart))


def mixers(layer: Layer) -> Iterator[Mixer]:
    if layer.mixer is not None:
        yield layer.mixer
    yield from (part for part in layer.parallel if not isinstance(part, TokenPart))
