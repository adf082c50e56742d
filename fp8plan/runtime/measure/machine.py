"""The machine of a measurement: card, driver, boot, packages. Cards of one model differ by some percent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

Answer = TypeVar("Answer")
FREED_BYTES, FREE_WAIT_S = 2 << 30, 30
NOTHING = dict.fromkeys(("gpu_uuid", "gpu_product", "driver", "gpu_memory_used_bytes"))


def machine_facts() -> dict[str, Any]:
    """Facts about the machine for the records of rollouts."""
    import torch

    return {
        "boot": boot_id(),
        "cpu_count": os.cpu_count(),
        "cpu_model": cpu_model(),
        "torch_version": torch.__version__,
    } | gpu_facts()


def boot_id() -> str | None:
    """Linux' name of the machine since its start, also inside a container; None on other systems."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else None


def cpu_model() -> str | None:
    """Name of the CPU as Linux gives it; None on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def engine_facts() -> dict[str, Any]:
    """Versions of the packages that bring the kernels; None for those that are not installed."""
    packages = {"engine_version": "vllm", "flashinfer_version": "flashinfer-python", "triton_version": "triton"}
    return {name: installed(package) for name, package in packages.items()}


def installed(*packages: str) -> str | None:
    """Version of the first of `packages` that is installed; None without any."""
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package).partition("+")[0]
    return None


def wait_for_memory() -> None:
    """Wait until a killed engine's GPU memory is free. Memory that is freed later spoils vLLM's profiling."""
    until = time.monotonic() + FREE_WAIT_S
    while (gpu_facts()["gpu_memory_used_bytes"] or 0) > FREED_BYTES and time.monotonic() < until:
        time.sleep(0.5)


def gpu_facts() -> dict[str, Any]:
    """Facts from NVML about the first visible GPU; all None without a driver or a visible GPU."""
    return _ask(_gpu_facts) or NOTHING


def _gpu_facts(nvml: Any) -> dict[str, Any]:
    nvml.nvmlInit()
    try:
        card = _first_visible(nvml)
        names = nvml.nvmlDeviceGetUUID(card), nvml.nvmlDeviceGetName(card), nvml.nvmlSystemGetDriverVersion()
        used = nvml.nvmlDeviceGetMemoryInfo(card).used
    finally:
        nvml.nvmlShutdown()
    texts = (name.decode() if isinstance(name, bytes) else name for name in names)
    return dict(zip(NOTHING, (*texts, used), strict=True))


def sm_clock_mhz() -> int | None:
    """Present clock of the first visible GPU's SMs; None if NVML does not know."""
    return _ask(lambda nvml: int(nvml.nvmlDeviceGetClockInfo(_card(), nvml.NVML_CLOCK_SM)))


def gpu_power_w() -> float | None:
    """Present power of the first visible GPU; None if NVML does not know."""
    return _ask(lambda nvml: float(nvml.nvmlDeviceGetPowerUsage(_card())) / 1e3)


def gpu_energy_j() -> float | None:
    """Joules of the first visible GPU since its driver was loaded; None if NVML does not know."""
    return _ask(lambda nvml: float(nvml.nvmlDeviceGetTotalEnergyConsumption(_card())) / 1e3)


def _ask(question: Callable[[Any], Answer]) -> Answer | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None


@cache
def _card() -> Any:
    """A handle that stays open, so that a reading takes microseconds."""
    import pynvml

    pynvml.nvmlInit()
    return _first_visible(pynvml)


def _first_visible(nvml: Any) -> Any:
    """CUDA's device 0, by the number or UUID in CUDA_VISIBLE_DEVICES.

    Raises NVMLError if that variable hides all devices: it is empty or -1.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first in ("", "-1"):
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdecimal() else 0)
