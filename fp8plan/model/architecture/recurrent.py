"""Mixers that keep a state of fixed size for each request: linear attention, state-space layers, short convolutions.

Sizes of the states: vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator and
MambaStateDtypeCalculator. The state of a convolution has the model's dtype. So has the recurrent state, unless the
family's config says otherwise (`state_element_bytes`). Convolutions are linears without the quantisation config.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8plan.model.architecture.linear import Cache, Holder, Linear, Size, column, elements, fused, row
from fp8plan.model.precision import BF16_BYTES, FP32_BYTES


def _state(conv_width: int, conv_kernel: int, recurrent_elements: int, element_bytes: int) -> tuple[Cache, ...]:
    conv = (conv_kernel - 1) * conv_width * BF16_BYTES
    return (Cache("state", state_bytes=conv + recurrent_elements * element_bytes),)


@dataclass(frozen=True, slots=True)
class DeltaNet(Holder):
    """Gated delta net (Qwen3-Next): layers/mamba/gdn/qwen_gdn_linear_attn.py. The state is
    [value heads, value size, key size]. vLLM passes the quantisation config to all three linears, the narrow one too.

    interleaved: the checkpoint holds q, k, v and z as one matrix in turns by head, and so b and a (Qwen3-Next)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_element_bytes: int = BF16_BYTES
    interleaved: bool = False

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        keys, values = self.key_heads * self.key_dim // tp, self.value_heads * self.value_dim // tp
        gates = self.value_heads // tp
        first = fused("in_proj_qkvz", (keys, keys, values, values), hidden), fused("in_proj_ba", (gates, gates), hidden)
        if self.interleaved:
            first = first[0]._replace(parts=()), first[1]._replace(parts=())
        return self.held(*first, row("out_proj", hidden, values))

    def vectors(self, hidden: int, tp: int = 1) -> int:
        gates = 2 * self.value_heads // tp  # A_log and dt_bias
        return self.conv_kernel * self.conv_width // tp + gates + self.value_dim

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return Size("key heads of linear attention", self.key_heads), Size(
            "value heads of linear attention", self.value_heads
        )

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        recurrent = self.value_heads // tp * self.value_dim * self.key_dim
        return _state(self.conv_width // tp, self.conv_kernel, recurrent, self.state_element_bytes)


@dataclass(frozen=True, slots=True)
class KimiDelta(Holder):
    """Kimi delta attention: layers/mamba/gdn/kimi_gdn_linear_attn.py. Its gates pass through `head_dim` channels, whose
    first halves every rank has. vLLM 0.30 fuses the first projections, 0.26 has q, k, v, f_a and b apart. The recurrent
    state is float32 (kda_state_dtype)."""

    heads: int
    head_dim: int
    conv_kernel: int

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        width = self.heads * self.head_dim // tp
        return self.held(
            fused("in_proj_qkvgfab", (width, width, width, self.heads // tp, self.head_dim), hidden),
            column("f_b_proj", width, self.head_dim),
            column("g_a_proj", self.head_dim, hidden),
            column("g_b_proj", width, self.head_dim),
            row("o_proj", hidden, width),
        )

    def vectors(self, hidden: int, tp: int = 1) -> int:
        width = self.heads * self.head_dim // tp
        return 3 * self.conv_kernel * width + width + self.heads // tp + self.head_dim  # conv, dt_bias, A_log, norm

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return (Size("heads of linear attention", self.heads),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        heads = self.heads // tp
        return _state(3 * heads * self.head_dim, self.conv_kernel, heads * self.head_dim**2, FP32_BYTES)


@dataclass(frozen=True, slots=True)
class Mamba2(Holder):
    """State-space layer of Mamba 2: layers/mamba/mamba_mixer2.py. Groups that ranks cannot share are copied to each."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_kernel: int
    bias: bool = False
    conv_bias: bool = True
    norm: bool = True  # a gated norm before out_proj
    state_element_bytes: int = BF16_BYTES

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        inner = self.heads * self.head_dim // tp
        groups = (self._conv_width(tp) - inner) // 2
        return self.held(
            fused("in_proj", (inner, inner, groups, groups, self.heads // tp), hidden),
            row("out_proj", hidden, inner),
        )

    def vectors(self, hidden: int, tp: int = 1) -> int:
        first, out = self.linears(hidden, tp)
        conv = self._conv_width(tp) * (self.conv_kernel + self.conv_bias)
        scalars = 3 * self.heads // tp  # A, D and dt_bias
        return conv + scalars + (out.k if self.norm else 0) + (first.n + hidden if self.bias else 0)

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        # With one group vLLM copies it; otherwise the norm works on whole groups (Mixer2RMSNormGated).
        groups = () if self.groups == 1 else (Size("state-space groups", self.groups),)
        return (Size("state-space heads", self.heads), *groups)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        recurrent = self.heads // tp * self.head_dim * self.state_size
        return _state(self._conv_width(tp), self.conv_kernel, recurrent, self.state_element_bytes)

    def _conv_width(self, tp: int) -> int:
        """Channels of one rank's convolution (extra_groups_for_head_shards)."""
        groups = self.groups if self.groups % tp == 0 else tp
        return (self.heads * self.head_dim + 2 * groups * self.state_size) // tp


@dataclass(frozen=True, slots=True)
class ShortConv(Holder):
    """Gated short convolution (LFM2): layers/mamba/short_conv.py."""

    width: int
    kernel: int
    bias: bool = False

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        width = self.width // tp
        return self.held(fused("in_proj", (width, width, width), hidden), row("out_proj", hidden, width))

    def vectors(self, hidden: int, tp: int = 1) -> int:
        width = self.width // tp
        return width * self.kernel + (4 * width + hidden if self.bias else 0)

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return (Size("channels of its short convolutions", self.width),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        return _state(self.width // tp, self.kernel, 0, BF16_BYTES)
