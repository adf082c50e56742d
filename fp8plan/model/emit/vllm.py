"""A planned engine as arguments and variables of vLLM.

Linears that stay in BF16 are patterns of the `ignore` list of vLLM's online quantisation. vLLM matches a pattern with a
module's full name from its start (should_ignore_layer). A fused module is ignored if its own name matches, and
otherwise if the names of all its parts do (find_matching_patterns, 0.30). A pattern names both.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.held import MODULES
from fp8plan.model.architecture.kept import OUTPUTS, ends_of, kept_numbers
from fp8plan.model.architecture.parts import parts
from fp8plan.model.attention_backend import named_backend
from fp8plan.model.configs import find_config
from fp8plan.model.configs.fields import NESTED
from fp8plan.model.emit.trainers import ENGINE_E8M0
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.plan import CPU_KV_CACHE_GIB
from fp8plan.model.precision import Precision
from fp8plan.model.setup import EngineSetup

# A quantised router picks other experts, so it stays in BF16. vLLM quantises any linear that gets the quantisation
# config. In 0.30 (vllm/model_executor/models) Qwen3-MoE and LFM2-MoE give it to `gate`, and the Transformers backend to
# Hunyuan's `gate.wg`. Other families give their routers none: `gate`, `router` (gpt-oss, Llama 4), `router.proj` (Gemma
# 4). A later version may, so the pattern has them too, and the gate of Qwen's shared expert. Dense models have no such
# modules.
ROUTER_PATTERN: Final = r"re:.*\.(gate|router|shared_expert_gate)(\.(wg|proj|layer|classifier))?$"


def is_router(module: str) -> bool:
    """True if a module of this full name is a router, or the gate of a shared expert."""
    return re.fullmatch(ROUTER_PATTERN.removeprefix("re:"), module) is not None


def ignored(setup: EngineSetup) -> list[str]:
    """The patterns for an engine: routers, linears whose inputs on a rank are no whole blocks, and kept ones.

    Raises ConfigError if as many layers are to be kept as there are, or if nothing says how many there are.
    """
    patterns, shape = [ROUTER_PATTERN], setup.known_shape
    if shape is not None:
        patterns += _without_whole_blocks(shape, setup.limits.tensor_parallel_size)
    return patterns + kept_patterns(setup)


def kept_patterns(setup: EngineSetup) -> list[str]:
    """The patterns of the linears that the user keeps. Raises ConfigError as `ignored` does."""
    patterns, kept = [], setup.remedies.keep_bf16
    if any(ends_of(kept)):
        shape = setup.known_shape
        layers = _layers_in_config(setup) if shape is None else shape.num_layers
        numbers = "|".join(map(str, kept_numbers(kept, layers)))
        patterns.append(rf"re:.*\.layers\.({numbers})\..*")
    if OUTPUTS in kept:
        patterns.append(rf"re:.*\.{MODULES[OUTPUTS]}$")
    return patterns


def _layers_in_config(setup: EngineSetup) -> int:
    """The layers of a model that the cost model does not know. Raises ConfigError if its config.json does not say."""
    config = find_config(setup.path)[0]
    for fields in (config, *(config.get(name) for name in NESTED)):
        if isinstance(fields, Mapping) and isinstance(layers := fields.get("num_hidden_layers"), int):
            return layers
    raise ConfigError(
        f"keep_bf16 is {setup.remedies.keep_bf16}, and config.json of {setup.path} has no num_hidden_layers; leave it "
        "out"
    )


def _without_whole_blocks(shape: ModelShape, tp: int) -> Iterable[str]:
    """One pattern for each name of a linear. It lists its layers if other layers have it in FP8."""
    having, left = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for number, layer in enumerate(shape.layers):
        linears = (linear for part in parts(layer) for linear in part.linears(shape.hidden_size, tp))
        for linear in linears:
            if linear.stored:  # kept
                continue
            having[linear.name].add(number)
            if linear.left_in_bf16:
                left[linear.name].add(number)
    for name, numbers in left.items():
        listed = "|".join(map(str, sorted(numbers)))
        where = "" if numbers == having[name] else rf"layers\.({listed})\.(.*\.)?"
        yield rf"re:.*\.{where}{MODULES.get(name, name)}$"


def vllm_kwargs(setup: EngineSetup) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one replica. Data-parallel replicas are separate engines that the trainer starts."""
    limits, preset = setup.limits, setup.precision
    arguments = limits.vllm_arguments()
    unset = [name for name in ("enable_expert_parallel", "enable_return_routed_experts") if not arguments[name]]
    left_out = ["data_parallel_size", *unset]
    if setup.gpu.is_cpu:
        left_out.append("gpu_memory_utilization")  # VLLM_CPU_KVCACHE_SPACE takes its place
    # vLLM enlarges its default block size: to 64 for FP8 MLA, where 16 would mean a slower kernel, and to the size of a
    # recurrent state.
    if limits.block_size == EngineLimits.for_gpu(setup.gpu).block_size:
        left_out.append("block_size")
    kwargs: dict[str, Any] = {
        "model": setup.path,
        "dtype": "bfloat16",
        "kv_cache_dtype": _kv_cache_dtype(setup),
        **{name: value for name, value in arguments.items() if name not in left_out},
        # Log-probs as sampled, temperature included: the ratio to the trainer's needs these.
        "logprobs_mode": "processed_logprobs",
    }
    if (kernel := named_backend(setup.gpu, preset, setup.known_shape)) is not None:
        kwargs["attention_backend"] = kernel.value
    if preset.in_blocks and setup.stored is None:
        config = {"linear": "fp8_per_block", "moe": "fp8_per_block", "ignore": ignored(setup)}
        kwargs |= {"quantization": "online", "quantization_config": config}
    if preset.in_blocks and limits.expert_ranks > 1 and setup.gpu.compute_capability == (9, 0):
        # Triton's kernels for FP8 experts were measured. With expert parallelism on Hopper vLLM prefers FlashInfer's
        # CUTLASS kernels (fused_moe/oracle/fp8.py). FlashInfer probably compiles them first: two H200s were not ready
        # after seven minutes.
        kwargs["moe_backend"] = "triton"
    return kwargs


