"""Facts about a started vLLM engine: from its log, and from its parts inside the worker.

The log's patterns are vLLM's (vllm/v1/worker/gpu_worker.py, vllm/v1/core/kv_cache_utils.py,
vllm/platforms/cuda.py, vllm/model_executor/kernels/linear/__init__.py). The parts (KV cache groups, classes of layers,
weights) are vLLM's attributes (v1/worker/gpu_model_runner.py, v1/worker/gpu/model_runner.py,
v1/kv_cache_interface.py). If a version lacks a fact, it is left out, None or empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from fp8plan.model.precision import Precision

# Field -> pattern with the number as its only group. GiB are 2^30 bytes, rounded by vLLM to two decimals.
NUMBERS: Final = {
    "model_loading_gib": r"Model loading took ([\d.]+) GiB",
    "model_loading_s": r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds",
    "available_kv_cache_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "kv_cache_size_tokens": r"KV cache size: ([\d,]+) tokens",
    "maximum_concurrency": r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x",
    "free_gib": r"Free memory on device \S* ?\(([\d.]+)/[\d.]+ GiB\) on startup",
    "total_gib": r"Free memory on device \S* ?\([\d.]+/([\d.]+) GiB\) on startup",
    "requested_gib": r"GPU memory utilization is \([\d.]+, ([\d.]+) GiB\)",
    "weights_gib": r"Actual usage is ([\d.]+) GiB for weight",
    "peak_activation_gib": r"([\d.]+) GiB for peak activation",
    "non_torch_gib": r"([\d.]+) GiB for non-torch memory",
    "cuda_graphs_gib": r"([\d.]+) GiB for CUDAGraph memory",
    "cuda_graphs_estimated_gib": r"CUDA graph pool memory: [\d.]+ GiB \(actual\), ([\d.]+) GiB \(estimated\)",
    "graph_capture_s": r"Graph capturing finished in (\d+) secs",
    "compile_s": r"torch\.compile took ([\d.]+) s in total",
    "engine_init_s": r"init engine \(.*?\) took ([\d.]+) s",
    "flash_attention_version": r"Using FlashAttention version (\d+)",
}

LINEAR: Final = r"Selected (\w+) for (?:Fp8|Online|PerBlock)\w*"
ATTENTION: Final = r"Using (\w+) attention backend"
MOE: Final = r"Using (.+?) (?:Fp8 |Unquantized )?MoE backend"
E8M0: Final = r"DeepGEMM E8M0 (enabled|disabled)"

# Lines of the log about vLLM's choices and the memory, and the time and process before their text.
TELLING: Final = re.compile(
    r"Using |Selected |[Bb]ackend|block size|page size|KV cache|[Mm]amba|GDN|[Pp]refix caching|chunked|GiB|"
    r"[Qq]uantiz|DeepGEMM|[Cc]udagraph|CUDAGraph|Setting |[Ff]all(ing|s|en) back|not support|took |default"
)
PREFIX: Final = re.compile(r"^(\([^)]*\) )?(INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d (\[\S+\] )?")
MOST_LINES, LONGEST_LINE = 150, 400

NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")  # number of a layer, in the name of a parameter


def engine_numbers(log: str) -> dict[str, float]:
    """NUMBERS in a log: field -> its last number."""
    matches = {name: re.findall(pattern, log) for name, pattern in NUMBERS.items()}
    return {name: float(values[-1].replace(",", "")) for name, values in matches.items() if values}


def kernel_backends(log: str, preset: Precision) -> dict[str, str]:
    """Kernel, as a Profile names it -> implementation, as vLLM names it. vLLM does not name its BF16 GEMM."""
    dtype = preset.gemm_dtype
    patterns = {f"gemm.{dtype}": LINEAR, f"attention.{preset.kv}": ATTENTION, f"moe.{dtype}": MOE}
    matches = {kernel: re.findall(pattern, log) for kernel, pattern in patterns.items()}
    return {kernel: names[-1] for kernel, names in matches.items() if names}


def model_runner(log: str) -> str:
    """The model runner: V1 or V2, which have other costs per step. Only V2 is named in the log
    (vllm/v1/worker/gpu_worker.py).
    """
    return "V2" if "Using V2 Model Runner" in log else "V1"


def uses_e8m0(log: str, preset: Precision) -> bool | None:
    """Return True if DeepGEMM ran with power-of-two scales; None if the log has no such line or no weight is FP8."""
    states = re.findall(E8M0, log)
    return states[-1] == "enabled" if states and preset.weights != "bf16" else None


def telling_lines(log: str) -> list[str]:
    """Lines of a log about vLLM's choices, without time and process, each once."""
    lines = (PREFIX.sub("", line.strip()) for line in log.split("\n") if TELLING.search(line))
    return list(dict.fromkeys(line[:LONGEST_LINE] for line in lines))[:MOST_LINES]


