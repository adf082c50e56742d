"""Checks of the names of the options that a caller hands to vLLM.

The names of options are read from vLLM's source files. Importing vLLM would take seconds, and it reads environment
variables that are set later (launch.Launch.prepare).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Final

from fp8plan.checks import refuse_names

# Features that the cost model does not know -> options that bring them. No guard can judge such an engine.
NOT_PREDICTED: Final[Mapping[str, str]] = {
    "speculative decoding: the time of a draft, and how many of its tokens are accepted; no sync reaches a draft's "
    "own weights": "speculative_config spec_method spec_model spec_tokens",
    "LoRA: the kernels and the memory of adapters": "enable_lora default_mm_loras",
    "layouts beyond tensor and expert parallelism": "pipeline_parallel_size prefill_context_parallel_size "
    "decode_context_parallel_size nnodes enable_batch_sharded_sampling enable_dbo ubatch_size enable_elastic_ep "
    "all2all_backend expert_placement_strategy disable_custom_all_reduce enable_hc_sp",
    "weights or KV cache outside of the GPU": "cpu_offload_gb cpu_offload_params offload_backend offload_group_size "
    "offload_params kv_offloading_size kv_transfer_config ec_transfer_config engram_config",
    "another scheduler than vLLM's default": "max_num_scheduled_tokens max_num_active_seqs "
    "long_prefill_token_threshold long_prefill_token_threshold_adaptive enable_chunked_prefill "
    "prefill_schedule_interval watermark scheduling_policy scheduler_cls disable_hybrid_kv_cache_manager "
    "kv_sharing_fast_prefill prefix_cache_retention_interval prefix_match_unit",
    "another cache of keys, values or states": "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype "
    "mamba_block_size mamba_cache_mode enable_mamba_fine_grained_prefix_cache "
    "enable_mamba_shared_prefix_checkpoint disable_sliding_window use_replayssm",
    "other graphs or kernels than vLLM's default": "compilation_config cudagraph_capture_sizes "
    "optimization_level performance_mode kernel_config ir_op_priority model_impl "
    "disable_cascade_attn enable_flashinfer_autotune mamba_backend mamba_config mamba_ssu_algorithm "
    "gdn_prefill_backend kda_prefill_backend kda_decode_backend sparse_indexer_topk_backend use_fp64_gumbel "
    "monokernel",
    "tracing and profiling": "profiler_config enable_layerwise_nvtx_tracing collect_detailed_traces",
}

# Reasons why samples or log-probs are not the policy's -> options that bring them.
NOT_THE_POLICYS: Final[Mapping[str, str]] = {
    "log-probs are not those of what is sampled, unless temperature is 1 and nothing is cut": "logprobs_mode",
    "samples are changed after the model, and the trainer's log-probs are not": "logits_processors watermark_config",
    "a request with an adapter samples from another policy than the synced one": "enable_lora default_mm_loras",
    "requests without sampling parameters of their own get ones that the trainer does not see": "generation_config "
    "override_generation_config",
    "the model that runs may be another than the trainer's": "hf_overrides model_class_overrides diffusion_config",
    "states are rounded at random": "enable_mamba_cache_stochastic_rounding",
}

# Values at which options change nothing, other than None, False, 0 and empty ones.
NEUTRAL: Final = dict(
    word.split("=")
    for word in (
        "all2all_backend=allgather_reducescatter decode_context_parallel_size=1 disable_cascade_attn=True "
        "enable_chunked_prefill=True expert_placement_strategy=linear generation_config=auto|vllm "
        "logprobs_mode=processed_logprobs mamba_backend=triton mamba_cache_dtype=auto mamba_cache_mode=none "
        "mamba_ssm_cache_dtype=auto model_impl=auto|vllm nnodes=1 offload_backend=auto optimization_level=2 "
        "performance_mode=balanced pipeline_parallel_size=1 prefill_context_parallel_size=1 "
        "prefill_schedule_interval=1 scheduling_policy=fcfs sparse_indexer_topk_backend=auto"
    ).split()
)

# Parts of a server's VllmConfig ("": itself) -> the options that it shows there by their own names.
SHOWN: Final[Mapping[str, str]] = {
    "": "speculative_config kv_transfer_config ec_transfer_config watermark_config",
    "model_config": "logits_processors hf_overrides model_impl override_generation_config",
    "parallel_config": "pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size enable_dbo "
    "nnodes",
    "scheduler_config": "long_prefill_token_threshold max_num_scheduled_tokens max_num_active_seqs "
    "enable_chunked_prefill",
}


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's options other than limits, as far as its configuration shows them.

    config: its VllmConfig as a JSON tree
    """
    parts = {part: config if not part else config.get(part) or {} for part in SHOWN}
    options = {name: parts[part].get(name) for part, names in SHOWN.items() for name in names.split()}
    options["enable_lora"] = config.get("lora_config") is not None
    return options | {"scheduling_policy": parts["scheduler_config"].get("policy")}