def _kv_cache_dtype(setup: EngineSetup) -> str:
    """vLLM's word for the KV cache's dtype.

    Its "auto" is FP8 for checkpoints that ask for it. On compute capability 10.x it is FP8 for latents whose tokens an
    indexer picks, too (GlmMoeDsaForCausalLM in vllm/model_executor/models/config.py). For others it is BF16.
    """
    if setup.precision.kv == "fp8":
        return "fp8"
    stored, shape = setup.stored, setup.known_shape
    indexed = shape is not None and shape.indexed
    return "bfloat16" if indexed or (stored is not None and stored.kv_fp8) else "auto"


def vllm_env(setup: EngineSetup) -> dict[str, str]:
    """Environment variables of the engine's processes.

    VLLM_USE_DEEP_GEMM_E8M0 is on by default, on Hopper too. DeepGEMM then quantises the block-quantised weights a
    second time, to power-of-two scales, and the weight error grows from 2.6% to 3.7% RMS on Gaussian weights. Off keeps
    the FP32 scales. It is on where `e8m0` of the setup says so. A checkpoint with such scales would switch it on, too
    (get_config in vllm/transformers_utils/config.py). On a CPU a variable sets the size of the KV pool.
    """
    if setup.gpu.is_cpu:
        return {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB)}
    if not setup.precision.in_blocks:
        return {}
    return {ENGINE_E8M0: "1" if setup.e8m0 else "0"}


def serve_command(kwargs: dict[str, Any], env: dict[str, str], extra: tuple[str, ...] = ()) -> str:
    """The shell command that serves the same engine."""
    variables = [f"{name}={value}" for name, value in env.items()]
    arguments = {name: value for name, value in kwargs.items() if name != "model"}
    return shlex.join([*variables, "vllm", "serve", str(kwargs["model"]), *serve_flags(arguments), *extra])


def serve_flags(kwargs: Mapping[str, Any]) -> Iterable[str]:
    """The words of `vllm serve` for arguments of `vllm.LLM`."""
    for name, value in kwargs.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value))


def precision_words(setup: EngineSetup, other: Precision) -> str:
    """The command of `vllm serve` with the variables and flags that an engine needs beyond those of another precision.

    Empty if it needs none, as the checkpoint itself says its precision.
    """
    engine = replace(setup, precision=other)
    kwargs = _beyond(vllm_kwargs(setup), vllm_kwargs(engine))
    env = _beyond(vllm_env(setup), vllm_env(engine))
    return serve_command({"model": setup.path, **kwargs}, env) if kwargs or env else ""


def _beyond(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the others do not have, or have with another value."""
    return {name: value for name, value in settings.items() if name not in others or others[name] != value}