def engine_parts(runner: Any) -> dict[str, Any]:
    """Facts about the worker's model runner, as plain data. The error's text stands for a part that this vLLM lacks."""
    config = getattr(runner, "kv_cache_config", None)
    parts: dict[str, Callable[[], Any]] = {
        "cache_groups": lambda: _cache_groups(config, getattr(runner, "attn_groups", None) or []),
        "cache_blocks": lambda: getattr(config, "num_blocks", None),
        "cache_tensors": lambda: _tensors(getattr(config, "kv_cache_tensors", None) or []),
        "kernel_block_sizes": lambda: _plain(
            getattr(runner, "kernel_block_sizes", None) or getattr(runner, "_kernel_block_sizes", None)
        ),
        "modules": lambda: dict(Counter(map(_described, runner.get_model().modules()))),
        "parameters": lambda: _parameters(runner.get_model().named_parameters()),
    }
    return {name: _or_error(find) for name, find in parts.items()}


def _or_error(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except (AttributeError, TypeError, KeyError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def _cache_groups(config: Any, attention: Iterable[Iterable[Any]]) -> list[dict[str, Any]]:
    """KV cache groups, each with its number of layers, the spec of a layer, and its attention backends."""
    groups = getattr(config, "kv_cache_groups", None) or []
    backends = [sorted({str(part.backend.get_name()) for part in group}) for group in attention]
    return [
        {
            "layers": len(group.layer_names),
            "first_layers": list(group.layer_names[:3]),
            "spec": _spec(group.kv_cache_spec),
            "backends": backends[number] if number < len(backends) else None,
        }
        for number, group in enumerate(groups)
    ]


def _spec(layer: Any) -> dict[str, Any]:
    """A KVCacheSpec: its class, its fields, its page. A spec that holds several lists each different one once."""
    facts: dict[str, Any] = {"kind": type(layer).__name__, "page_size_bytes": layer.page_size_bytes}
    for field in fields(layer) if is_dataclass(layer) else ():
        value = getattr(layer, field.name)
        if isinstance(value, Mapping):
            each = Counter(repr(sorted(_spec(part).items())) for part in value.values())
            facts[field.name] = [{"layers": count, "spec": text} for text, count in each.items()]
        else:
            facts[field.name] = _plain(value)
    return facts


def _tensors(cache: Iterable[Any]) -> list[dict[str, int]]:
    """The cache's tensors by size and by the number of layers that share one."""
    each = Counter((tensor.size, len(getattr(tensor, "shared_by", ()))) for tensor in cache)
    return [{"bytes": size, "shared_by": shared, "tensors": count} for (size, shared), count in each.items()]


def _described(module: Any) -> str:
    """A module's class, with the class of its attention or of its quantisation method."""
    behind = getattr(module, "impl", None) or getattr(module, "quant_method", None)
    name = type(module).__name__
    if behind is None:
        return name
    expert_kernel = getattr(getattr(behind, "moe_kernel", None), "fused_experts", None)
    kernel = [] if expert_kernel is None else [type(expert_kernel).__name__]
    return " / ".join([name, type(behind).__name__, *kernel])


def _parameters(named: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Parameters by their names without layer numbers: dtype, shape, number, and the bytes of all."""
    sizes_of: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for name, value in named:
        key = NUMBER.sub(".N", name), str(value.dtype).removeprefix("torch."), tuple(value.shape)
        sizes_of.setdefault(key, []).append(value.numel() * value.element_size())
    return [
        {"name": name, "dtype": dtype, "shape": list(shape), "count": len(sizes), "bytes": sum(sizes)}
        for (name, dtype, shape), sizes in sizes_of.items()
    ]


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
