"""vLLM's own planning of the KV cache, run on its spec objects: what fp8plan.model.memory must reproduce."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from installed_vllm import VLLM

from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.memory.kv_specs import KvRules, LayerCache
from fp8plan.version import at_least


class Shape(NamedTuple):
    """An attention layer's KV heads and head size, or a latent's width as (0, width)."""

    kv_heads: int
    head_dim: int


class Planned(NamedTuple):
    """vLLM's answer. groups: pairs (layers, block size)"""

    groups: list[tuple[tuple[int, ...], int]]
    block_size: int
    block_bytes: int
    num_blocks: int
    tokens: int
    request_bytes: int
    fits: bool


class _Backend:
    """An attention backend that takes every multiple of a block, as Hopper's do."""

    kernel_block = 16

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(cls.kernel_block)]

    @staticmethod
    def customize_spec(spec):
        return spec


def token_bytes(shape: Shape, element_bytes: int) -> int:
    return (2 * shape.kv_heads or 1) * shape.head_dim * element_bytes


def _config(rules: KvRules):
    """The fields of a VllmConfig that vLLM reads to plan the KV cache."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=rules.max_model_len, original_max_model_len=rules.max_model_len, architecture="Any"
        ),
        cache_config=SimpleNamespace(
            block_size=rules.block_size,
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            mamba_cache_mode="align" if rules.enable_prefix_caching else "none",
            mamba_block_size=rules.block_size if rules.enable_prefix_caching else rules.max_model_len,
            mamba_page_size_padded=None,
            user_specified_mamba_block_size=False,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        num_prefill_lookahead_tokens=0,
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
        max_in_flight_tokens=rules.in_flight_tokens,
    )


@contextmanager
def _model(config, shape: Shape, state_bytes: int):
    """A hybrid model class and config, for _align_hybrid_block_size."""
    import torch

    config.model_config.use_mla = not shape.kv_heads
    config.model_config.dtype = torch.uint8
    config.model_config.get_num_kv_heads = lambda _: shape.kv_heads or 1
    config.model_config.get_head_size = lambda: shape.head_dim
    config.model_config.hf_text_config = SimpleNamespace()
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: ((state_bytes,),),
        get_mamba_state_dtype_from_config=lambda _: (torch.uint8,),
    )
    registry = mock.patch("vllm.model_executor.models.ModelRegistry.resolve_model_cls", return_value=(model, ""))
    with registry, mock.patch("vllm.config.vllm.set_current_vllm_config", side_effect=lambda _: nullcontext()):
        yield


def _align(config, rules: KvRules, caches: list[LayerCache], shapes: list[Shape]) -> None:
    """Change the block sizes of `config` as the platform does."""
    from vllm.platforms.interface import Platform

    attention = [shape for shape, cache in zip(shapes, caches, strict=True) if cache.kind != "state"]
    states = [cache.state_bytes for cache in caches if cache.kind == "state"]
    if attention and states:
        with _model(config, attention[0], max(states)):
            Platform._align_hybrid_block_size(config, _Backend)


def _spec(config, rules: KvRules, cache: LayerCache, shape: Shape):
    import torch
    from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within
    from vllm.v1 import kv_cache_interface as vllm_specs

    block_size = config.cache_config.block_size
    if cache.kind == "state":
        return vllm_specs.MambaSpec(
            block_size=config.cache_config.mamba_block_size,
            shapes=((cache.state_bytes,),),
            dtypes=(torch.uint8,),
            page_size_padded=config.cache_config.mamba_page_size_padded,
            mamba_cache_mode=config.cache_config.mamba_cache_mode,
            **({"num_prefill_checkpoint_blocks": 1} if cache.checkpoint and rules.has(cache.checkpoint) else {}),
        )
    common = {"num_kv_heads": shape.kv_heads or 1, "head_size": shape.head_dim, "dtype": torch.uint8}
    if cache.kind == "latent":
        return vllm_specs.MLAAttentionSpec(block_size=block_size, **common)
    if cache.kind == "full":
        return vllm_specs.FullAttentionSpec(block_size=block_size, **common)
    if cache.kind == "chunked":
        return vllm_specs.ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=cache.window, **common)
    window = vllm_specs.SlidingWindowSpec(block_size=1, sliding_window=cache.window, **common)
    per_token = window.real_page_size_bytes
    with mock.patch.object(_Backend, "kernel_block", rules.kernel_block):
        fitting = _largest_kernel_block_within(_Backend, per_token, per_token * block_size, block_size)
    return replace(window, block_size=fitting)


def specs(caches: list[LayerCache], shapes: list[Shape], rules: KvRules):
    """vLLM's specs of layers that keep `caches`, and the config they were made with."""
    config = _config(rules)
    with mock.patch.object(_Backend, "kernel_block", rules.kernel_block):
        _align(config, rules, caches, shapes)
    layers = [_spec(config, rules, cache, shape) for cache, shape in zip(caches, shapes, strict=True)]
    return config, {str(place): spec for place, spec in enumerate(layers)}


