"""Facts about a vLLM worker, read from its live objects: kernels, formats, settings, and faults of its weights.

`zero_kv` clears its KV cache. `examine` finds weights that cannot be right, and ones that changed without a sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from fp8plan.model.emit.vllm import is_router
from fp8plan.model.precision import UE8M0
from fp8plan.runtime.apply.weight_sync.kv_scales import attention_layers
from fp8plan.runtime.apply.worker.binding import kind
from fp8plan.runtime.this_host import host_loop_s

if TYPE_CHECKING:
    import torch

PART: Final = 1 << 24  # bytes that are summed up at once


def worker_facts(worker: Any) -> dict[str, Any]:
    """Read a worker's facts, as plain data.

    layers:    kinds of modules with weights -> how many
    kernels:   "gemm", "moe" -> name of the kernel
    e8m0:      True if DeepGEMM's scales are powers of two; None without blockwise FP8
    held_e8m0: True if those of the checkpoint are
    attention: classes of the implementations that read its KV cache, sorted; each class stands once
    device:    product name of the GPU, or "cpu"
    routers:   dtype of a router's weights -> how many routers have it
    weights:   number of the sync that serves on this rank, 0: the checkpoint; None: not synced by fp8plan
    quantization:    vLLM's name of the weights' format; None: they are not quantised
    experts:         True if the model has routed experts
    routed_experts:  True if the engine returns the experts that each token went to
    prefix_caching:  True if the engine keeps prefixes
    weight_transfer: vLLM's backend of weight updates; None: none is configured
    host_loop_s:     the loop of its host (runtime.this_host), if this is the first rank, on a GPU; else None

    and vllm_version, kv_cache_dtype, cudagraph_mode, enforce_eager and logprobs_mode
    """
    import torch
    import vllm

    model, config = worker.model_runner.get_model(), worker.vllm_config
    beside = getattr(config, "aux_output_config", config.model_config)  # what is returned beside tokens, from 0.31 on
    kinds = Counter(kind(layer) for layer in model.modules() if any(p is not None for p in layer._parameters.values()))
    attention = [layer for _, layer in attention_layers(model)]
    device = next(model.parameters()).device
    return {
        "vllm_version": vllm.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "layers": dict(kinds),
        "kernels": _kernels(model),
        "e8m0": _uses_e8m0(model),
        "held_e8m0": _holds_e8m0(config.model_config),
        "attention": attention_classes(attention),
        "kv_cache_dtype": _kv_cache_dtype(attention),
        "cudagraph_mode": getattr(config.compilation_config.cudagraph_mode, "name", None),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "logprobs_mode": str(getattr(config.model_config, "logprobs_mode", "raw_logprobs")),
        "routers": _routers(model),
        "weights": getattr(getattr(worker, "_fp8plan_live", None), "version", None),
        "quantization": config.model_config.quantization,
        "experts": bool(config.model_config.is_moe),
        "routed_experts": bool(getattr(beside, "enable_return_routed_experts", False)),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "weight_transfer": getattr(getattr(config, "weight_transfer_config", None), "backend", None),
        "host_loop_s": host_loop_s() if device.type == "cuda" and worker.rank == 0 else None,
    }


def preset_of(facts: Mapping[str, Any]) -> str | None:
    """Return the preset that a worker's facts describe; None if they describe none of fp8plan's."""
    layers, dtype = facts.get("layers"), facts.get("kv_cache_dtype")
    if layers is None or dtype is None:
        return None
    quantised = [kind for kind in layers if "Fp8" in kind]
    if any("PerBlock" not in kind for kind in quantised):
        return None
    parts = ["fp8_block"] if quantised else []
    if str(dtype).startswith("fp8"):
        parts.append("fp8_kv")
    return "+".join(parts) or "bf16"


def attention_classes(layers: Iterable[Any]) -> list[str]:
    """Return the classes of attention layers' implementations, sorted.

    A layer has several implementations if vLLM picks one for each batch (v1/attention/backends/composite.py).
    """
    classes = set()
    for implementation in (layer.impl for layer in layers):
        variants = getattr(implementation, "get_impl_variants", None)
        classes |= {type(variant).__name__ for variant in (variants() if variants else (implementation,))}
    return sorted(classes)


def _kv_cache_dtype(layers: Sequence[Any]) -> str | None:
    """Return vLLM's name of the KV cache's dtype: that of an FP8 layer, if there is one."""
    dtypes = [str(layer.kv_cache_dtype) for layer in layers if hasattr(layer, "kv_cache_dtype")]
    return max(dtypes, key=lambda dtype: dtype.startswith("fp8"), default=None)


def _kernels(model: Any) -> dict[str, str]:
    """Return the kernel class of quantised linears and the backend of experts, as vLLM's log names them."""
    methods = [method for layer in model.modules() if (method := getattr(layer, "quant_method", None)) is not None]
    linear = [type(method.fp8_linear).__name__ for method in methods if hasattr(method, "fp8_linear")]
    backends = [getattr(m, "fp8_backend", None) or getattr(m, "unquantized_backend", None) for m in methods]
    experts = [getattr(backend, "value", str(backend)) for backend in backends if backend is not None]
    return {part: names[0] for part, names in (("gemm", linear), ("moe", experts)) if names}


