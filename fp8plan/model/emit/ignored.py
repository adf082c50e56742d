"""The linears that vLLM is told to leave in BF16, as patterns of its online quantisation's `ignore` list.

vLLM matches each pattern with a module's full name from its start (should_ignore_layer). A fused module is left out if
its own name matches, and otherwise if the names of all its parts do (find_matching_patterns, 0.30). A pattern names
both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import parts

# A quantised router picks other experts, so it is left out. vLLM quantises any linear that is given the quantisation
# config. Read in 0.30 (vllm/model_executor/models): Qwen3-MoE and LFM2-MoE give it to `gate`, and the Transformers
# backend gives it to what it finds inside of Hunyuan's (`gate.wg`). The other families give it none, whether they call
# their router `gate`, `router` (gpt-oss, Llama 4) or `router.proj` (Gemma 4); they are named here all the same, since
# the next version may. So is the gate that weighs Qwen's shared expert. A dense model has no module of these names.
ROUTER_PATTERN: Final = r"re:.*\.(gate|router|shared_expert_gate)(\.(wg|proj|layer|classifier))?$"

# What stands before the names of an MLP's matrices, of shared experts', and of a recurrent mixer's.
_MLP: Final = r"(mlp|mlps\.\d+|feed_forward|mixer|shared_mlp)"  # LongCat has two MLPs in a layer
_SHARED: Final = r"(shared_experts?|shared_mlp)"
_RECURRENT: Final = r"(linear_attn|mamba|mixer|short_conv|conv)"

# A linear of the cost model -> the ends of vLLM's names for it, over all families. Others have their own name there.
_NAMES: Final[Mapping[str, str]] = {
    "qkv_proj": r"(qkv|q|k|v)_proj",
    "o_proj": r"(o_proj|self_attn\.(out_proj|dense))",  # LFM2, Phi
    "fused_qkv_a_proj": r"(fused_qkv_a_proj|q_a_proj|kv_a_proj_with_mqa)",
    "in_proj_qkvz": r"in_proj_(qkvz|qkv|z)",
    "in_proj_ba": r"in_proj_(ba|b|a)",
    "in_proj_qkvgfab": r"(in_proj_qkvgfab|[qkv]_proj|f_a_proj|b_proj)",
    "in_proj": rf"{_RECURRENT}\.in_proj",
    "out_proj": rf"{_RECURRENT}\.out_proj",
    # Granite, LFM2, Phi, StarCoder2
    "gate_up_proj": rf"{_MLP}\.(gate_up_proj|gate_proj|up_proj|input_linear|w13|w1|w3)",
    "up_proj": rf"{_MLP}\.(up_proj|fc1|c_fc)",
    "down_proj": rf"{_MLP}\.(down_proj|output_linear|w2|fc2|c_proj)",
    "shared_gate_up_proj": rf"{_SHARED}\.(gate_up_proj|gate_proj|up_proj|input_linear)",
    "shared_up_proj": rf"{_SHARED}\.up_proj",
    "shared_down_proj": rf"{_SHARED}\.(down_proj|output_linear)",
}


def is_router(module: str) -> bool:
    """Tell whether a module of this full name is a router, or the gate of a shared expert."""
    return re.fullmatch(ROUTER_PATTERN.removeprefix("re:"), module) is not None


def ignored(shape: ModelShape | None, tensor_parallel_size: int) -> list[str]:
    """The patterns for an engine on that many ranks: routers, and linears whose inputs on a rank are no whole blocks.

    shape: None for a model that the cost model does not know: only routers are left out
    """
    return [ROUTER_PATTERN, *(_without_whole_blocks(shape, tensor_parallel_size) if shape is not None else ())]


def _without_whole_blocks(shape: ModelShape, tp: int) -> Iterable[str]:
    """One pattern for each name of a linear. It lists the layers if other layers have one of this name in FP8."""
    having, left = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for number, layer in enumerate(shape.layers):
        for linear in (linear for part in parts(layer) for linear in part.linears(shape.hidden_size, tp)):
            having[linear.name].add(number)
            if linear.left_in_bf16:
                left[linear.name].add(number)
    for name, numbers in left.items():
        listed = "|".join(map(str, sorted(numbers)))
        where = "" if numbers == having[name] else rf"layers\.({listed})\.(.*\.)?"
        yield rf"re:.*\.{where}{_NAMES.get(name, name)}$"