def fits(ours: KvPlan) -> bool:
    """True if one request of max_model_len fits, so that the engine starts. 0.26 does not subtract the null block."""
    free = ours.num_blocks - at_least(ours.rules.vllm, (0, 30))
    return free > 0 and ours.request_blocks <= free


def of_ours(ours: KvPlan) -> Planned:
    """Our plan in the same words."""
    return Planned(
        groups=[(group.layers, group.block_size) for group in ours.groups],
        block_size=ours.block_size or ours.rules.block_size,
        block_bytes=ours.block_bytes,
        num_blocks=ours.num_blocks,
        tokens=ours.tokens,
        request_bytes=ours.request_blocks * ours.block_bytes,
        fits=fits(ours),
    )


def plan(config, layers: dict, available_bytes: int) -> Planned:
    """vLLM's plan. Raises whatever vLLM raises where it has none."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    places = {name: place for place, name in enumerate(layers)}
    steps = _steps(config)
    groups = steps.groups(dict(layers))
    made = steps.made(groups, available_bytes)
    return Planned(
        groups=[(tuple(places[x] for x in group.layer_names), group.kv_cache_spec.block_size) for group in groups],
        block_size=config.cache_config.block_size,
        block_bytes=steps.block_bytes(groups),
        num_blocks=made.num_blocks,
        tokens=get_kv_cache_capacity(config, made)[0],
        request_bytes=steps.request_bytes(groups),
        fits=_fits(steps, layers, available_bytes),
    )


class _Steps(NamedTuple):
    """The functions of vLLM's planning.

    groups:        layers -> groups
    block_bytes:   groups -> bytes of a block
    made:          groups and available bytes -> KVCacheConfig
    request_bytes: groups -> bytes of one request of max_model_len
    check:         layers and available bytes; raises ValueError if a request does not fit
    """

    groups: Callable[[dict], list]
    block_bytes: Callable[[list], int]
    made: Callable[[list, int], Any]
    request_bytes: Callable[[list], int]
    check: Callable[[dict, int], Any]


def _steps(config) -> _Steps:
    if at_least(VLLM, (0, 33)):
        return _steps_of_builder(config)
    from vllm.v1.core import kv_cache_utils as utils

    of_config = (config,) if at_least(VLLM, (0, 32)) else ()
    return _Steps(
        groups=partial(utils.get_kv_cache_groups, config),
        block_bytes=partial(utils._pool_bytes_per_block, *of_config),
        made=partial(utils.get_kv_cache_config_from_groups, config),
        request_bytes=partial(utils._max_memory_usage_bytes_from_groups, config),
        check=lambda layers, available: utils.get_kv_cache_configs(config, [layers], [available]),
    )


def _steps_of_builder(config) -> _Steps:
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder = get_kv_cache_config_builder(config)
    block_bytes = partial(planning._pool_bytes_per_block_from_builder, builder, config)
    return _Steps(
        groups=partial(builder.get_kv_cache_groups, config),
        block_bytes=block_bytes,
        made=lambda groups, available: builder.get_kv_cache_config_from_groups(
            config, groups, available // block_bytes(groups)
        ),
        request_bytes=partial(planning._max_memory_usage_bytes_from_groups, builder, config),
        check=lambda layers, available: planning.get_kv_cache_configs(
            config, [layers], [available], planning.get_global_kv_cache_groups(config, [layers])
        ),
    )


def _fits(steps: _Steps, layers: dict, available_bytes: int) -> bool:
    try:
        steps.check(layers, available_bytes)
    except ValueError as error:
        if "KV cache is needed" in str(error) or "No available memory" in str(error):
            return False
        raise
    return True