def _routers(model: Any) -> dict[str, int]:
    """Count the routers by the dtype of their weights. A router is recognised by its name (model.emit.vllm)."""
    layers = [layer for name, layer in model.named_modules() if is_router(name)]
    weights = [weight for layer in layers if (weight := layer._parameters.get("weight")) is not None]
    return dict(Counter(str(weight.dtype).removeprefix("torch.") for weight in weights))


def _uses_e8m0(model: Any) -> bool | None:
    """Return True if a kernel uses DeepGEMM's E8M0 scales, None without a linear in FP8 blocks.

    Kernels keep the setting that they were made with.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    in_blocks = [m for m in methods if m is not None and getattr(m, "weight_block_size", None) is not None]
    kernels = [method.fp8_linear for method in in_blocks if hasattr(method, "fp8_linear")]
    if not kernels:
        return None
    parts = [part for kernel in kernels for part in (kernel, getattr(kernel, "fallback", None))]
    return any(bool(getattr(part, "use_deep_gemm_e8m0", False)) for part in parts)


def _holds_e8m0(model_config: Any) -> bool:
    """Return True if the config of the checkpoint says that its scales are powers of two."""
    how = getattr(getattr(model_config, "hf_config", None), "quantization_config", None)
    return isinstance(how, Mapping) and how.get("scale_fmt") == UE8M0


def digest(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits: the sum of its 32-bit words, each times its place (modulo 2^64)."""
    import torch

    data, total = tensor.contiguous().view(-1).view(torch.uint8), 0
    for start in range(0, data.numel(), PART):  # a part at a time: a word takes over 24 bytes meanwhile
        part = data[start : start + PART]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 4)).clone().view(torch.int32).long()
        places = torch.arange(start // 4 + 1, start // 4 + 1 + words.numel(), device=words.device)
        total += int((words * places).sum())
    return total % 2**64


def zero_kv(worker: Any) -> int:
    """Zero all of a worker's KV cache, and return its bytes. No request may run, and the cache must not sleep.

    Attention multiplies masked values by 0, and 0 x NaN is NaN. So NaN that unusable weights have left in a block would
    reach the next request that gets the block. Whole storages are zeroed as bytes, whatever their dtype: layers may
    share a storage, and have padding.
    """
    import torch

    views = _tensors(worker.model_runner.kv_caches)
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache, which is a tensor, a list of a layer's states (Mamba), or None."""
    import torch

    if isinstance(nested, torch.Tensor):
        yield from [nested] if nested.numel() else []
    elif isinstance(nested, (list, tuple)):
        for part in nested:
            yield from _tensors(part)


def examine(worker: Any) -> dict[str, Any]:
    """Examine every parameter of a worker's model.

    unsound: parameter -> its fault: NaN or Inf, a matrix of zeros, a scale that is not above 0
    changed: parameters that have changed since the last call, although no sync has come between
    since:   False if there was no call since the last sync
    """
    model = worker.model_runner.get_model()
    version = getattr(getattr(worker, "_fp8plan_live", None), "version", None)
    unsound, digests = {}, {}
    for name, tensor in model.named_parameters():
        digests[name] = digest(tensor.data)
        if fault := _wrong(name, tensor.data):
            unsound[name] = fault
    version_then, digests_then = getattr(worker, "_fp8plan_examined", (None, {}))
    since = bool(digests_then) and version_then == version
    worker._fp8plan_examined = version, digests
    changed = [name for name, value in digests.items() if since and digests_then.get(name, value) != value]
    return {"unsound": unsound, "changed": changed, "since": since}


def _wrong(name: str, tensor: torch.Tensor) -> str | None:
    """Return the fault of a parameter, if any; None for integers (packed weights), which cannot be judged."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return None
    least, most = torch.inf, -torch.inf
    for part in tensor.detach().reshape(-1).split(PART):
        low, high = map(float, part.float().aminmax())  # NaN if any value is
        if not (isfinite(low) and isfinite(high)):
            return "NaN or Inf"
        least, most = min(least, low), max(most, high)
    if "scale" in name.rpartition(".")[2] and least <= 0:
        return "a scale that is not above 0"
    if tensor.dim() > 1 and least == most == 0:  # a norm may begin at zeros
        return "zeros alone"
    return None
