"""The caches that the layers of a model keep, in bytes of a precision: what `plan_kv_cache` plans."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention, Mamba2, Mixer, mixers
from fp8plan.model.kv_cache.precision import CPU_BLOCK, kernel_block, why_no_fp8_kv
from fp8plan.model.kv_cache.specs import KvRules, LayerCache, in_bytes, indexer_cache
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import Precision


class ModelCaches(NamedTuple):
    """The caches of one rank, and the rules by which vLLM plans them."""

    layers: tuple[LayerCache, ...]
    rules: KvRules


def model_caches(
    shape: ModelShape,
    precision: Precision,
    limits: EngineLimits,
    longest_request: int,
    on_cpu: bool = False,
    capability: tuple[int, int] | None = None,
) -> ModelCaches:
    """The caches of a model under `limits`: by vLLM 0.26 on a GPU, by 0.30 on a CPU, as their profiles are measured.

    longest_request: tokens, where limits.max_model_len is None
    capability:      compute capability of the GPU; None: Hopper's

    Raises ConfigError where vLLM cannot keep them in this precision, or in a way that is not modelled.
    """
    layers = layer_caches(shape, precision, limits.tensor_parallel_size)
    if not layers:
        raise ConfigError(f"{shape.name}: no layer keeps anything of earlier tokens; allowed: models with attention")
    _check_states(shape, limits, on_cpu)
    if reason := why_not_kept(shape, precision, on_cpu, capability):
        raise ConfigError(f"{shape.name} in {precision.name}: {reason}; allowed: a precision with a BF16 KV cache")
    if on_cpu:
        return ModelCaches(layers, KvRules.of(limits, longest_request, CPU_BLOCK, vllm="0.30"))
    sparse = any(_sparse(attention) for attention, _ in shape.parts_of(LatentAttention))
    block = kernel_block(layers, precision.kv_element_bytes, sparse)
    # vLLM takes the kernel's block where none is given, and so is a smaller one understood here.
    limits = replace(limits, block_size=max(limits.block_size, block))
    return ModelCaches(layers, KvRules.of(limits, longest_request, block))


def why_not_kept(
    shape: ModelShape, precision: Precision, on_cpu: bool = False, capability: tuple[int, int] | None = None
) -> str | None:
    """Say why vLLM cannot keep the caches of this model in this precision (0.26 on a GPU), or None if it can.

    capability: compute capability of the GPU; None: Hopper's
    """
    if precision.kv != "fp8":
        return None
    if on_cpu:  # one kernel reads heads of every size
        return why_no_fp8_kv(shape.caches())
    layers = [attention for attention, _ in shape.parts_of(Attention)]
    head_dims, sinks = {x.head_dim for x in layers}, any(x.sinks for x in layers)
    return why_no_fp8_kv(shape.caches(), head_dims, sinks=sinks, capability=capability)


def layer_caches(shape: ModelShape, precision: Precision, tensor_parallel_size: int = 1) -> tuple[LayerCache, ...]:
    """The caches of each layer on one rank, in the order of the layers. A layer that keeps nothing has no entry, one
    with an indexer has two."""
    tp = tensor_parallel_size
    found = (mixer for layer in shape.layers for mixer in mixers(layer))
    return tuple(cache for mixer in found for cache in _of_mixer(mixer, precision.kv_element_bytes, tp))


@lru_cache
def _of_mixer(mixer: Mixer, kv_bytes: int, tp: int) -> tuple[LayerCache, ...]:
    """The caches of one mixer. Most layers of a model are equal, and a search plans memory thousands of times."""
    found = tuple(in_bytes(cache, kv_bytes, _sparse(mixer)) for cache in mixer.caches(tp))
    if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
        return *found, indexer_cache(mixer.indexer.head_dim)
    return found


def _sparse(mixer: Mixer) -> bool:
    """Tell whether an indexer picks the tokens that it attends to."""
    return isinstance(mixer, LatentAttention) and (mixer.indexer is not None or mixer.shares_index)


def _check_states(shape: ModelShape, limits: EngineLimits, on_cpu: bool) -> None:
    """Raise ConfigError where vLLM 0.26 would keep a state for every block of tokens (mamba_cache_mode "all"): with
    prefix caching, for the models whose class says SupportsMambaPrefixCaching, which all have Mamba 2."""
    if limits.enable_prefix_caching and not on_cpu and shape.parts_of(Mamba2):
        raise ConfigError(
            f"{shape.name}: enable_prefix_caching is True, with which vLLM 0.26 keeps a state of its Mamba layers for "
            "every block of tokens (mamba_cache_mode 'all'), and that is not modelled; allowed: False, vLLM's default "
            "for models with recurrent layers"
        )