def not_predicted(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a text for each kind of option that the cost model does not know, with names and values."""
    return tuple(f"{names} ({what})" for names, what in _changing(NOT_PREDICTED, options))


def remarks(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return remarks for the user on options whose effect on speed or samples fp8plan does not know."""
    of_speed = (
        f"{names}: fp8plan does not model {what}; the prediction leaves it out, and the guard is off"
        for names, what in _changing(NOT_PREDICTED, options)
    )
    of_samples = (
        f"{names}: {what}; fp8plan cannot tell this from a mismatch of precision"
        for names, what in _changing(NOT_THE_POLICYS, options)
    )
    return (*of_speed, *of_samples)


def arguments_of(engine: type[Any]) -> frozenset[str]:
    """Return the names of an engine's own arguments, for `refuse_unknown`."""
    makers = (signature(maker).parameters.values() for maker in (engine.from_setup, engine.from_plan))
    return frozenset(argument.name for maker in makers for argument in maker if argument.kind != argument.VAR_KEYWORD)


def refuse_unknown(
    options: Mapping[str, Any], beside: Collection[str] = (), server: bool = False, where: str = "vLLM"
) -> None:
    """Raise ConfigError for an option that the installed vLLM does not have, with the nearest one that it has.

    beside: the caller's own arguments, which may have been meant
    server: options of `vllm serve` are allowed, too
    where:  name of the place that holds the options, for the error
    """
    allowed = _engine_options() | (_server_options() if server else frozenset())
    if allowed:
        refuse_names(where, options, allowed, beside)


def _changing(table: Mapping[str, str], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for text, names in table.items():
        if changes := [f"{name}={options[name]!r:.60}" for name in names.split() if _changes(name, options.get(name))]:
            yield ", ".join(changes), text


def _changes(name: str, value: Any) -> bool:
    if value is None:
        return False
    return str(getattr(value, "value", value)) not in NEUTRAL[name].split("|") if name in NEUTRAL else bool(value)


@cache
def _engine_options() -> frozenset[str]:
    """Arguments of vllm.LLM and of AsyncEngineArgs; empty if vLLM's sources have another form."""
    fields = _fields(_source("engine/arg_utils.py"), "EngineArgs", "AsyncEngineArgs")
    if not fields:
        return frozenset()
    signatures = [
        function.args
        for node in _classes(_source("entrypoints/llm.py"), "LLM")
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
    ]
    return fields | {argument.arg for s in signatures for argument in (*s.args, *s.kwonlyargs)} - {"self"}


@cache
def _server_options() -> frozenset[str]:
    names: set[str] = set()
    for path in (_folder() / "entrypoints").rglob("cli_args.py"):
        text = path.read_text(encoding="utf-8")
        names |= _fields(text, "BaseFrontendArgs", "FrontendArgs")
        names |= {flag.replace("-", "_") for flag in re.findall(r'"--([\w-]+)"', text)}
    return frozenset(names)


def _folder() -> Path:
    spec = find_spec("vllm")
    return Path(((spec and spec.submodule_search_locations) or [""])[0])


def _source(path: str) -> str:
    file = _folder() / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _classes(text: str, *names: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name in names]


def _fields(text: str, *names: str) -> frozenset[str]:
    written = (line for node in _classes(text, *names) for line in node.body)
    fields = (line.target for line in written if isinstance(line, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))
