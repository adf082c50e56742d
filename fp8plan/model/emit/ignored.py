"""The linears that vLLM is told to leave in BF16, as patterns of its online quantisation's `ignore` list.

vLLM matches each pattern with a module's full name from its start (should_ignore_layer). A fused module is left out if
its own name matches, and otherwise if the names of all its parts do (find_matching_patterns, 0.30). A pattern names
both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.held import MODULES
from fp8plan.model.architecture.parts import parts

# A quantised router picks other experts, so it is left out. vLLM quantises any linear that is given the quantisation
# config. Read in 0.30 (vllm/model_executor/models): Qwen3-MoE and LFM2-MoE give it to `gate`, and the Transformers
# backend gives it to what it finds inside of Hunyuan's (`gate.wg`). The other families give it none, whether they call
# their router `gate`, `router` (gpt-oss, Llama 4) or `router.proj` (Gemma 4); they are named here all the same, since
# the next version may. So is the gate that weighs Qwen's shared expert. A dense model has no module of these names.
ROUTER_PATTERN: Final = r"re:.*\.(gate|router|shared_expert_gate)(\.(wg|proj|layer|classifier))?$"


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
        yield rf"re:.*\.{where}{MODULES.get(name, name)}$"
