"""The parts that work on each token alone: a dense MLP, and a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from fp8plan.model.architecture.linear import Linear, Size, column, elements, fused, row


@dataclass(frozen=True, slots=True)
class Mlp:
    """Two or three matrices. gated: gate and up are two matrices, which vLLM fuses. `fp8_per_block` quantises all."""

    inner: int
    gated: bool = True
    bias: bool = False
    activation_elements: int = 0  # numbers of the activation (xIELU: alpha_p, alpha_n, beta and eps)

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        inner = self.inner // tp
        first = fused("gate_up_proj", (inner, inner), hidden) if self.gated else column("up_proj", inner, hidden)
        return first, row("down_proj", hidden, inner)

    def vectors(self, hidden: int, tp: int = 1) -> int:
        return self.activation_elements + (sum(linear.n for linear in self.linears(hidden, tp)) if self.bias else 0)

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return (Size("MLP channels", self.inner),)


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a mixture-of-experts layer. Sizes are per expert, before tensor parallelism.

    `fp8_per_block` quantises routed and shared experts. The router and the shared experts' gate stay BF16: most
    families build them without the quantisation config; Qwen3-MoE's router has it, and fp8plan leaves it out. GLM-4 MoE
    and MiniMax-M2 keep the router in float32 (glm4_moe.py, minimax_m2.py). It is counted as BF16 here: 1 MB a layer
    less.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # of all shared experts together
    shared_gate: bool = False  # a gate of one output weighs the shared experts (Qwen)
    gated: bool = True
    bias: bool = False  # of the experts' matrices (gpt-oss)
    shared_bias: bool = False
    shared_stream: bool = True  # vLLM can run the shared experts beside the routed ones, on a stream of their own
    router_bias: bool = False  # a learned bias, or a correction of the scores, for each expert
    router_scales: bool = False  # learned scales of the router's input and of each expert's output (Gemma 4)

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        matrices = [column("router", self.num_experts, hidden, quantisable=False)]
        if self.shared_intermediate_size:
            inner = self.shared_intermediate_size // tp
            if self.shared_gate:
                matrices.append(column("shared_expert_gate", 1, hidden, quantisable=False))
            matrices.append(
                fused("shared_gate_up_proj", (inner, inner), hidden)
                if self.gated
                else column("shared_up_proj", inner, hidden)
            )
            # Its output is added to the routed experts' before their one all-reduce, so it has none of its own.
            matrices.append(column("shared_down_proj", hidden, inner))
        return tuple(matrices)

    def expert_linears(self, hidden: int, slices: int = 1) -> tuple[Linear, Linear]:
        """The w13 and w2 matrices of ONE routed expert on one rank, cut by tensor parallelism into so many slices."""
        inner = self.intermediate_size // slices
        w13, w2 = column("experts_w13", (1 + self.gated) * inner, hidden), row("experts_w2", hidden, inner)
        return w13._replace(padded=True), w2._replace(padded=True)

    def most_on_a_rank(self, ranks: int) -> int:
        """Experts of the fullest of the ranks that share out whole experts (vLLM's determine_expert_map)."""
        return -(-self.num_experts // ranks)

    def vectors(self, hidden: int, tp: int = 1, ranks: int = 1) -> int:
        """As in Part. ranks: those that share out whole experts; 1: each of `tp` ranks has a slice of every expert"""
        inner, shared = self.intermediate_size // (tp // ranks), self.shared_intermediate_size // tp
        routed = self.most_on_a_rank(ranks) * ((1 + self.gated) * inner + hidden) if self.bias else 0
        beside = (1 + self.gated) * shared + hidden if self.shared_bias and shared else 0
        router = self.num_experts * (self.router_bias + self.router_scales) + hidden * self.router_scales
        return routed + beside + router

    def parameters(self, hidden: int) -> int:
        routed = self.num_experts * elements(self.expert_linears(hidden))
        return routed + elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self, expert_parallel: bool = False) -> tuple[Size, ...]:
        """As in Part. expert_parallel: routed experts stay whole"""
        routed = (Size("channels of an expert", self.intermediate_size),)
        shared = (Size("channels of its shared experts", self.shared_intermediate_size),)
        return (*(() if expert_parallel else routed), *(shared if shared[0].size else ()))
