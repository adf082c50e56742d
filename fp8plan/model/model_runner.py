"""Which of vLLM's two model runners an engine takes; sampler, activation peak and CUDA-graph reserve follow from it."""

from __future__ import annotations

from typing import Final, Literal

from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.hardware import Gpu

# DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES of vllm/config/vllm.py, 0.26, those that fp8plan reads, by their model_type.
V2_WITH_EXPERTS: Final = ("deepseek_v2", "granitemoe", "qwen2_moe")


def model_runner(shape: ModelShape, gpu: Gpu) -> Literal["v1", "v2"]:
    """The model runner of vLLM 0.26 (VllmConfig._is_default_v2_model_runner_model): V2 on a GPU for models without
    recurrent layers that are dense or among `V2_WITH_EXPERTS`."""
    sparse = bool(shape.parts_of(Experts)) and shape.model_type not in V2_WITH_EXPERTS
    return "v1" if gpu.is_cpu or shape.recurrent or sparse else "v2"
